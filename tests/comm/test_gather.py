"""The quantized all-gather gives what quantizing the whole gives, to the bit, and sends what ShardMap says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.distributed_c10d import _coalescing_manager
from torch.utils._python_dispatch import TorchDispatchMode

from minifloat.comm.sharded_cast import gather
from minifloat.distributed import Group, ShardMap, start_gather
from tests.helpers.distributed_pool import Pools, on_ranks
from tests.helpers.gather_cases import (
    CPU,
    HADAMARD,
    PER_TENSOR,
    PLAIN,
    STOCHASTIC,
    STRIPS,
    TILES,
    Example,
    Sent,
    Wire,
    agreement_bytes,
    difference,
    draw_example,
    example,
    gather_examples,
    whole_and_part,
    world,
)

# ---- the property ----


def run_property(worker_pool: Pools, size: int, draws: int, batch: int) -> None:
    """``draws`` batches of random examples."""

    @settings(
        max_examples=draws, derandomize=draws < 50,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
    )  # fmt: skip
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        examples = [draw_example(lambda choices: data.draw(st.sampled_from(choices)), size) for _ in range(batch)]
        for rank, results in enumerate(worker_pool(size).run(gather_examples, examples)):
            for drawn, found in zip(examples, results, strict=True):
                assert not found, f"rank {rank}, {drawn}: {found}"

    check()


@pytest.mark.parametrize("size", [2, 3, 4])
def test_gathered_shards_are_the_quantized_whole(worker_pool: Pools, size: int) -> None:
    run_property(worker_pool, size, 7, 10)


CORNERS = [
    example((1, 0), STRIPS), example((0, 0), PLAIN, HADAMARD), example((0, 5), TILES),
    example((127, 129), STRIPS), example((128, 128), TILES), example((1, 1), PLAIN, HADAMARD),
    example((7, 8), "e2m1/16x16/two_level"), example((0, 33), "identity"), example((200, 1), PER_TENSOR),
    example((5, 9), PLAIN, HADAMARD, dtype="float32", kind="special"),
    example((20, 13), TILES, PLAIN, chained=True), example((20, 13), "e2m1/16x16/two_level", STRIPS, chained=True),
    example((33, 30), "e4m3/row/fp32"), example((0, 7), "e4m3/row/fp32"),
    example((33, 30), "e2m1/1x32/e8m0"), example((1, 64), "e2m1/32x32/e8m0"), example((33, 30), "e3m2/1x32/e8m0"),
    example((3, 2), STOCHASTIC, STOCHASTIC.replace("two_level", "two_level/hadamard16"), cols=33),
]  # fmt: skip


def test_corners(worker_pool: Pools) -> None:
    for results in worker_pool(2).run(gather_examples, CORNERS):
        assert dict(zip(CORNERS, results, strict=True)) == dict.fromkeys(CORNERS, "")
    middle = [
        example((9, 2, 1, 120), row, column) for row, column in ((STRIPS, None), (PLAIN, HADAMARD), (TILES, None))
    ]
    for results in worker_pool(4).run(gather_examples, middle):  # units that span three ranks
        assert results == [""] * len(middle)


def test_one_rank_casts_as_ever() -> None:
    shards, group = ShardMap((37,)), Group.of(None)
    for row, column in ((PER_TENSOR, PER_TENSOR), (STRIPS, STRIPS), (PLAIN, HADAMARD), ("identity", "identity")):
        whole, part, _ = whole_and_part(example((37,), row, column), group, CPU)
        assert not difference(part, whole)
        assert not difference(gather(part, shards, group, rowwise=True, columnwise=True), whole)


# ---- how it travels ----

TRAVELS = [
    example((16, 16), PER_TENSOR), example((40, 33), PER_TENSOR), example((40, 33), STRIPS, cols=130),
    example((40, 33), TILES, cols=130), example((128, 128), STRIPS), example((40, 33), PLAIN, HADAMARD),
    example((40, 33), "identity", dtype="float32"), example((0, 33), "e2m1/1x16/two_level/amax_per_row"),
    example((40, 33), "e4m3/tensor/given"), example((40, 33), "e4m3/row/fp32"),
    example((40, 33), "e2m1/16x16/two_level"),
]  # fmt: skip


def sent_and_expected(rank: int, size: int, drawn: Example) -> tuple[list[Sent], list[Sent], int, int]:
    group, quantizer, shards = world(), drawn.quantizer(), ShardMap(drawn.rows)
    itemsize = getattr(torch, drawn.dtype).itemsize
    with Wire() as before:
        _, part, _ = whole_and_part(drawn, group, CPU)
    with Wire() as during:
        gather(part, shards, group, rowwise=True, columnwise=True)
    agreement = [agreement_bytes(shards, *cast, drawn.cols, itemsize, rank) for cast in quantizer.casts]
    gathered = [shards.gather_bytes(*cast, drawn.cols, itemsize) for cast in quantizer.casts]
    return before.sent, during.sent, sum(agreement), sum(gathered)


def test_bytes_on_the_wire(worker_pool: Pools) -> None:
    """What the backend is given, by ShardMap's formula; bytes alone, but for amaxes in a sum."""
    for drawn in TRAVELS:
        for before, during, agreement, gathered in worker_pool(2).run(sent_and_expected, drawn):
            assert sum(sent.bytes for sent in before) == agreement, drawn
            assert sum(sent.bytes for sent in during) == gathered, drawn
            assert {sent.dtype for sent in during} == {torch.uint8}
            assert {sent.dtype for sent in before if sent.collective != "allreduce_"} <= {torch.uint8}
            assert len({sent.collective for sent in during}) == 1, "one call of the backend"


class Copies(TorchDispatchMode):
    """Lists the operations inside that copy tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.seen += [name] * (name in ("copy_", "clone", "cat", "_to_copy"))
        return func(*args, **(kwargs or {}))


def copies(rank: int, size: int, rows: tuple[int, ...]) -> list[str]:
    """The copies that gathering makes."""
    _, part, shards = whole_and_part(example(rows, STRIPS.replace("128", "32"), columnwise=False), world(), CPU)
    with Copies() as mode:
        gather(part, shards, world(), rowwise=True, columnwise=False)
    return mode.seen


def test_equal_shards_go_straight_to_their_place(worker_pool: Pools) -> None:
    """Uneven ones are padded and put together: codes and scales each once."""
    assert worker_pool(2).run(copies, (32, 32)) == [[], []]
    assert worker_pool(2).run(copies, (32, 5))[0] == ["cat", "cat"]


@on_ranks(2)
def test_what_does_not_fit_is_refused(rank: int, size: int) -> None:
    rowwise, shards = whole_and_part(example((8, 8), STRIPS, columnwise=False), world(), CPU)[1:]
    with pytest.raises(ValueError, match="needs a columnwise operand"):
        gather(rowwise, shards, world(), rowwise=True, columnwise=True)


@pytest.mark.parametrize("caller_coalesces", [False, True])
@on_ranks(2)
def test_several_tensors_in_one_call(rank: int, size: int, caller_coalesces: bool) -> None:
    """Three tensors as one transfer (gloo: a call each), beside another one, started later and waited for first."""
    rows = (20, 13)
    drawn = [example(rows, PER_TENSOR), example(rows, STRIPS), example(rows, PLAIN, HADAMARD), example(rows, TILES)]
    wholes, parts, shards = zip(*[whole_and_part(each, world(), CPU) for each in drawn], strict=True)
    usage = {"rowwise": True, "columnwise": True}
    with Wire() as wire:
        if caller_coalesces:
            with _coalescing_manager(world().process_group, async_ops=True) as manager:
                first = start_gather(parts[:3], shards[0], world(), **usage)
                second = start_gather(parts[3:], shards[0], world(), **usage)
            manager.wait()
        else:
            first = start_gather(parts[:3], shards[0], world(), **usage)
            second = start_gather(parts[3:], shards[0], world(), **usage)
    found = second.wait() + first.wait()
    results = [difference(*pair) for pair in zip(found, (wholes[3], *wholes[:3]), strict=True)]
    assert results == [""] * 4
    assert {sent.collective for sent in wire.sent} == {
        "allgather_into_tensor_coalesced_" if caller_coalesces else "_allgather_base_"
    }
