"""Which experts each token goes to and with which probabilities, and the losses that keep experts in use.

The host waits for nothing, and nothing is atomic but counts, which are integers: runs repeat to the bit. Of experts
with equal scores the first ones are chosen, on every device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from minifloat.functional.autograd import apply, first_order, guarded

ScoreFunction = Literal["softmax", "sigmoid"]

_TINY = 1e-20
"""Added to a sum of scores that others are divided by; DeepSeek-V3's."""


@dataclass(frozen=True)
class Selection:
    """How experts are chosen by their scores; the arguments are those of :class:`~minifloat.TopKRouter`."""

    top_k: int
    score_function: ScoreFunction = "softmax"
    score_before_top_k: bool = True
    normalize_top_k: bool = False
    num_groups: int = 1
    group_top_k: int = 1
    scaling_factor: float = 1.0

    def scores(self, logits: Tensor) -> Tensor:
        """The score function along the last dim."""
        return torch.softmax(logits, dim=-1) if self.score_function == "softmax" else torch.sigmoid(logits)


class Choice(NamedTuple):
    """What is chosen, and by what.

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
    """X W^T of ``x`` [T, H] and ``weight`` [E, H], multiplied in fp32.

    A GPU multiplies those of bf16 on tensor cores, whose products of bf16 are exact and whose sums are fp32: within
    2^-16 of the largest logit (fp32 without tensor cores: 2^-19), and in an eighth of the time.
    """
    if x.is_cuda and x.dtype == weight.dtype == torch.bfloat16 and x.numel():
        return apply(_LogitsFunction, x, weight)
    return torch.nn.functional.linear(x.float(), weight.float())


class _LogitsFunction(torch.autograd.Function):
    """X W^T and its gradients, of bf16 matrices in fp32 on tensor cores.

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


def _largest(x: Tensor, k: int) -> Tensor:
    """Where the k largest of each row are; of equal ones the first, which ``topk`` does not promise."""
    return torch.sort(x, dim=-1, descending=True, stable=True).indices[:, :k].clone()  # or all E are kept for backward


def _within_best_groups(candidates: Tensor, how: Selection) -> Tensor:
    """``candidates`` [T, E], -inf outside of the groups whose two best sum up to the most."""
    groups = candidates.view(candidates.shape[0], how.num_groups, candidates.shape[1] // how.num_groups)
    best = groups.topk(min(2, groups.shape[2]), dim=-1).values.sum(-1)
    among = torch.zeros_like(best, dtype=torch.bool).scatter_(1, _largest(best, how.group_top_k), True)
    return groups.masked_fill(~among[:, :, None], -torch.inf).flatten(1)


class _Pick(torch.autograd.Function):
    """``gather`` of columns that differ within a row, whose backward therefore adds nothing up."""

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
    """How many of ``indices`` each expert is, int64 [E]; -1 is none."""
    flat = indices.reshape(-1)
    flat = torch.where(flat < 0, num_experts, flat)
    return flat.new_zeros(num_experts + 1).scatter_add_(0, flat, torch.ones_like(flat))[:num_experts]


# ---- losses ----


def load_balancing_loss(scores: Tensor, counts: Tensor, how: Selection, token_mask: Tensor | None) -> Tensor:
    """``E sum_e f_e P_e``: 1 where experts are used alike, E / k where all tokens go to the same ones.

    f_e is the part of all choices that expert e is, which has no gradient, and P_e the mean over tokens of its share in
    the scores of all experts. Switch Transformers (Fedus et al. 2021), for k choices as DeepSeek-V3 (2024) has it.

    Args:
        scores: those of :class:`Choice`, [T, E].
        counts: int [E], how often each expert was chosen.
        token_mask: bool [T], which tokens count; all without one.
    """
    total = counts.sum().clamp(min=1).to(scores.dtype)
    sums = _of_tokens(_shares(scores, how), token_mask).sum(0)
    return (counts.to(scores.dtype) / total * sums).sum() * (scores.shape[1] * how.top_k) / total


def _shares(scores: Tensor, how: Selection) -> Tensor:
    """Scores of all experts [T, E] that sum up to 1 in each row."""
    values = scores if how.score_before_top_k else how.scores(scores)
    return values if how.score_function == "softmax" else values / (values.sum(-1, keepdim=True) + _TINY)


def z_loss(logits: Tensor, counts: Tensor, how: Selection, token_mask: Tensor | None) -> Tensor:
    """The mean over tokens of ``logsumexp(logits)^2``, which keeps logits small: ST-MoE (Zoph et al. 2022)."""
    squares = _of_tokens(logits.logsumexp(-1).square(), token_mask)
    return squares.sum() * how.top_k / counts.sum().clamp(min=1).to(logits.dtype)


def _of_tokens(x: Tensor, token_mask: Tensor | None) -> Tensor:
    """``x`` [T, ...], 0 where a token does not count."""
    if token_mask is None:
        return x
    return torch.where(token_mask.view(-1, *[1] * (x.dim() - 1)), x, 0.0)
