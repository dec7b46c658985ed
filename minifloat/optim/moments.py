"""How AdamW's moments are kept between steps: fp32, bf16, or E4M3 codes with one scale for each 128 elements.

A moment moves by little: with beta2 = 0.999 by a thousandth a step, while a bf16 has steps of 1/256 to 1/128 of its
value and an E4M3 of 1/16 to 1/8. Rounded to the nearest it would stay where it is. So both low-precision forms round
stochastically, up or down with probabilities that make the mean exact, which holds the moments to their fp32 course.

E4M3 keeps the second moment as its square root: codes span a factor of about 2^18, which is 2^36 of the moment itself.
Blocks are of up to 128 consecutive elements of a row, ``p[i]``, so that whoever cuts a parameter by rows, as FSDP2
does, cuts codes and scales alike. Parameters of fewer than two dims, few elements in all, keep moments in fp32. Scales
are powers of two: then all codes but the smallest have the significant bits of the value, and rounding those
stochastically leaves the cast nothing to do. A root that is not zero gets a code that is not zero, since an update
divides by it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from minifloat.comm.dtensor import own_rows, sharded_like
from minifloat.formats import ROWWISE, Format
from minifloat.operand import Operand
from minifloat.quantizer import Quantizer, cast_all

Moments = Literal["fp32", "bf16", "fp8"]
State = dict[str, Any]

_E4M3 = Quantizer(Format("e4m3", block=128, scale_rule="pow2"), columnwise=False)
_DROPPED = {"bf16": 16, "fp8": 20}
"""Bits of an fp32 mantissa, of 23, beyond those that a code has."""


def dtype(moments: Moments) -> torch.dtype:
    """What moments, or their codes, are stored in."""
    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8": torch.uint8}[moments]


def kept_as(p: Tensor, moments: Moments) -> Moments:
    """What the moments of a parameter are kept as where ``moments`` is asked for."""
    return "fp32" if moments == "fp8" and p.dim() < 2 else moments


def zeros(p: Tensor, names: Sequence[str], moments: Moments) -> State:
    """State of a parameter that has not been stepped, for the moments called ``names``; DTensors where it is one.

    Raises:
        ValueError: a DTensor is sharded by another dim than rows, which would cut blocks.
    """
    values = {name: torch.zeros_like(p, dtype=dtype(moments)) for name in names}
    if moments != "fp8":
        return values
    if any(placement.is_shard() and placement.dim != 0 for placement in getattr(p, "placements", ())):
        raise ValueError(
            f"fp8 moments are in blocks of a row, which a parameter of shape {tuple(p.shape)} sharded as "
            f"{p.placements} cuts: use moments='bf16'"  # type: ignore[attr-defined]
        )
    blocks = -(-math.prod(p.shape[1:]) // 128)
    scales = [torch.ones(own_rows(p).shape[0], blocks, dtype=torch.float32, device=p.device) for _ in names]
    whole = p.shape[0], blocks
    return values | {f"{name}_scale": sharded_like(p, own, whole) for name, own in zip(names, scales, strict=True)}


def load(states: Sequence[State], name: str, moments: Moments) -> list[Tensor]:
    """The moments called ``name`` in fp32, of this rank's rows: with ``"fp32"`` the very tensors of the states."""
    held = [own_rows(state[name]) for state in states]
    if moments == "fp32":
        return held
    if moments == "bf16":
        return [moment.float() for moment in held]
    return [_decode(codes, own_rows(state[f"{name}_scale"])) for codes, state in zip(held, states, strict=True)]


def store(
    states: Sequence[State], name: str, values: Sequence[Tensor], moments: Moments, generator: torch.Generator | None
) -> None:
    """Writes moments that :func:`load` gave and the step changed."""
    if moments == "fp32":
        return
    assert generator is not None
    rounded = [stochastic_round(x, _DROPPED[moments], generator) for x in values]
    held = [own_rows(state[name]) for state in states]
    if moments == "bf16":
        torch._foreach_copy_(held, rounded)
        return
    matrices = [_by_rows(x) for x in rounded]
    casts = cast_all(matrices, [_E4M3] * len(matrices))
    for state, own, operands, x in zip(states, held, casts, matrices, strict=True):
        operand = operands.any
        assert operand.scale_inv is not None
        codes = operand.codes.masked_fill((operand.codes == 0) & (x > 0), 1)  # 1 is the smallest code above zero
        own.copy_(codes.view(own.shape))
        own_rows(state[f"{name}_scale"]).copy_(operand.scale_inv)


def stochastic_round(x: Tensor, dropped: int, generator: torch.Generator) -> Tensor:
    """fp32 ``x`` with its last ``dropped`` bits zero: one of two neighbours, in the mean ``x``. Inf and NaN stay."""
    bits = x.contiguous().view(torch.int32)
    noise = torch.randint(0, 1 << dropped, bits.shape, dtype=torch.int32, device=x.device, generator=generator)
    rounded = ((bits + noise) & -(1 << dropped)).view(torch.float32)
    return torch.where(x.isfinite(), rounded, x)


def _by_rows(x: Tensor) -> Tensor:
    """[M, K] of [M, ...]."""
    return x.reshape(x.shape[0], math.prod(x.shape[1:]))


def _decode(codes: Tensor, scale_inv: Tensor) -> Tensor:
    matrix = _by_rows(codes)
    shape = matrix.shape[0], matrix.shape[1]
    operand = Operand(matrix, scale_inv, None, _E4M3.row_format, ROWWISE, shape, torch.float32)
    return operand.dequantize().view(codes.shape)
