"""``Linear(etp_group=...)`` inside of ``quantized_model_init``: rows of codes, which are gathered as they are."""

from __future__ import annotations

from itertools import pairwise, product
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import minifloat
from minifloat.functional.etp import rows
from minifloat.optim import MasterWeights
from minifloat.tensor import QuantizedTensor
from tests.helpers.distributed_pool import Pools, on_ranks
from tests.helpers.recipes import NAMED

SIZES = (24, 70, 33, 128, 4)


def _models(recipe: str, later: str | None, **options: Any) -> tuple[nn.Sequential, nn.Sequential]:
    """The same layers, whole and with rows that blocks straddle; ``later``: the recipe that they get afterwards."""

    def make(group: Any) -> nn.Sequential:
        torch.manual_seed(1)
        with minifloat.quantized_model_init(recipe=recipe, **options):
            layers = [minifloat.Linear(k, n, False, recipe=recipe, etp_group=group) for k, n in pairwise(SIZES)]
        for layer in layers if later is not None else ():
            layer.recipe = later
        return nn.Sequential(*layers)

    return make(None), make(dist.group.WORLD)


def _own(layer: Any, whole: Tensor) -> Tensor:
    return whole[layer._etp.rows.range(0)]


def _seeded(run: Any, *args: Any) -> Any:
    """Both models draw the same random bits."""
    torch.manual_seed(7)
    return run(*args)


def _train(rank: int, size: int, recipe: str, later: str | None) -> None:
    whole, sharded = _models(recipe, later)
    for weight in sharded.parameters():  # rows, and what is saved of them, are in memory of their own
        items = weight.__create_write_items__("weight", weight)
        parts = [weight, *[weight.__get_tensor_shard__(item.index) for item in items]]
        for each in (weight._values(), *[buffer for part in parts for buffer in part._buffers().values()]):
            assert each.dim() < 2 or each.untyped_storage().nbytes() == each.nbytes
    optimizers = [MasterWeights(model.parameters(), torch.optim.SGD, lr=0.1) for model in (whole, sharded)]
    quantize_shards = rows.quantize_shards
    casts: list[int] = []

    def count(xs: Any, *args: Any) -> Any:
        casts.append(len(xs))
        return quantize_shards(xs, *args)

    with mock.patch.object(rows, "quantize_shards", count):
        for step in range(3):
            torch.manual_seed(100 * step + rank)
            x, dy = torch.randn(32, SIZES[0]), torch.randn(32, SIZES[-1])
            x1, x2 = (x.clone().requires_grad_() for _ in range(2))
            y1, y2 = _seeded(whole, x1), _seeded(sharded, x2)
            _seeded(y1.backward, dy)
            _seeded(y2.backward, dy)
            assert torch.equal(y1, y2)
            assert x1.grad is not None and x2.grad is not None and torch.equal(x1.grad, x2.grad)
            for a, b in zip(whole, sharded, strict=True):
                dist.all_reduce(a.weight.grad)
                atol = 0 if size == 2 else 1e-6
                torch.testing.assert_close(_own(b, a.weight.grad / size), b.weight.grad, rtol=0, atol=atol)
                grads: list[Any] = [None] * size
                dist.all_gather_object(grads, b.weight.grad)
                a.weight.grad = torch.cat(grads)  # of three ranks to the bit as they were added
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            for a, b in zip(whole, sharded, strict=True):
                assert isinstance(b.weight, QuantizedTensor)
                assert torch.equal(_own(b, a.weight.dequantize()), b.weight.dequantize())
    if later is None:
        assert sum(casts) == 0  # parameters are what is gathered


SLOW = {("current", 3), ("block", 3), ("nvfp4", 3)}
TRAININGS = [
    pytest.param(recipe, size, marks=[pytest.mark.slow] * ((recipe, size) in SLOW))
    for recipe, size in product(NAMED, (2, 3))
]


@pytest.mark.parametrize(("recipe", "size"), TRAININGS)
def test_training_is_that_of_whole_quantized_weights(worker_pool: Pools, recipe: str, size: int) -> None:
    worker_pool(size).run(_train, recipe, None)


@pytest.mark.parametrize(("recipe", "later"), [("mxfp8", "current"), ("delayed", "none"), ("block", "none")])
def test_other_recipe_than_that_of_the_weights(worker_pool: Pools, recipe: str, later: str) -> None:
    worker_pool(2).run(_train, recipe, later)


@pytest.mark.parametrize("override", [None, "high_precision", "dequantized"])
@pytest.mark.parametrize("experts", [False, True])
@on_ranks(2)
def test_backward_sends_the_rows_that_it_saved(rank: int, size: int, experts: bool, override: Any) -> None:
    """Backward sends other rows than forward: values where codes are whole blocks, or codes after a cast of values."""
    recipe, results = minifloat.recipe.MXFP8BlockScaling(backward_override=override), []
    for group in (None, dist.group.WORLD):
        torch.manual_seed(1)
        layer: Any
        with minifloat.quantized_model_init(recipe=recipe):
            if experts:
                layer = minifloat.GroupedLinear(2, 64, 96, False, recipe=recipe, etp_group=group)
            else:
                layer = minifloat.Linear(64, 96, False, recipe=recipe, etp_group=group)
        for step in range(2):
            torch.manual_seed(100 * step + rank)
            x = torch.randn(32, 64, requires_grad=True)
            y = layer(x, [10, 22]) if experts else layer(x)
            if override == "dequantized" and not experts:
                layer.whole_weight()
            y.square().sum().backward()
            results.append((y.detach(), x.grad))
    for whole, sharded in zip(results[:2], results[2:], strict=True):
        assert all(map(torch.equal, whole, sharded))


@on_ranks(3)
def test_start_values(rank: int, size: int) -> None:
    """Preserved ones, those of ``reset_parameters``, and those of a checkpoint in high precision."""
    whole, sharded = _models("current", None, preserve_high_precision_init_val=True)
    for a, b in zip(whole, sharded, strict=True):
        assert torch.equal(_own(b, a.weight.get_high_precision_init_val()), b.weight.get_high_precision_init_val())
    for recipe in ("delayed", "mxfp8"):
        whole, sharded = _models(recipe, None)
        for model in (whole, sharded):
            torch.manual_seed(3)
            for layer in model:
                layer.reset_parameters()
        for a, b in zip(whole, sharded, strict=True):
            assert torch.equal(_own(b, a.weight.dequantize()), b.weight.dequantize())
        sharded.load_state_dict(
            {name: value.dequantize() * 2 for name, value in sharded.state_dict().items() if name.endswith("weight")},
            strict=False,
        )
        whole.load_state_dict(
            {name: value.dequantize() * 2 for name, value in whole.state_dict().items() if name.endswith("weight")},
            strict=False,
        )
        for a, b in zip(whole, sharded, strict=True):
            assert torch.equal(_own(b, a.weight.dequantize()), b.weight.dequantize()), recipe
