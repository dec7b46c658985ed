"""Sharded modules: how they start, what they free and when, their options, groups, and answers to bad input."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from minifloat.autocast import autocast
from minifloat.functional.quantize import linear_config
from minifloat.nn import Linear, quantized_model_init
from minifloat.recipe import DelayedScaling, Recipe, named
from minifloat.recompute import checkpoint
from minifloat.tensor import QuantizedTensor, quantize
from tests.helpers.distributed_pool import Pools
from tests.helpers.fused_model import assert_same, run
from tests.helpers.recipes import NAMED
from tests.helpers.sample import each_pair
from tests.helpers.selection import diagonals
from tests.helpers.tensor_parallel_cases import KINDS, Case, Results
from tests.helpers.tensor_parallel_oracle import shard

pytestmark = pytest.mark.usefixtures("one_thread")  # as the ranks have

BF16, FP32 = torch.bfloat16, torch.float32
RECIPES: list[Recipe | None] = [None, NAMED["delayed"], NAMED["nvfp4"]]


# ---- Start values ---------------------------------------------------------------------------------------------------

NOTES = ("tensor_model_parallel", "partition_dim", "partition_stride", "partition_parts")
SPLIT = {"query": 24, "key": 8, "value": 40}


def _started(rank: int, size: int, case: Case, recipe: str | None) -> dict[str, tuple[Tensor, Any]]:
    """Start values, drawn twice, and what the parameters of a copy of a copy say of themselves."""
    with quantized_model_init(recipe is not None, recipe=recipe):
        module = case.make(dist.group.WORLD)
    first = {name: values(parameter) for name, parameter in module.named_parameters()}
    for seed in (6, 5):
        torch.manual_seed(seed)
        module.reset_parameters()  # type: ignore[operator]
        same = [torch.equal(first[name], values(p)) for name, p in module.named_parameters() if "norm" not in name]
        assert all(same) if seed == 5 else not any(same)
    module = copy.deepcopy(pickle.loads(pickle.dumps(module))).to(BF16)
    return {name: (first[name], [getattr(p, note, None) for note in NOTES]) for name, p in module.named_parameters()}


def values(parameter: Tensor) -> Tensor:
    """A copy in high precision."""
    return parameter.dequantize().detach() if isinstance(parameter, QuantizedTensor) else parameter.detach().clone()


@each_pair
@pytest.mark.parametrize("recipe", [None, "mxfp8"])
@pytest.mark.parametrize("options", [{}, {"parameters_split": SPLIT}], ids=["whole", "split"])
@pytest.mark.parametrize("kind", KINDS)
def test_start_values(worker_pool: Pools, kind: str, options: dict[str, Any], recipe: str | None) -> None:
    """Shards put together are the unsharded module's parameters, and the notes on them say how to."""
    if options and "mlp" in kind:
        return
    case = Case(kind, options=options)
    ranks = worker_pool(2).run(_started, case, recipe)
    whole = dict(case.make().named_parameters())
    assert all(rank.keys() == whole.keys() for rank in ranks)
    for name, value in whole.items():
        (sharded, dim, stride, parts), notes = ranks[0][name][1], ranks[1][name][1]
        assert [sharded, dim, stride, parts] == notes
        everywhere = "norm" in name or name == "fc2.bias" or (kind == "row" and name.endswith("bias"))
        assert bool(sharded) is not everywhere
        for rank in range(2):
            own = shard(value, rank, 2, dim, parts) if sharded else value
            if recipe is not None and own.dim() == 2:
                own = quantize(own, linear_config(named(recipe)).weight).dequantize()
            assert torch.equal(ranks[rank][name][0], own), name
        assert not sharded or (stride == len(parts) and sum(parts) == value.shape[dim])
        assert sharded or (dim, stride, parts) in ((-1, 1, ()), (None, None, None))


# ---- Options --------------------------------------------------------------------------------------------------------


def _with_option(rank: int, size: int, case: Case, option: Callable[[Case, nn.Module, Any], None]) -> None:
    """``option`` is given a module of this case, and a function that runs another one in the ordinary way."""

    def ordinary(case: Case = case) -> Results:
        return stepped(case, case.make(dist.group.WORLD), rank)

    option(case, case.make(dist.group.WORLD), ordinary)


def stepped(case: Case, module: nn.Module, rank: int | None = None, **kwargs: Any) -> Results:
    """One step on this rank's share."""
    rank = dist.get_rank() if rank is None else rank
    xs, dys = case.shares(*case.batch(0))
    extra = {} if case.rows_per_rank is None else {"rows_per_rank": case.rows_per_rank}
    return run(module, xs[rank], dys[rank], case.recipe, **extra, **kwargs)


def linears(module: nn.Module) -> dict[str, Linear]:
    """By the names that their parameters have in the module."""
    return {f"{name}." if name else "": part for name, part in module.named_modules() if isinstance(part, Linear)}


def fuse_wgrad(case: Case, module: nn.Module, ordinary: Any) -> None:
    plain = ordinary()
    for part in linears(module).values():
        part.fuse_wgrad_accumulation = True
        part.weight.main_grad = torch.ones_like(part.weight)  # type: ignore[attr-defined]
    found = stepped(case, module)
    for name, part in linears(module).items():
        assert f"{name}weight" not in found and part.weight.grad_added_to_main_grad  # type: ignore[attr-defined]
        found[f"{name}weight"] = part.weight.main_grad - 1  # type: ignore[attr-defined]
        plain[f"{name}weight"] = (plain[f"{name}weight"] + 1) - 1
    assert_same(found, plain)


def delay_wgrad(case: Case, module: nn.Module, ordinary: Any) -> None:
    for part in linears(module).values():
        part.delay_wgrad_compute = True
    found = stepped(case, module)
    assert not any(f"{name}weight" in found for name in linears(module))
    module.backward_dw()  # type: ignore[operator]
    assert_same(found | {f"{name}weight": part.weight.grad for name, part in linears(module).items()}, ordinary())  # type: ignore[misc]


def microbatches(case: Case, module: nn.Module, ordinary: Any) -> None:
    plain = ordinary()
    for first in (True, False):
        if not isinstance(case.recipe, DelayedScaling) or first:  # whose scales have moved on
            assert_same(stepped(case, module, is_first_microbatch=first), plain)


def original_input(case: Case, module: nn.Module, ordinary: Any) -> None:
    for part in linears(module).values():
        part.save_original_input = True
    assert_same(stepped(case, module), ordinary())


def made_again(case: Case, module: nn.Module, ordinary: Any) -> None:
    """What norms and activations give is; not where ranks gather it, who keep their rows."""
    for option in ("recompute_norm", "recompute_activation"):
        if hasattr(module, option):
            setattr(module, option, True)
    assert_same(stepped(case, module), ordinary())


def returned_bias(case: Case, module: nn.Module, ordinary: Any) -> None:
    *_, last = linears(module).values()
    last.return_bias = True
    if module is not last:
        module.return_bias = True  # type: ignore[assignment]
    xs, dys = case.shares(*case.batch(0))
    x = xs[dist.get_rank()].requires_grad_()
    extra = {} if case.rows_per_rank is None else {"rows_per_rank": case.rows_per_rank}
    with autocast(enabled=case.recipe is not None, recipe=case.recipe):
        y, bias = module(x, **extra)
    torch.manual_seed(1)
    y = (y + bias).to(y.dtype)
    y.backward(dys[dist.get_rank()])
    plain = ordinary()
    if last._exchange.mode == "row":  # else the ordinary module adds before it rounds
        assert torch.equal(y, plain["y"])
    found = {"x": x.grad} | {name: p.grad for name, p in module.named_parameters()}
    assert_same(found, {name: plain[name] for name in found})  # type: ignore[arg-type]


def frozen(case: Case, module: nn.Module, ordinary: Any) -> None:
    plain = ordinary()
    for name in linears(module):
        module = case.make(dist.group.WORLD)
        linears(module)[name].requires_grad_(False)
        found = stepped(case, module)
        assert_same(found, {key: plain[key] for key in plain.keys() - {f"{name}weight", f"{name}bias"}})


def input_without_gradient(case: Case, module: nn.Module, ordinary: Any) -> None:
    if "norm" in linears(module) or case.kind not in ("column", "row"):
        return
    xs, dys = case.shares(*case.batch(0))
    extra = {} if case.rows_per_rank is None else {"rows_per_rank": case.rows_per_rank}
    with autocast(enabled=case.recipe is not None, recipe=case.recipe):
        y = module(xs[dist.get_rank()], **extra)
    torch.manual_seed(1)
    y.backward(dys[dist.get_rank()])
    plain = ordinary()
    assert_same({name: p.grad for name, p in module.named_parameters()}, {k: plain[k] for k in ("weight", "bias")})  # type: ignore[misc]


def checkpointed(case: Case, module: nn.Module, ordinary: Any) -> None:
    inside = copy.copy(module)
    inside.forward = lambda *args, **kwargs: checkpoint(module, *args, **kwargs)  # type: ignore[method-assign]
    assert_same(stepped(case, inside), ordinary())


def quantized_parameters(case: Case, module: nn.Module, ordinary: Any) -> None:
    """A shard is quantized by itself, when it is made or when it is used; delayed scaling's scales would differ."""
    if case.recipe is None or isinstance(case.recipe, DelayedScaling):
        return
    with quantized_model_init(recipe=case.recipe):
        module = case.make(dist.group.WORLD)
    assert all(isinstance(part.weight, QuantizedTensor) for part in linears(module).values())
    assert_same(stepped(case, module), ordinary())


def norm_output(case: Case, module: nn.Module, ordinary: Any) -> None:
    """The rows of this rank; delayed scaling then casts the rounded values."""
    if not hasattr(module, "norm") or isinstance(case.recipe, DelayedScaling):
        return
    module.return_layernorm_output = True  # type: ignore[assignment]
    found = stepped(case, module)
    xs, _ = case.shares(*case.batch(0))
    assert torch.equal(found.pop("n"), module.norm(xs[dist.get_rank()]))  # type: ignore[operator]
    assert_same(found, ordinary())


def quantized_output(case: Case, module: nn.Module, ordinary: Any) -> None:
    """What the next layer would make of it."""
    if case.recipe is None or isinstance(case.recipe, DelayedScaling) or "mlp" in case.kind:
        return
    xs, _ = case.shares(*case.batch(0))
    extra = {} if case.rows_per_rank is None else {"rows_per_rank": case.rows_per_rank}
    with autocast(recipe=case.recipe):
        y = module(xs[dist.get_rank()], fp8_output=True, **extra)
    quantizer = linear_config(case.recipe).output
    plain = ordinary()["y"]
    assert torch.equal(values(y), quantizer(plain).dequantize().reshape(plain.shape) if quantizer.quantized else plain)


def kept_in_parts(case: Case, module: nn.Module, ordinary: Any) -> None:
    """Sequences of a batch beside each other are rows like others."""
    flat = ordinary(replace(case, rows=tuple(3 * rows for rows in case.rows)))
    found = stepped(replace(case, inner=(3,)), module)
    assert found["y"].shape == (*found["x"].shape[:2], flat["y"].shape[1]) or case.kind in ("column", "row", "norm")
    assert_same({k: v.flatten(0, -2) if k in "xy" else v for k, v in found.items()}, flat)


OPTIONS = (
    fuse_wgrad, delay_wgrad, microbatches, original_input, made_again, returned_bias, frozen, input_without_gradient,
    checkpointed, kept_in_parts, quantized_parameters, norm_output, quantized_output,
)  # fmt: skip


@pytest.mark.parametrize(
    ("recipe", "kind", "option"),
    diagonals(3, RECIPES, KINDS, OPTIONS),
    ids=lambda value: getattr(value, "__name__", None),
)
def test_options(worker_pool: Pools, option: Any, kind: str, recipe: Recipe | None) -> None:
    """Each gives the numbers of the module without it."""
    worker_pool(2).run(_with_option, Case(kind, (20, 13), True, recipe, dtype=FP32), option)


def _quantized_input(rank: int, size: int, case: Case) -> None:
    assert case.recipe is not None
    xs, dys = case.shares(*case.batch(0))
    x = quantize(xs[rank], linear_config(case.recipe).input)
    extra = {} if case.rows_per_rank is None else {"rows_per_rank": case.rows_per_rank}
    results = []
    for given in (x, x.dequantize()):
        module = case.make(dist.group.WORLD)
        with autocast(recipe=case.recipe):
            y = module(given, **extra)
        y.backward(dys[rank])
        results.append({"y": y.detach()} | {name: p.grad for name, p in module.named_parameters()})
    assert_same(results[0], results[1])


@each_pair
@pytest.mark.parametrize("recipe", ["current", "mxfp8"])
@pytest.mark.parametrize("rows", [(32, 64), (20, 13)], ids=str)
@pytest.mark.parametrize("kind", ["column", "row"])
def test_quantized_input(worker_pool: Pools, kind: str, rows: tuple[int, int], recipe: str) -> None:
    """Codes travel as they are, or are cast again where their scales are a rank's own; to the layer they are values."""
    worker_pool(2).run(_quantized_input, Case(kind, rows, True, named(recipe)))


@pytest.mark.parametrize("kind", KINDS)
def test_options_without_sequence_parallelism(worker_pool: Pools, kind: str) -> None:
    """The same, of all options, with one recipe."""
    for option in OPTIONS:
        worker_pool(2).run(_with_option, Case(kind, (33, 0), False, named("current"), dtype=FP32), option)
