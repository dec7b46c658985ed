"""A rank's rows of a quantized parameter taken apart and put together again, and in compiled code."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import MetadataIndex

from minifloat import QuantizedTensor, QuantizerRole
from minifloat.comm.group import Group, ShardMap
from minifloat.recipe import named
from minifloat.tensor import quantize
from minifloat.tensor.rows import QuantizedRows, rows_of
from tests.helpers.compare import assert_same_bits
from tests.helpers.distributed_pool import on_ranks
from tests.helpers.sample import each_twice, first_by_default

RECIPES = ["current", "block", "rowwise", "mxfp8", "nvfp4", "mxfp4"]
SHARDS = [(50, 50), (33, 67), (0, 100)]


def shards_of(recipe: str, rows: tuple[int, ...], group: str = "") -> tuple[QuantizedTensor, list[QuantizedRows]]:
    """A weight [100, 64], and what each rank has of it."""
    torch.manual_seed(0)
    whole = quantize(torch.randn(100, 64), named(recipe).quantizer(QuantizerRole("linear", "weight")))
    groups = [Group(group, len(rows), rank) for rank in range(len(rows))]
    return whole, [rows_of(whole, ShardMap(rows), each) for each in groups]


@each_twice
@pytest.mark.parametrize("rows", SHARDS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_flatten(recipe: str, rows: tuple[int, ...]) -> None:
    """Rows that begin inside of a block read its codes, of which they have those before them."""
    whole, shards = shards_of(recipe, rows, "ranks")
    assert shards[1].cover.exact == (recipe in ("current", "rowwise") or rows[0] == 0)
    for shard, expected in zip(shards, whole.dequantize().split(rows), strict=True):
        shard._group, shard.scale = "ranks", torch.ones(1)
        names, context = shard.__tensor_flatten__()
        inner = {name: getattr(shard, name) for name in names}
        back: Any = type(shard).__tensor_unflatten__(inner, context, shard.shape, shard.stride())
        assert type(back) is QuantizedRows and back.shape == shard.shape and back.stride() == shard.stride()
        assert back.__tensor_flatten__() == (names, context) and back.quantizer == shard.quantizer
        assert all(back._buffers()[name] is inner[name] for name in names)
        assert (back.cover.group, back.cover.begin, back.cover.own) == (
            shard.cover.group, shard.cover.begin, shard.cover.own,
        )  # fmt: skip
        assert_same_bits(back.dequantize(), expected)


def storages(x: Any) -> set[int]:
    """Of the buffers of a tensor that have elements."""
    return {each.untyped_storage().data_ptr() for each in x._buffers().values() if each.numel()}


@each_twice
@pytest.mark.parametrize("rows", SHARDS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_memory(recipe: str, rows: tuple[int, ...]) -> None:
    """Rows, their values and what is saved of them are in memory of their own, as large as they are."""
    whole, shards = shards_of(recipe, rows)
    held = [storages(each) for each in (whole, *shards)]
    assert sum(map(len, held)) == len(set().union(*held))
    for shard in shards:
        values = shard.dequantize()
        assert values.untyped_storage().nbytes() == values.nbytes
        before = values.clone()
        values.zero_()
        assert torch.equal(shard.dequantize(), before)
        (item, *others) = shard.__create_write_items__("weight", whole) or [None]
        assert not others and (item is None) == (shard.cover.owned[0] == shard.cover.owned[1])
        if item is not None:
            saved = shard.__get_tensor_shard__(MetadataIndex("weight", item.tensor_data.chunk.offsets))
            assert saved.shape == item.tensor_data.chunk.sizes
            first, end = shard.cover.owned
            assert torch.equal(saved.dequantize(), whole.dequantize()[first:end])
            if first > shard.cover.begin:
                assert storages(saved).isdisjoint(storages(shard))


@pytest.mark.usefixtures("fresh_compiler")
@first_by_default
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_compiled(recipe: str, dynamic: bool) -> None:
    """A shard in a graph has the values of its rows, and gets their gradient; a result of the graph may be it."""

    @torch.compile(backend="aot_eager", fullgraph=True, dynamic=dynamic)
    def total(x: Tensor, shard: Tensor) -> Tensor:
        return F.linear(x, shard).sum() + shard.dequantize().square().sum()

    @torch.compile(backend="aot_eager", fullgraph=True, dynamic=dynamic)
    def run(x: Tensor, shard: Tensor) -> tuple[Tensor, ...]:
        return F.linear(x, shard), shard.dequantize().sum(0), shard * 2, shard[3:7], shard.detach()

    whole, shards = shards_of(recipe, SHARDS[0])
    for shard, own in zip(shards, whole.dequantize().split(SHARDS[0]), strict=True):
        x = torch.randn(5, 64)
        *found, same = run(x, shard)
        for mine, expected in zip(found, (F.linear(x, own), own.sum(0), own * 2, own[3:7]), strict=True):
            assert_same_bits(mine.dequantize() if hasattr(mine, "quantizer") else mine.detach(), expected)
        assert type(same) is QuantizedRows
        assert_same_bits(same.dequantize(), own)
        parameter, plain = nn.Parameter(shard), own.clone().requires_grad_()
        total(x, parameter).backward()
        (F.linear(x, plain).sum() + plain.square().sum()).backward()
        assert parameter.grad is not None and plain.grad is not None
        assert_same_bits(parameter.grad, plain.grad)


@first_by_default
@pytest.mark.parametrize("recipe", ["current", "mxfp8", "block", "nvfp4"])
@on_ranks(2)
def test_written_in_compiled_code(rank: int, size: int, recipe: str) -> None:
    """Neighbours exchange rows of blocks that they share, as in eager code."""
    torch.manual_seed(0)
    quantizer = named(recipe).quantizer(QuantizerRole("linear", "weight"))
    group = Group.of(torch.distributed.group.WORLD)
    found = []
    for compiled in (True, False):
        torch._dynamo.reset()
        torch.manual_seed(0)
        shard = rows_of(quantize(torch.randn(100, 64), quantizer), ShardMap((50, 50)), group)
        shard.join(group)

        def step(shard: Tensor, grad: Tensor) -> None:
            with torch.no_grad():
                shard.add_(grad)

        run = torch.compile(step, backend="aot_eager", fullgraph=True) if compiled else step
        run(shard, torch.randn(50, 64, generator=torch.Generator().manual_seed(rank)))
        found += shard._buffers().values()
    half = len(found) // 2
    for mine, expected in zip(found[:half], found[half:], strict=True):
        assert torch.equal(mine, expected)
