"""Collectives of rows: asynchronous handles in eager mode, functional collectives under a compiler; and their checks.

Sums are in the dtype of what is summed, never quantized. What is only moved is sent as bytes: some backends know no
8-bit floats, and coalesce one dtype only.
"""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from minifloat.comm.group import Group, ShardMap, group_of_name


def other_recipes(recipe: str, group: str, device: str) -> str:
    """Says under which recipes ranks run a layer, if not all under the same: a small collective.

    What is gathered would be codes of several formats, and what is summed products of several. All ranks get words for
    an error, "" if there is none.
    """
    process_group = group_of_name(group)
    digest = zlib.crc32(recipe.encode())
    ends = torch.tensor([digest, -digest], device=device)
    dist.all_reduce(ends, dist.ReduceOp.MAX, process_group)
    return "" if int(ends.sum()) == 0 else recipes_of_all(recipe, process_group)


def recipes_of_all(recipe: str, process_group: dist.ProcessGroup) -> str:
    """Says that ranks run a layer under different recipes, and under which: a collective."""
    table = [recipe] * process_group.size()
    dist.all_gather_object(table, recipe, group=process_group)
    said = "; ".join(f"rank {rank}: {each}" for rank, each in enumerate(table))
    return f"the ranks of its group run under different recipes; give all the same: {said}"


def other_recipes_in_trace(recipe: str, group: str, device: str) -> str:
    """Compares recipes while a compiler traces the layer; once for each, since a rank may trace it alone.

    Without the layer's name, which the compiler would guard: equal layers are traced once, whatever their names.
    """
    agreed = _agreed.setdefault(group_of_name(group), set())
    others = "" if recipe in agreed else other_recipes(recipe, group, device)
    if not others:
        if len(agreed) >= _MOST_AGREED:
            agreed.clear()
        agreed.add(recipe)
    return others


_agreed: WeakKeyDictionary[dist.ProcessGroup, set[str]] = WeakKeyDictionary()
_MOST_AGREED = 4096
other_recipes_in_trace._dynamo_marked_constant = True  # type: ignore[attr-defined] # what assume_constant_result does


def check_sharded(collective: str, x: Tensor, shards: ShardMap, group: Group) -> None:
    """Raises ValueError, naming the collective and the sizes, unless this rank brings the rows that ``shards`` says."""
    if shards.size != group.size or x.shape[0] != shards.rows[group.rank]:
        raise ValueError(
            f"{collective}: rank {group.rank} of {group.size} has {x.shape[0]} rows, but the row counts of the ranks "
            f"are {shards.rows}; give every rank the counts of all"
        )


T = TypeVar("T")
U = TypeVar("U")
_functional = torch.ops._c10d_functional


class Pending(Generic[T]):
    """A transfer under way; :meth:`wait` gives its result, in the order of the stream, without waiting on the host.

    What is being sent is kept until then by the backend's handles, and nothing is kept afterwards.
    """

    def __init__(self, works: Sequence[Any], finish: Callable[[], T]) -> None:
        self._works = list(works)
        self._finish: Callable[[], T] | None = finish

    def wait(self) -> T:
        """The result; it can be had once."""
        finish, self._finish = self._finish, None
        assert finish is not None, "what was pending has been waited for"
        for work in self._works:
            work.wait()
        self._works = []
        return finish()

    def then(self, step: Callable[[T], U]) -> Pending[U]:
        """The transfer, with ``step`` to make the result of what comes."""
        return Pending([], lambda: step(self.wait()))


def wait_tensor(x: Tensor) -> Tensor:
    """The result of a functional collective."""
    result: Tensor = _functional.wait_tensor(x)
    return result


def _traced(x: Tensor) -> bool:
    """Whether ``x`` is in a traced graph, which PyTorch 2.11 does not say inside of operations of a tensor of ours."""
    return torch.compiler.is_compiling() or type(x) is not Tensor


def as_bytes(x: Tensor) -> Tensor:
    """The memory of ``x`` [rows, ...] as uint8 [rows, bytes of a row]; a copy unless ``x`` is contiguous."""
    if x.dtype == torch.uint8 and x.dim() == 2:
        return x.contiguous()
    x = x.contiguous()
    flat = x.as_strided((x.numel(),), (1,))  # dims of size 1 have any stride, which a view of another dtype refuses
    return flat.view(torch.uint8).view(x.shape[0], math.prod(x.shape[1:]) * x.itemsize)


def from_bytes(data: Tensor, like: Tensor) -> Tensor:
    """The inverse of :func:`as_bytes` for tensors of other rows of the same kind as ``like``."""
    shape = data.shape[0], *like.shape[1:]
    if data.numel() == 0:
        return like.new_empty(shape)
    values = data if like.dtype == data.dtype else data.view(like.dtype)
    return values if like.dim() == 2 else values.reshape(shape)


# ---- moving rows ----


def start_all_gather_rows(
    xs: Sequence[Tensor], maps: Sequence[ShardMap], group: Group, into: Sequence[Tensor | None] | None = None, *,
    overlapped: bool = True,
) -> Pending[list[Tensor]]:  # fmt: skip
    """Gathers several tensors along their first dim, in one call of the backend.

    Equal row counts are received in place; others are padded to the largest and put together after the wait. Inside a
    coalescing region of the caller on the group the transfers join it, complete when its handle was waited for.

    Args:
        xs: [rows, ...] each, of any dtype: this rank's rows.
        maps: the rows of every rank, for each tensor.
        into: contiguous tensors [sum(rows), ...] to fill; None where there is none.
        overlapped: with what is computed meanwhile; else no events between streams are needed.
    """
    targets = [None] * len(xs) if into is None else list(into)
    if group.size == 1:
        return Pending([], lambda: [_fill(target, x) for x, target in zip(xs, targets, strict=True)])
    sends, receives, places = [], [], []
    for place, (x, rows, target) in enumerate(zip(xs, maps, targets, strict=True)):
        data = as_bytes(x)
        if rows.largest * data.shape[1] == 0:
            continue
        sends.append(padded_rows(data, rows.largest))
        receives.append(as_bytes(target) if target is not None and rows.is_even else None)
        places.append(place)
    transfer = _start_all_gather(sends, receives, group, overlapped)

    def finish() -> list[Tensor]:
        gathered = dict(zip(places, transfer.wait(), strict=True))
        return [
            _without_padding(gathered.get(place), x, rows, target)
            for place, (x, rows, target) in enumerate(zip(xs, maps, targets, strict=True))
        ]

    return Pending([], finish)


def padded_rows(x: Tensor, rows: int) -> Tensor:
    """Pads ``x`` with rows of any value, so that all ranks send as much."""
    if x.shape[0] == rows:
        return x
    padded = x.new_empty(rows, *x.shape[1:])
    padded[: x.shape[0]] = x
    return padded


def _start_all_gather(
    sends: Sequence[Tensor], receives: Sequence[Tensor | None], group: Group, overlapped: bool
) -> Pending[list[Tensor]]:
    """Starts one for ``sends``: uint8 [rows, bytes], of one size on all ranks; ``receives``: [size * rows, bytes]."""
    if torch.compiler.is_compiling():
        gathered = _functional.all_gather_into_tensor_coalesced(list(sends), group.size, group.name)
        return Pending([], lambda: [_fill(into, wait_tensor(x)) for x, into in zip(gathered, receives, strict=True)])
    targets = [
        send.new_empty(group.size * send.shape[0], send.shape[1]) if target is None else target
        for send, target in zip(sends, receives, strict=True)
    ]
    process_group = group.process_group
    if process_group in dist.distributed_c10d._world.pg_coalesce_state:
        gather_one = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
        for target, send in zip(targets, sends, strict=True):
            gather_one(target, send, group=process_group, async_op=True)
    elif targets:
        options = _gather_options(overlapped)
        if targets[0].is_cpu:  # gloo's of several at once ends the process now and then (PyTorch's issue 65231)
            each = zip(targets, sends, strict=True)
            works = [process_group._allgather_base(target, send, options) for target, send in each]
        else:
            works = [process_group.allgather_into_tensor_coalesced(targets, list(sends), options)]
        return Pending([work for work in works if work is not None], lambda: targets)
    return Pending([], lambda: targets)


# The two collectives of a quantized gather are methods of the process group: PyTorch's functions look at so much first
# that a small gather takes longer on the host than on the device. Their options are made once.


@functools.cache
def _gather_options(overlapped: bool) -> Any:
    options = dist.distributed_c10d.AllgatherOptions()  # type: ignore[attr-defined]
    options.asyncOp = overlapped
    return options


@functools.cache
def _max_options() -> Any:
    options = dist.AllreduceOptions()
    options.reduceOp, options.asyncOp = dist.ReduceOp.MAX, False  # type: ignore[assignment]
    return options


def _fill(target: Tensor | None, value: Tensor) -> Tensor:
    return value if target is None else target.copy_(value)


def _without_padding(data: Tensor | None, x: Tensor, rows: ShardMap, target: Tensor | None) -> Tensor:
    """The whole, from the rows of all ranks as bytes, those of each padded to the largest number."""
    if data is None:
        return x.new_empty(rows.total, *x.shape[1:]) if target is None else target
    if rows.is_even:
        return from_bytes(data, x) if target is None else target
    parts = data.split([length for count in rows.rows for length in (count, rows.largest - count)])[::2]
    if target is None:
        return from_bytes(torch.cat(parts), x)
    torch.cat(parts, out=as_bytes(target))
    return target


def all_gather_rows(x: Tensor, shards: ShardMap, group: Group) -> Tensor:
    """Gathers ``x`` [rows, ...] of every rank below each other, in any dtype; raises as ``check_sharded`` does."""
    check_sharded("all_gather_rows", x, shards, group)
    return start_all_gather_rows([x], [shards], group, overlapped=False).wait()[0]


def start_exchange_rows(x: Tensor, send: Sequence[int], receive: Sequence[int], group: Group) -> Pending[Tensor]:
    """Exchanges rows of ``x``, as many as ``send`` says to each rank in turn, for as many as ``receive`` says."""
    data = as_bytes(x)
    if _traced(data):
        exchanged = _functional.all_to_all_single(data, list(receive), list(send), group.name)
        return Pending([], lambda: from_bytes(wait_tensor(exchanged), x))
    received = data.new_empty(sum(receive), data.shape[1])
    work = dist.all_to_all_single(received, data, list(receive), list(send), group.process_group, async_op=True)
    return Pending([work], lambda: from_bytes(received, x))


# ---- reductions ----


def averages(x: Tensor, groups: Sequence[Group]) -> bool:
    """Whether sums of ``x`` may be divided by the sizes of ``groups`` underway, exactly: NCCL and powers of two."""
    exact = x.dtype in (torch.float32, torch.bfloat16) and all(each.size & (each.size - 1) == 0 for each in groups)
    return exact and x.is_cuda and all(each.process_group._get_backend(x.device).name() == "nccl" for each in groups)


def start_reduce_scatter_rows(x: Tensor, shards: ShardMap, group: Group, *, mean: bool = False) -> Pending[Tensor]:
    """Sums ``x`` [sum(rows), N] of all ranks in its own dtype, of which a rank gets its rows, as ``shards`` says.

    ``mean``: or divides the sum by their number, where the backend :func:`averages`.

    Raises:
        ValueError: ``x`` has other rows than the sum.
    """
    if shards.size != group.size or x.shape[0] != shards.total:
        raise ValueError(
            f"reduce_scatter_rows: rank {group.rank} of {group.size} has {x.shape[0]} rows to sum, of which the ranks "
            f"are to get {shards.rows}; the counts of the {group.size} ranks must add up to the rows"
        )
    if group.size == 1:
        return Pending([], lambda: x)
    own, largest = shards.rows[group.rank], shards.largest
    if shards.is_even:
        send = x.contiguous()
    else:
        send = x.new_zeros(group.size * largest, *x.shape[1:])
        for rank, part in enumerate(x.split(list(shards.rows))):
            send[rank * largest : rank * largest + part.shape[0]] = part
    if send.numel() == 0:
        return Pending([], lambda: x[:own])
    if torch.compiler.is_compiling():
        scattered = _functional.reduce_scatter_tensor(send, "sum", group.size, group.name)
        return Pending([], lambda: wait_tensor(scattered)[:own])
    summed = x.new_empty(largest, *x.shape[1:])
    scatter = dist.reduce_scatter_single if hasattr(dist, "reduce_scatter_single") else dist.reduce_scatter_tensor
    op = dist.ReduceOp.AVG if mean else dist.ReduceOp.SUM
    work = scatter(summed, send, op=op, group=group.process_group, async_op=True)
    return Pending([work], lambda: summed[:own])


def start_all_reduce(x: Tensor, group: Group, *, mean: bool = False) -> Pending[Tensor]:
    """Starts :func:`all_reduce`; ``mean``: as in :func:`start_reduce_scatter_rows`."""
    if group.size == 1 or x.numel() == 0:
        return Pending([], lambda: x)
    if torch.compiler.is_compiling():
        reduced = _functional.all_reduce(x.contiguous(), "sum", group.name)
        return Pending([], lambda: wait_tensor(reduced))
    addend = x.contiguous()
    op = dist.ReduceOp.AVG if mean else dist.ReduceOp.SUM
    work = dist.all_reduce(addend, op=op, group=group.process_group, async_op=True)
    return Pending([work], lambda: addend)


def all_reduce(x: Tensor, group: Group) -> Tensor:
    """Sums ``x`` over all ranks, in its own dtype, which may be in the memory of ``x``: use the result alone."""
    return start_all_reduce(x, group).wait()


def all_reduce_max(xs: Sequence[Tensor], group: Group, *, in_place: bool = False) -> list[Tensor]:
    """The largest over the ranks of each element of several fp32 tensors [n], in one all-reduce.

    ``in_place``: the result may take the memory of ``xs``.
    """
    if group.size == 1 or not xs:
        return list(xs)
    largest = xs[0] if in_place and len(xs) == 1 else torch.cat(list(xs))
    if _traced(largest):
        largest = wait_tensor(_functional.all_reduce(largest, "max", group.name))
    else:
        work = group.process_group.allreduce([largest], _max_options())
        if work is not None:  # of a backend that does not work in the stream
            work.wait()
    return [largest] if len(xs) == 1 else list(largest.split([x.shape[0] for x in xs]))
