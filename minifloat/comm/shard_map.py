"""Which rows of a matrix lie on which rank, and what follows from it for the codes and scales of each format.

Pure arithmetic on row counts, which all ranks know on the host: every rank finds the same answers without asking.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from minifloat.comm.cache import kept
from minifloat.formats import COLUMNWISE, ROWWISE, Format
from minifloat.ops.quantize import code_shape, scale_shape


def unit_rows(fmt: Format, dim: int) -> int:
    """Rows that must lie together for their cast along ``dim``: a block's, a rotation's, the two of a packed byte.

    1 also for a format of one scale for the whole tensor: ranks agree on the amax, and each casts what it has.
    """
    rows = fmt.scale_block(dim)[0] or 1
    if fmt.transform == "hadamard16":
        rows = max(rows, 16)
    return max(rows, 2) if fmt.packed and dim == COLUMNWISE else rows


def moves_rows(fmt: Format) -> bool:
    """The rows of a unit that straddles ranks go to one of them before the cast.

    Where codes are single bytes of unrotated elements they stay where they are: agreeing on amaxes is enough.
    """
    return fmt.packed or fmt.transform != "none"


class Pieces(NamedTuple):
    """A rank's rows, counted from its first one, as three ranges that meet.

    Up to ``head`` they belong to a unit that began on an earlier rank; from there to ``tail`` are whole units; the
    rest begins a unit that later ranks continue.
    """

    head: int
    tail: int
    end: int


@dataclass(frozen=True)
class ShardMap:
    """A matrix [sum(rows), K] along whose first dim ranks hold ``rows`` each, in the order of the ranks; 0 is allowed.

    A *unit* is a group of consecutive rows that are cast together (:func:`unit_rows`), counted from the first row of
    the whole. It belongs to the rank of its first row.
    """

    rows: tuple[int, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.rows, tuple) or not self.rows or min(self.rows) < 0:
            raise ValueError(f"rows of the ranks are {self.rows}; one count a rank is needed, 0 or more")

    @classmethod
    def even(cls, rows: int, size: int) -> ShardMap:
        """``size`` ranks of ``rows`` rows each."""
        return cls((rows,) * size)

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

    @kept
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

    def pieces(self, rank: int, unit: int) -> Pieces:
        """How units of ``unit`` rows cut the rows of ``rank``."""
        first, end = self.first(rank), self.end(rank)
        head = min(first + -first % unit, end)
        tail = end if end == self.total else max(head, end - end % unit)
        return Pieces(head - first, tail - first, end - first)

    @kept
    def straddling(self, rank: int, unit: int) -> tuple[int | None, int | None]:
        """The numbers of the units of ``unit`` rows that the head and the tail of ``rank`` are part of, if any."""
        first, cut = self.first(rank), self.pieces(rank, unit)
        return first // unit if cut.head else None, (first + cut.tail) // unit if cut.end > cut.tail else None

    @kept
    def sent(self, unit: int) -> tuple[tuple[int, ...], ...]:
        """``[from][to]``: rows of straddling units that each rank sends to their owners, less than a unit a rank."""
        table = [[0] * self.size for _ in self.rows]
        for rank in range(self.size):
            if head := self.pieces(rank, unit).head:
                table[rank][self.owner(self.first(rank) // unit * unit)] = head
        return tuple([tuple(line) for line in table])

    # ---- what each rank holds of the quantized whole ----

    def sources(self, fmt: Format, dim: int) -> ShardMap:
        """The rows that each rank casts: its own, or, where straddling units move, those of the units it owns."""
        return self.whole_units(unit_rows(fmt, dim)) if moves_rows(fmt) else self

    def codes(self, fmt: Format, dim: int) -> ShardMap:
        """Rows of the codes that each rank holds."""
        return ShardMap(tuple([code_shape(fmt, dim, rows, 1)[0] for rows in self.sources(fmt, dim).rows]))

    def scales(self, fmt: Format, dim: int) -> ShardMap:
        """Rows of the grid of scales that each rank holds; for one scale for the whole tensor none is sharded."""
        if not fmt.quantized or fmt.block == 0:
            return ShardMap((0,) * self.size)
        owned = self.whole_units(unit_rows(fmt, dim))
        return ShardMap(tuple([scale_shape(fmt, dim, rows, 1)[0] for rows in owned.rows]))

    # ---- bytes on the wire ----

    def gather_bytes(self, fmt: Format, dim: int, cols: int, itemsize: int = 2) -> int:
        """Bytes that every rank sends when this orientation of the whole [M, cols] is gathered.

        Args:
            itemsize: bytes of an element of the tensor itself, which is what the identity format sends.
        """
        width = code_shape(fmt, dim, 1, cols)[1] * (1 if fmt.quantized else itemsize)
        count = self.codes(fmt, dim).largest * width
        if fmt.quantized and fmt.block:
            count += self.scales(fmt, dim).largest * scale_shape(fmt, dim, 1, cols)[1] * fmt.scale_dtype.itemsize
        return count + 4 * self.largest * (fmt.amax_per_row and dim == ROWWISE)

    def agreement_bytes(self, fmt: Format, dim: int, cols: int, itemsize: int, rank: int) -> int:
        """Bytes that ``rank`` sends before its cast: amaxes to reduce, amaxes or rows of straddling units."""
        unit = unit_rows(fmt, dim)
        count = 0
        if fmt.needs_amax and not (fmt.amax_per_row and dim == ROWWISE):
            count += 4 * (cols if fmt.amax_per_row else 1)
        if self.aligned(unit):
            return count
        if moves_rows(fmt):
            return count + sum(self.sent(unit)[rank]) * cols * itemsize
        return count + 2 * scale_shape(fmt, dim, 1, cols)[1] * itemsize
