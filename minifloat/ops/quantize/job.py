"""Jobs of the cast kernels: what is asked, how it is spread over launches and programs, the layouts of a tile.

*Layouts* say which threads hold which elements of a tile that is cast along rows and columns, where Gluon compiles the
kernel. Triton chooses layouts itself: both orientations are cast in the one in which the tile was loaded, and the
transposed codes are put in order byte by byte. Here the tile goes through shared memory in the 16 bits of its input,
and each orientation reads it as it stores its codes: a thread has neighbours in memory, and most of a block or all of
it. Columns to be transposed are read by ``ldmatrix``, which transposes on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl

from minifloat.formats import Format
from minifloat.ops.launch import KNOWN, MOST_BY_VALUE, most_matrices
from minifloat.ops.tiles import Tile

T = TypeVar("T")


class CastTarget(NamedTuple):
    """One cast: how, and where to.

    Args:
        format, dim: the number format, and the dim that is scaled along.
        level: amax or scale that is given; see ``reference.cast``.
        codes, scale_inv, amax: outputs, as ``kernels.quantize.cast`` returns them; codes of bf16 are values.
        k_major: the codes of a columnwise cast lie in memory with the contracted dim consecutive.
    """

    format: Format
    dim: int
    level: Tensor | None
    codes: Tensor
    scale_inv: Tensor
    amax: Tensor
    k_major: bool


class CastJob(NamedTuple):
    """One matrix ``x`` [M, K], contiguous, and its casts; ``rng`` is for stochastic rounding, see reference.py."""

    x: Tensor
    rng: Tensor | None
    row: CastTarget | None
    column: CastTarget | None

    @property
    def targets(self) -> list[CastTarget]:
        return [target for target in (self.row, self.column) if target is not None]

    @property
    def both(self) -> tuple[CastTarget, CastTarget]:
        """Rowwise and columnwise: what is not wanted is not written to, but needs an address."""
        first = self.targets[0]
        return self.row or first, self.column or first

    @property
    def sharded(self) -> bool:
        """Whether the random bits are those of rows of a larger tensor."""
        return self.rng is not None and self.rng.numel() == 3


def groups(jobs: Sequence[CastJob]) -> Iterator[list[CastJob]]:
    """Jobs that one launch can do: alike in dtype, formats and kind of ``rng``, at most ``launch.most_matrices``."""
    alike: dict[object, list[CastJob]] = {}
    for job in jobs:
        targets = [(t.format, t.dim, t.k_major, t.level is None, t.codes.dtype) for t in job.targets]
        key = (job.x.device, job.x.dtype, job.sharded, *targets)
        alike.setdefault(key, []).append(job)
    for group in alike.values():
        most = most_matrices(group[0].x.get_device())
        for first in range(0, len(group), most):
            yield group[first : first + most]


class Programs(NamedTuple):
    """Says which programs of a launch work on which matrix.

    Args:
        total: number of programs.
        starts: first program of each matrix, as many as the kernel has variants for: 1, 2 or :data:`MOST_BY_VALUE`. Of
            more matrices as many as there are, whose number is in the place of the first one's 0.
    """

    total: int
    starts: tuple[int, ...]

    @classmethod
    def of(cls, counts: Sequence[int]) -> Programs:
        """Makes those of matrices that take ``counts`` programs."""
        starts, total = [], 0
        for count in counts:
            starts.append(total)
            total += count
        if len(counts) > MOST_BY_VALUE:
            return cls(total, (len(counts), *starts[1:]))
        padded = next(size for size in (1, 2, MOST_BY_VALUE) if size >= len(counts))
        return cls(total, tuple(starts + [total] * (padded - len(counts))))

    @property
    def variant(self) -> int:
        """``COUNT`` of the kernels: matrices whose arguments are arguments of the launch; 0 if they are in a table."""
        return len(self.starts) if len(self.starts) <= MOST_BY_VALUE else 0

    def pad(self, values: Sequence[T]) -> tuple[T, ...]:
        """``values`` of the matrices, repeated for the places that no matrix takes."""
        return (*values, *[values[0]] * (len(self.starts) - len(values)))

    def sizes(self, xs: Sequence[Tensor]) -> list[tuple[int, ...]]:
        """Rows and columns of the matrices."""
        return [self.pad([x.shape[i] for x in xs]) for i in (0, 1)]

    def outputs(self, jobs: Sequence[CastJob], *parts: Callable[[CastTarget], Tensor]) -> list[tuple[Tensor, ...]]:
        """``parts`` of the targets, rowwise and then columnwise."""
        return [self.pad([part(job.both[side]) for job in jobs]) for side in (0, 1) for part in parts]


def aligned(sizes: Sequence[int]) -> bool:
    """Whether all are multiples of 16, so that rows begin where wide accesses may."""
    return all(size % 16 == 0 for size in sizes)


class Aligned(NamedTuple):
    """Whether rows and columns are multiples of 16, and whether the memory of columnwise codes is, in rows."""

    rows: bool
    cols: bool
    stored: bool

    @classmethod
    def of(cls, rows: Sequence[int], cols: Sequence[int]) -> Aligned:
        """Looks at whole matrices, whose codes have as many rows in memory."""
        whole = aligned(rows)
        return cls(whole, aligned(cols), whole)


def input_max(x: Tensor) -> float:
    """The largest finite value of the dtype of ``x``."""
    return float(torch.finfo(x.dtype).max)


Basis = list[int]
"""Steps in a tile for each index bit: so many rows, so many columns."""


@dataclass(frozen=True, eq=False)  # a launch looks its kernel up by its constants: :func:`layouts` has one of each
class Layouts:
    """Layouts of a tile as loaded, in shared memory, and as cast both ways; most ``registers`` of a thread."""

    registers: int | None
    loaded: Any
    shared: Any
    row: Any
    column: Any


def through_shared(x: Tensor, fmt: Format, column: bool, k_major: bool, sizes: Aligned) -> bool:
    """Whether a cast of values in the dtype of ``x`` goes through shared memory, where that has run and is faster.

    Elements and rules of the user's may do what Gluon does not compile.
    """
    ours = fmt.element in ("e4m3", "e5m2") and fmt.scale_rule in ("fp32", "pow2", "e8m0")
    strips = column and not fmt.tile and (fmt.block, k_major) in ((128, True), (32, False))
    wide = sizes.cols and (sizes.stored or not k_major)
    return ours and strips and wide and x.dtype == torch.bfloat16 and _runs_on(x.device)


@cache
def _runs_on(device: torch.device) -> bool:
    """Whether Triton's version and the device are those that this has run on."""
    return device.type == "cuda" and KNOWN and torch.cuda.get_device_capability(device) == (9, 0)


@lru_cache(256)
def layouts(choice: Tile, block: int, k_major: bool, as_values: tuple[bool, ...] = (False, False)) -> Layouts | None:
    """Makes the layouts of a tile in strips of a ``block`` of 16 bits; None if it is too small for so many warps.

    Args:
        k_major: columnwise codes are stored with the columns outermost.
        as_values: the row's and the column's codes are bf16 values, of which eight neighbours are 16 bytes.
    """
    tile, warps = (choice.rows, choice.cols), choice.warps
    if as_values[1]:
        column = _layout(tile, _bits(1, 1, 8), [*_bits(1, 8, 64), *_bits(0, 8, 32)], 0, block, warps)
    elif k_major:
        column = _layout(tile, _bits(0, 1, 16), [*_bits(0, 16, 64), *_bits(1, 1, 8)], 0, block, warps)
    else:
        column = _layout(tile, _bits(1, 1, 4), [*_bits(1, 4, 64), *_bits(0, 16, 32)], 0, block, warps)
    wide, high = (8, 4) if as_values[0] else (16, 8)
    row = _layout(tile, _bits(1, 1, wide), [*_bits(1, wide, 64), *_bits(0, 1, high)], 1, block, warps)
    if row is None or column is None:
        return None
    loaded, shared = gl.BlockedLayout([1, 8], [2, 16], [warps, 1], [1, 0]), gl.NVMMASharedLayout(128, 16, rank=2)
    return Layouts(choice.registers, loaded, shared, row, column)


def _bits(dim: int, first: int, end: int) -> list[Basis]:
    """The index bits along ``dim`` from ``first`` to below ``end``, powers of two."""
    return [[0, 1 << i] if dim else [1 << i, 0] for i in range(first.bit_length() - 1, end.bit_length() - 1)]


def _layout(
    tile: tuple[int, int], registers: list[Basis], lanes: list[Basis], dim: int, block: int, warps: int
) -> gl.DistributedLinearLayout | None:
    """Elements of a thread and lanes of a warp; what else is in a block along ``dim`` a thread has, then come warps."""
    others = [bit for axis in (1 - dim, dim) for bit in _bits(axis, 1, tile[axis]) if bit not in registers + lanes]
    within = [bit for bit in others if 0 < bit[dim] < block]
    across = [bit for bit in others if bit not in within]
    split = warps.bit_length() - 1
    inside = all(bit[0] < tile[0] and bit[1] < tile[1] for bit in registers + lanes)
    if not inside or len(across) < split:
        return None
    return gl.DistributedLinearLayout([*registers, *within, *across[split:]], lanes, across[:split], [], list(tile))
