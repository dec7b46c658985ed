"""What is particular to one family of cast kernels: tiles, hard amaxes, layouts, seeds, what is compiled."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from minifloat.formats import COLUMNWISE, ELEMENTS, ROWWISE, SCALE_RULES, Format
from minifloat.ops.quantize import blocks, gpu, nvfp4, per_tensor, reference
from minifloat.ops.quantize.job import Aligned, CastJob, layouts
from minifloat.ops.tiles import Tile
from tests.helpers import triton_interpreter
from tests.helpers.kernel_casts import (
    DTYPES,
    E4M3,
    FOUR_OVER_SIX,
    FP32,
    GIVEN,
    MX,
    NV,
    NV_ROTATED,
    NV_ROTATED_STOCHASTIC,
    NV_STOCHASTIC,
    NVFP4,
    PAIRS,
    POW2,
    Pair,
    assert_kernel_is_reference,
    assert_reference,
    data,
    job,
    kernels_of,
    target,
)  # fmt: skip
from tests.helpers.sample import each_once, first_by_default

BF16, CUDA = torch.bfloat16, torch.device("cuda")
FOR_EACH_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))


def for_each(pairs: list[Pair]) -> pytest.MarkDecorator:
    """Parametrises a test over pairs of formats."""
    ids = [f"{row and row.spec}-{column and column.spec}" for row, column in pairs]
    return pytest.mark.parametrize("pair", pairs, ids=ids)


def of(fmt: Format) -> Pair:
    return fmt, fmt


TILES = {
    blocks: [Tile(32, 128, 1), Tile(32, 128, 2), Tile(32, 64, 1), Tile(64, 128, 4), Tile(128, 128, 8)],
    nvfp4: [Tile(16, cols, 4) for cols in (32, 256, 512)],
    per_tensor: [Tile(32, 64, 4), Tile(64, 64, 4), Tile(128, 128, 8), Tile(16, 256, 4)],
}

# ---- casts ----


@pytest.mark.parametrize(
    ("pair", "tile"),
    [
        (of(fmt) if fmt != NV else (NV, NV_ROTATED_STOCHASTIC), tile)
        for fmt in (POW2, replace(MX, tile=True), GIVEN, NV)
        for tile in TILES[kernels_of(fmt)]
    ],
    ids=lambda each: "x".join(map(str, each)) if isinstance(each, Tile) else each[0].spec,
)
def test_every_tile_gives_the_same_bits(pair: Pair, tile: Tile, device: torch.device) -> None:
    assert_kernel_is_reference([job(data("mixed", (130, 80), BF16, device), *pair)], tile)


@pytest.mark.parametrize("fmt", [POW2, FP32, MX], ids=lambda fmt: fmt.spec)
@FOR_EACH_DTYPE
def test_given_amaxes_of_any_value(fmt: Format, dtype: torch.dtype, device: torch.device) -> None:
    """An amax of every exponent, with mantissas around each place where a rule changes; zero, infinity, NaN."""
    mantissas = torch.tensor([0, 1, 0x3FFFFF, 0x400000, 0x400001, 0x5FFFFF, 0x600000, 0x600001, 0x7FFFFF])
    level = ((torch.arange(256)[:, None] << 23) + mantissas).int().view(torch.float32).reshape(-1, 1)
    x = torch.randn(level.numel(), 3).to(dtype).to(device)
    given = target(x, fmt, ROWWISE, False)._replace(level=level.to(device))
    assert_kernel_is_reference([CastJob(x, None, given, None)], Tile(512, 128, 4))


@each_once
@pytest.mark.parametrize("shape", [(7, 13), (17, 33)], ids=str)
@for_each([(row, column) for row, column in PAIRS if (row or column).packed])  # type: ignore[union-attr]
def test_odd_end_of_packed_codes(pair: Pair, shape: tuple[int, int], device: torch.device) -> None:
    """What follows an odd last row or column is code 0, whatever sign, infinity or NaN is in its block or its amax.

    The 0 outside of the matrix times a scale of NaN is NaN.
    """
    made = job(-data("special", shape, BF16, device).abs(), *pair, factor=1.0)
    assert_kernel_is_reference([made])
    for each in made.targets:
        if kernels_of(each.format) is blocks and each.level is not None:
            each.level.view(-1)[::2] = torch.nan
    assert_kernel_is_reference([made])


@for_each([of(E4M3), of(POW2), NVFP4[0]])
def test_a_flag_on_the_device_leaves_everything_as_it_is(pair: Pair, device: torch.device) -> None:
    x = data("mixed", (130, 144), BF16, device)
    skipped, done = job(x, *pair), job(x, *pair)
    cast = kernels_of(pair[0]).cast  # type: ignore[arg-type]
    cast([skipped], torch.ones(1, device=device))
    for each in skipped.targets:
        assert all((part.contiguous().view(torch.uint8) == 0xFF).all() for part in (each.codes, each.scale_inv))
    cast([done], torch.zeros(1, device=device))
    assert_reference(done)


# ---- per tensor and per row ----


@pytest.mark.parametrize(("shape", "dim"), [((7, 0), ROWWISE), ((0, 100), COLUMNWISE), ((0, 0), ROWWISE)])
@pytest.mark.parametrize("epsilon", [0.0, 1e-3])
def test_scales_of_rows_of_nothing(epsilon: float, shape: tuple[int, int], dim: int, device: torch.device) -> None:
    """Those of an amax of 0, which ``amax_epsilon`` raises; beside a matrix that has values, and a second time."""
    fmt = Format(scale_rule="pow2", amax_per_row=True, amax_epsilon=epsilon)
    for _ in range(2):
        xs = [torch.empty(shape, device=device), data("mixed", (5, 6), torch.float32, device)]
        amaxes = [reference.amax(x, fmt, dim) for x in xs]
        made = gpu.recorded_cast(xs, amaxes, [None] * 2, [fmt.spec] * 2, [dim] * 2, [False] * 2, None)
        wanted = [part for x, amax in zip(xs, amaxes, strict=True) for part in reference.cast(x, amax, None, fmt, dim)]
        assert all(torch.equal(a, b) for a, b in zip(made, wanted, strict=True))


@pytest.mark.parametrize("size", [1, 7, 8192, 8200])
def test_amax_drops_nan_and_keeps_infinity(size: int, device: torch.device) -> None:
    x = torch.randn(1, size, device=device)
    x[0, size // 2] = torch.nan
    infinite = torch.where(torch.arange(size, device=device) == size - 1, -torch.inf, x)
    amaxes = [torch.zeros(1, device=device) for _ in range(2)]
    per_tensor.amax([x, infinite], amaxes)
    assert torch.equal(amaxes[0], reference.amax(x, E4M3, ROWWISE))
    assert amaxes[1].item() == torch.inf


# ---- blocks ----


@each_once
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
    monkeypatch.setattr("minifloat.ops.quantize.job._runs_on", lambda device: True)
    x, sizes = torch.zeros(32, 48, dtype=torch.bfloat16), Aligned.of([32], [48])

    def chosen(x: Tensor, *wanted: Format | None, k_major: bool = True, sizes: Aligned = sizes) -> bool:
        return blocks.choose(job(x, *wanted, k_major=k_major), sizes, shared=True)[1] is not None

    tiles = replace(POW2, tile=True)
    assert chosen(x, POW2, POW2) and chosen(x, None, POW2)
    assert chosen(x, MX, MX, k_major=False) and chosen(x, None, MX, k_major=False)
    assert not chosen(x, POW2, None) and not chosen(x, MX, None)
    assert not any(chosen(x.to(dtype), POW2, POW2) for dtype in (torch.float16, torch.float32))
    assert not any(chosen(x, POW2, POW2, sizes=Aligned.of(*size)) for size in (([33], [48]), ([32], [47])))
    assert chosen(x, MX, MX, k_major=False, sizes=Aligned.of([33], [48]))
    assert not any(chosen(x, *of(replace(MX, element=element)), k_major=False) for element in ("e2m1", "e3m2"))
    assert not chosen(x, tiles, tiles) and not chosen(x, MX, MX) and not chosen(x, POW2, POW2, k_major=False)
    assert blocks.choose(job(x, POW2, POW2), sizes)[1] is None


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


# ---- NVFP4 ----


@pytest.mark.parametrize("seed", [(0, 0), (2**62 - 1, 2**62 - 1), (-1, -(2**63))])
def test_every_seed_is_taken(seed: tuple[int, int], device: torch.device) -> None:
    made = job(data("mixed", (16, 48), BF16, device), NV_STOCHASTIC, NV_STOCHASTIC)
    assert made.rng is not None
    made.rng.copy_(torch.tensor(seed))
    nvfp4.cast([made], None, Tile(16, 256, 4))
    assert_reference(made)


def test_rounding_of_every_bf16_and_of_ties(device: torch.device) -> None:
    """A block whose amax is 6 in a tensor whose amax is 6 * 448 is not scaled: elements are codes as they are."""
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    ties = torch.stack([ties, ties.nextafter(ties * 2), ties.nextafter(ties * 0)]).flatten()
    elements = torch.cat([every[every.abs() <= 6], ties, -ties])
    elements = torch.nn.functional.pad(elements, (0, -len(elements) % 15)).reshape(-1, 15)
    x = torch.cat([torch.full((len(elements), 1), 6.0), elements], dim=1).reshape(-1)
    x = torch.nn.functional.pad(x, (0, -len(x) % 4096)).reshape(-1, 4096).to(device)
    for fmt in (NV, NV_STOCHASTIC):
        made = job(x, fmt, None)
        assert made.row is not None and made.row.level is not None
        made.row.level.fill_(6 * 448)
        nvfp4.cast([made], None, Tile(16, 4096, 8))
        assert_reference(made)


@first_by_default
@pytest.mark.parametrize(
    ("row", "column", "cols"), [(NV, NV_ROTATED, 512), (FOUR_OVER_SIX[0], None, 256)], ids=["strips", "four_over_six"]
)
def test_compiled_cast_rounds_exactly_and_does_not_spill(row: Format, column: Format | None, cols: int) -> None:
    byte, fp32 = (torch.uint8,), (torch.float32,)
    outputs = (fp32, byte, byte, fp32, byte, byte)
    constants = (1, row, column, column is not None, False, False, True, cols)
    compiled = triton_interpreter.compile_for(
        nvfp4.cast_nvfp4_kernel, (torch.bfloat16,), (torch.int64,), *outputs, torch.float32, (7,), (7,), (7,),
        *constants, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    assert compiled.spills == 0
    assert "ld.global.v4.b32" in compiled.ptx and "st.global.v2.b32" in compiled.ptx
    assert not any(inexact in compiled.ptx for inexact in (".ftz", "div.full", "rcp.approx", "div.approx"))
