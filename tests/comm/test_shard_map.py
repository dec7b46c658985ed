"""Tests of the row arithmetic of sharded matrices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minifloat.comm.group import MAX_CACHED, cached, unit_rows
from minifloat.distributed import Group, ShardMap
from minifloat.formats import COLUMNWISE, IDENTITY, ROWWISE, Format, parse
from minifloat.ops.quantize import code_shape, scale_shape
from tests.helpers.gather_cases import agreement_bytes

STRIPS = parse("e4m3/1x128/pow2")
TILES = parse("e4m3/128x128/pow2")
NVFP4 = parse("e2m1/1x16/two_level")
ROTATED = parse("e2m1/1x16/two_level/hadamard16")
PER_ROW = parse("e2m1/1x16/two_level/amax_per_row")
CASTS = [
    (Format(), ROWWISE), (STRIPS, ROWWISE), (STRIPS, COLUMNWISE), (TILES, ROWWISE), (NVFP4, ROWWISE),
    (NVFP4, COLUMNWISE), (ROTATED, COLUMNWISE), (parse("e2m1/16x16/two_level"), ROWWISE), (PER_ROW, ROWWISE),
    (PER_ROW, COLUMNWISE), (parse("e4m3/1x32/e8m0/hadamard16"), COLUMNWISE),
    (IDENTITY, ROWWISE),
]  # fmt: skip

maps = st.lists(st.one_of(st.integers(0, 40), st.sampled_from([0, 16, 128, 129, 300])), min_size=1, max_size=6).map(
    lambda rows: ShardMap(tuple(rows))
)
units = st.sampled_from([1, 2, 16, 128])


def owners(shards: ShardMap) -> list[int]:
    """The rank of every row, the long way."""
    return [rank for rank, count in enumerate(shards.rows) for _ in range(count)]


@given(shards=maps, unit=units)
@settings(max_examples=200)
def test_units_belong_to_the_rank_of_their_first_row(shards: ShardMap, unit: int) -> None:
    held = owners(shards)
    owned = [held[row // unit * unit] for row in range(shards.total)]
    whole = shards.whole_units(unit)
    assert owners(whole) == owned and whole.size == shards.size
    assert shards.aligned(unit) == (owned == held)
    table = [[0] * shards.size for _ in shards.rows]
    for source, target in zip(held, owned, strict=True):
        table[source][target] += source != target
    assert shards.sent(unit) == tuple(map(tuple, table))
    assert all(sum(line) < unit for line in table)


@pytest.mark.parametrize(("fmt", "dim"), CASTS, ids=lambda value: getattr(value, "spec", str(value)))
@given(shards=maps)
@settings(max_examples=50)
def test_codes_and_scales_add_up(fmt: Format, dim: int, shards: ShardMap) -> None:
    """What the ranks hold, below each other, has the shape of the whole's codes and scales."""
    assert shards.codes(fmt, dim).total == code_shape(fmt, dim, shards.total, 8)[0]
    if fmt.quantized and fmt.block:
        assert shards.scales(fmt, dim).total == scale_shape(fmt, dim, shards.total, 8)[0]
    else:
        assert shards.scales(fmt, dim).total == 0
    sources = shards.sources(fmt, dim)
    assert sources == shards.whole_units(unit_rows(fmt, dim))


def test_an_example() -> None:
    """Rows 128 to 199 are a second, partial block of 128, which straddles; so do rows 128 to 143, a group of 16."""
    shards = ShardMap((130, 0, 70))
    assert (shards.total, shards.largest, shards.size, shards.is_even) == (200, 130, 3, False)
    assert ShardMap((3, 7, 5)).largest == 7
    assert [shards.first(rank) for rank in range(3)] == [0, 130, 130]
    assert shards.whole_units(128).rows == (200, 0, 0)
    assert shards.sent(128) == ((0, 0, 0), (0, 0, 0), (70, 0, 0))
    assert shards.scales(STRIPS, COLUMNWISE).rows == (2, 0, 0) and shards.codes(STRIPS, COLUMNWISE).rows == (200, 0, 0)
    assert shards.whole_units(16).rows == (144, 0, 56) and shards.sent(16) == ((0, 0, 0), (0, 0, 0), (14, 0, 0))
    assert shards.codes(NVFP4, COLUMNWISE).rows == (72, 0, 28) and shards.scales(NVFP4, COLUMNWISE).rows == (9, 0, 4)
    assert shards.codes(ROTATED, COLUMNWISE).rows == (72, 0, 32)
    assert shards.codes(NVFP4, ROWWISE).rows == shards.scales(NVFP4, ROWWISE).rows == (130, 0, 70)


def test_bytes_on_the_wire() -> None:
    """What every rank sends, worked out by hand: the tests of the gather compare it with what the backend is given."""
    shards = ShardMap((130, 0, 70))
    assert shards.gather_bytes(Format(), ROWWISE, 48) == 130 * 48
    assert shards.gather_bytes(STRIPS, ROWWISE, 200) == 130 * 200 + 130 * 2 * 4
    assert shards.gather_bytes(STRIPS, COLUMNWISE, 200) == 200 * 200 + 2 * 200 * 4
    assert shards.gather_bytes(NVFP4, COLUMNWISE, 48) == 72 * 48 + 9 * 48
    assert shards.gather_bytes(PER_ROW, ROWWISE, 48) == 130 * (24 + 3 + 4)
    assert shards.gather_bytes(IDENTITY, ROWWISE, 48, 4) == 130 * 48 * 4
    assert agreement_bytes(shards, Format(), ROWWISE, 48, 2, 0) == 4
    assert agreement_bytes(shards, Format(scale_rule="given"), ROWWISE, 48, 2, 0) == 0
    assert agreement_bytes(shards, STRIPS, ROWWISE, 48, 2, 0) == 0
    assert [agreement_bytes(shards, STRIPS, COLUMNWISE, 48, 2, rank) for rank in range(3)] == [0, 0, 70 * 48 * 2]
    assert agreement_bytes(shards, TILES, ROWWISE, 200, 2, 2) == 70 * 200 * 2
    assert [agreement_bytes(shards, ROTATED, COLUMNWISE, 48, 2, rank) for rank in range(3)] == [4, 4, 4 + 14 * 48 * 2]
    assert agreement_bytes(shards, PER_ROW, ROWWISE, 48, 2, 2) == 0
    assert agreement_bytes(ShardMap.even(128, 2), STRIPS, COLUMNWISE, 48, 2, 0) == 0


def test_units_of_formats() -> None:
    assert unit_rows(Format(), ROWWISE) == unit_rows(NVFP4, ROWWISE) == unit_rows(IDENTITY, ROWWISE) == 1
    assert unit_rows(TILES, ROWWISE) == unit_rows(STRIPS, COLUMNWISE) == 128
    assert unit_rows(NVFP4, COLUMNWISE) == unit_rows(ROTATED, COLUMNWISE) == 16
    assert unit_rows(parse("e4m3/tensor/fp32/hadamard16"), COLUMNWISE) == 16


@pytest.mark.parametrize("rows", [(), (3, -1), (1.5, 2.5), (3.0,), ("3",), (None, 3)])
def test_rows_that_are_none(rows: tuple[Any, ...]) -> None:
    with pytest.raises(ValueError, match="one count a rank is needed"):
        ShardMap(rows)


def test_group_of_one() -> None:
    assert Group.of(None) == Group() == Group("", 1, 0)
    assert Group.of(Group("tp", 4, 3)) == Group("tp", 4, 3)
    assert hash(ShardMap((1, 2))) == hash(ShardMap((1, 2))) and ShardMap.even(3, 2) == ShardMap((3, 3))


def test_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal arguments are computed once, of those used lately; and by a compiler, which looks inside, every time."""
    asked: list[ShardMap] = []

    @cached
    def total(shards: ShardMap) -> int:
        asked.append(shards)
        return shards.total

    assert [total(ShardMap((1, 2))), total(ShardMap((1, 2))), total(ShardMap((4,)))] == [3, 3, 4] and len(asked) == 2
    for rows in range(MAX_CACHED):
        total(ShardMap((rows, 0)))
    total(ShardMap((1, 2)))
    assert len(asked) == MAX_CACHED + 3, "what was not asked for again has made room"
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert total(ShardMap((1, 2))) == 3 and len(asked) == MAX_CACHED + 4
