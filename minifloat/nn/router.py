"""``TopKRouter``: which experts of a mixture each token goes to, and with which probabilities."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from minifloat.arguments import (
    Count,
    Device,
    FloatDtype,
    Fraction,
    NonNegativeFloat,
    PositiveFloat,
    Size,
    checked,
    shown,
)
from minifloat.autocast import is_batch_invariant, used
from minifloat.comm import dtensor_ddp
from minifloat.comm.collectives import all_reduce
from minifloat.comm.dtensor_ddp import is_dtensor, local_part, local_rows
from minifloat.comm.group import Group
from minifloat.functional.autograd import autocast_dtype, autocast_off
from minifloat.functional.gemm import multiply_values
from minifloat.functional.router import (
    Capacity,
    Choice,
    DropPolicy,
    ScoreFunction,
    Selection,
    choose_experts,
    count_experts,
    load_balancing_loss,
    multiply_in_fp32,
    random_logits,
    sequence_loss,
    z_loss,
)
from minifloat.nn.options import InitMethod, check_meta, check_tensor, initialize, one_dtype
from minifloat.recompute import recomputes


class RouterOutput(NamedTuple):
    """Choice of a router for T tokens.

    Attributes:
        probabilities: [T, k], fp32.
        indices: int64 [T, k]: the experts of each token, the one of the largest score first; -1 for masked tokens and
            for choices that found no room, whose probabilities are 0.
        loss: fp32, to be added to the model's: the auxiliary losses times their coefficients.
    """

    probabilities: Tensor
    indices: Tensor
    loss: Tensor


class TopKRouter(nn.Module):
    """Router that chooses k of E experts for each token, by a linear from H features to E logits.

    ===========  ==============  ==================  ===============  ===============================================
    routers of   score_function  score_before_top_k  normalize_top_k  more
    ===========  ==============  ==================  ===============  ===============================================
    Mixtral      softmax         True                True
    Qwen3-MoE    softmax         True                its option
    gpt-oss      softmax         False               False            ``bias=True, logits_dtype=None``
    DeepSeek-V3  sigmoid         True                True             groups, ``scaling_factor``, ``expert_bias_rate``
    ===========  ==============  ==================  ===============  ===============================================

    Scores are fp32; ties go to the first experts. Gradients flow through the probabilities and the loss.

    Args:
        hidden_size, num_experts, top_k: H, E, k.
        score_function: the function from logits to scores.
        score_before_top_k: score all E logits and choose k experts by score; False: choose k by their logits and score
            these alone.
        normalize_top_k: the probabilities of a token are divided by their sum.
        num_groups, group_top_k: experts form ``num_groups`` equal groups, in their order, and are chosen within the
            ``group_top_k`` groups whose two best scores have the largest sum.
        scaling_factor: the final factor of probabilities.
        aux_loss_coefficient: of the load balancing loss ``E sum_e f_e P_e``: f_e is the fraction of choices that name
            expert e, P_e the mean of its share in a token's scores, over the tokens of a forward on this rank.
        seq_aux_loss_coefficient: of the mean of that loss over sequences, Megatron's ``seq_aux_loss``.
        seq_dim: the dim of the input [..., H] along a sequence: 0 of [sequence, batch, H].
        global_aux_loss_coefficient: of the same loss with choices counted over ``aux_loss_group``, Megatron's
            ``global_aux_loss``: its mean over the ranks, as data parallelism averages gradients, is the loss of all
            their tokens. All ranks must call a forward in training; in evaluation ranks do not wait, and the loss
            covers this rank's tokens.
        aux_loss_group: the ranks with different tokens; None: this rank alone.
        z_loss_coefficient: of the mean of ``logsumexp(logits)^2``.
        expert_bias_rate: balance without a loss (DeepSeek-V3): the buffer ``expert_bias``, fp32 [E], is added to the
            scores for the choice alone, and each :meth:`update_expert_bias` changes it by this rate. None: no bias.
        input_jitter_eps: in training each element of the input is multiplied by a number drawn uniformly from 1 - eps
            to 1 + eps, in its dtype, by PyTorch's generator, so that a recomputation repeats it (Switch Transformers,
            Megatron's ``moe_input_jitter_eps``).
        force_load_balancing: for benchmarks alone: standard normal numbers replace all logits, so experts get about
            equally many tokens, and the logits get their gradient; Megatron's ``moe_router_force_load_balancing``.
        capacity_factor: an expert takes at most ``ceil(T k / E * capacity_factor)`` tokens, in evaluation too; further
            choices are dropped, as with Megatron's ``moe_expert_capacity_factor`` without padding: their indices are
            -1, and the token's other probabilities do not change. The loss and the counts of ``expert_bias_rate``
            include all choices. None drops nothing.
        drop_policy: choice of a full expert: "probs" keeps the tokens of the largest probabilities, "position" the
            first.
        bias: the linear has a bias [E].
        logits_dtype: dtype of the linear; None: the dtype of the input, or of ``torch.autocast``.
        init_method: fills the weight [E, H] in place; default: as ``nn.Linear``. The bias starts at 0.
        params_dtype, dtype, device: as in :class:`~minifloat.Linear`.

    Raises:
        ValueError: ``top_k`` exceeds the experts, groups are not equal, or arguments contradict each other.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    expert_bias: Tensor | None
    expert_counts: Tensor | None

    @checked
    def __init__(
        self,
        hidden_size: Size,
        num_experts: Size,
        top_k: Size,
        *,
        score_function: ScoreFunction = "softmax",
        score_before_top_k: bool = True,
        normalize_top_k: bool = False,
        num_groups: Size | None = None,
        group_top_k: Size | None = None,
        scaling_factor: PositiveFloat = 1.0,
        aux_loss_coefficient: NonNegativeFloat = 0.0,
        seq_aux_loss_coefficient: NonNegativeFloat = 0.0,
        seq_dim: Count = 0,
        global_aux_loss_coefficient: NonNegativeFloat = 0.0,
        aux_loss_group: Group | ProcessGroup | DeviceMesh | None = None,
        z_loss_coefficient: NonNegativeFloat = 0.0,
        expert_bias_rate: NonNegativeFloat | None = None,
        input_jitter_eps: Fraction = 0.0,
        force_load_balancing: bool = False,
        capacity_factor: PositiveFloat | None = None,
        drop_policy: DropPolicy = "probs",
        bias: bool = False,
        logits_dtype: FloatDtype | None = torch.float32,
        init_method: InitMethod | None = None,
        params_dtype: FloatDtype | None = None,
        dtype: FloatDtype | None = None,
        device: Device | None = None,
    ) -> None:
        super().__init__()
        self.hidden_size, self.num_experts, self.top_k = hidden_size, num_experts, top_k
        self.selection = Selection(
            top_k, score_function, score_before_top_k, normalize_top_k, num_groups or 1, group_top_k or 1,
            scaling_factor,
        )  # fmt: skip
        self._check(num_groups, group_top_k)
        self.input_jitter_eps, self.force_load_balancing = input_jitter_eps, force_load_balancing
        self.capacity = None if capacity_factor is None else Capacity(capacity_factor, drop_policy)
        self.aux_loss_coefficient, self.z_loss_coefficient = aux_loss_coefficient, z_loss_coefficient
        self.seq_aux_loss_coefficient, self.seq_dim = seq_aux_loss_coefficient, seq_dim
        self.global_aux_loss_coefficient = global_aux_loss_coefficient
        self.aux_loss_group = Group.of(aux_loss_group)
        self.expert_bias_rate, self.logits_dtype, self.init_method = expert_bias_rate, logits_dtype, init_method
        dtype = one_dtype(self._label, dtype, params_dtype)
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size, dtype=dtype, device=device))
        has_bias = nn.Parameter(torch.empty(num_experts, dtype=dtype, device=device)) if bias else None
        self.register_parameter("bias", has_bias)
        biased = expert_bias_rate is not None
        zeros = torch.zeros(num_experts, dtype=torch.float32, device=device) if biased else None
        self.register_buffer("expert_bias", zeros)
        counts = torch.zeros(num_experts, dtype=torch.int64, device=device) if biased else None
        self.register_buffer("expert_counts", counts, persistent=False)
        self.reset_parameters()

    def _check(self, num_groups: int | None, group_top_k: int | None) -> None:
        """Checks arguments that depend on each other."""
        how, experts = self.selection, self.num_experts
        if how.top_k > experts:
            raise ValueError(f"{self._label}: top_k is {how.top_k}, and there are {experts} experts to choose from")
        if (num_groups is None) != (group_top_k is None):
            raise ValueError(
                f"{self._label}: num_groups is {num_groups} and group_top_k {group_top_k}; give both or neither"
            )
        if experts % how.num_groups or how.group_top_k > how.num_groups:
            raise ValueError(
                f"{self._label}: num_groups is {how.num_groups} and group_top_k {how.group_top_k}; groups of {experts} "
                "experts must be equal, and group_top_k at most their number"
            )
        if how.top_k > (among := experts // how.num_groups * how.group_top_k):
            raise ValueError(
                f"{self._label}: top_k is {how.top_k}, and the {how.group_top_k} of {how.num_groups} groups that "
                f"group_top_k and num_groups choose have {among} experts; choose more groups"
            )
        if how.normalize_top_k and how.score_function == "softmax" and not how.score_before_top_k:
            raise ValueError(
                f"{self._label}: normalize_top_k is True, and the softmax after the choice sums up to 1 already; leave "
                "it out, or use score_before_top_k=True"
            )

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws the weight again, and sets the bias, ``expert_bias`` and its counts to 0."""
        weight = self.weight
        if is_dtensor(weight):  # all ranks draw the whole, of which each keeps its own
            whole = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
            initialize(whole, self.init_method)
            local_rows(weight).copy_(local_part(whole, weight))
        else:
            initialize(weight, self.init_method)
        for each in (self.bias, self.expert_bias, self.expert_counts):
            if each is not None:
                each.zero_()

    def forward(self, x: Tensor, token_mask: Tensor | None = None) -> RouterOutput:
        """Chooses the experts of the T tokens of ``x`` [..., H], in their order.

        In training, a router with ``expert_bias`` counts the choices of each expert.

        Args:
            token_mask: bool [...], False for tokens without experts, such as padding: their indices are -1, their
                probabilities 0, and counts and the loss omit them.

        Raises:
            TypeError, ValueError: ``x`` or ``token_mask`` is no such tensor.
        """
        check_tensor(x, self)
        check_meta(x, self, self._parameters.get("weight"))
        mask = self._checked_mask(x, token_mask)
        sizes = x.shape[:-1]
        if mask is not None:  # NaN of padding would reach the gradient of the weight, as 0 times NaN
            x = x.reshape(-1, self.hidden_size).masked_fill(~mask[:, None], 0.0)
        if self.input_jitter_eps and self.training:
            x = x * torch.empty_like(x).uniform_(1 - self.input_jitter_eps, 1 + self.input_jitter_eps)
        dtype = autocast_dtype(x) if self.logits_dtype is None else self.logits_dtype
        with autocast_off(x):
            logits = self._logits(x, dtype)
            if self.force_load_balancing:
                logits = random_logits(logits)
            choice = choose_experts(logits, self.selection, self.expert_bias)
            if mask is not None:
                indices = choice.indices.masked_fill(~mask[:, None], -1)
                choice = Choice(torch.where(mask[:, None], choice.probabilities, 0.0), indices, choice.scores)
            counting = self.expert_counts is not None and self.training and not recomputes()  # no choice counts twice
            if counting:
                dtensor_ddp.keep_histories()
            loss, has_loss = logits.new_zeros(()), self._has_loss
            if counting or has_loss:
                counts = count_experts(choice.indices, self.num_experts)
            if has_loss:
                loss = self._loss(logits, choice, counts, mask, sizes)
            if counting and self.expert_counts is not None:
                self.expert_counts.add_(counts)
            probabilities, indices, _ = choice
            if self.capacity is not None:
                if used.batch_invariant and is_batch_invariant():
                    raise ValueError(
                        f"{self._label}: capacity_factor drops choices by those of other tokens, which "
                        "autocast(batch_invariant=True) excludes; set router.capacity = None, or leave that option out"
                    )
                probabilities, indices = self.capacity.drop(probabilities, indices, self.num_experts, mask)
        return RouterOutput(probabilities, indices, loss)

    @property
    def draws(self) -> bool:
        """Whether a forward draws random numbers, which a recomputation must repeat."""
        return self.force_load_balancing or (bool(self.input_jitter_eps) and self.training)

    @property
    def _has_loss(self) -> bool:
        balance = self.aux_loss_coefficient or self.seq_aux_loss_coefficient or self.global_aux_loss_coefficient
        return bool(balance or self.z_loss_coefficient)

    def _loss(self, logits: Tensor, choice: Choice, counts: Tensor, mask: Tensor | None, sizes: torch.Size) -> Tensor:
        """Sums the losses times their coefficients, of tokens [*sizes] that chose experts ``counts`` [E] times."""
        loss, how = logits.new_zeros(()), self.selection
        if self.aux_loss_coefficient:
            loss = loss + self.aux_loss_coefficient * load_balancing_loss(choice.scores, counts, how, mask)
        if self.seq_aux_loss_coefficient:
            if self.seq_dim >= max(len(sizes), 1):
                raise ValueError(
                    f"{self._label}: seq_dim is {self.seq_dim}, and tokens are of shape {tuple(sizes)}; choose the dim "
                    "of the input that has the tokens of a sequence"
                )
            loss = loss + self.seq_aux_loss_coefficient * sequence_loss(choice, how, mask, sizes or (1,), self.seq_dim)
        if self.global_aux_loss_coefficient:
            group = self.aux_loss_group if self.training else Group()  # no rank waits for one that does not evaluate
            everywhere = all_reduce(counts.clone(), group)  # in whose memory the sum may be
            balance = load_balancing_loss(choice.scores, everywhere, how, mask)
            loss = loss + self.global_aux_loss_coefficient * group.size * balance
        if self.z_loss_coefficient:
            loss = loss + self.z_loss_coefficient * z_loss(logits, counts, how, mask)
        return loss

    def _checked_mask(self, x: Tensor, token_mask: Tensor | None) -> Tensor | None:
        """Returns the mask as [T]; raises unless it and ``x`` fit."""
        if x.dim() == 0 or x.shape[-1] != self.hidden_size or not x.is_floating_point():
            raise ValueError(
                f"{self._label}: input is {shown(x)}; floating-point numbers [..., {self.hidden_size}] are needed"
            )
        if token_mask is None:
            return None
        check_tensor(token_mask, self, "token_mask")
        if token_mask.dtype != torch.bool or token_mask.shape != x.shape[:-1]:
            raise ValueError(
                f"{self._label}: token_mask is {shown(token_mask)}; bools of shape {tuple(x.shape[:-1])} are needed, "
                "True for each token that goes to experts"
            )
        return token_mask.reshape(-1)

    def _logits(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Computes logits [T, E], multiplied in ``dtype``, in fp32 or fp64."""
        if used.batch_invariant and is_batch_invariant():
            return self._logits_of_rows(x.reshape(-1, self.hidden_size), dtype)
        if dtype == torch.float32 and self.bias is None and not is_dtensor(self.weight):
            return multiply_in_fp32(x.reshape(-1, self.hidden_size), self.weight)
        bias = None if self.bias is None else self.bias.to(dtype)
        logits = F.linear(x.reshape(-1, self.hidden_size).to(dtype), self.weight.to(dtype), bias)
        return logits.to(torch.promote_types(dtype, torch.float32))

    def _logits_of_rows(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Computes logits of which a row depends on no other token."""
        if dtype == torch.float64 or is_dtensor(self.weight):
            raise ValueError(
                f"{self._label}: autocast(batch_invariant=True) multiplies a whole weight in bf16, fp16 or fp32, not a "
                f"{type(self.weight).__name__} in {dtype}; use logits_dtype=torch.float32, and do not split it"
            )
        own = dtype == torch.float32 and x.dtype == self.weight.dtype  # products of bf16 are exact in fp32
        operands = (x, self.weight) if own else (x.to(dtype), self.weight.to(dtype))
        logits = multiply_values(*operands, dtype)
        return (logits if self.bias is None else logits + self.bias.to(dtype)).float()

    @checked
    @torch.no_grad()
    def update_expert_bias(self, group: Group | ProcessGroup | DeviceMesh | None = None) -> None:
        """Ends a step: raises the bias of experts chosen less often than the mean, and lowers that of others.

        The change is ``expert_bias_rate``, or 0 at the mean. Counts start at 0 again.

        Args:
            group: counts are summed over its ranks, all of which must call this.

        Raises:
            ValueError: there is no bias.
        """
        if self.expert_bias is None or self.expert_counts is None:
            raise ValueError(f"{self._label}: there is no expert_bias to update; make it with expert_bias_rate")
        assert self.expert_bias_rate is not None
        counts = all_reduce(self.expert_counts, Group.of(group))
        missing = counts.sum() - self.num_experts * counts  # of integers, exact
        self.expert_bias.add_(missing.sign().to(torch.float32), alpha=self.expert_bias_rate)
        self.expert_counts.zero_()

    # ---- buffers that keep their dtypes ----

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        before, device = self.expert_bias, self.weight.device
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if before is not None and self.expert_bias is not None and self.expert_bias.dtype != torch.float32:
            self.expert_bias = before.to(self.expert_bias.device)
        if device.type == "meta" and not self.weight.is_meta:
            for each in (self.expert_bias, self.expert_counts):
                if each is not None:
                    each.zero_()  # to_empty has given it memory that nothing was written to
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        saved = state_dict.get(f"{prefix}expert_bias")
        if isinstance(saved, Tensor) and saved.is_floating_point():
            state_dict[f"{prefix}expert_bias"] = saved.float()  # or assign=True would take another dtype
        super()._load_from_state_dict(state_dict, prefix, *args)
        bias, counts = self.expert_bias, self.expert_counts
        if bias is not None and counts is not None and counts.is_meta and not bias.is_meta:
            self.expert_counts = torch.zeros_like(counts, device=bias.device)

    @property
    def _label(self) -> str:
        """Name of the layer in errors."""
        return f"TopKRouter({self.hidden_size}, {self.num_experts}, {self.top_k})"

    def extra_repr(self) -> str:
        how = self.selection
        parts = [f"{self.hidden_size}, {self.num_experts}, top_k={how.top_k}, score_function={how.score_function!r}"]
        parts += ["score_before_top_k=False"] * (not how.score_before_top_k)
        parts += ["normalize_top_k=True"] * how.normalize_top_k
        parts += [f"input_jitter_eps={self.input_jitter_eps}"] * (self.input_jitter_eps > 0)
        parts += ["force_load_balancing=True"] * self.force_load_balancing
        parts += [f"num_groups={how.num_groups}, group_top_k={how.group_top_k}"] * (how.num_groups > 1)
        if (capacity := self.capacity) is not None:
            parts.append(f"capacity_factor={capacity.factor}, drop_policy={capacity.policy!r}")
        return ", ".join(parts)
