"""Casts of kernels beside those of the reference: the data, the formats, the memory that they write, the comparison."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from minifloat.formats import COLUMNWISE, ROWWISE, Format
from minifloat.ops.launch import count_launches, ready
from minifloat.ops.quantize import amax_shape, blocks, empty_cast, nvfp4, per_tensor, reference
from minifloat.ops.quantize.job import CastJob, CastTarget
from tests.helpers.cast_inputs import DATA as DATA
from tests.helpers.cast_inputs import data as data
from tests.helpers.compare import assert_same_bits

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SEED = (0x1234_5678_9ABC_DEF0, 0x0FED_CBA9_8765_4321)

E4M3, E5M2 = Format("e4m3"), Format("e5m2", scale_rule="pow2")
GIVEN = Format("e4m3", scale_rule="given")
PER_TENSOR = [E4M3, E5M2, Format("e4m3", amax_epsilon=2.0), GIVEN, replace(GIVEN, element="e5m2")]
POW2 = Format("e4m3", 128, scale_rule="pow2")
FP32 = Format("e5m2", 128, scale_rule="fp32", amax_epsilon=1e-3)
MX = Format("e4m3", 32, scale_rule="e8m0")
BLOCKS = [
    *(POW2, replace(POW2, tile=True), replace(POW2, block=64, element="e5m2", amax_epsilon=1e-3)),
    *(FP32, replace(FP32, element="e4m3", tile=True, amax_epsilon=0.0), replace(FP32, block=16)),
    *(MX, replace(MX, tile=True), replace(MX, element="e5m2")),
    *(replace(MX, element="e2m1"), replace(MX, element="e2m1", tile=True)),
    *(replace(MX, element="e2m3"), replace(MX, element="e3m2", tile=True)),
]
NV = Format("e2m1", 16, scale_rule="two_level")
NV_ROTATED = replace(NV, transform="hadamard16")
NV_STOCHASTIC = replace(NV, rounding="stochastic")
NV_ROTATED_STOCHASTIC = replace(NV_ROTATED, rounding="stochastic")
NV_TILES = replace(NV, tile=True)
NV_LINES = replace(NV, amax_per_row=True)
FOUR_OVER_SIX = [
    replace(NV, rounding=rounding, block_scale_max=largest)  # type: ignore[arg-type]
    for rounding in ("four_over_six_mae", "four_over_six_mse")
    for largest in (448.0, 256.0)
]
Pair = tuple[Format | None, Format | None]
"""Rowwise and columnwise."""
NVFP4: list[Pair] = [
    *((NV, NV_ROTATED), (NV_STOCHASTIC, NV_ROTATED_STOCHASTIC), (NV, NV), (NV_STOCHASTIC, NV_STOCHASTIC)),
    *((NV_LINES, NV_LINES), (NV_TILES, None), (None, NV_TILES), (None, NV_ROTATED)),
    (replace(NV_TILES, rounding="stochastic"), replace(NV_TILES, rounding="stochastic")),
    *[(fmt, fmt) for fmt in FOUR_OVER_SIX],
    *[(replace(fmt, tile=True), replace(fmt, tile=True)) for fmt in FOUR_OVER_SIX],
    (replace(FOUR_OVER_SIX[0], amax_per_row=True), replace(FOUR_OVER_SIX[3], amax_per_row=True)),
]
ROWS = [Format(amax_per_row=True), Format(scale_rule="pow2", amax_per_row=True, amax_epsilon=1e-3)]
PAIRS: list[Pair] = [(fmt, fmt) for fmt in (*PER_TENSOR, *BLOCKS)] + NVFP4
MIXED: list[Pair] = [(E4M3, E5M2), (FP32, POW2), (replace(POW2, tile=True), POW2), (NV, E4M3), (GIVEN, MX)]
"""Of two formats."""
WITHOUT_KERNEL: list[Pair] = [
    *[(fmt, fmt) for fmt in (Format(block=2, scale_rule="fp32"), Format(block=8, tile=True, scale_rule="e8m0"))],
    *[(fmt, fmt) for fmt in (Format("e5m2", block=512, scale_rule="pow2"), Format("e2m1", 32, scale_rule="two_level"))],
]
"""What the reference casts, on a GPU too."""
ROTATED_FIRST: Pair = None, replace(MX, element="e2m1", transform="hadamard16")
"""A matrix is rotated by one launch and cast by another; groups are cast by the reference."""


# ---- data ----


def elsewhere(x: Tensor, place: str) -> Tensor:
    """A tensor in other memory: not at a multiple of 16 bytes, in another order, with gaps, or one row for all."""
    if place == "odd address":
        return torch.cat([x.new_zeros(3), x.flatten()])[3:].view(x.shape)
    if place == "transposed" and x.dim() == 2:
        return x.t().contiguous().t()
    if place == "strided":
        return torch.stack([x, torch.ones_like(x)], -1)[..., 0]
    return x[:1].expand_as(x) if place == "one row" and x.dim() == 2 else x


# ---- the casts ----


def kernels_of(fmt: Format) -> Any:
    """The module whose kernels cast to a format."""
    return nvfp4 if fmt.scale_rule == "two_level" else blocks if fmt.block else per_tensor


def target(x: Tensor, fmt: Format, dim: int, k_major: bool, factor: float | None = None) -> CastTarget:
    """Where to. Levels are the reference's, times ``factor``; None measures where a kernel can."""
    k_major = k_major and not fmt.packed  # which no GEMM asks for
    codes, scales = empty_cast(x, fmt, dim, k_major)
    amax = torch.empty(amax_shape(fmt, dim, *x.shape), dtype=torch.float32, device=x.device)
    if fmt.scale_rule == "given":
        return CastTarget(fmt, dim, torch.tensor([3.7], device=x.device), codes, scales, amax.zero_(), k_major)
    measured = kernels_of(fmt) is blocks and factor is None
    level = None if measured else reference.amax(x, fmt, dim) * (factor or 1.0)
    return CastTarget(fmt, dim, level, codes, scales, amax, k_major)


def job(
    x: Tensor, row: Format | None, column: Format | None, k_major: bool = True, factor: float | None = None
) -> CastJob:
    """The casts of a matrix along its rows and along its columns; tiles of NVFP4 are rowwise in both places."""
    rng = torch.tensor(SEED, device=x.device)
    stochastic = any(fmt is not None and fmt.rounding == "stochastic" for fmt in (row, column))
    down = ROWWISE if row is None and column is not None and kernels_of(column) is nvfp4 and column.tile else COLUMNWISE
    return CastJob(
        ready(x),
        rng if stochastic else None,
        target(x, row, ROWWISE, k_major, factor) if row else None,
        target(x, column, down, k_major, factor) if column else None,
    )


def assert_reference(made: CastJob) -> None:
    """What a job's targets hold is what the reference gives, to the bit."""
    for each in made.targets:
        rng = made.rng if each.format.rounding == "stochastic" else None
        expected = reference.cast(made.x, each.level, rng, each.format, each.dim)
        assert_same_bits(each.codes, expected.codes)
        assert_same_bits(each.scale_inv, expected.scale_inv)
        if each.format.scale_rule == "given":
            assert_same_bits(each.amax, expected.amax)


def assert_kernel_is_reference(jobs: Sequence[CastJob], choice: Any = None, launches: int = 1) -> None:
    """Casts jobs on the kernels of their format, in so many launches."""
    (kernels,) = {kernels_of(each.format) for made in jobs for each in made.targets}
    with count_launches() as counted:
        kernels.cast(jobs, None, choice)
    nothing = kernels is not per_tensor and not any(made.x.numel() for made in jobs)
    assert sum(counted.values()) == (0 if nothing else launches)
    for made in jobs:
        assert_reference(made)
