"""The block casts in Triton against the reference, bit for bit: in the interpreter, and on a GPU where there is one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from minifloat.formats import COLUMNWISE, ELEMENTS, ROWWISE, SCALE_RULES, Format
from minifloat.ops.quantize import amax_shape, code_shape, reference, scale_shape
from minifloat.ops.quantize.job import Aligned, Job, Target
from minifloat.ops.tiles import Tile
from tests.helpers import triton_interpreter
from tests.helpers.compare import assert_same_bits
from tests.helpers.poison import poison

pytest.importorskip("triton")
import triton
import triton.language as tl

from minifloat.formats import device as device_functions
from minifloat.ops.launch import count_launches
from minifloat.ops.quantize import blocks
from minifloat.ops.quantize import device as device_code
from minifloat.ops.quantize.layouts import layouts
from tests.helpers.sample import each_twice

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
POW2 = Format("e4m3", 128, scale_rule="pow2")
FP32 = Format("e5m2", 128, scale_rule="fp32", amax_epsilon=1e-3)
MX = Format("e4m3", 32, scale_rule="e8m0")
FORMATS = [
    *(POW2, replace(POW2, tile=True), replace(POW2, block=64, element="e5m2", amax_epsilon=1e-3)),
    *(FP32, replace(FP32, element="e4m3", tile=True, amax_epsilon=0.0), replace(FP32, block=16)),
    *(MX, replace(MX, tile=True), replace(MX, element="e5m2")),
    *(replace(MX, element="e2m1"), replace(MX, element="e2m1", tile=True)),
    *(replace(MX, element="e2m3"), replace(MX, element="e3m2", tile=True)),
]
SHAPES = [(1, 1), (1, 128), (128, 128), (64, 96), (129, 130), (0, 128), (128, 0)]
TILES = [Tile(32, 128, 1), Tile(32, 128, 2), Tile(32, 64, 1), Tile(64, 128, 4), Tile(128, 128, 8)]
FOR_EACH_FORMAT = pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.spec)
FOR_EACH_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
INFINITIES, NANS = [torch.inf, -torch.inf], [torch.nan, -torch.nan]


# ---- inputs ----


def _with(values: list[float], x: Tensor) -> Tensor:
    """``x`` with some of ``values`` at about one place in 200."""
    chosen = torch.rand(x.shape) < 0.005
    x[chosen] = torch.tensor(values).repeat(x.numel())[: int(chosen.sum())]
    return x


def _blank(x: Tensor, value: float) -> Tensor:
    """``x`` with whole strips and a whole tile of ``value``."""
    x[1::5], x[:, 1::5] = value, value
    x[:128, 128:256] = value
    return x


DATA: dict[str, Callable[[tuple[int, int], torch.dtype], Tensor]] = {
    "normal": lambda shape, dtype: torch.randn(shape),
    "heavy_tailed": lambda shape, dtype: torch.randn(shape) * torch.exp(2.5 * torch.randn(shape)),
    "tiny": lambda shape, dtype: torch.randn(shape) * 0.125 * torch.finfo(dtype).tiny,
    "small": lambda shape, dtype: torch.randn(shape) * 2.0**-120 * 4.0 ** torch.randint(-3, 3, (shape[0], 1)),
    "huge": lambda shape, dtype: (torch.rand(shape) * 0.5 + 0.5) * torch.finfo(dtype).max * torch.randn(shape).sign(),
    "zeros": lambda shape, dtype: torch.zeros(shape) * torch.randn(shape).sign(),
    "zero_blocks": lambda shape, dtype: _blank(torch.randn(shape), 0.0),
    "infinite": lambda shape, dtype: _with(INFINITIES, torch.randn(shape)),
    "nan": lambda shape, dtype: _with(NANS, torch.randn(shape)),
    "nan_blocks": lambda shape, dtype: _blank(_with(NANS + INFINITIES, torch.randn(shape)), torch.nan),
    # Amaxes next to MAX and its powers of two, where the scale changes: one step of the dtype around them.
    "edges": lambda shape, dtype: (
        torch.tensor([448.0, 57344.0, 1.0])[torch.randint(3, shape)] * (1 + torch.randint(-1, 2, shape) * 2.0**-7)
    ),
}


# ---- comparison ----


class Orientation(NamedTuple):
    """Which casts of a matrix are wanted, and whether the columnwise codes are k_major."""

    row: bool
    column: bool
    k_major: bool = True


ROW, COLUMN, COLUMN_PLAIN = Orientation(True, False), Orientation(False, True), Orientation(False, True, False)
BOTH, BOTH_PLAIN = Orientation(True, True), Orientation(True, True, False)
FOR_EACH_ORIENTATION = pytest.mark.parametrize(
    "orientation", [ROW, COLUMN, COLUMN_PLAIN, BOTH, BOTH_PLAIN], ids=["row", "column", "plain", "both", "both_plain"]
)


def _empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, transposed: bool) -> Tensor:
    tensor = torch.empty(tuple(reversed(shape)) if transposed else shape, dtype=dtype, device=device)
    poison(tensor)
    return tensor.t() if transposed else tensor


def _target(x: Tensor, fmt: Format, dim: int, k_major: bool, level: Tensor | None = None) -> Target:
    """Poisoned outputs; the scales of rows lie with the rows consecutive in memory."""
    shape = tuple(x.shape)
    codes = _empty(code_shape(fmt, dim, *shape), torch.uint8, x.device, k_major)
    scales = _empty(scale_shape(fmt, dim, *shape), fmt.scale_dtype, x.device, dim == ROWWISE and not fmt.tile)
    amax = _empty(amax_shape(fmt, dim, *shape), torch.float32, x.device, False)
    return Target(fmt, dim, level, codes, scales, amax, k_major)


def _job(x: Tensor, fmt: Format, orientation: Orientation, levels: bool = False) -> Job:
    def target(dim: int, k_major: bool) -> Target:
        k_major = k_major and not fmt.packed  # which no GEMM asks for
        return _target(x, fmt, dim, k_major, reference.amax(x, fmt, dim) * 1.5 if levels else None)

    row = target(ROWWISE, False) if orientation.row else None
    return Job(x, None, row, target(COLUMNWISE, orientation.k_major) if orientation.column else None)


def _check(job: Job) -> None:
    for target in job.targets:
        expected = reference.cast(job.x, target.level, None, target.format, target.dim)
        assert_same_bits(target.codes, expected.codes)
        assert_same_bits(target.scale_inv, expected.scale_inv)


def _cast(job: Job, choice: Tile | None = None, launches: int = 1) -> None:
    with count_launches() as counter:
        blocks.cast([job], None, choice)
    assert counter == ({"cast_block_kernel": launches} if job.x.numel() else {})
    _check(job)


# ---- casts ----


@each_twice
@FOR_EACH_FORMAT
@FOR_EACH_ORIENTATION
def test_cast(fmt: Format, orientation: Orientation, device: torch.device) -> None:
    for i, shape in enumerate(SHAPES):
        x = torch.randn(shape).to(DTYPES[i % 3])
        _cast(_job(x.to(device), fmt, orientation))


@each_twice
@FOR_EACH_FORMAT
@pytest.mark.parametrize("data", DATA)
def test_data(fmt: Format, data: str, device: torch.device) -> None:
    dtype = DTYPES[(FORMATS.index(fmt) + list(DATA).index(data)) % 3]
    _cast(_job(DATA[data]((40, 136), dtype).to(dtype).to(device), fmt, BOTH))


@each_twice
@pytest.mark.parametrize("fmt", [POW2, FP32, MX, replace(MX, tile=True)], ids=lambda fmt: fmt.spec)
@pytest.mark.parametrize("choice", TILES, ids=lambda tile: "x".join(map(str, tile)))
def test_every_tile(fmt: Format, choice: Tile, device: torch.device) -> None:
    x = torch.randn(130, 48).to(torch.bfloat16).to(device)
    for orientation in (ROW, COLUMN, BOTH):
        _cast(_job(x, fmt, orientation), choice)


@FOR_EACH_FORMAT
def test_given_amaxes(fmt: Format, device: torch.device) -> None:
    x = DATA["nan_blocks"]((40, 136), torch.float32).to(device)
    for orientation in (ROW, COLUMN, BOTH):
        _cast(_job(x, fmt, orientation, levels=True))


@pytest.mark.parametrize("fmt", [POW2, FP32, MX], ids=lambda fmt: fmt.spec)
@FOR_EACH_DTYPE
def test_given_amaxes_of_any_value(fmt: Format, dtype: torch.dtype, device: torch.device) -> None:
    """An amax of every exponent, with mantissas around each place where a rule changes; zero, infinity, NaN."""
    mantissas = torch.tensor([0, 1, 0x3FFFFF, 0x400000, 0x400001, 0x5FFFFF, 0x600000, 0x600001, 0x7FFFFF])
    level = ((torch.arange(256)[:, None] << 23) + mantissas).int().view(torch.float32).reshape(-1, 1)
    x = torch.randn(level.numel(), 3).to(dtype).to(device)
    _cast(Job(x, None, _target(x, fmt, ROWWISE, False, level.to(device)), None), Tile(512, 128, 4))


@pytest.mark.parametrize("fmt", [fmt for fmt in FORMATS if fmt.packed], ids=lambda fmt: fmt.spec)
def test_odd_end_of_packed_codes_with_amaxes_of_nan(fmt: Format, device: torch.device) -> None:
    """The 0 outside of the matrix times a scale of NaN is NaN, and what follows the last code is 0 all the same."""
    for shape, orientation in (((8, 13), ROW), ((33, 80), COLUMN), ((35, 67), BOTH), ((1, 1), BOTH)):
        job = _job(torch.randn(shape, device=device), fmt, orientation, levels=True)
        for target in job.targets:
            assert target.level is not None
            target.level.view(-1)[::2] = torch.nan
        _cast(job)


@triton.jit
def _pack_kernel(target, M, K, COLUMN: tl.constexpr, BLOCK: tl.constexpr):
    first_m, first_k = tl.program_id(0) * BLOCK, tl.program_id(1) * BLOCK
    codes = tl.full((BLOCK, BLOCK), 0xF, tl.uint8)
    device_code.store_packed(target, codes, first_m, first_k, M, K, COLUMN)


@pytest.mark.parametrize("shape", [(1, 1), (7, 12), (12, 7), (16, 16), (17, 16), (16, 17), (31, 33), (20, 20)], ids=str)
def test_packed_codes_are_followed_by_zero(shape: tuple[int, int], device: torch.device) -> None:
    """Whatever lies outside: also where a 0 is encoded as another code, as an element of the user's may do."""
    for dim in (ROWWISE, COLUMNWISE):
        want = reference._pack(torch.full(shape, 0xF, dtype=torch.uint8), dim).to(device)
        target = _empty(tuple(want.shape), torch.uint8, device, False).zero_()
        _pack_kernel[tuple(triton.cdiv(size, 16) for size in shape)](target, *shape, dim == COLUMNWISE, 16)
        assert torch.equal(target, want)


def test_orientations_that_differ(device: torch.device) -> None:
    """In format, and in whether amaxes are given: two launches."""
    x = torch.randn(130, 144).to(torch.bfloat16).to(device)
    row = _target(x, POW2, ROWWISE, False)
    hybrid = _target(x, replace(POW2, element="e5m2"), COLUMNWISE, True)
    given = _target(x, POW2, COLUMNWISE, True, reference.amax(x, POW2, COLUMNWISE))
    _cast(Job(x, None, row, hybrid), launches=2)
    _cast(Job(x, None, row, given), launches=2)


@pytest.mark.parametrize("fmt", [POW2, replace(MX, tile=True)], ids=lambda fmt: fmt.spec)
def test_several_jobs(fmt: Format, device: torch.device) -> None:
    shapes = [(130, 144), (0, 32), (1, 128), (16, 17), (128, 0), (64, 300)]
    for count in (2, 6):
        jobs = [_job(torch.randn(shape, device=device), fmt, BOTH) for shape in shapes[:count]]
        with count_launches() as counter:
            blocks.cast(jobs, None)
        assert counter == {"cast_block_kernel": 1}
        for job in jobs:
            _check(job)


def test_noop(device: torch.device) -> None:
    job = _job(torch.randn(130, 144, device=device), POW2, BOTH)
    blocks.cast([job], torch.ones(1, device=device))
    for target in job.targets:
        assert torch.all(target.codes == 0xFF) and torch.all(target.scale_inv.isnan())
    blocks.cast([job], torch.zeros(1, device=device))
    _check(job)


@FOR_EACH_FORMAT
def test_amax(fmt: Format, device: torch.device) -> None:
    for shape, orientation in (((130, 136), BOTH), ((40, 136), ROW), ((136, 40), COLUMN), ((0, 128), BOTH)):
        job = _job(DATA["nan_blocks"](shape, torch.float32).to(torch.bfloat16).to(device), fmt, orientation)
        with count_launches() as counter:
            blocks.amax([job])
        assert counter == ({"cast_block_kernel": 1} if job.x.numel() else {})
        for target in job.targets:
            assert_same_bits(target.amax, reference.amax(job.x, fmt, target.dim))
            assert torch.all(target.codes == 0xFF)


# ---- larger, on a GPU ----


@pytest.mark.gpu
@FOR_EACH_FORMAT
@FOR_EACH_DTYPE
def test_large(fmt: Format, dtype: torch.dtype) -> None:
    for shape in ((4096, 4096), (1000, 2056), (2049, 1111)):
        x = DATA["nan_blocks"](shape, dtype).to(dtype).cuda()
        for choice in TILES:
            for orientation in (ROW, COLUMN, BOTH):
                _cast(_job(x, fmt, orientation), choice)


# ---- what the compiler makes of it ----


@triton.jit
def _floored_kernel(amaxes, exponents, MAX: tl.constexpr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    exponent = device_functions.floored_exponent(tl.load(amaxes + at), MAX, 0.0, 3.4028234663852886e38)
    tl.store(exponents + at, exponent)


@pytest.mark.parametrize("largest", [448.0, 57344.0])
def test_floored_exponent(largest: float, device: torch.device) -> None:
    """The exponent without a division is that with one, at random amaxes and next to the places where it changes."""
    size = 1 << 20
    bits = torch.randint(0, 0x7F800001, (size,), dtype=torch.int32)
    bits[: size // 2] = (bits[: size // 2] & ~0x7FFFFF) + torch.randint(0x5FFFF8, 0x600008, (size // 2,)).int()
    amaxes = bits.view(torch.float32).to(device)
    exponents = torch.empty(size, dtype=torch.int32, device=device)
    for part, found in zip(amaxes.split(1 << 14), exponents.split(1 << 14), strict=True):
        _floored_kernel[(1,)](part, found, largest, 1 << 14)
    fmt = Format("e4m3" if largest == 448 else "e5m2", 128, scale_rule="pow2")
    expected, _ = fmt.scaling.scale(amaxes, fmt, 3.4028234663852886e38)
    assert torch.equal(exponents, expected.view(torch.int32) >> 23)


@pytest.mark.parametrize("with_layouts", [False, True], ids=["triton", "gluon"])
@pytest.mark.parametrize("rule", ["pow2", "fp32", "e8m0"])
def test_compiled(rule: str, with_layouts: bool) -> None:
    """Wide accesses, exact arithmetic, no spills; with layouts columns are transposed where they are read."""
    codes, scale = torch.uint8, torch.uint8 if rule == "e8m0" else torch.float32
    tensors = [(t,) for t in (torch.bfloat16, torch.float32, codes, scale, torch.float32, codes, scale)]
    block, tile = (32, Tile(32, 128, 2)) if rule == "e8m0" else (128, Tile(128, 128, 8))
    k_major = rule != "e8m0"
    chosen = layouts(tile, block, k_major) if with_layouts else None
    assert with_layouts == (chosen is not None)
    constants = (1, True, True, k_major, False, block, False)
    compiled = triton_interpreter.compile_for(
        blocks.CAST.function_for((chosen,)), *tensors, torch.float32, *[(7,)] * 8,
        *constants, ELEMENTS["e4m3"], 448.0, SCALE_RULES[rule], 0.0, 3.3895313892515355e38, *[True] * 4, *tile[:2],
        chosen, num_warps=tile.warps, enable_fp_fusion=False,
    )  # fmt: skip
    assert "ld.global.v4.b32" in compiled.ptx and "st.global.v4.b32" in compiled.ptx
    assert not any(word in compiled.ptx for word in (".ftz", "div.full", "fma.rn", "max.NaN", ".approx"))
    assert compiled.spills == 0
    if with_layouts:
        assert "LDS.U8" not in compiled.sass and "STS.U8" not in compiled.sass
        assert "LDSM.16.MT88" in compiled.sass or not k_major


def test_what_goes_through_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Casts of bf16 along the columns to strips of FP8, of sizes that allow wide accesses."""
    monkeypatch.setattr("minifloat.ops.quantize.layouts._runs_on", lambda device: True)
    x, sizes = torch.zeros(32, 48, dtype=torch.bfloat16), Aligned.of([32], [48])

    def chosen(x: Tensor, fmt: Format, orientation: Orientation, sizes: Aligned = sizes) -> bool:
        return blocks.choose(_job(x, fmt, orientation), sizes, shared=True)[1] is not None

    assert all(chosen(x, POW2, each) for each in (BOTH, COLUMN))
    assert all(chosen(x, MX, each) for each in (BOTH_PLAIN, COLUMN_PLAIN))
    assert not any(chosen(x, fmt, ROW) for fmt in (POW2, MX))
    assert not any(chosen(x.to(dtype), POW2, BOTH) for dtype in (torch.float16, torch.float32))
    assert not any(chosen(x, POW2, BOTH, Aligned.of(*size)) for size in (([33], [48]), ([32], [47])))
    assert chosen(x, MX, BOTH_PLAIN, Aligned.of([33], [48]))
    assert not any(chosen(x, replace(MX, element=element), BOTH_PLAIN) for element in ("e2m1", "e3m2"))
    assert not chosen(x, replace(POW2, tile=True), BOTH) and not chosen(x, MX, BOTH) and not chosen(x, POW2, BOTH_PLAIN)
    assert blocks.choose(_job(x, POW2, BOTH), sizes)[1] is None


@pytest.mark.parametrize(
    ("k_major", "as_values"),
    [(True, (False, False)), (False, (False, False)), (False, (True, False)), (False, (True, True))],
    ids=["k_major", "plain", "row as values", "values"],
)
def test_layouts(k_major: bool, as_values: tuple[bool, bool]) -> None:
    """Each element has one place among threads, and a thread has neighbours in memory; None if warps are too many."""
    block = 128 if k_major else 32
    for tile in (Tile(block, 128, 1), Tile(block, 128, 2), Tile(block, 256, 4), Tile(2 * block, 128, 4)):
        chosen = layouts(tile, block, k_major, as_values)
        assert chosen is not None
        for layout, consecutive in ((chosen.row, [0, 1]), (chosen.column, [1, 0] if k_major else [0, 1])):
            bits = [tuple(bit) for bit in (*layout.reg_bases, *layout.lane_bases, *layout.warp_bases)]
            assert len(set(bits)) == len(bits) and 2 ** len(bits) == tile.rows * tile.cols
            assert all((m & (m - 1), k & (k - 1)) == (0, 0) and (m == 0) != (k == 0) for m, k in bits)
            assert len(layout.lane_bases) == 5 and 2 ** len(layout.warp_bases) == tile.warps
            assert layout.reg_bases[:2] == [consecutive, [2 * at for at in consecutive]]
    assert layouts(Tile(block, 128, 32), block, k_major, as_values) is None
    assert layouts(Tile(block, 32, 1), block, k_major, as_values) is None
