"""Statistics of what a cast lost: computed on the device, as sums that add up over steps and ranks."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from minifloat.formats import parse
from minifloat.operand import Operand
from minifloat.ops.quantize import reference

MEANINGS = {
    "excess": "what was lost beyond the usual, of elements or of the signal's amplitude the larger share; the order",
    "amax": "the largest finite absolute value in high precision",
    "underflow": "share of elements that became zero, by their code or their scale; in 4 bits 4 to 20 % is usual",
    "saturation": "share of elements at the largest code; one in each block is usual, 1/16 of NVFP4",
    "SNR dB": "signal-to-noise ratio of finite elements; 31 in E4M3, 25 in E5M2 and 17 to 20 in 4 bits is usual",
    "non-finite": "number of elements that are infinite or NaN in high precision; such rows come first",
}
"""Columns of reports, in their order."""


class Losses(NamedTuple):
    """Losses of one cast, or of several together, as in :data:`MEANINGS`.

    ``snr`` is infinite without noise, minus infinite where finite elements are no longer finite. ``excess`` is 0 where
    underflow and noise are those of :func:`usual`, 1 where all is lost.
    """

    amax: float
    underflow: float
    saturation: float
    snr: float
    nonfinite: int
    excess: float


def measure(x: Tensor, operand: Operand) -> Tensor:
    """Compares ``operand`` with the values ``x`` [M, K] that it was cast from; waits for no device.

    A format that rotates has its zeros and largest codes counted after the rotation, which spreads what a
    non-finite element does to the noise over its 16 rows; in groups of rows they are not counted, and their shares are
    NaN. Rows of no group are left out.

    Returns:
        fp64 [9]: amax, then sums: codes, underflows, codes of the largest magnitude, signal, noise, non-finite
        elements, and underflows and noise as usual. :func:`combine` adds them up, :func:`read` gives their meaning.

    Raises:
        ValueError: ``operand`` holds values, no codes.
    """
    if operand.codes.dtype != torch.uint8:
        raise ValueError(f"measure compares codes; this {operand.format.spec} operand has none: cast it by itself")
    sums, (zeros, noise) = _sums(x, operand), usual(operand.format.spec, operand.dim)
    return torch.cat([sums, sums[1:2] * zeros, sums[4:5] * noise])


@lru_cache(256)
def usual(spec: str, dim: int) -> tuple[float, float]:
    """Computes which parts of elements and of signal a cast loses of Laplace's values: tails as of activations."""
    x, fmt = torch.empty(2, 128, 128, dtype=torch.float32, device="cpu"), parse(spec)
    x = x.exponential_(generator=torch.Generator().manual_seed(0)).diff(dim=0)[0]
    level = reference.amax(x, fmt if fmt.needs_amax else reference.WHOLE, dim)
    given = fmt.max / level if fmt.scale_rule == "given" else level if fmt.needs_amax else None
    rng = torch.zeros(2, dtype=torch.int64, device="cpu")  # not drawn: a run that is inspected keeps its bits
    codes, scale_inv, *_ = reference.cast(x, given, rng, fmt, dim)
    operand = Operand(codes, scale_inv, level, fmt, dim, (128, 128), x.dtype)
    _, count, zeros, _, signal, noise, _ = _sums(x, operand).tolist()
    return zeros / count, noise / signal


def _sums(x: Tensor, operand: Operand) -> Tensor:
    """Computes what :func:`measure` returns, without what is usual."""
    fmt = operand.format
    with torch.no_grad():
        finite = x.isfinite()
        if operand.offsets is not None:
            of_no_group = torch.arange(len(x), device=x.device)[:, None] >= operand.offsets[-1]
            values, finite = torch.where(finite & ~of_no_group, x, 0), finite | of_no_group
        else:
            values = torch.where(finite, x, 0)
        amax = _norms(values, math.inf).amax() if values.numel() else values.new_zeros(()).double()
        # Squares of 1e-20 underflow in fp32, and those of 1e20 overflow; an exponent that fp16 has will do for fp16.
        unit = torch.exp2(-torch.frexp(amax)[1].double().clamp(min=-15 if x.dtype == torch.float16 else -126))
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
    """Adds up what :func:`measure` gave, [n, 9], of several steps, casts or ranks: [9]."""
    return torch.cat([measured[:, :1].amax(0), measured[:, 1:].sum(0)])


def read(measured: Tensor) -> Losses:
    """Reads what :func:`measure` or :func:`combine` gave [9]; waits for the device."""
    amax, count, underflow, largest, signal, noise, nonfinite, zeros, usual_noise = measured.tolist()
    ratio = math.inf if noise == 0 else signal / noise
    snr = 10 * math.log10(ratio) if ratio > 0 else -math.inf  # or NaN
    count, signal = max(count, 1), signal or 1.0
    lost = min(10 ** (-snr / 20), 1.0), math.sqrt(usual_noise / signal)
    pairs = [lost] if math.isnan(count) else [lost, (underflow / count, zeros / count)]
    excess = max((found - normal) / (1 - normal) for found, normal in pairs)
    return Losses(amax, underflow / count, largest / count, snr, int(nonfinite), excess)
