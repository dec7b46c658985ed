"""Which rows of a matrix lie on which rank, and what follows from it for the codes and scales of each format.

Pure arithmetic on row counts, which all ranks know on the host: every rank finds the same answers without asking.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ParamSpec, TypeVar

import torch

from minifloat.formats import COLUMNWISE, ROWWISE, Format
from minifloat.ops.quantize import code_shape, scale_shape

P = ParamSpec("P")
T = TypeVar("T")

MAX_CACHED = 1024
"""Cached results of each function: row counts that never repeat must not fill the memory."""

_caches: dict[Callable[..., Any], Callable[..., Any]] = {}  # not in closures, which Dynamo looks into


def cached(function: Callable[P, T]) -> Callable[P, T]:
    """``functools.lru_cache`` outside of compiled code, which computes the value while it is traced.

    What follows from row counts and formats takes longer to compute than a small tensor to send.
    """
    _caches[function] = functools.lru_cache(MAX_CACHED)(function)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        result: T = _caches[function](*args, **kwargs)
        return result

    return call


def unit_rows(fmt: Format, dim: int) -> int:
    """Rows that must lie together for their cast along ``dim``: a block's, a rotation's, the two of a packed byte.

    1 also for a format of one scale for the whole tensor: ranks agree on the amax, and each casts what it has.
    """
    rows = fmt.scale_block(dim)[0] or 1
    if fmt.transform == "hadamard16":
        rows = max(rows, 16)
    return max(rows, 2) if fmt.packed and dim == COLUMNWISE else rows


@dataclass(frozen=True)
class ShardMap:
    """A matrix [sum(rows), K] along whose first dim ranks hold ``rows`` each, in the order of the ranks; 0 is allowed.

    A *unit* is a group of consecutive rows that are cast together (:func:`unit_rows`), counted from the first row of
    the whole. It belongs to the rank of its first row.
    """

    rows: tuple[int, ...]

    def __post_init__(self) -> None:
        counts = isinstance(self.rows, tuple) and all(isinstance(rows, (int, torch.SymInt)) for rows in self.rows)
        if not counts or not self.rows or min(self.rows) < 0:
            raise ValueError(f"rows of the ranks are {self.rows}; one count a rank is needed, 0 or more")

    @classmethod
    def even(cls, rows: int, size: int) -> ShardMap:
        """``size`` ranks of ``rows`` rows each."""
        return cls((rows,) * size)

    @classmethod
    def chunks(cls, rows: int, size: int) -> ShardMap:
        """``rows`` shared out as ``torch.chunk`` does: equally, rounded up; the last ranks may have fewer or none."""
        most = -(-rows // size)
        return cls(tuple([max(0, min(most, rows - rank * most)) for rank in range(size)]))

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.rows)

    @property
    def total(self) -> int:
        """Rows of the whole."""
        return sum(self.rows)

    @property
    def largest(self) -> int:
        """Rows of the rank that has the most: what every rank sends of a gathered tensor."""
        return max(self.rows)

    @property
    def is_even(self) -> bool:
        """All ranks have equally many rows."""
        return min(self.rows) == max(self.rows)

    def first(self, rank: int) -> int:
        """The first row of ``rank``, counted in the whole."""
        return sum(self.rows[:rank])

    def end(self, rank: int) -> int:
        """One past the last row of ``rank``."""
        return self.first(rank) + self.rows[rank]

    # ---- units ----

    @cached
    def whole_units(self, unit: int) -> ShardMap:
        """The rows that belong to each rank if units of ``unit`` rows stay whole."""
        ends = [min(end + -end % unit, self.total) for end in accumulate(self.rows)]
        return ShardMap(tuple([end - before for end, before in zip(ends, [0, *ends], strict=False)]))

    def aligned(self, unit: int) -> bool:
        """No unit straddles ranks."""
        return self.whole_units(unit) == self

    def owner(self, row: int) -> int:
        """The rank of ``row`` of the whole."""
        return next(rank for rank in range(self.size) if row < self.end(rank))

    @cached
    def sent(self, unit: int) -> tuple[tuple[int, ...], ...]:
        """``[from][to]``: rows of straddling units that each rank sends to their owners, less than a unit a rank."""
        table = [[0] * self.size for _ in self.rows]
        for rank in range(self.size):
            first, end = self.first(rank), self.end(rank)
            if head := min(first + -first % unit, end) - first:
                table[rank][self.owner(first // unit * unit)] = head
        return tuple([tuple(line) for line in table])

    # ---- what each rank holds of the quantized whole ----

    def sources(self, fmt: Format, dim: int) -> ShardMap:
        """The rows that each rank casts: those of the units that it owns."""
        return self.whole_units(unit_rows(fmt, dim))

    def codes(self, fmt: Format, dim: int) -> ShardMap:
        """Rows of the codes that each rank holds."""
        return ShardMap(tuple([code_shape(fmt, dim, rows, 1)[0] for rows in self.sources(fmt, dim).rows]))

    def scales(self, fmt: Format, dim: int) -> ShardMap:
        """Rows of the grid of scales that each rank holds; for one scale for the whole tensor none is sharded."""
        if not fmt.quantized or not fmt.owns_scales(dim):
            return ShardMap((0,) * self.size)
        return ShardMap(tuple([scale_shape(fmt, dim, rows, 1)[0] for rows in self.sources(fmt, dim).rows]))

    @cached
    def gathered(self, fmt: Format, dim: int) -> tuple[tuple[str, ShardMap], ...]:
        """The fields of an operand that are all-gathered, and the rows that each rank has; others are equal on all."""
        fields = [("codes", self.codes(fmt, dim))]
        if fmt.quantized and fmt.owns_scales(dim):
            fields.append(("scale_inv", self.scales(fmt, dim)))
        if fmt.block and fmt.amax_per_row and dim == ROWWISE:
            fields.append(("amax", self))
        return tuple(fields)

    # ---- communication volume ----

    def gather_bytes(self, fmt: Format, dim: int, cols: int, itemsize: int = 2) -> int:
        """Bytes that every rank sends when this orientation of the whole [M, cols] is gathered.

        Args:
            itemsize: bytes of an element of the tensor itself, which is what the identity format sends.
        """
        width = code_shape(fmt, dim, 1, cols)[1] * (1 if fmt.quantized else itemsize)
        count = self.codes(fmt, dim).largest * width
        if fmt.quantized and fmt.owns_scales(dim):
            count += self.scales(fmt, dim).largest * scale_shape(fmt, dim, 1, cols)[1] * fmt.scale_dtype.itemsize
        return count + 4 * self.largest * (fmt.block > 0 and fmt.amax_per_row and dim == ROWWISE)

    def agreement_bytes(self, fmt: Format, dim: int, cols: int, itemsize: int, rank: int) -> int:
        """Bytes that ``rank`` sends before its cast: amaxes to reduce, rows of straddling units."""
        unit = unit_rows(fmt, dim)
        count = 0 if self.aligned(unit) else sum(self.sent(unit)[rank]) * cols * itemsize
        if fmt.reduces_amax(dim):
            count += 4 * (cols if fmt.amax_per_row else 1)
        return count
