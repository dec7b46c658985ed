"""The sharded cast: what ranks agree on, shards that are quantized already, under a compiler, and mistakes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from minifloat.comm.sharded_cast import gather
from minifloat.distributed import Group, ShardMap, prepare_shard, quantize_shard
from minifloat.formats import COLUMNWISE, ROWWISE, parse
from minifloat.operand import Quantized
from minifloat.quantizer import Quantizer, cast_all
from minifloat.tensor import quantize
from tests.helpers.distributed_pool import Pools, on_ranks
from tests.helpers.gather_cases import (
    HADAMARD,
    PER_TENSOR,
    PLAIN,
    STOCHASTIC,
    STRIPS,
    TILES,
    Example,
    difference,
    example,
    values,
    world,
)
from tests.helpers.sample import first_by_default


@first_by_default
@pytest.mark.parametrize(
    ("drawn", "backend"),
    [
        pytest.param(example((16, 16), PER_TENSOR), "inductor", marks=pytest.mark.slow),
        (example((20, 7), STRIPS), "aot_eager"),
        (example((32, 32), STRIPS.replace("128", "32")), "aot_eager"),
        (example((20, 7), STOCHASTIC, STOCHASTIC.replace("two_level", "two_level/hadamard16")), "aot_eager"),
        (example((9, 30), TILES, PLAIN, chained=True), "aot_eager"),
    ],
    ids=["tensor", "uneven", "even", "nvfp4", "chained"],
)
@on_ranks(2)
def test_compiled(rank: int, size: int, drawn: Example, backend: str) -> str:
    """One graph casts and gathers."""
    torch._dynamo.reset()
    quantizer, shards, group = drawn.quantizer(), ShardMap(drawn.rows), world()
    x, rng = values(drawn), torch.tensor([7, 8])
    whole = cast_all([x], [quantizer], rngs=[rng])[0]

    @torch.compile(fullgraph=True, backend=backend)
    def gathered(own: Tensor, rng: Tensor) -> Quantized:
        part = quantize_shard(own, quantizer, shards, group, rng=rng)
        return gather(part, shards, group, rowwise=True, columnwise=True)

    return difference(gathered(x[shards.first(rank) : shards.end(rank)].clone(), rng), whole)


# ---- what is agreed on ----


def drawn_bits(rank: int, size: int) -> tuple[Quantized, Tensor, Quantized]:
    """Gathered with bits that nobody gave, the next number of this rank's generator, and what the first rank's give."""
    drawn = example((5, 9), STOCHASTIC)
    shards, quantizer, x = ShardMap(drawn.rows), drawn.quantizer(), values(drawn)
    torch.manual_seed(100)
    expected = cast_all([x], [quantizer])[0]
    torch.manual_seed(100 + rank)
    own = x[shards.first(rank) : shards.end(rank)]
    part = quantize_shard(own, quantizer, shards, world())
    after = torch.rand(1)
    torch.manual_seed(100 + rank)
    cast_all([own], [quantizer])
    assert torch.equal(after, torch.rand(1)), "the generator moved on as by an ordinary cast"
    return gather(part, shards, world(), rowwise=True, columnwise=True), after, expected


def test_random_bits_are_those_that_the_first_rank_draws(worker_pool: Pools) -> None:
    (first, _, expected), (second, _, _) = worker_pool(2).run(drawn_bits)
    assert not difference(first, expected) and not difference(second, expected)


@on_ranks(4)
def test_groups_of_a_mesh(rank: int, size: int) -> str:
    """The rows of two pairs of ranks at once, each with the bits that the pair's first rank draws."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    group = Group.of(mesh["tp"])
    assert group == Group.of(mesh.get_group("tp")) and (group.size, group.rank) == (2, rank % 2)
    with pytest.raises(ValueError, match=r"one dim of a device mesh, got 2 .*mesh\['tp'\]"):
        Group.of(mesh)
    drawn = example((5, 9), STOCHASTIC, STOCHASTIC.replace("two_level", "two_level/hadamard16"), seed=rank // 2)
    shards, quantizer, x = ShardMap(drawn.rows), drawn.quantizer(), values(drawn)
    torch.manual_seed(rank - rank % 2)
    expected = cast_all([x], [quantizer])[0]
    torch.manual_seed(rank)
    part = quantize_shard(x[shards.first(group.rank) : shards.end(group.rank)], quantizer, shards, group)
    return difference(gather(part, shards, group, rowwise=True, columnwise=True), expected)


@on_ranks(2)
def test_amaxes_that_are_known(rank: int, size: int) -> None:
    """A producer has found the amaxes of its own rows: the same result, rotated groups that straddle included."""
    results = []
    for drawn in (example((5, 9), PER_TENSOR), example((5, 9), PLAIN, HADAMARD), example((16, 9), PLAIN, HADAMARD)):
        x, shards, quantizer = values(drawn), ShardMap(drawn.rows), drawn.quantizer()
        own = x[shards.first(rank) : shards.end(rank)]
        amaxes = quantizer.amax(own)
        part = quantize_shard(own, quantizer, shards, world(), amaxes=amaxes)
        for kept, again in zip(amaxes, quantizer.amax(own), strict=True):
            assert kept is not None and again is not None and torch.equal(kept, again), "the caller's own"
        found = gather(part, shards, world(), rowwise=True, columnwise=True)
        results.append(difference(found, quantizer(x)))
    assert results == [""] * 3


def measured(rank: int, size: int) -> tuple[float, float]:
    drawn = example((5, 9), "e4m3/tensor/given")
    x, shards = values(drawn).float(), ShardMap(drawn.rows)
    own = x[shards.first(rank) : shards.end(rank)]
    part = quantize_shard(own, drawn.quantizer(), shards, world(), scale=torch.ones(1))
    with pytest.raises(ValueError, match="delayed scaling casts with a scale"):
        quantize_shard(own, drawn.quantizer(), shards, world())
    assert part.any.amax is not None
    return float(part.any.amax), float(own.abs().amax())


def test_a_delayed_cast_measures_its_own_rows(worker_pool: Pools) -> None:
    found = worker_pool(2).run(measured)
    assert all(amax == own for amax, own in found) and found[0] != found[1]


# ---- shards that are quantized already ----


def travelled(rank: int, size: int, drawn: Example, held: tuple[bool, bool], agree: bool) -> tuple[bool, str]:
    """Whether the codes of an existing shard travelled as they are, and how the result differs from what it should be.

    That is the shards' codes below each other, or what the values that they stand for are quantized to as a whole.
    """
    shards, quantizer, group = ShardMap(drawn.rows), drawn.quantizer(), world()
    shares = values(drawn).split(list(drawn.rows))
    usage = quantizer.with_usage(rowwise=held[0], columnwise=held[1])
    existing = [usage.cast(share, usage.amax(values(drawn))) if agree else usage(share) for share in shares]
    part = prepare_shard(existing[rank], quantizer, shards, group, scales_agree=agree)
    found = gather(part, shards, group, rowwise=True, columnwise=True)
    if all(any(mine is theirs for theirs in existing[rank]) for mine in part):
        joined = [torch.cat([each.along(dim).codes for each in existing]) for dim in (ROWWISE, COLUMNWISE)]
        alike = all(torch.equal(found.along(dim).codes, codes) for dim, codes in zip((-1, 0), joined, strict=True))
        return True, "" if alike else "codes"
    again = quantizer(torch.cat([each.dequantize() for each in existing]))
    return False, difference(found, again)


@pytest.mark.parametrize(
    ("drawn", "held", "agree", "as_it_is"),
    [
        (example((128, 128), STRIPS), (True, True), False, True),
        (example((128, 100), STRIPS), (True, True), False, True),
        (example((128, 128), STRIPS), (True, False), False, False),
        (example((100, 128), STRIPS), (True, True), False, False),
        (example((128, 128), TILES), (True, False), False, True),
        (example((8, 9), PER_TENSOR), (True, True), False, False),
        (example((8, 9), PER_TENSOR), (True, True), True, True),
        (example((16, 16), PLAIN), (True, True), False, False),
        (example((16, 16), PLAIN), (True, True), True, True),
        (example((8, 16), PLAIN), (True, True), True, False),
        (example((8, 9), "identity"), (True, True), False, True),
    ],
    ids=lambda value: f"{value.formats[0]}-{value.rows}" if isinstance(value, Example) else str(value),
)
def test_an_existing_shard(
    worker_pool: Pools, drawn: Example, held: tuple[bool, bool], agree: bool, as_it_is: bool
) -> None:
    assert worker_pool(2).run(travelled, drawn, held, agree) == [(as_it_is, "")] * 2


@on_ranks(2)
def test_existing_tensors(rank: int, size: int) -> str:
    """A QuantizedTensor of another format, and a transposed view of one, are cast again; a plain tensor is cast."""
    x, shards = torch.randn(16, 16), ShardMap((8, 8))
    own = x[8 * rank : 8 * rank + 8]
    wanted, other = Quantizer(parse("e4m3/1x8/fp32")), Quantizer(parse("e5m2/1x8/fp32"))
    results = []
    for existing, whole in (
        (own, x),
        (quantize(own, other), torch.cat([other(part).dequantize() for part in x.split(8)])),
        (
            quantize(own.t().contiguous(), other).t(),
            torch.cat([other(part.t()).dequantize().t() for part in x.split(8)]),
        ),
    ):
        part = prepare_shard(existing, wanted, shards, world())
        results.append(difference(gather(part, shards, world(), rowwise=True, columnwise=True), wanted(whole)))
    return "".join(results)


# ---- mistakes ----


def test_other_rows_than_the_counts_say() -> None:
    with pytest.raises(ValueError, match=r"rank 0 of 1 has 4 rows, but the row counts of the ranks are \(3,\)"):
        quantize_shard(torch.randn(4, 8), Quantizer(parse(PER_TENSOR)), ShardMap((3,)), Group())
