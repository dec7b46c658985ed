"""``fully_shard``: what is on the wire, what memory holds, checkpoints, prefetching, and mistakes."""

from __future__ import annotations

import copy
import functools
import re
import tempfile
from collections.abc import Callable
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy, register_fsdp_forward_method
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor

import minifloat
from minifloat.comm.group import ShardMap
from minifloat.formats import COLUMNWISE, ROWWISE
from minifloat.operand import Quantized
from minifloat.parallel.fsdp import fully_shard, hooks
from minifloat.parallel.fsdp.weight import GatheredWeight, ShardedWeight
from minifloat.tensor.rows import row_unit
from tests.helpers.distributed_pool import Pools, on_ranks
from tests.helpers.fsdp_cases import (
    Case,
    RecordedGathers,
    gathered_bytes,
    layers,
    linears,
    mesh_of,
    shard,
    step,
    units_of,
)
from tests.helpers.memory import live_storages

# ---- the wire ----


def wire(rank: int, size: int, recipe: str) -> list[tuple[int, int, int]]:
    """Of two steps: bytes sent by each gather, what the formula says, and what bf16 would be."""
    sizes = (256, 2048, 70, 256)
    model = layers(recipe, *sizes)
    for child in model:
        fully_shard(child, mesh=mesh_of(size), reshard_after_forward=True)
    fully_shard(model, mesh=mesh_of(size))
    recorded = RecordedGathers(model)
    step(model, rank)
    recorded.sent.clear()
    step(model, rank)
    quantizer = model[0]._config(model[0].recipe).weight
    expected = []
    for dim, order in ((ROWWISE, 1), (COLUMNWISE, -1)):
        along = ROWWISE if quantizer.format(dim).symmetric else dim
        for k, n in list(pairwise(sizes))[::order]:
            shards = ShardMap.chunks(n, size).whole_units(row_unit(quantizer))
            expected.append((shards.gather_bytes(quantizer.format(dim), along, k), 2 * shards.largest * k))
    return [(sent, *formula) for sent, formula in zip(recorded.sent, expected, strict=True)]


@pytest.mark.parametrize(("recipe", "most"), [("delayed", 0.5), ("block", 0.52), ("mxfp8", 0.52), ("nvfp4", 0.29)])
def test_wire_bytes(worker_pool: Pools, recipe: str, most: float) -> None:
    for gathers in worker_pool(2).run(wire, recipe):
        assert [sent for sent, _, _ in gathers] == [formula for _, formula, _ in gathers]
        assert all(sent <= most * bf16 for sent, _, bf16 in (gathers[0], gathers[-1]))  # shards of 8 blocks or more


# ---- memory ----


def _tensors(operands: Quantized) -> list[Tensor]:
    return [t for operand in operands if operand is not None for t in operand[:3] if t is not None]


@pytest.mark.parametrize("recipe", ["current", "mxfp8", "nvfp4"])
@on_ranks(2)
def test_memory(rank: int, size: int, recipe: str) -> list[str]:
    """What is wrong with the memory of gathered weights: where it is, when it is freed, whether it moves."""
    model = linears(recipe)
    shard(model, Case("linears", recipe, reshard=True), mesh_of(size))
    step(model, rank)
    weights = [each.weight for each in hooks.parameters_below(model)]
    held = [weight.gathered for weight in weights]
    tensors = [_tensors(unsharded.operands) for unsharded in held]
    parameters = [weight.params[0]._unsharded_param for weight in weights]
    wrong, seen = [], []
    for child, unsharded in zip(model, held, strict=True):

        def look(module: nn.Module, args: Any, unsharded: Any = unsharded) -> None:
            seen.append(unsharded.holds(ROWWISE))
            symmetric = unsharded.operands.rowwise is unsharded.operands.columnwise
            if not symmetric and unsharded.holds(COLUMNWISE):
                wrong.append("forward has what backward reads")

        child.register_forward_pre_hook(look)

    def kept_to_the_end(module: nn.Module, args: Any, output: Any) -> None:
        kept = [not weight.cast or weight.cast.parts for weight in weights[:-1]]  # the last one is not sharded again
        wrong.extend(["a rank keeps what it has sent"] * any(kept) * (recipe == "current"))

    model.register_forward_hook(kept_to_the_end)
    before = live_storages()
    step(model, rank)
    wrong += ["a step leaves memory behind"] * (live_storages() != before)
    wrong += ["forward lacks what it reads"] * (seen != [True] * len(weights))
    for weight, unsharded, before, parameter in zip(weights, held, tensors, parameters, strict=True):
        wrong += ["a gathered weight outlives its backward"] * (unsharded.holds(ROWWISE) or unsharded.holds(COLUMNWISE))
        now = _tensors(unsharded.operands)
        wrong += ["tensors were made anew"] * any(a is not b for a, b in zip(before, now, strict=True))
        wrong += ["the parameter was made anew"] * (weight.params[0]._unsharded_param is not parameter)
    return wrong


# ---- where values come from ----


def preserved_from_meta(rank: int, size: int) -> list[str]:
    """Masters start from this rank's rows of what the unsharded layer draws; after a checkpoint from its codes."""
    wrong = []
    for recipe in ("mxfp8", "delayed"):
        with minifloat.quantized_model_init(recipe=recipe, preserve_high_precision_init_val=True):
            with torch.device("meta"):
                model = layers(recipe, 24, 70, 2)
            plain = layers(recipe, 24, 70, 2)
        shard(model, Case("", recipe), mesh_of(size))
        model.to_empty(device="cpu")
        for each in (model, plain):
            torch.manual_seed(3)
            for child in each:
                child.reset_parameters()
        for mine, theirs in zip(model, plain, strict=True):
            kept, drawn = mine.weight._local_tensor.get_high_precision_init_val(), theirs.weight
            rows = drawn.get_high_precision_init_val().split(-(-drawn.shape[0] // size))[rank]
            wrong += [recipe] * (kept is None or not torch.equal(kept, rows))
        state = {"model": get_model_state_dict(model)}
        with tempfile.TemporaryDirectory() as folder:
            shared = [folder]
            dist.broadcast_object_list(shared)
            dcp.save(state, checkpoint_id=shared[0])
            dcp.load(state, checkpoint_id=shared[0])
            dist.barrier()
        left = [child.weight._local_tensor.get_high_precision_init_val() for child in model]
        wrong += [f"{recipe}: kept after a load"] * any(each is not None for each in left)
    return wrong


def experts_from_meta(rank: int, size: int) -> list[str]:
    """Routers and experts, too, start as the unsharded ones do."""
    wrong = []
    for single in (False, True):
        options = {"single_grouped_weight": single, "single_grouped_bias": single}
        models = [
            nn.Sequential(
                minifloat.TopKRouter(16, 5, 2, device=device),
                minifloat.GroupedLinear(3, 16, 7, device=device, **options),  # type: ignore[arg-type]
            )
            for device in ("meta", "cpu")
        ]
        fully_shard(models[0], mesh=mesh_of(size))
        models[0].to_empty(device="cpu")
        with torch.no_grad():
            for parameter in models[0].parameters():
                parameter.fill_(100.0)
        for each in models:
            torch.manual_seed(3)
            for child in each:
                child.reset_parameters()  # type: ignore[operator]
        for (name, mine), theirs in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
            assert isinstance(mine, DTensor)
            wrong += [f"{name}, single={single}"] * (not torch.equal(mine.full_tensor(), theirs))
    return wrong


def assigned(rank: int, size: int) -> list[str]:
    """Loaded by ``assign=True``, and again after a step, beside a state dict taken before."""
    model, other = layers("nvfp4", 24, 70, 2), layers("nvfp4", 24, 70, 2)
    shard(model, Case("", "nvfp4"), mesh_of(size))
    shard(other, Case("", "nvfp4"), mesh_of(size))
    assert all(type(value) is DTensor for value in model.state_dict().values())
    model.load_state_dict(other.state_dict(), assign=True)
    wrong = gathered_bytes(model)
    with torch.no_grad():
        for value in model.state_dict().values():
            value.mul_(1.7)
    return wrong + gathered_bytes(model)


def moved(rank: int, size: int) -> list[str]:
    model = layers("current", 24, 70, 2).double()
    shard(model.float(), Case("", "current"), mesh_of(size))
    model.bfloat16()
    wrong = [] if model[0].weight.dtype == torch.bfloat16 else ["dtype"]
    found = []
    model[0].register_forward_pre_hook(lambda module, args: found.append(module.weight.dtype))
    model(torch.zeros(2, 24, dtype=torch.bfloat16))
    return wrong + ["logical dtype"] * (found != [torch.bfloat16])


def moved_quantized(rank: int, size: int) -> list[str]:
    """Parameters that are kept quantized: codes and what masters start from outlive another dtype."""
    with minifloat.quantized_model_init(recipe="mxfp8", preserve_high_precision_init_val=True):
        model = layers("mxfp8", 24, 70, 2)
    shard(model, Case("", "mxfp8"), mesh_of(size))
    before = [child.weight._local_tensor for child in model]
    kept = [(rows._operands.rowwise.codes.clone(), rows.get_high_precision_init_val()) for rows in before]
    model.bfloat16()
    wrong = []
    for child, (codes, initial) in zip(model, kept, strict=True):
        rows = child.weight._local_tensor
        same = rows.dtype == torch.bfloat16 and torch.equal(rows._operands.rowwise.codes, codes)
        wrong += [child._label] * (not same or not torch.equal(rows.get_high_precision_init_val(), initial))
    return wrong


def gathered_ahead(rank: int, size: int) -> list[str]:
    """What was gathered ahead is put together with the scale of its own cast, not of a later one."""
    model, plain = layers("current", 24, 70), layers("current", 24, 70)
    model.load_state_dict(plain.state_dict())
    shard(model, Case("", "current"), mesh_of(size))
    x = torch.randn(4, 24)
    model(x)
    model.reshard()
    model[0].reshard()
    model[0].unshard(async_op=True)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0)
    return [] if torch.equal(model(x), plain(x)) else ["codes and scale do not belong together"]


def microbatches(rank: int, size: int) -> list[str]:
    """``is_first_microbatch`` keeps no weight, gathered as codes or not: the next microbatch sees what has changed."""
    wrong = []
    for own in ("mxfp8", None):
        plain, model = minifloat.Linear(24, 70, recipe=own), minifloat.Linear(24, 70, recipe=own)
        model.load_state_dict(plain.state_dict())
        fully_shard(model, mesh=mesh_of(size))
        x = torch.randn(4, 24)
        for first in (True, False):
            with minifloat.autocast(recipe="mxfp8"):
                same = torch.equal(model(x, is_first_microbatch=first), plain(x))
            model.reshard()
            wrong += [f"{own}, {first}"] * (not same or model._weight_cache is not None)
            with torch.no_grad():
                for parameter in (*plain.parameters(), *model.parameters()):
                    parameter.add_(1.0)
    return wrong


def offloaded(rank: int, size: int) -> list[str]:
    model = layers("mxfp8", 24, 70, 2)
    for unit in (*model, model):
        fully_shard(unit, mesh=mesh_of(size), offload_policy=CPUOffloadPolicy(pin_memory=False))
    return gathered_bytes(model)


def by_method(rank: int, size: int) -> list[str]:
    """Another method than ``forward``, first of all and after the weights have changed."""
    model, plain = layers("mxfp8", 24, 70, 2), layers("mxfp8", 24, 70, 2)
    model.load_state_dict(plain.state_dict())
    shard(model, Case("", "mxfp8"), mesh_of(size))
    model.encode = model.forward
    register_fsdp_forward_method(model, "encode")
    x, wrong = torch.randn(4, 24), []
    for i in range(2):
        wrong += [f"call {i}"] * (not torch.equal(model.encode(x), plain(x)))
        with torch.no_grad():
            for parameter in (*model.parameters(), *plain.parameters()):
                parameter.mul_(2.0)
    return wrong


def copied(rank: int, size: int) -> list[str]:
    """A gathered weight without its columnwise codes, copied as a whole."""
    with minifloat.quantized_model_init(recipe="mxfp8"):
        model, copy = layers("mxfp8", 64, 64), layers("mxfp8", 64, 64)
    shard(model, Case("", "mxfp8"), mesh_of(size))
    with torch.no_grad():
        model(torch.zeros(2, 64))
        model.reshard()
        for _ in range(2):
            model[0].unshard()
            copy[0].weight.copy_(model[0].weight)
            model[0].reshard()
        model[0].unshard()
        same = torch.equal(copy[0].weight.dequantize(), model[0].weight.dequantize())
    return [] if same else ["values"]


def refused(rank: int, size: int) -> list[str]:
    """What PyTorch's own function would lose; several modules, and linears that know no recipe."""
    with minifloat.quantized_model_init(recipe="mxfp8"):
        model = minifloat.Linear(64, 128, name="head")
    torch_fully_shard(model, mesh=mesh_of(size))
    with pytest.raises(ValueError, match="Linear 'head': PyTorch's own fully_shard does not keep quantized parameters"):
        model(torch.randn(4, 64))
    with pytest.raises(TypeError, match=r"fully_shard: module is .*Linear"):
        fully_shard([nn.Linear(4, 4)], mesh=mesh_of(size))
    with pytest.warns(UserWarning, match=r"Sequential: its nn.Linear know no recipe.*convert"):
        fully_shard(nn.Sequential(nn.Linear(4, 4)), mesh=mesh_of(size), recipe="mxfp8")
    linear = fully_shard(nn.Linear(64, 64), mesh=mesh_of(size))
    with pytest.raises(ValueError, match="convert: 0 was given to fully_shard already"):
        minifloat.convert(nn.Sequential(linear), "mxfp8", filter_fn=lambda *layer: True)
    return []


@pytest.mark.parametrize(
    "fn",
    [
        refused,
        preserved_from_meta,
        experts_from_meta,
        assigned,
        moved,
        moved_quantized,
        offloaded,
        by_method,
        copied,
        gathered_ahead,
        microbatches,
    ],
    ids=lambda fn: fn.__name__,
)
def test_values(worker_pool: Pools, fn: Callable[..., Any]) -> None:
    assert worker_pool(2).run(fn) == [[]] * 2


# ---- who gathers when ----


@pytest.mark.parametrize("recipe", ["current", "mxfp8"])
@on_ranks(2)
def test_gathers_by_hand_and_ahead(rank: int, size: int, recipe: str) -> list[str]:
    """Unsharded by hand before a forward, of weights that were cast earlier and have changed; then prefetched."""
    model = layers(recipe, 24, 70, 33, 40)
    plain = layers(recipe, 24, 70, 33, 40)
    plain.load_state_dict(model.state_dict())
    shard(model, Case("", recipe), mesh_of(size))
    expected = step(plain, rank)
    outputs = [step(model, rank)]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0)
    for child in model:
        child.unshard(async_op=child is model[1])
    with torch.no_grad():
        torch.manual_seed(rank)
        outputs.append(model(torch.randn(4, 24)) / 8)
        for child in model:
            child.unshard()
            with pytest.raises(ValueError, match="write to the sharded parameter"):
                child.weight.mul_(0.5)
            child.reshard()
        for parameter in model.parameters():
            parameter.mul_(0.5)
    model[0].set_modules_to_forward_prefetch([model[1], model[2]])
    model[2].set_modules_to_backward_prefetch([model[1], model[0]])
    outputs.append(step(model, rank))
    return [f"forward {i}" for i, output in enumerate(outputs) if not torch.equal(output, expected)]


@on_ranks(2)
def test_backward_learns_what_it_reads(rank: int, size: int) -> None:
    """Gathers that FSDP2 does not know of, in each of three steps under activation checkpointing."""
    model = layers("mxfp8", 24, 70, 33)
    shard(model, Case("", "mxfp8", reshard=True), mesh_of(size))
    for child in model:
        child.forward = functools.partial(minifloat.checkpoint, child.forward)
    counts, original = [0] * 3, GatheredWeight.gather
    for i in range(3):

        def counting(*args: Any, number: int = i) -> None:
            counts[number] += 1
            original(*args)

        with mock.patch.object(GatheredWeight, "gather", counting):
            step(model, rank)
    assert counts == [2, 0, 0]


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
@on_ranks(2)
def test_layers_that_stay_unsharded_gather_both_orientations_at_once(rank: int, size: int, recipe: str) -> None:
    """In two steps and a forward without gradients: gathers that FSDP2 does not know of, and those that it begins."""
    model = layers(recipe, 24, 70, 33)
    shard(model, Case("", recipe, reshard=False), mesh_of(size))
    fetched, gathered = [], []
    with (
        mock.patch.object(GatheredWeight, "gather", autospec=True, side_effect=GatheredWeight.gather) as fetches,
        mock.patch.object(ShardedWeight, "begin_gather", autospec=True, side_effect=ShardedWeight.begin_gather) as own,
    ):
        for i in range(3):
            if i < 2:
                step(model, rank)
            else:
                with torch.no_grad():
                    model(torch.randn(4, 24))
            fetched.append(fetches.call_count)
            gathered.append(own.call_count)
    assert (fetched, gathered) == ([0, 0, 0], [2, 4, 6])


class Failing(nn.Module):
    """Passes on what it gets, until it raises an error."""

    fails = False

    def forward(self, x: Tensor) -> Tensor:
        if self.fails:
            raise RuntimeError("fails")
        return x


class WithGenerate(nn.Sequential):
    """Has a second method that computes what ``forward`` does."""

    def generate(self, x: Tensor) -> Tensor:
        return super().forward(x)


def after_a_failure(rank: int, size: int, method: str, units: str, options: dict[str, Any]) -> bool:
    """Whether a forward after a failed one, and an update, computes with the parameters of then."""
    torch.manual_seed(0)
    plain = WithGenerate(minifloat.Linear(24, 70, recipe="mxfp8"), Failing(), minifloat.Linear(70, 12, recipe="mxfp8"))
    model: Any = copy.deepcopy(plain)
    for unit in units_of(model, units):
        if next(unit.parameters(), None) is not None:
            fully_shard(unit, mesh=mesh_of(size), **options)
    fully_shard(model, mesh=mesh_of(size), **options)
    register_fsdp_forward_method(model, "generate")
    parameters, x, call = [*model.parameters()], torch.randn(4, 24), getattr(model, method)
    call(x).sum().backward()
    model[1].fails = True
    with pytest.raises(RuntimeError, match="fails"):
        call(x)
    model[1].fails = False
    with torch.no_grad():
        for mine, theirs in zip(parameters, plain.parameters(), strict=True):
            mine.to_local().mul_(2)
            theirs.mul_(2)
    return torch.equal(call(x), plain(x))


@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": False}])
@pytest.mark.parametrize("units", ["root", "each"])
@pytest.mark.parametrize("method", ["__call__", "generate"])
def test_a_forward_that_failed_leaves_nothing(
    worker_pool: Pools, method: str, units: str, options: dict[str, Any]
) -> None:
    assert worker_pool(2).run(after_a_failure, method, units, options) == [True, True]


# ---- mistakes ----


def mistake(rank: int, size: int, which: str) -> None:
    with minifloat.quantized_model_init(which == "reduce, quantized", recipe="delayed"):
        model = layers("delayed", 8, 12, 4)
    mesh = mesh_of(size)
    if which == "fuse":
        model[0].fuse_wgrad_accumulation = True
    if which.startswith("reduce"):
        model[0].recipe = minifloat.DelayedScaling(reduce_amax=False)
    fully_shard(model[0], mesh=mesh)
    (torch_fully_shard if which == "torch" else fully_shard)(model, mesh=mesh)
    if which == "recipe":
        model[0].recipe = minifloat.MXFP8BlockScaling()
    if which == "between microbatches":
        model.set_requires_gradient_sync(False)
        step(model, rank)
        model[1].recipe = "none"
    step(model, rank)


@pytest.mark.parametrize(
    ("which", "message"),
    [
        ("fuse", r"Linear\(8, 12\): fuse_wgrad_accumulation leaves gradients"),
        ("reduce", r"DelayedScaling\(reduce_amax=False\) gives each rank its own"),
        ("reduce, quantized", r"DelayedScaling\(reduce_amax=False\) gives each rank its own"),
        ("torch", "PyTorch's own fully_shard"),
        ("between microbatches", r"Linear\(12, 4\): its recipe was set to 'none' between microbatches"),
        ("recipe", r"Linear\(8, 12\): .* gathered as e4m3/tensor/given, .* wants e4m3/1x32/e8m0; set the layer's"),
    ],
)
def test_mistakes(worker_pool: Pools, which: str, message: str) -> None:
    with pytest.raises(ValueError) as error:
        worker_pool(2).run(mistake, which)
    assert re.search(message, str(error.value)), str(error.value)
