"""Choice of experts for tokens, and rows in the order of their experts and back.

The host waits for nothing, and nothing is atomic but counts, which are integers: runs repeat to the bit. Of experts
with equal scores the first ones are chosen, on every device. No row is dropped but what the indices drop: the number of
rows is always T k, and how many of them each expert has is known to the device alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from minifloat.arguments import Size, checked, label_of, shown
from minifloat.autocast import check_can_wait, checks_finite, used
from minifloat.functional.autograd import apply, exporting, first_order, guarded
from minifloat.ops.permute import check_indices, checked_indices, permute_rows, unpermute_rows, unpermute_rows_backward

ScoreFunction = Literal["softmax", "sigmoid"]
DropPolicy = Literal["probs", "position"]

_TINY = 1e-20
"""Added to a sum of scores that others are divided by; DeepSeek-V3's."""


@dataclass(frozen=True)
class Selection:
    """Rule by which experts are chosen; the arguments are those of :class:`~minifloat.TopKRouter`."""

    top_k: int
    score_function: ScoreFunction = "softmax"
    score_before_top_k: bool = True
    normalize_top_k: bool = False
    num_groups: int = 1
    group_top_k: int = 1
    scaling_factor: float = 1.0

    def scores(self, logits: Tensor) -> Tensor:
        """Computes the score function along the last dim."""
        return torch.softmax(logits, dim=-1) if self.score_function == "softmax" else torch.sigmoid(logits)


class Choice(NamedTuple):
    """Experts that are chosen, and the scores that they are chosen by.

    Attributes:
        probabilities: [T, k].
        indices: int64 [T, k], the largest first.
        scores: [T, E], of all experts: the logits, where the score function comes after the choice.
    """

    probabilities: Tensor
    indices: Tensor
    scores: Tensor


def choose_experts(logits: Tensor, how: Selection, expert_bias: Tensor | None) -> Choice:
    """Chooses k of E experts for each row of ``logits`` [T, E], which are fp32 or fp64.

    ``expert_bias``, [E], is added to the scores for the choice alone. NaN is the largest of all.
    """
    scores = how.scores(logits) if how.score_before_top_k else logits
    candidates = scores.detach()
    if expert_bias is not None:
        candidates = candidates + expert_bias
    if how.num_groups > 1:
        candidates = _within_best_groups(candidates, how)
    indices = _largest(candidates, how.top_k)
    chosen = apply(_Pick, scores, indices)
    if not how.score_before_top_k:
        chosen = how.scores(chosen)
    if how.normalize_top_k:
        chosen = chosen / (chosen.sum(-1, keepdim=True) + _TINY)
    if how.scaling_factor != 1:
        chosen = chosen * how.scaling_factor
    return Choice(chosen, indices, scores)


def multiply_in_fp32(x: Tensor, weight: Tensor) -> Tensor:
    """Computes X W^T of ``x`` [T, H] and ``weight`` [E, H] in fp32.

    A GPU multiplies those of bf16 on tensor cores, whose products of bf16 are exact and whose sums are fp32: within
    2^-16 of the largest logit (fp32 without tensor cores: 2^-19), and in an eighth of the time.
    """
    if x.is_cuda and x.dtype == weight.dtype == torch.bfloat16 and x.numel():
        return apply(_LogitsFunction, x, weight)
    return torch.nn.functional.linear(x.float(), weight.float())


class _LogitsFunction(torch.autograd.Function):
    """Computes X W^T and its gradients, of bf16 matrices in fp32 on tensor cores.

    dY is the sum of two bf16 matrices to 16 bits, twice as many as its products are rounded to at last.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(guarded(x), weight)
        return torch.mm(x, weight.t(), out_dtype=torch.float32)

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        high = dy.to(torch.bfloat16)
        both = torch.cat([high, (dy - high).to(torch.bfloat16)], dim=1)
        dx = torch.mm(both, weight.repeat(2, 1)) if ctx.needs_input_grad[0] else None
        dw = None
        if ctx.needs_input_grad[1]:
            sums = torch.mm(both.t(), x, out_dtype=torch.float32)
            dw = (sums[: len(weight)] + sums[len(weight) :]).to(torch.bfloat16)
        return dx, dw


def random_logits(logits: Tensor) -> Tensor:
    """Draws standard normal numbers in the place of ``logits``, which get the gradient of what is drawn."""
    return torch.randn_like(logits) + (logits - logits.detach()).nan_to_num()  # of infinity, too, numbers are drawn


def _largest(x: Tensor, k: int) -> Tensor:
    """Finds the k largest of each row; of equal ones the first, which ``topk`` does not promise."""
    return torch.sort(x, dim=-1, descending=True, stable=True).indices[:, :k].clone()  # or all E are kept for backward


def _within_best_groups(candidates: Tensor, how: Selection) -> Tensor:
    """Sets ``candidates`` [T, E] to -inf outside of the groups whose two best sum up to the most."""
    groups = candidates.view(candidates.shape[0], how.num_groups, candidates.shape[1] // how.num_groups)
    best = groups.topk(min(2, groups.shape[2]), dim=-1).values.sum(-1)
    among = torch.zeros_like(best, dtype=torch.bool).scatter_(1, _largest(best, how.group_top_k), True)
    return groups.masked_fill(~among[:, :, None], -torch.inf).flatten(1)


class _Pick(torch.autograd.Function):
    """Gathers columns that differ within a row, so that backward adds nothing up."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, indices: Tensor) -> Tensor:
        ctx.save_for_backward(indices)
        ctx.experts = scores.shape[1]
        return scores.gather(1, indices)

    @staticmethod
    @first_order
    def backward(ctx: Any, dchosen: Tensor) -> tuple[Tensor, None]:
        (indices,) = ctx.saved_tensors
        return dchosen.new_zeros(indices.shape[0], ctx.experts).scatter_(1, indices, dchosen), None


def count_experts(indices: Tensor, num_experts: int) -> Tensor:
    """Counts how many of ``indices`` [..., T, k] each expert is, int64 [..., E]; -1 is none."""
    flat = indices.flatten(-2)
    flat = torch.where(flat < 0, num_experts, flat)
    sizes = *flat.shape[:-1], num_experts + 1
    return flat.new_zeros(sizes).scatter_add_(-1, flat, torch.ones_like(flat))[..., :num_experts]


# ---- capacity ----


@dataclass(frozen=True)
class Capacity:
    """Bound of the tokens that an expert takes: of T tokens with k of E experts each ``ceil(T k / E * factor)``.

    Where more have chosen it, ``policy`` says whom it takes: those of the largest probabilities, or the first ones.
    """

    factor: float
    policy: DropPolicy = "probs"

    def drop(
        self, probabilities: Tensor, indices: Tensor, num_experts: int, token_mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Sets the choices [T, k] that find no room to probability 0 and index -1; the others keep theirs.

        Only the tokens of ``token_mask``, bool [T], count for T; the indices of others are -1. Of equal probabilities
        the first token's is the larger, and NaN is the largest.
        """
        flat = indices.reshape(-1)
        order = torch.arange(flat.shape[0], device=flat.device)
        if self.policy == "probs":
            order = torch.sort(probabilities.detach().reshape(-1), descending=True, stable=True).indices
        experts, by_expert = torch.sort(torch.where(flat < 0, num_experts, flat)[order], stable=True)
        firsts = torch.searchsorted(experts, torch.arange(num_experts + 1, device=flat.device))
        place = torch.arange(flat.shape[0], device=flat.device) - firsts[experts]  # among those of the same expert
        room = self._room(indices, num_experts, token_mask)
        keep = torch.empty_like(flat, dtype=torch.bool).scatter_(0, order[by_expert], place < room).view_as(indices)
        return torch.where(keep, probabilities, 0.0), torch.where(keep, indices, -1)

    def _room(self, indices: Tensor, num_experts: int, token_mask: Tensor | None) -> Tensor | int:
        """Tokens that an expert takes; on the device where only that knows how many there are."""
        tokens, k = indices.shape
        if token_mask is None:
            return math.ceil(tokens * k / num_experts * self.factor)
        return (token_mask.sum().double() * k / num_experts * self.factor).ceil()


# ---- losses ----


def load_balancing_loss(scores: Tensor, counts: Tensor, how: Selection, token_mask: Tensor | None) -> Tensor:
    """Computes ``E sum_e f_e P_e``: 1 where experts are used alike, E / k where all tokens go to the same ones.

    f_e is the part of all choices that expert e is, which has no gradient, and P_e the mean over tokens of its share in
    the scores of all experts. Switch Transformers (Fedus et al. 2021), for k choices as DeepSeek-V3 (2024) has it.

    Args:
        scores: those of :class:`Choice`, [..., T, E].
        counts: int [..., E], how often each expert was chosen. If also by tokens that others have, the result is a sum
            over this rank's tokens, and those of all ranks add up to the loss of all tokens (Qiu et al. 2025).
        token_mask: bool [..., T], which tokens count; all without one.

    Returns:
        [...], a loss of each group of tokens.
    """
    total = counts.sum(-1).clamp(min=1).to(scores.dtype)
    shares = scores if how.score_before_top_k else how.scores(scores)
    if how.score_function != "softmax":  # whose rows sum up to 1
        shares = shares / (shares.sum(-1, keepdim=True) + _TINY)
    sums = _of_tokens(shares, token_mask).sum(-2)
    return (counts.to(scores.dtype) / total[..., None] * sums).sum(-1) * (scores.shape[-1] * how.top_k) / total


def sequence_loss(
    choice: Choice, how: Selection, token_mask: Tensor | None, sizes: Sequence[int], seq_dim: int
) -> Tensor:
    """Computes the mean over sequences of the load balancing loss of each: DeepSeek-V2 (2024), Megatron's seq_aux_loss.

    Args:
        choice: of T tokens.
        token_mask: bool [T]; a sequence none of whose tokens counts does not count either.
        sizes: shape of the tokens, whose product is T.
        seq_dim: which of these dims has the tokens of a sequence; the others are of sequences.
    """
    scores, indices = (_sequences(each, sizes, seq_dim) for each in (choice.scores, choice.indices))
    mask = None if token_mask is None else _sequences(token_mask, sizes, seq_dim)
    counts = count_experts(indices, scores.shape[-1])
    losses = load_balancing_loss(scores, counts, how, mask)
    return losses.sum() / counts.any(-1).sum().clamp(min=1).to(losses.dtype)


def _sequences(x: Tensor, sizes: Sequence[int], seq_dim: int) -> Tensor:
    """Brings ``x`` [T, ...] into [sequences, tokens of each, ...]."""
    last = len(sizes) - 1
    apart = x.reshape(*sizes, *x.shape[1:]).movedim(seq_dim, last)
    return apart.flatten(0, last - 1) if last else apart[None]


def z_loss(logits: Tensor, counts: Tensor, how: Selection, token_mask: Tensor | None) -> Tensor:
    """Computes the mean over tokens of ``logsumexp(logits)^2``, which keeps logits small: ST-MoE (Zoph et al. 2022)."""
    squares = _of_tokens(logits.logsumexp(-1).square(), token_mask)
    return squares.sum() * how.top_k / counts.sum().clamp(min=1).to(logits.dtype)


def _of_tokens(x: Tensor, token_mask: Tensor | None) -> Tensor:
    """Sets ``x``, of the shape of the mask or of one dim more, to 0 where a token does not count."""
    if token_mask is None:
        return x
    return torch.where(token_mask if token_mask.dim() == x.dim() else token_mask[..., None], x, 0.0)


DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64)


class Routing(NamedTuple):
    """Order of the k choices (slots) of T tokens by expert, made by :func:`sort_by_expert`.

    Attributes:
        order: int32 [T k], the slot ``token * k + choice`` of each row.
        inverse: int32 [T, k], the row of each slot.
        counts: int32 [E], the number of rows of each expert.
        offsets: int32 [E + 1], the first row of each expert, and the total. Rows after it are dropped slots.
    """

    order: Tensor
    inverse: Tensor
    counts: Tensor
    offsets: Tensor


@checked
def sort_by_expert(indices: Tensor, num_experts: Size) -> Routing:
    """Sorts slots by expert, and by token within an expert.

    Args:
        indices: int [T, k]: the experts of each token, 0 to E - 1, or -1 for a dropped slot: it comes after all experts
            and is not counted, :func:`permute` gives it a row of zeros, :func:`unpermute` adds none. Others on a device
            are dropped too, but raise under ``autocast(check_finite=True)``, which waits.
        num_experts: E.

    Raises:
        TypeError, ValueError: the arguments are no such, or the host has an index that is none.
        RuntimeError: ``autocast(check_finite=True)`` in compiled code or the capture of a CUDA graph.
    """
    return route(indices, num_experts)


def route(indices: Tensor, num_experts: int, layer: object = "sort_by_expert") -> Routing:
    """:func:`sort_by_expert` in ``layer``, which errors name."""
    if indices.dim() != 2 or indices.shape[1] == 0 or indices.dtype not in _INTEGERS:
        raise ValueError(
            f"{label_of(layer)}: indices is {shown(indices)}; a tensor of signed integers [T, k] is needed"
        )
    indices = indices.to(torch.promote_types(indices.dtype, torch.int32))  # no int8 can be compared with all numbers
    on_host, compiling = indices.is_cpu and type(indices) is Tensor, torch.compiler.is_compiling()
    wait = used.check_finite and checks_finite() and not indices.is_meta
    if wait and (compiling or not on_host):
        check_can_wait(label_of(layer))
    if on_host and compiling and not exporting():
        indices = checked_indices(indices, num_experts, layer if isinstance(layer, str) else type(layer).__name__)
    elif wait or (on_host and not compiling):
        check_indices(indices, num_experts, label_of(layer))
    flat = indices.reshape(-1)
    flat = flat.masked_fill((flat < 0) | (flat >= num_experts), num_experts)
    keys = flat.to(torch.int16 if num_experts < 2**15 else torch.int32)  # the fewer bits, the faster is a radix sort
    keys, order = torch.sort(keys, stable=True)
    rows = torch.arange(order.shape[0], dtype=torch.int32, device=order.device)
    inverse = torch.empty_like(rows).scatter_(0, order, rows)
    experts = torch.arange(num_experts + 1, dtype=keys.dtype, device=keys.device)
    offsets = torch.searchsorted(keys, experts, out_int32=True)
    return Routing(order.to(torch.int32), inverse.view(indices.shape), offsets.diff(), offsets)


@checked
def permute(x: Tensor, routing: Routing) -> Tensor:
    """Copies tokens ``x`` [T, H] to rows [T k, H] sorted by expert; rows after the last expert's are 0.

    The gradient of a token is the sum over its k rows, in the order of its slots, in fp32, rounded once.

    Raises:
        TypeError, ValueError: ``x`` is not [T, H] of bf16, fp16, fp32 or fp64.
    """
    _check_rows("permute", "x", x, routing.inverse.shape[0], "T")
    return apply(PermuteFunction, x, routing.inverse, routing.offsets, False)


@checked
def unpermute(y: Tensor, routing: Routing, probabilities: Tensor | None = None) -> Tensor:
    """Sums the k rows of each token, ``y`` [T k, H] to [T, H], multiplied by probabilities if given.

    Products and sums are fp32, in the order of slots, and rounded once, as are gradients, which are 0 for dropped slots
    whatever their ``y``. Gradients of probabilities are fp32.

    Args:
        probabilities: [T, k], any floating-point dtype; fp32 as a router gives them.

    Raises:
        TypeError, ValueError: ``y`` is not [T k, H] of bf16, fp16, fp32 or fp64, or ``probabilities`` not [T, k].
    """
    _check_rows("unpermute", "y", y, routing.order.shape[0], "T k")
    if probabilities is None:
        return apply(PermuteFunction, y, routing.inverse, routing.offsets, True)
    _check_probabilities("unpermute", probabilities, routing)
    weights = probabilities.to(torch.promote_types(y.dtype, torch.float32))
    return apply(WeightedUnpermuteFunction, y, weights, routing.inverse, routing.offsets)


@checked
def permute_probabilities(probabilities: Tensor, routing: Routing) -> Tensor:
    """Sorts probabilities [T, k] like the rows, fp32 [T k]; a slot has the gradient of its row.

    Raises:
        TypeError, ValueError: ``probabilities`` is not [T, k] of floating-point numbers.
    """
    _check_probabilities("permute_probabilities", probabilities, routing)
    return apply(PermuteProbabilitiesFunction, probabilities.float(), routing.order, routing.inverse)


def _check_probabilities(function: str, probabilities: Tensor, routing: Routing) -> None:
    if probabilities.shape != routing.inverse.shape or not probabilities.is_floating_point():
        raise ValueError(
            f"{function}: probabilities is {shown(probabilities)}; the routing is of {tuple(routing.inverse.shape)}, "
            "[T, k], and needs floating-point numbers of that shape"
        )


def _check_rows(function: str, name: str, x: Tensor, rows: int, symbol: str) -> None:
    if x.dim() != 2 or x.shape[0] != rows:
        raise ValueError(
            f"{function}: {name} is {shown(x)}; [{symbol}, H] is needed, and {symbol} is {rows} for this routing"
        )
    if x.dtype not in DTYPES:
        raise ValueError(f"{function}: {name} is of {x.dtype}; bf16, fp16, fp32 and fp64 are supported")


class PermuteFunction(torch.autograd.Function):
    """Puts tokens into rows, or ``back``: each the gradient of the other. Keeps the routing alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, inverse: Tensor, offsets: Tensor, back: bool) -> Tensor:
        ctx.save_for_backward(inverse, offsets)
        ctx.back = back
        return (unpermute_rows if back else permute_rows)(x, None, inverse, offsets)

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        return (permute_rows if ctx.back else unpermute_rows)(dy, None, *ctx.saved_tensors), None, None, None


class WeightedUnpermuteFunction(torch.autograd.Function):
    """Adds up weighted rows. Keeps the routing and the probabilities, and ``y`` if these need a gradient."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, probabilities: Tensor, inverse: Tensor, offsets: Tensor) -> Tensor:
        kept = (guarded(y),) if ctx.needs_input_grad[1] else ()
        ctx.save_for_backward(guarded(probabilities), inverse, offsets, *kept)
        return unpermute_rows(y, probabilities, inverse, offsets)

    @staticmethod
    @first_order
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor | None, ...]:
        probabilities, inverse, offsets, *kept = ctx.saved_tensors
        if not kept:
            return permute_rows(dx, probabilities, inverse, offsets), None, None, None
        return *unpermute_rows_backward(dx, kept[0], probabilities, inverse, offsets), None, None


class PermuteProbabilitiesFunction(torch.autograd.Function):
    """Permutes probabilities. Both directions read by index, so that nothing is summed."""

    @staticmethod
    def forward(ctx: Any, probabilities: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return probabilities.reshape(-1)[order]

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return grad[inverse], None, None
