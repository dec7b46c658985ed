"""``MoE``: a mixture of experts in the place of an MLP, whose routing the host does not see."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any, Unpack, cast

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from minifloat.arguments import NonNegativeFloat, Size, checked, label_of
from minifloat.autocast import is_batch_invariant, used
from minifloat.functional.autograd import as_output, autocast_dtype, exporting
from minifloat.functional.gemm import multiply_values
from minifloat.functional.norm_activation import activate
from minifloat.functional.router import route
from minifloat.nn import parts
from minifloat.nn.grouped_mlp import GroupedMLP
from minifloat.nn.linear import Linear
from minifloat.nn.options import InitMethod, LinearOptions, Placement, check_tensor, initialize, place
from minifloat.nn.router import TopKRouter
from minifloat.recompute import checkpoint, checkpoint_without_dropout, drops_side_effects, recomputes


class SharedGate(nn.Linear):
    """Weighs what the MLP of every token gives: sigmoid(X w^T), [..., 1], of X [..., H] in its dtype.

    A class of its own, which ``convert`` leaves alone: it is multiplied in high precision under every recipe.
    """

    def __init__(self, hidden_size: int, init_method: InitMethod | None, **placement: Unpack[Placement]) -> None:
        self.init_method = init_method
        super().__init__(hidden_size, 1, bias=False, device=placement.get("device"), dtype=placement.get("dtype"))

    def reset_parameters(self) -> None:
        """Draws the weight anew."""
        initialize(self.weight, self.init_method)

    def forward(self, x: Tensor) -> Tensor:
        """Computes the weight of each token in the dtype of ``x``, or of ``torch.autocast``."""
        dtype = autocast_dtype(x)
        x, weight = x.to(dtype), self.weight.to(dtype)
        alone = used.batch_invariant and is_batch_invariant()
        logits = multiply_values(x, weight, dtype) if alone else nn.functional.linear(x, weight)
        return torch.sigmoid(logits)


class MoE(parts.LayerOfParts):
    """Mixture of experts: Y is the sum of p_e MLP_e(X) over a token's k experts, plus a shared MLP if there is one.

    The router chooses experts, tokens are sorted by expert (k rows for each), :class:`GroupedMLP` computes, and the
    rows of each token are added up with their probabilities. Without biases p multiplies the activation instead: Y is
    the sum of W2_e (p_e act(H_e)). Only the router's ``capacity_factor`` drops tokens, and the host waits only for the
    sizes of the exchanges of ``ep_group``.

    Args:
        hidden_size, ffn_hidden_size: widths of X and Y, and of each expert.
        num_experts, top_k: E and k.
        bias, activation, activation_params, init_method, output_layer_init_method, params_dtype, dtype, device, recipe,
            name, single_grouped_weight, fuse_wgrad_accumulation, delay_wgrad_compute, recompute_activation,
        shared_ffn_hidden_size: width of the shared MLP for every token; None: no shared MLP.
        shared_gate: its result is multiplied by sigmoid(X w^T), as by Qwen2-MoE's ``shared_expert_gate``; w is the
            weight [1, H] of the part ``shared_gate``.
        router: a module that returns probabilities, experts and a loss of X [..., hidden_size], and ``token_mask`` if
            there is one; or arguments of the default ``TopKRouter(hidden_size, num_experts, top_k,
            normalize_top_k=True)`` with the coefficient below, such as ``{"score_function": "sigmoid"}``.
        aux_loss_coefficient: of the router's load balancing loss.
        expert_etp_group: ranks that shard the rows of the experts' weights, as in :class:`GroupedMLP`.
        ep_group: ranks that distribute the experts, as in :class:`GroupedMLP`: tokens are sent to them and back.
        etp_group: ranks that shard the rows of the shared MLP's weights, as in :class:`~minifloat.Linear`; any number
            of them. The router is replicated, and its gradients are reduced by
            :func:`~minifloat.distributed.reduce_replicated`.
        etp_reduction: over either.

    Attributes:
        router_loss: of the latest forward; add :func:`router_losses` of the model to its loss.
        expert_counts: int32 [E], the choices of each expert in the latest forward, without dropped ones.

    Raises:
        TypeError, ValueError: as in the parts; or there is no MLP for ``shared_gate``.
    """

    @checked
    def __init__(
        self,
        hidden_size: Size,
        ffn_hidden_size: Size,
        num_experts: Size,
        top_k: Size = 2,
        *,
        bias: bool = False,
        activation: str = "swiglu",
        activation_params: Mapping[str, float] | None = None,
        shared_ffn_hidden_size: Size | None = None,
        shared_gate: bool = False,
        router: nn.Module | Mapping[str, Any] | None = None,
        aux_loss_coefficient: NonNegativeFloat = 0.0,
        single_grouped_weight: bool = False,
        delay_wgrad_compute: bool = False,
        recompute_activation: bool = False,
        init_method: InitMethod | None = None,
        output_layer_init_method: InitMethod | None = None,
        name: str | None = None,
        expert_etp_group: ProcessGroup | DeviceMesh | None = None,
        ep_group: ProcessGroup | DeviceMesh | None = None,
        **options: Unpack[LinearOptions],
    ) -> None:
        super().__init__()
        placement = place(type(self).__name__, options)
        self.hidden_size, self.num_experts = hidden_size, num_experts
        if not isinstance(router, nn.Module):
            given = {"normalize_top_k": True, "aux_loss_coefficient": aux_loss_coefficient, **placement}
            router = TopKRouter(hidden_size, num_experts, top_k, **{**given, **(router or {})})
        self.router = router
        of_experts: LinearOptions = {**options, "etp_group": expert_etp_group}
        self.experts = GroupedMLP(
            num_experts, hidden_size, ffn_hidden_size, activation=activation, activation_params=activation_params,
            bias=bias, delay_wgrad_compute=delay_wgrad_compute, single_grouped_weight=single_grouped_weight,
            recompute_activation=recompute_activation, init_method=init_method,
            output_layer_init_method=output_layer_init_method, name=parts.part_name(name, "experts"), ep_group=ep_group,
            **of_experts,
        )  # fmt: skip
        self.shared_fc1 = self.shared_fc2 = self.shared_gate = None
        if shared_gate:
            if shared_ffn_hidden_size is None:
                raise ValueError(
                    f"MoE{'' if name is None else f' {name!r}'}: shared_gate is True, and there is no MLP for every "
                    "token that it could weigh; give shared_ffn_hidden_size, or leave it out"
                )
            self.shared_gate = SharedGate(hidden_size, init_method, **placement)
        if shared_ffn_hidden_size is not None:
            width = shared_ffn_hidden_size * (2 if self.experts.activation.gated else 1)
            linear = partial(Linear, bias=bias, delay_wgrad_compute=delay_wgrad_compute, **options)
            self.shared_fc1 = linear(
                hidden_size, width, init_method=init_method, name=parts.part_name(name, "shared_fc1")
            )
            self.shared_fc2 = linear(
                shared_ffn_hidden_size,
                hidden_size,
                init_method=output_layer_init_method or init_method,
                name=parts.part_name(name, "shared_fc2"),
            )
        self.router_loss: Tensor | None = None
        self.expert_counts: Tensor | None = None

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None, token_mask: Tensor | None = None) -> Tensor:
        """Computes Y of the shape of X [..., hidden_size].

        Args:
            is_first_microbatch: as in :class:`~minifloat.Linear`.
            token_mask: bool [...]; tokens where it is False go to no expert.
        """
        y, loss, counts = self._run(x, is_first_microbatch, token_mask)
        # Not in the backward of this forward, or of one before the latest, nor in a program, which has no attributes.
        if not recomputes() and not exporting():
            if not (torch.compiler.is_dynamo_compiling() and drops_side_effects()):
                self.router_loss, self.expert_counts = loss, counts
            elif loss.requires_grad:
                raise RuntimeError(
                    f"{label_of(self.experts)}: a compiled checkpoint drops the loss of the router, which is an "
                    "attribute; set torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True, which "
                    "keeps it, or use TransformerLayer(checkpoint_mlp=True), or fullgraph=False"
                )
        return y

    def _run(
        self, x: Tensor, is_first_microbatch: bool | None, token_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Computes Y, the loss of the router and the counts of the experts."""
        check_tensor(x, self)
        tokens = x.reshape(-1, x.shape[-1])
        options = {} if token_mask is None else {"token_mask": token_mask}
        probabilities, indices, loss = self.router(x, **options)  # which knows whether the mask is of these tokens
        routing = route(indices, self.num_experts, self.experts)
        shared: Callable[[], Tensor] = partial(self._shared, tokens, is_first_microbatch)
        given: list[Any] = [tokens, routing, is_first_microbatch, probabilities]
        if self.shared_fc1 is not None and self._sends_tokens:
            shared = cache(shared)
            given.append(shared)
        y = self.experts(*given)
        if self.shared_fc1 is not None:
            y = y + shared()
        if y.shape != x.shape and self.shared_fc1 is None and not parts.is_own(self.experts, GroupedMLP):
            y = y.reshape(x.shape).clone()  # no view, and nothing that others may have saved
        elif y.shape != x.shape:
            y = as_output(y, x.shape)
        return y, loss, routing.counts

    @property
    def _sends_tokens(self) -> bool:
        """Whether tokens are sent to experts, in eager code, so that the host may overlap other work."""
        own = parts.is_own(self.experts, GroupedMLP) and not torch.compiler.is_compiling()
        return own and self.experts.ep_group.size > 1

    def _shared(self, tokens: Tensor, is_first_microbatch: bool | None) -> Tensor:
        """The MLP of every token."""
        assert self.shared_fc1 is not None and self.shared_fc2 is not None
        h = activate(self.shared_fc1(tokens, is_first_microbatch), self.experts.activation)
        shared: Tensor = self.shared_fc2(h, is_first_microbatch)
        return shared if self.shared_gate is None else self.shared_gate(tokens) * shared

    def __getstate__(self) -> dict[str, Any]:
        # Those of the original's graph, which neither copies nor files can have.
        return self.__dict__ | {"router_loss": None, "expert_counts": None}


class LayerNormMoE(parts.LayerOfParts):
    """Norm and mixture of experts, Y = MoE(norm(X)), in the place of an MLP in a :class:`~minifloat.TransformerLayer`.

    Args:
        hidden_size, ffn_hidden_size, eps, normalization, zero_centered_gamma, return_layernorm_output, checkpoint: as
            of :class:`~minifloat.LayerNormMLP`; ``ffn_hidden_size`` is the width of each expert.
        num_experts, top_k and the others: as in :class:`MoE`.
    """

    @checked
    def __init__(
        self,
        hidden_size: Size,
        ffn_hidden_size: Size,
        num_experts: Size,
        top_k: Size = 2,
        eps: NonNegativeFloat = 1e-5,
        *,
        normalization: parts.Normalization = "LayerNorm",
        zero_centered_gamma: bool = False,
        return_layernorm_output: bool = False,
        checkpoint: bool = False,
        **of_experts: Any,
    ) -> None:
        super().__init__()
        placement = place(type(self).__name__, cast(Placement, of_experts))
        self.return_layernorm_output, self.checkpoint = return_layernorm_output, checkpoint
        self.norm = parts.NORMS[normalization](hidden_size, eps, zero_centered_gamma=zero_centered_gamma, **placement)
        self.moe = MoE(hidden_size, ffn_hidden_size, num_experts, top_k, **of_experts)

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> Any:
        """Computes Y of the shape of X [..., hidden_size]; ``return_layernorm_output``: gives the norm's result too."""
        check_tensor(x, self)
        again = checkpoint if getattr(self.moe.router, "draws", False) else checkpoint_without_dropout
        if not (self.checkpoint and torch.is_grad_enabled()):
            y, n = self._run(x, is_first_microbatch)
        elif torch.compiler.is_compiling() and parts.is_own(self.moe, MoE):  # a graph's checkpoint sets no attribute
            y, n, *found = again(self._run_apart, x, is_first_microbatch)
            self.moe.router_loss, self.moe.expert_counts = found
        else:
            y, n = again(self._run, x, is_first_microbatch)
        return parts.outputs(y, (self.return_layernorm_output, n))

    def _run(self, x: Tensor, is_first_microbatch: bool | None) -> tuple[Tensor, Tensor]:
        n = self.norm(x)
        return self.moe(n, is_first_microbatch), n

    def _run_apart(self, x: Tensor, is_first_microbatch: bool | None) -> tuple[Tensor, ...]:
        """Computes also what the mixture would keep."""
        n = self.norm(x)
        y, loss, counts = self.moe._run(n, is_first_microbatch)
        return y, n, loss, counts


@checked
def router_losses(model: nn.Module) -> Tensor | float:
    """Sums the losses of all routers of ``model`` in their latest forward, to be added to the model's own loss.

    Each loss counts once: without another forward the next sum is 0. Losses include their coefficients.
    """
    total: Tensor | float = 0.0
    for module in model.modules():
        if isinstance(module, MoE) and module.router_loss is not None:
            total, module.router_loss = total + module.router_loss, None
    return total
