"""Statistics of what a cast lost: computed on the device, as sums that add up over steps and ranks."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from minifloat.operand import Operand
from minifloat.ops.quantize import reference


class Losses(NamedTuple):
    """Losses of one cast, or of several together.

    Args:
        amax: largest absolute value among finite elements in high precision.
        underflow: share of elements that were not zero in high precision and are zero, by their code or their scale.
        saturation: share of elements at a code of the largest magnitude, their scale not 0. A scale from a block's amax
            that is no power of two puts about one element of each block there: some 1/16 is normal for NVFP4's strips.
        snr: signal-to-noise in dB, over elements that are finite in high precision; infinite without noise, minus
            infinite where some of them are no longer finite.
        nonfinite: number of elements that are infinite or NaN in high precision.
    """

    amax: float
    underflow: float
    saturation: float
    snr: float
    nonfinite: int


def measure(x: Tensor, operand: Operand) -> Tensor:
    """Compares ``operand`` with the values ``x`` [M, K] that it was cast from; waits for no device.

    A format that rotates has its zeros and largest codes counted after the rotation, which spreads what a
    non-finite element does to the noise over its 16 rows; in groups of rows they are not counted, and their shares are
    NaN. Rows of no group are left out.

    Returns:
        fp64 [7]: amax, then sums: codes, underflows, codes of the largest magnitude, signal, noise, non-finite
        elements. :func:`combine` adds them up, :func:`read` gives their meaning.

    Raises:
        ValueError: ``operand`` holds values, no codes.
    """
    fmt = operand.format
    if operand.codes.dtype != torch.uint8:
        raise ValueError(f"measure compares codes; this {fmt.spec} operand has none: cast it by itself")
    with torch.no_grad():
        finite = x.isfinite()
        if operand.offsets is not None:
            of_no_group = torch.arange(len(x), device=x.device)[:, None] >= operand.offsets[-1]
            values, finite = torch.where(finite & ~of_no_group, x, 0), finite | of_no_group
        else:
            values = torch.where(finite, x, 0)
        amax = _norms(values, math.inf).amax() if values.numel() else values.new_zeros(()).double()
        # Squares of 1e-20 underflow in fp32, and those of 1e20 overflow; an exponent that fp16 has will do for fp16.
        exponent = torch.frexp(amax)[1].double().clamp(min=-15 if x.dtype == torch.float16 else -126)
        unit = torch.exp2(-exponent)
        noise = operand.dequantize(torch.float32).sub_(values).masked_fill_(~finite, 0).mul_(unit)
        before, elements, count = _elements(values, operand)
        if fmt.transform == "none":
            elements.masked_fill_(~finite, 0)
        sums = [
            count,
            _norms(before, 0).sum() - _norms(elements, 0).sum(),  # a zero stays one
            _norms((elements > 0.95 * fmt.max).bfloat16(), 0).sum(),  # no other code is so close to the largest
            (_norms(values * unit, 2) / unit).square().sum(),
            (_norms(noise, 2) / unit).square().sum(),
            _norms((~finite).bfloat16(), 0).sum(),
        ]
        return torch.stack([amax, *(each.double() for each in sums)])


def _norms(x: Tensor, order: float) -> Tensor:
    """Computes norms of rows in fp64 of sums in fp32; of order 0 they count: these passes read and write least."""
    return torch.linalg.vector_norm(x, order, dim=-1, dtype=torch.float32).double()


def _elements(values: Tensor, operand: Operand) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the values that were cast, after a rotation, the magnitudes of their codes, and how many there are."""
    fmt, scale_inv, offsets = operand.format, operand.scale_inv, operand.offsets
    if fmt.transform != "none" and offsets is not None:
        nothing = values.new_zeros(0)
        return nothing, nothing, nothing.new_full((), math.nan, dtype=torch.float64)
    assert scale_inv is not None
    before = values if fmt.transform == "none" else reference.rotated(values.float(), fmt, operand.dim)
    # Values under scales of 1 are the elements: 127 is E8M0's, 56 that of E4M3 under an amax of max x max.
    one = 56 if fmt.scale_rule == "two_level" else 127 if scale_inv.dtype == torch.uint8 else 1
    kept = scale_inv != 0 if one != 127 else torch.ones_like(scale_inv)  # under a scale of 0 no element is left
    amax = None if operand.amax is None else torch.full_like(operand.amax, fmt.max * fmt.block_scale_max)
    ones, plain = (kept * one).to(scale_inv.dtype), replace(fmt, transform="none")
    of_ones = operand._replace(scale_inv=ones, amax=amax, format=plain, shape=(before.shape[0], before.shape[1]))
    elements = of_ones.dequantize(torch.bfloat16)
    rows = torch.full((), len(before), device=values.device) if offsets is None else offsets[-1]
    return before, elements.abs_(), rows.double() * before.shape[1]


def combine(measured: Tensor) -> Tensor:
    """Adds up what :func:`measure` gave, [n, 7], of several steps, casts or ranks: [7]."""
    return torch.cat([measured[:, :1].amax(0), measured[:, 1:].sum(0)])


def read(measured: Tensor) -> Losses:
    """Reads what :func:`measure` or :func:`combine` gave [7]; waits for the device."""
    amax, count, underflow, largest, signal, noise, nonfinite = measured.tolist()
    ratio = math.inf if noise == 0 else signal / noise
    snr = 10 * math.log10(ratio) if ratio > 0 else -math.inf  # or NaN
    count = max(count, 1)
    return Losses(amax, underflow / count, largest / count, snr, int(nonfinite))
