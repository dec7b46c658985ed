"""Groups of ranks: who they are, which rows of a tensor each has, which random numbers each draws."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from minifloat.formats import COLUMNWISE, ROWWISE, Format
from minifloat.ops.quantize import code_shape, scale_shape


class Group(NamedTuple):
    """Process group by name, which can be hashed, pickled and traced. A group of one rank never communicates.

    Args:
        name: what PyTorch's functional collectives know the group by; unread where ``size`` is 1.
        size: number of ranks.
        rank: this process's rank within the group.
    """

    name: str = ""
    size: int = 1
    rank: int = 0

    @staticmethod
    def of(group: Group | dist.ProcessGroup | DeviceMesh | None) -> Group:
        """Makes a group of a process group or of a one-dimensional mesh; of None, of this process alone.

        Raises:
            ValueError: the mesh has several dims, or this process is not among the ranks.
        """
        if group is None:
            return Group()
        if isinstance(group, Group):
            return group
        if isinstance(group, DeviceMesh):
            if group.ndim != 1:
                raise ValueError(
                    f"a group is one dim of a device mesh, got {group.ndim} ({group.mesh_dim_names}); "
                    "pass one of them, as in mesh['tp']"
                )
            group = group.get_group()
        rank = dist.get_rank(group)
        if rank < 0:
            members = dist.get_process_group_ranks(group)
            raise ValueError(f"rank {dist.get_rank()} is not in the group, whose ranks are {members}")
        return Group(group.group_name, dist.get_world_size(group), rank)

    @property
    def process_group(self) -> dist.ProcessGroup:
        """PyTorch's process group of this name."""
        return group_of_name(self.name)


def group_of_name(name: str) -> dist.ProcessGroup:
    """The process group that has this name on every rank."""
    group: dist.ProcessGroup = dist.distributed_c10d._resolve_process_group(name)  # type: ignore[attr-defined, arg-type]
    return group


P = ParamSpec("P")
T = TypeVar("T")

MAX_CACHED = 1024
"""Cached results of each function: row counts that never repeat must not fill the memory."""

_caches: dict[Callable[..., Any], Callable[..., Any]] = {}  # not in closures, which Dynamo looks into


def cached(function: Callable[P, T]) -> Callable[P, T]:
    """Caches as ``functools.lru_cache`` outside of compiled code, which computes the value while it is traced.

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
    """Row counts of a matrix [sum(rows), K] that is sharded by rows over ranks, in their order; 0 is allowed.

    A *unit* is a group of consecutive rows that are cast together (:func:`unit_rows`), counted from row 0 of the
    matrix. It belongs to the rank of its first row.
    """

    rows: tuple[int, ...]

    def __post_init__(self) -> None:
        counts = isinstance(self.rows, tuple) and all(isinstance(rows, (int, torch.SymInt)) for rows in self.rows)
        if not counts or not self.rows or min(self.rows) < 0:
            raise ValueError(f"rows of the ranks are {self.rows}; one count a rank is needed, 0 or more")

    @classmethod
    def even(cls, rows: int, size: int) -> ShardMap:
        """Gives each of ``size`` ranks ``rows`` rows."""
        return cls((rows,) * size)

    @classmethod
    def chunks(cls, rows: int, size: int) -> ShardMap:
        """Shares ``rows`` out as ``torch.chunk`` does: equally, rounded up; the last ranks may have fewer or none."""
        most = -(-rows // size)
        return cls(tuple([max(0, min(most, rows - rank * most)) for rank in range(size)]))

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.rows)

    @property
    def total(self) -> int:
        """Rows of the full matrix."""
        return sum(self.rows)

    @property
    def largest(self) -> int:
        """Largest row count; to gather, every rank pads its rows to it."""
        return max(self.rows)

    @property
    def is_even(self) -> bool:
        """Whether all ranks have equally many rows."""
        return min(self.rows) == max(self.rows)

    def first(self, rank: int) -> int:
        """Index of the first row of ``rank`` in the full matrix."""
        return sum(self.rows[:rank])

    def end(self, rank: int) -> int:
        """Row after the last one of ``rank``."""
        return self.first(rank) + self.rows[rank]

    # ---- units ----

    @cached
    def whole_units(self, unit: int) -> ShardMap:
        """The rows that belong to each rank if units of ``unit`` rows stay whole."""
        ends = [min(end + -end % unit, self.total) for end in accumulate(self.rows)]
        return ShardMap(tuple([end - before for end, before in zip(ends, [0, *ends], strict=False)]))

    def aligned(self, unit: int) -> bool:
        """Whether no unit straddles ranks."""
        return self.whole_units(unit) == self

    def owner(self, row: int) -> int:
        """The rank of ``row`` of the whole."""
        return next(rank for rank in range(self.size) if row < self.end(rank))

    @cached
    def sent(self, unit: int) -> tuple[tuple[int, ...], ...]:
        """Counts, by ``[from][to]``, the rows of straddling units that ranks send to the units' owners."""
        table = [[0] * self.size for _ in self.rows]
        for rank in range(self.size):
            first, end = self.first(rank), self.end(rank)
            if head := min(first + -first % unit, end) - first:
                table[rank][self.owner(first // unit * unit)] = head
        return tuple([tuple(line) for line in table])

    # ---- what each rank holds of the quantized whole ----

    def sources(self, fmt: Format, dim: int) -> ShardMap:
        """Rows that each rank casts: those of the units that it owns."""
        return self.whole_units(unit_rows(fmt, dim))

    def codes(self, fmt: Format, dim: int) -> ShardMap:
        """Rows of the codes that each rank holds."""
        return ShardMap(tuple([code_shape(fmt, dim, rows, 1)[0] for rows in self.sources(fmt, dim).rows]))

    def scales(self, fmt: Format, dim: int) -> ShardMap:
        """Rows of the scale grid on each rank; a single scale for the tensor is not sharded."""
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
        """Bytes that every rank sends to gather this orientation of [M, cols].

        Args:
            itemsize: bytes of an element of the tensor itself, which is what the identity format sends.
        """
        width = code_shape(fmt, dim, 1, cols)[1] * (1 if fmt.quantized else itemsize)
        count = self.codes(fmt, dim).largest * width
        if fmt.quantized and fmt.owns_scales(dim):
            count += self.scales(fmt, dim).largest * scale_shape(fmt, dim, 1, cols)[1] * fmt.scale_dtype.itemsize
        return count + 4 * self.largest * (fmt.block > 0 and fmt.amax_per_row and dim == ROWWISE)


# ---- random numbers: outside of this the generators of a group, seeded alike, draw the same on every rank ----


def draw_apart(group: Group, function: Callable[..., T], x: Tensor, *args: object) -> T:
    """Calls ``function(x, *args)``, which draws on the device of ``x`` what no other rank of the group draws.

    All ranks of the group call it together. A compiler leaves it, and what it calls, to PyTorch.
    """
    if torch.compiler.is_compiling():  # whose decorator would bring the compiler along at import
        result: T = torch.compiler.disable(_draw_apart)(group.rank, function, x, *args)
        return result
    return _draw_apart(group.rank, function, x, *args)


def _draw_apart(rank: int, function: Callable[..., T], x: Tensor, *args: object) -> T:
    """Draws from other generators of the host and of the device, which are what they were afterwards.

    Their seed is the host's next number and the rank: it is known without waiting for the device, differs from use to
    use, and a recomputation that brings the host's generator back finds it again.
    """
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("dropout that ranks draw apart cannot be captured in a CUDA graph; set its probability to 0")
    seed, on_host = int(torch.randint(2**62, (), device="cpu")) + rank, x.device.type == "cpu"
    with torch.random.fork_rng([] if on_host else [x.device], device_type="cuda" if on_host else x.device.type):
        torch.default_generator.manual_seed(seed)
        if not on_host:
            torch.get_device_module(x.device).default_generators[x.device.index].manual_seed(seed)
        return function(x, *args)
