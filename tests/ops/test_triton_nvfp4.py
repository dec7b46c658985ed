"""NVFP4 casts in Triton against the reference, bit for bit: in the interpreter on a CPU, compiled on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from minifloat.formats import COLUMNWISE, ROWWISE, Format
from minifloat.ops.quantize import amax_shape, code_shape, reference, scale_shape

pytest.importorskip("triton")

import tests.helpers.triton_interpreter  # noqa: F401  (launches run in the interpreter where there is no GPU)
from minifloat.ops.launch import count_launches
from minifloat.ops.quantize import nvfp4
from minifloat.ops.quantize.job import Job, Target
from minifloat.ops.tiles import Tile
from tests.helpers.sample import each_twice
from tests.helpers.triton_compile import compile_for

PLAIN = Format("e2m1", 16, scale_rule="two_level")
ROTATED = replace(PLAIN, transform="hadamard16")
STOCHASTIC = replace(PLAIN, rounding="stochastic")
ROTATED_STOCHASTIC = replace(ROTATED, rounding="stochastic")
TILE = replace(PLAIN, tile=True)
PER_ROW = replace(PLAIN, amax_per_row=True)
FOUR_OVER_SIX = [
    replace(PLAIN, rounding=rounding, block_scale_max=largest)
    for rounding in ("four_over_six_mae", "four_over_six_mse")
    for largest in (448.0, 256.0)
]
CASTS: list[tuple[Format | None, Format | None]] = [
    (PLAIN, ROTATED),
    (STOCHASTIC, ROTATED_STOCHASTIC),
    (PLAIN, PLAIN),
    (STOCHASTIC, STOCHASTIC),
    (PER_ROW, PER_ROW),
    (TILE, None),
    (replace(TILE, rounding="stochastic"), replace(TILE, rounding="stochastic")),
    (None, TILE),
    (None, ROTATED),
    *[(fmt, fmt) for fmt in FOUR_OVER_SIX],
    *[(replace(fmt, tile=True), replace(fmt, tile=True)) for fmt in FOUR_OVER_SIX],
    (replace(FOUR_OVER_SIX[0], amax_per_row=True), replace(FOUR_OVER_SIX[3], amax_per_row=True)),
]
SHAPES = [(1, 16), (16, 16), (17, 33), (48, 80), (129, 50), (33, 272)]
EMPTY = [(0, 32), (7, 0), (0, 0)]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SEED = (0x1234_5678_9ABC_DEF0, 0x0FED_CBA9_8765_4321)
SMALL = Tile(16, 256, 4)
FOR_EACH_CAST = pytest.mark.parametrize(
    ("row", "column"), CASTS, ids=[f"{row and row.spec}-{column and column.spec}" for row, column in CASTS]
)
FOR_EACH_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))


KINDS = ["mixed", "special", "tiny"]


def inputs(kind: str, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Columns of different kinds beside each other, or with everything that is not a number, or close to zero."""
    x = torch.randn(shape)
    if kind == "tiny":  # denormals; the scale of the tensor overflows
        x = x * torch.finfo(dtype).smallest_normal * torch.exp2(torch.randint(-6, 12, shape).float())
    else:
        x[:, 1::3] *= torch.exp(2.5 * torch.randn_like(x[:, 1::3]))  # heavy tails
        x[:, 16:32] = torch.randint(-24, 25, x[:, 16:32].shape) / 4  # ties of the rounding
        x[:, 32:48] *= 1e-4  # block scales near zero
        x[torch.rand(shape) < 0.1] = 0.0
        x[:, 48:64] = torch.copysign(torch.zeros(()), torch.randn_like(x[:, 48:64]))
    if kind == "special":
        for value in (torch.nan, -torch.nan, torch.inf, -torch.inf, -0.0, torch.finfo(dtype).max):
            x[torch.rand(shape) < 0.01] = value
        x[:, 64:80] = -torch.nan
    return x.to(dtype).to(device)


def rng_on(device: torch.device) -> Tensor:
    return torch.tensor(SEED, dtype=torch.int64, device=device)


def target_for(x: Tensor, fmt: Format, dim: int) -> Target:
    """Poisoned outputs; the level is the reference's."""
    rows, cols = x.shape
    codes = x.new_empty(code_shape(fmt, dim, rows, cols), dtype=torch.uint8)
    scales = x.new_empty(scale_shape(fmt, dim, rows, cols), dtype=fmt.scale_dtype)
    return Target(fmt, dim, reference.amax(x, fmt, dim), codes, scales, x.new_empty(0, dtype=torch.float32), False)


def job_for(x: Tensor, row: Format | None, column: Format | None) -> Job:
    stochastic = any(fmt is not None and fmt.rounding == "stochastic" for fmt in (row, column))
    return Job(
        x,
        rng_on(x.device) if stochastic else None,
        target_for(x, row, ROWWISE) if row else None,
        target_for(x, column, ROWWISE if column == TILE else COLUMNWISE) if column else None,
    )


def assert_as_reference(job: Job) -> None:
    for target in job.targets:
        rng = job.rng if target.format.rounding == "stochastic" else None
        expected = reference.cast(job.x, target.level, rng, target.format, target.dim)
        name = f"{target.format.spec} dim {target.dim} {tuple(job.x.shape)} {job.x.dtype}"
        assert target.scale_inv.shape == expected.scale_inv.shape and target.codes.shape == expected.codes.shape, name
        wrong = (target.scale_inv != expected.scale_inv).nonzero()
        assert not len(wrong), f"{name}: scales at {wrong[:4].tolist()}"
        wrong = (target.codes != expected.codes).nonzero()
        assert not len(wrong), f"{name}: codes at {wrong[:4].tolist()}"


def check(xs: Sequence[Tensor], row: Format | None, column: Format | None, choice: Tile | None = SMALL) -> None:
    jobs = [job_for(x, row, column) for x in xs]
    with count_launches() as launches:
        nvfp4.cast(jobs, None, choice)
    assert sum(launches.values()) == any(x.numel() for x in xs)
    for job in jobs:
        assert_as_reference(job)


# ---- casts ----


@FOR_EACH_CAST
def test_cast_is_that_of_the_reference(row: Format | None, column: Format | None, device: torch.device) -> None:
    for kind in KINDS:
        check([inputs(kind, (16, 144), torch.bfloat16, device)], row, column)


@each_twice
@pytest.mark.parametrize("shape", [*SHAPES, *EMPTY], ids=str)
@pytest.mark.parametrize(("row", "column"), [CASTS[0], CASTS[1], CASTS[6]], ids=["nearest", "stochastic", "tile"])
def test_cast_of_every_shape(
    row: Format | None, column: Format | None, shape: tuple[int, int], device: torch.device
) -> None:
    check([inputs("mixed", shape, torch.bfloat16, device)], row, column)


@FOR_EACH_CAST
def test_odd_end_of_packed_codes(row: Format | None, column: Format | None, device: torch.device) -> None:
    """What follows an odd last row or column is code 0, whatever sign, infinity or NaN is in its block."""
    for shape in ((1, 1), (7, 13), (17, 81)):
        x = -inputs("special", shape, torch.bfloat16, device).abs()
        check([x], row, column)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=["float16", "float32"])
def test_cast_of_every_dtype(dtype: torch.dtype, device: torch.device) -> None:
    for kind in KINDS:
        check([inputs(kind, (16, 144), dtype, device)], PLAIN, ROTATED)
    check([inputs("special", (16, 144), dtype, device)], FOUR_OVER_SIX[0], ROTATED_STOCHASTIC)


@pytest.mark.parametrize("cols", [32, 512])
@pytest.mark.parametrize(("row", "column"), [CASTS[1], CASTS[6], CASTS[-2]], ids=["strip", "tile", "four_over_six"])
def test_every_tile_gives_the_same_bits(
    row: Format | None, column: Format | None, cols: int, device: torch.device
) -> None:
    check([inputs("mixed", (16, 80), torch.bfloat16, device)], row, column, Tile(16, cols, 4))


@pytest.mark.parametrize("count", [2, 5])
def test_several_matrices_in_one_launch(count: int, device: torch.device) -> None:
    shapes = [(17, 48), (0, 64), (32, 16), (1, 128), (16, 80)][:count]
    check([inputs("mixed", shape, torch.bfloat16, device) for shape in shapes], STOCHASTIC, ROTATED_STOCHASTIC)


@pytest.mark.parametrize("seed", [(0, 0), (2**62 - 1, 2**62 - 1), (-1, -(2**63))])
def test_every_seed_is_taken(seed: tuple[int, int], device: torch.device) -> None:
    job = job_for(inputs("mixed", (16, 48), torch.bfloat16, device), STOCHASTIC, STOCHASTIC)
    assert job.rng is not None
    job.rng.copy_(torch.tensor(seed))
    nvfp4.cast([job], None, SMALL)
    assert_as_reference(job)


def test_noop_leaves_outputs_alone(device: torch.device) -> None:
    x = inputs("mixed", (16, 32), torch.bfloat16, device)
    skipped, done = job_for(x, PLAIN, ROTATED), job_for(x, PLAIN, ROTATED)
    nvfp4.cast([skipped], torch.ones(1, device=device), SMALL)
    assert all((part == 0xFF).all() for target in skipped.targets for part in (target.codes, target.scale_inv))
    nvfp4.cast([done], torch.zeros(1, device=device), SMALL)
    assert_as_reference(done)


# ---- elements ----


def test_rounding_of_every_bf16_and_of_ties(device: torch.device) -> None:
    """A block whose amax is 6 in a tensor whose amax is 6 * 448 is not scaled: elements are codes as they are."""
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    ties = torch.stack([ties, ties.nextafter(ties * 2), ties.nextafter(ties * 0)]).flatten()
    elements = torch.cat([every[every.abs() <= 6], ties, -ties])
    elements = torch.nn.functional.pad(elements, (0, -len(elements) % 15)).reshape(-1, 15)
    x = torch.cat([torch.full((len(elements), 1), 6.0), elements], dim=1).reshape(-1)
    x = torch.nn.functional.pad(x, (0, -len(x) % 4096)).reshape(-1, 4096).to(device)
    for fmt in (PLAIN, STOCHASTIC):
        job = job_for(x, fmt, None)
        assert job.row is not None and job.row.level is not None
        job.row.level.fill_(6 * 448)
        nvfp4.cast([job], None, Tile(16, 4096, 8))
        assert_as_reference(job)


# ---- amaxes ----


@FOR_EACH_DTYPE
@pytest.mark.parametrize("kind", KINDS)
def test_amaxes_are_those_of_the_reference(kind: str, dtype: torch.dtype, device: torch.device) -> None:
    xs = [inputs(kind, shape, dtype, device) for shape in ((33, 96), (17, 50), (0, 16))]
    for fmt, dim in ((PER_ROW, ROWWISE), (PER_ROW, COLUMNWISE), (ROTATED, COLUMNWISE)):
        found = [x.new_zeros(amax_shape(fmt, dim, *x.shape), dtype=torch.float32) for x in xs]
        nvfp4.amax(xs, fmt, dim, found, Tile(16, 128, 4))
        for x, amax in zip(xs, found, strict=True):
            assert torch.equal(amax, reference.amax(x, fmt, dim)), (fmt.spec, dim, x.shape)
    row, column = ([x.new_zeros(1, dtype=torch.float32) for x in xs] for _ in range(2))
    nvfp4.amax(xs, ROTATED, COLUMNWISE, column, Tile(16, 128, 4), row)
    for x, a, b in zip(xs, row, column, strict=True):
        assert torch.equal(a, reference.amax(x, PLAIN, ROWWISE))
        assert torch.equal(b, reference.amax(x, ROTATED, COLUMNWISE))


@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
def test_amax_of_nothing_but_one_value(value: float, device: torch.device) -> None:
    x = torch.full((16, 64), value, dtype=torch.bfloat16, device=device)
    for fmt, dim in ((PER_ROW, ROWWISE), (PER_ROW, COLUMNWISE), (ROTATED, COLUMNWISE)):
        found = x.new_zeros(amax_shape(fmt, dim, *x.shape), dtype=torch.float32)
        nvfp4.amax([x], fmt, dim, [found], Tile(16, 128, 4))
        assert torch.equal(found, reference.amax(x, fmt, dim))


# ---- compiled ----


@pytest.mark.parametrize(
    ("row", "column", "cols"), [(PLAIN, ROTATED, 512), (FOUR_OVER_SIX[0], None, 256)], ids=["strips", "four_over_six"]
)
def test_compiled_cast_rounds_exactly_and_does_not_spill(row: Format, column: Format | None, cols: int) -> None:
    byte, fp32 = (torch.uint8,), (torch.float32,)
    outputs = (fp32, byte, byte, fp32, byte, byte)
    constants = (1, row, column, column is not None, False, False, True, cols)
    compiled = compile_for(
        nvfp4.cast_nvfp4_kernel, (torch.bfloat16,), (torch.int64,), *outputs, torch.float32, (7,), (7,), (7,),
        *constants, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    assert compiled.spills == 0
    assert "ld.global.v4.b32" in compiled.ptx and "st.global.v2.b32" in compiled.ptx
    assert not any(inexact in compiled.ptx for inexact in (".ftz", "div.full", "rcp.approx", "div.approx"))


# ---- large matrices ----


@pytest.mark.gpu
@FOR_EACH_DTYPE
@FOR_EACH_CAST
def test_large_matrices_on_a_gpu(row: Format | None, column: Format | None, dtype: torch.dtype) -> None:
    device = torch.device("cuda")
    for shape in ((512, 4096), (1000, 1104), (300, 777)):
        for kind in KINDS:
            check([inputs(kind, shape, dtype, device)], row, column, None)
