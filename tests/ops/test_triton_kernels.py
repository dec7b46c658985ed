"""The kernels that find amaxes, cast and decode beside their references, bit for bit: interpreted, or on a GPU.

One table of operations and one test: each format of a matrix, of groups of its rows, and of rows that are read by
index; sizes that divide by nothing, no rows, columns or groups, NaN, infinity and zeros, inputs anywhere in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from minifloat.formats import COLUMNWISE, ROWWISE, Format
from minifloat.ops import grouped, quantize
from minifloat.ops.grouped import casts, layout, spread
from minifloat.ops.launch import count_launches
from minifloat.ops.quantize import casts_blocks, decode, gpu, reference
from tests.helpers.compare import assert_same_bits, assert_same_bits_or_nan, strides
from tests.helpers.kernel_casts import (
    DATA,
    DTYPES,
    MIXED,
    PAIRS,
    ROTATED_FIRST,
    ROWS,
    WITHOUT_KERNEL,
    Pair,
    data,
    elsewhere,
)
from tests.helpers.triton_interpreter import confined, last_first


class Kernel(NamedTuple):
    """What launches the kernels of an operation, and the operation: its reference, and the shapes that it promises."""

    run: Callable[..., Any]
    operation: Any


AMAX, CAST, DEQUANTIZE = "amax", "cast", "dequantize"
MATRIX, GROUPS, GATHERED = "matrix", "groups", "gathered"
KERNELS = {
    (AMAX, MATRIX): Kernel(gpu.amax, quantize.amax),
    (CAST, MATRIX): Kernel(gpu.cast, quantize.cast),
    (DEQUANTIZE, MATRIX): Kernel(decode.dequantize, quantize.dequantize),
    (AMAX, GROUPS): Kernel(casts.amax, grouped.grouped_amax),
    (CAST, GROUPS): Kernel(casts.cast, grouped.grouped_cast),
    (DEQUANTIZE, GROUPS): Kernel(spread.dequantize, grouped.grouped_dequantize),
    (AMAX, GATHERED): Kernel(casts.gathered_amax, grouped.gathered_amax),
    (CAST, GATHERED): Kernel(casts.cast, grouped.grouped_cast),
}


class Size(NamedTuple):
    """The rows of a matrix, or of groups that others stand in front of, and the columns."""

    rows: int | tuple[int, ...]
    cols: int
    before: int = 0


SIZES: dict[str, list[Size]] = {
    MATRIX: [
        *(Size(17, 33), Size(40, 136), Size(1, 1), Size(0, 128), Size(7, 0), Size(129, 50), Size(48, 144), Size(20, 1)),
        *(Size(0, 0), Size(1, 40), Size(7, 13)),
    ],
    GROUPS: [
        *(Size((7, 0, 23, 15), 37, 17), Size((0, 0), 32), Size((7, 0, 33, 1), 160), Size((), 32), Size((2, 3), 0)),
        *(Size((0, 1, 16, 0), 48), Size((0,), 0), Size((128, 1, 70, 31), 37, 130)),
    ],
}
LARGE: dict[str, list[Size]] = {
    MATRIX: [Size(4096, 4096), Size(1000, 2056), Size(2049, 1111), Size(4099, 1030)],
    GROUPS: [Size((1000, 0, 17, 2048, 1, 0, 333, *[40] * 60), cols) for cols in (1024, 1040, 1030)],
}
MANY = Size((1,) * 270, 32)
"""More groups than a program of the table's kernel writes."""
SIZES[GATHERED], LARGE[GATHERED] = [size for size in SIZES[GROUPS] if size.cols], LARGE[GROUPS]
PLACES = ["plain", "odd address", "transposed", "strided", "one row"]


class Input(NamedTuple):
    """What an operation reads, and the matrix that this is."""

    x: Tensor
    matrix: Tensor
    offsets: Tensor | None = None
    rows: Tensor | None = None

    @property
    def arguments(self) -> tuple[Tensor, ...]:
        return tuple(each for each in (self.x, self.rows, self.offsets) if each is not None)


def make(of: str, size: Size, kind: str, dtype: torch.dtype, place: str, device: torch.device) -> Input:
    """Rows that are no group's, and tokens that go to none, are NaN or infinite."""
    if isinstance(size.rows, int):
        x = elsewhere(data(kind, (size.rows, size.cols), dtype, device), place)
        return Input(x, x.contiguous())
    offsets = torch.tensor([size.before, *size.rows], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)
    total = size.before + sum(size.rows) + 3
    x = data(kind, (11 if of == GATHERED else total, size.cols), dtype, device)
    if of == GATHERED:
        x[-1] = torch.nan
        rows = torch.randint(0, 10, (total,), dtype=torch.int32, device=device)
        rows[: size.before], rows[total - 3 :] = 10, 10
        return Input(x, x[rows.long()], offsets, rows)
    x[: size.before], x[total - 3 :] = torch.inf, torch.nan
    x = elsewhere(x, place if place != "one row" else "plain")
    return Input(x, x.contiguous(), elsewhere(offsets, place))


def owners(given: Input, fmt: Format, dim: int) -> Iterator[tuple[slice, dict[str, slice]]]:
    """Of each group, or of the whole matrix: its rows, and where in each tensor of a cast it is."""
    if given.offsets is None:
        yield slice(None), dict.fromkeys(layout.NAMES, slice(None))
        return
    known = given.offsets.tolist()
    places = [layout.own_rows(name, fmt, dim, known) for name in layout.NAMES]
    for rows, *own in zip(map(slice, known, known[1:]), *places, strict=True):
        yield rows, dict(zip(layout.NAMES, own, strict=True))


def both(kernel: Kernel, arguments: Any, plain: Any = None, backwards: bool = False) -> Iterator[list[Tensor]]:
    """Outputs of the kernels, then of the reference: as the fake promises them, and in memory of their own."""
    promised = kernel.operation.shapes(*arguments)
    for run, given in ((kernel.run, arguments), (kernel.operation.reference, plain or arguments)):
        with confined(), last_first() if backwards else nullcontext():
            result = run(*given)
        made, shapes = ([each] if isinstance(each, Tensor) else list(each) for each in (result, promised))
        for a, b in zip(made, shapes, strict=True):
            assert (a.shape, a.dtype, strides(a)) == (b.shape, b.dtype, strides(b))
        memory = [each.untyped_storage().data_ptr() for each in made if each.numel()]
        assert len(set(memory)) == len(memory)
        yield made


def check_amaxes(of: str, given: Input, formats: Sequence[Format], dims: Sequence[int]) -> None:
    """Those of each group are those of its rows."""
    how = () if of == GATHERED else ([fmt.spec for fmt in formats], dims)
    first = [given.x] * len(dims) if of == MATRIX else given.x
    for made in both(KERNELS[AMAX, of], (first, *given.arguments[1:], *how)):
        for found, fmt, dim in zip(made, formats, dims, strict=False):
            for rows, place in owners(given, fmt, dim) if found.numel() else ():
                own = (fmt, dim) if of != GATHERED else (Format(), ROWWISE)
                want = reference.amax(given.matrix[rows], *own)
                assert_same_bits(found[place["amax"]].reshape(-1), want.reshape(-1))


def level_of(given: Input, fmt: Format, dim: int, measured: bool) -> Tensor | None:
    """A cast's amaxes or scales; None where a kernel may measure them and shall."""
    groups = 1 if given.offsets is None else given.offsets.numel() - 1
    if fmt.scale_rule == "given":
        return torch.arange(1.0, groups + 1, device=given.x.device) * 3.7
    if given.offsets is not None:
        found = grouped.grouped_amax.reference(given.matrix, given.offsets, [fmt.spec], [dim])[0]
        return found if fmt.needs_amax else None
    return reference.amax(given.matrix, fmt, dim) * 1.5 if fmt.needs_amax or not measured else None


def check_casts(
    of: str, given: Input, formats: Sequence[Format], dims: Sequence[int], k_major: bool, i: int, place: str
) -> None:
    """Codes, scales and measured amaxes of each group are those of its rows alone; what they stand for, too."""
    levels = [level_of(given, fmt, dim, i % 2 == 0) for fmt, dim in zip(formats, dims, strict=True)]
    if len(set(formats)) == 1 and formats[0].symmetric and not formats[0].amax_per_row:
        levels = levels[:1] * len(levels)  # one object: one pass
        if i % 3 == 0 and of != GATHERED:
            levels = [None if each is None else each * (n + 1) for n, each in enumerate(levels)]
    specs, transposed = (
        [fmt.spec for fmt in formats],
        [k_major and not (of == MATRIX and fmt.packed) for fmt in formats],
    )
    seeds = torch.randint(-(2**62), 2**62, (1 if given.offsets is None else len(given.offsets) - 1, 2))
    rng = seeds.to(given.x.device) if any(fmt.rounding == "stochastic" for fmt in formats) else None
    arguments: Any = given.x, given.offsets, levels, rng, specs, dims, transposed, given.rows
    plain = None
    if of == MATRIX:
        rngs = [rng[0] if rng is not None and fmt.rounding == "stochastic" else None for fmt in formats]
        plain = [given.x] * len(dims), levels, rngs, specs, dims, transposed, None
        moved = {id(each): each if each is None else elsewhere(each, place) for each in (*levels, *rngs)}
        if not gpu.casts(formats[0]) or (formats[0].amax_per_row and not formats[0].block):
            moved = {id(each): each for each in (*levels, *rngs)}
        elif place == "transposed":
            moved |= {id(each): each if each is None else each.double() for each in levels}
        arguments = plain[0], [moved[id(each)] for each in levels], [moved[id(each)] for each in rngs], *plain[3:]
    decoded, wanted = torch.zeros(given.matrix.shape), []
    for j, (fmt, dim, level) in enumerate(zip(formats, dims, levels, strict=True)):
        for group, (rows, where) in enumerate(owners(given, fmt, dim)):
            own = None if level is None else level[where["amax"]]
            own = own if of == MATRIX or own is None else own.reshape(-1)
            seed = rng[group] if rng is not None and fmt.rounding == "stochastic" else None
            want = reference.cast(given.matrix[rows], own, seed, fmt, dim)
            wanted.append((j, group, where, want, fmt.scale_rule == "given"))
            if j == len(dims) - 1:
                shape, amax = given.matrix[rows].shape, own if fmt.scale_rule == "two_level" else None
                decoded[rows] = reference.dequantize(want.codes, want.scale_inv, amax, fmt, dim, *shape).cpu()
    for made in both(KERNELS[CAST, of], arguments, plain, i % 3 == 1):
        for j, group, where, want, measured in wanted:
            codes, scales, amaxes = made[3 * j : 3 * j + 3]
            assert_same_bits(codes[where["codes"]].contiguous(), want.codes)
            assert_same_bits(scales[where["scale_inv"]].reshape(want.scale_inv.shape), want.scale_inv)
            if measured:
                assert_same_bits(amaxes[group : group + 1], want.amax)
    check_values(of, given, formats[-1], dims[-1], made[-3:], levels[-1], decoded, DTYPES[i % 3])


def check_values(
    of: str, given: Input, fmt: Format, dim: int, made: Sequence[Tensor], level: Tensor | None, want: Tensor,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    """What codes stand for, also those in rows that are longer, and of fewer columns."""
    codes, scales, _ = made
    amax, cols = level if fmt.scale_rule == "two_level" else None, given.x.shape[1]
    where = () if given.offsets is None else (given.offsets.contiguous(),)
    longer = torch.cat([codes, codes[:, :1]], 1)[:, : codes.shape[1]]
    for stored, wide in ((codes, cols), *[(longer, cols), (codes, cols - 1)] * (cols == 37)):
        arguments = stored, scales, amax, *where, fmt.spec, dim, len(given.matrix), wide, dtype
        for values in both(KERNELS[DEQUANTIZE, GROUPS if where else MATRIX], arguments):
            assert_same_bits_or_nan(values[0], want[:, :wide].to(dtype))


@contextmanager
def noted(*what: object) -> Iterator[None]:
    """Says of an error in which case it was."""
    try:
        yield
    except Exception as error:
        error.add_note(" ".join(map(str, what)))
        raise


def cases() -> list[Any]:
    """All formats of matrices and of groups; of rows that are read by index those that have one scale or blocks."""
    found = []
    for i, pair in enumerate([*PAIRS, *MIXED, *[(fmt, fmt) for fmt in ROWS], *WITHOUT_KERNEL, ROTATED_FIRST]):
        fmt = pair[1] or pair[0]
        assert fmt is not None
        gathered = pair == (fmt, fmt) and (casts_blocks(fmt) or (not fmt.block and not fmt.amax_per_row))
        searches = fmt.rounding.startswith("four_over_six") and fmt.block_scale_max == 448.0
        for of in (MATRIX, *[GROUPS] * (not searches), *[GATHERED] * gathered):
            found.append(pytest.param(of, pair, i, id=f"{of}-{pair[0] and pair[0].spec}-{pair[1] and pair[1].spec}"))
    return found


@pytest.mark.parametrize(("of", "pair", "number"), cases())
def test_kernels_are_their_references(of: str, pair: Pair, number: int, device: torch.device) -> None:
    """At every size, each of one of the kinds of data, dtypes, places in memory, orientations and memory orders."""
    both_ways = [(fmt, dim) for fmt, dim in zip(pair, (ROWWISE, COLUMNWISE), strict=True) if fmt]
    sizes = SIZES[of][: -1 if both_ways[0][0].scale_rule == "two_level" else None]
    sizes = sizes + [MANY] * (of == GROUPS and number == 0) + (LARGE[of] if device.type == "cuda" else [])
    with count_launches() as launches:
        for i, size in enumerate(sizes, number):
            kind, dtype, place = list(DATA)[i % len(DATA)], DTYPES[i % 3], PLACES[i % 5]
            given = make(of, size, kind, dtype, place, device)
            formats, dims = zip(*[both_ways, both_ways[:1], both_ways[-1:]][i % 4 % 3], strict=True)
            k_major = i % 2 == 0 or (of == GATHERED and not formats[0].block)
            with noted(of, size, kind, dtype, place, dims, k_major):
                check_amaxes(of, given, formats, dims)
                check_casts(of, given, formats, dims, k_major, i, place)
    by_reference = pair in WITHOUT_KERNEL or (pair == ROTATED_FIRST and of == GROUPS)
    assert any("cast" in name for name in launches) != by_reference
