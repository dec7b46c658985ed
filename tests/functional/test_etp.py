"""Extended tensor parallelism of linears: bytes, predictions and memory; numbers are those of unsharded ones."""

from __future__ import annotations

import gc
import random
import time
from collections import Counter
from typing import Any
from unittest import mock
from weakref import ref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from minifloat import Linear, autocast
from minifloat.distributed import parallelize
from minifloat.formats import COLUMNWISE, ROWWISE
from minifloat.functional.etp import prefetch_queue, rows, weight
from minifloat.functional.quantize import linear_config
from minifloat.tools.train.step import compute_unquantized
from tests.helpers import etp_linears as etp
from tests.helpers.distributed_pool import Pools, on_ranks
from tests.helpers.etp_linears import Data, make, queue, recorded, set_prefetch, set_recast, sgd, step
from tests.helpers.memory import live_storages
from tests.helpers.recipes import STATELESS_LINEAR
from tests.helpers.sample import each_once

# ---- bytes ----


def gathered(rank: int, size: int, recipes: list[str]) -> None:
    """Of even, uneven and empty shards in turn."""
    for i, name in enumerate(recipes):
        recipe, n = STATELESS_LINEAR[name], (23, 16 * size, 23, size - 1)[i % 4]
        torch.manual_seed(n)
        whole = Linear(20, n, recipe=recipe)
        torch.manual_seed(n)
        layer = Linear(20, n, recipe=recipe, etp_group=dist.group.WORLD)
        source, quantizer = layer._etp, layer._config(recipe).weight
        source.cast(quantizer, torch.float32)
        parts = source.parts(ROWWISE)
        assert parts is not None
        expected = quantizer(whole.weight.detach())
        for dim in (ROWWISE, COLUMNWISE):
            with recorded() as calls:
                (got,) = source.start(dim, parts).wait()
            assert torch.equal(got.along(dim).codes, expected.along(dim).codes)
            for field in ("scale_inv", "amax"):
                a, b = getattr(got.along(dim), field), getattr(expected.along(dim), field)
                assert (a is None) == (b is None) and (a is None or torch.equal(a, b))
            own = parts.matrices[0].along(dim)
            formula = source.sharding.shards.gather_bytes(own.format, own.dim, 20, own.codes.itemsize)
            assert sum(nbytes for _, nbytes, _ in calls) == formula and source.nbytes(dim, parts) == size * formula


@pytest.mark.parametrize("size", [2, 3])
def test_what_is_gathered_is_the_quantized_whole(worker_pool: Pools, size: int) -> None:
    weights = {linear_config(recipe).weight: name for name, recipe in STATELESS_LINEAR.items()}
    worker_pool(size).run(gathered, list(weights.values()))


# ---- predictions ----


def scenarios(
    rank: int, size: int, recipe: Any, names: list[str], depth: int, most: int | None, width: int
) -> tuple[list[str], list[Any]]:
    """What is wrong, and the collectives."""
    wrong, sent = [], []
    for name in names:
        results, nets = [], []
        for sharded in (False, True):
            net = make(sharded, recipe, width=width)
            nets.append(net)
            if sharded:
                set_prefetch(net, depth, most)
            torch.manual_seed(7)
            with recorded() as calls:
                results.append(etp.SCENARIOS[name](net, Data(rank, width=width)))
                sent += calls if sharded else []
        bound = 1e-5 if name == "used twice" or size == 3 else 0.0
        wrong += [f"{name}: {each}" for each in etp.differences(nets[1], nets[0], *results[::-1], bound)]
        wrong += [f"{name}: a gather is left"] * bool(queue(nets[1])._prefetched)
    return wrong, sent


def check_scenarios(pools: Pools, size: int, *case: Any) -> None:
    answers = pools(size).run(scenarios, *case)
    assert [wrong for wrong, _ in answers] == [[]] * size
    exchanged = [
        [(name, 0 if name == "all-to-all" else size, dtype) for name, size, dtype in calls] for _, calls in answers
    ]
    assert all(calls == exchanged[0] for calls in exchanged)  # the same on all ranks, in the same order


FEW = ["used twice", "interleaved", "checkpoint", "saved on CPU"]


ALL = list(etp.SCENARIOS)


@pytest.mark.parametrize(
    ("names", "depth", "most"),
    [
        pytest.param(FEW, 0, None, id="0"),
        pytest.param(FEW, 1, None, id="1"),
        pytest.param(ALL, 1, None, id="all, 1", marks=pytest.mark.slow),
        pytest.param(ALL, 2, None, id="all, 2"),
        pytest.param(FEW, 3, 600, id="600 bytes"),
    ],
)
def test_predictions_change_no_number(worker_pool: Pools, names: list[str], depth: int, most: int | None) -> None:
    check_scenarios(worker_pool, 2, "current", names, depth, most, etp.WIDTH)


@pytest.mark.parametrize("recipe", ["none", "mxfp8", "nvfp4", pytest.param("block", marks=pytest.mark.slow)])
def test_predictions_change_no_number_under(worker_pool: Pools, recipe: str) -> None:
    check_scenarios(worker_pool, 2, recipe, FEW, 2, None, etp.WIDTH)


@pytest.mark.parametrize("most", [None, 40])
def test_ranks_without_rows_decide_as_others_do(worker_pool: Pools, most: int | None) -> None:
    check_scenarios(worker_pool, 3, "current", ["saved on CPU", "written between"], 2, most, 4)


@pytest.mark.parametrize("depth", [0, 1, 2])
@on_ranks(2)
def test_a_steady_loop_wastes_no_gather(rank: int, size: int, depth: int) -> None:
    """Of each step: gathers, those that were not used, and products that waited for a gather of their own."""
    net, data = make(True), Data(rank)
    set_prefetch(net, depth)
    ahead = queue(net)
    find, counts = ahead._find, []
    missed = [0]

    def count(*args: Any) -> Any:
        found = find(*args)
        missed[0] += found is None
        return found

    before = (ahead.gathered, ahead.wasted, 0)
    with mock.patch.object(ahead, "_find", count):
        for _ in range(4):
            sgd(net)
            step(net, data)
            now = ahead.gathered, ahead.wasted, missed[0]
            counts.append((now[0] - before[0], now[1] - before[1], now[2] - before[2]))
            before = now
    assert counts[0] == (8, 0, 8)  # of 4 layers, each forward and backward
    assert counts[1:] == [(8, 0, 8 if depth == 0 else 1)] * 3  # nothing is predicted of a step's first


@each_once
@pytest.mark.parametrize(("first", "casts"), [((None,) * 3, 3), ((True, False, False), 1)])
@pytest.mark.parametrize("recipe", ["current", "mxfp8"])
@on_ranks(2)
def test_weights_are_cast_together_once_a_pass_or_a_step(
    rank: int, size: int, recipe: str, first: tuple[bool | None, ...], casts: int
) -> None:
    """Of each step of several microbatches: weights that are cast, and all-reduces of their amaxes."""
    net, data = make(True, recipe), Data(rank)
    counts, made = [], [0]
    together = weight.cast_together

    def count(wanted: Any, replayed: Any = None) -> Any:
        made[0] += len(wanted)
        return together(wanted, replayed)

    with mock.patch.object(weight, "cast_together", count):
        for _ in range(3):
            sgd(net)
            made[0] = reduced = 0
            for each in first:
                with recorded() as calls:
                    y = net(data.draw(), first=each)
                reduced += sum(name == "all-reduce" for name, *_ in calls)
                y.backward(data.draw())
            counts.append((made[0], reduced))
    assert counts[1:] == [(4 * casts, casts if recipe == "current" else 0)] * 2


@pytest.mark.parametrize("kept", [0, 1])
@pytest.mark.parametrize("by", ["layers", "autocast"])
@on_ranks(2)
def test_no_weight_is_cast_by_a_recipe_that_is_over(rank: int, size: int, by: str, kept: int) -> None:
    """The casts of each step, two before the recipe changes and two after, where some layers never had one."""
    net, data, cast = make(True, "current" if by == "layers" else None), Data(rank), Counter[bool]()
    for layer in net.layers[:kept]:
        layer.recipe = "none"
    together, counts = weight.cast_together, []

    def count(wanted: Any, replayed: Any = None) -> Any:
        cast.update(quantizer.quantized for _, quantizer, _ in wanted)
        return together(wanted, replayed)

    with mock.patch.object(weight, "cast_together", count):
        for i in range(4):
            if i == 2 and by == "layers":
                compute_unquantized(net)
            with autocast(enabled=by == "autocast" and i < 2, recipe="current"):
                cast.clear()
                sgd(net)
                step(net, data)
                counts.append((cast[True], cast[False]))
    assert counts == [(4 - kept, kept)] * 2 + [(0, 4)] * 2


# ---- casts that are repeated for backward ----


@pytest.mark.parametrize(
    ("recipe", "width", "depth"), [("current", 23, 1), ("current", 23, 2), ("mxfp8", 64, 0), ("nvfp4", 64, 1)]
)
@on_ranks(2)
def test_repeated_casts_change_no_number(rank: int, size: int, recipe: str, width: int, depth: int) -> list[str]:
    """What is wrong where codes are freed after a forward, in more scenarios of one case."""
    wrong = []
    for name in [*FEW, "skipped", "evaluated", "1F1B", "retained", "frozen"] if depth == 2 else FEW:
        nets, results = [make(sharded, recipe, width=width) for sharded in (False, True)], []
        set_recast(nets[1])
        set_prefetch(nets[1], depth, 1000)
        for net in nets:
            torch.manual_seed(7)
            results.append(etp.SCENARIOS[name](net, Data(rank, width=width)))
        found = etp.differences(nets[1], nets[0], *results[::-1], 1e-5 if name == "used twice" else 0.0)
        wrong += [f"{name}: {each}" for each in found]
    return wrong


def held(rank: int, size: int, recipe: str, first: bool | None) -> list[int]:
    """Codes of rows that autograd and the layers keep from a forward on, and how many layers do."""
    net, data = make(True, recipe, width=64, bias=False), Data(rank, width=64)
    set_recast(net)
    counts = []
    for _ in range(2):
        saved: list[torch.Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, saved=saved: saved.append(t) or t, lambda t: t):
            y = net(data.draw(True), first=first)
        counts.append(sum(t.numel() for t in saved if t.shape == (32, 64)))
        counts.append(sum(each._cast is not None and each._cast.parts is not None for each in etp.sources(net)))
        y.backward(data.draw())
    return counts


@pytest.mark.parametrize("recipe", ["current", "mxfp8"])
def test_codes_are_freed_before_backward(worker_pool: Pools, recipe: str) -> None:
    for first, wanted in ((None, [0, 0]), (True, [4 * 32 * 64, 4])):
        assert worker_pool(2).run(held, recipe, first) == [wanted * 2] * 2


@on_ranks(2)
def test_a_write_before_a_repeated_cast_raises(rank: int, size: int) -> None:
    net, x = make(True), Data(rank).draw(True)
    set_recast(net)
    y = net(x)
    with torch.no_grad():
        net.layers[1].weight.add_(1)
    with pytest.raises(ValueError, match=r"Linear.*'1'.*written between a forward and its backward.*recast"):
        y.sum().backward()
    net(x).sum().backward()


# ---- writes ----


@pytest.mark.parametrize("recipe", ["none", "current", "mxfp8"])
@on_ranks(2)
def test_a_write_gives_no_old_values(rank: int, size: int, recipe: str) -> None:
    nets, data = [make(sharded, recipe) for sharded in (False, True)], Data(rank)
    reference, net = nets
    set_prefetch(net, 2)
    x = data.draw()

    def alike(first: bool | None = None) -> bool:
        with torch.no_grad():
            return torch.equal(net(x, first=first), reference(x, first=first))

    def scale(by: float) -> None:
        """In a way that PyTorch does not see."""
        for each in nets:
            for layer in each.layers:
                layer.weight.data.mul_(by)

    assert alike()
    with torch.no_grad():
        for each in nets:
            for layer in each.layers:
                layer.weight.mul_(-2)
    assert alike()
    for each in nets:
        each.load_state_dict({name: value * 0.5 for name, value in each.state_dict().items()})
    assert alike()
    scale(3.0)
    assert alike() and not queue(net)._prefetched  # no weight of an evaluation to come is gathered
    scale(0.5)
    assert alike(first=True) and alike(first=False)
    with torch.no_grad():
        before = net(x, first=False)
    scale(3.0)
    with torch.no_grad():
        assert recipe == "none" or torch.equal(net(x, first=False), before)  # "none": the parameter's own memory
    for layer in net.layers:
        layer.invalidate()
    with torch.no_grad():
        assert torch.equal(net(x, first=False), reference(x, first=True))
    scale(0.5)
    ys = [each(x) for each in nets]  # between an evaluation and a step, as where averaged weights are put back
    assert torch.equal(*ys)
    for each in nets:
        y = each(x.clone().requires_grad_())
        with torch.no_grad():
            each.layers[1].weight.add_(1)
        if recipe == "none":  # as nn.Linear, whose backward reads the parameter
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                y.sum().backward()
        else:
            y.sum().backward()
    first = net.layers[0]
    assert recipe == "none" or etp.same(first.weight.grad, etp.own(first, reference.layers[0].weight.grad))


def step_by_data(net: nn.Module) -> None:
    for p in net.parameters():
        p.data -= 0.5 * p.grad


def step_by_vector(net: nn.Module) -> None:
    vector = nn.utils.parameters_to_vector(net.parameters())
    gradient = torch.cat([p.grad.flatten() for p in net.parameters()])
    nn.utils.vector_to_parameters(vector.detach() - 0.5 * gradient, net.parameters())


UNSEEN = {"data": step_by_data, "vector": step_by_vector}


@each_once
@pytest.mark.parametrize("first", [(None,), (None, None), (True, False)])
@pytest.mark.parametrize("how", UNSEEN)
@on_ranks(2)
def test_steps_that_pytorch_does_not_see(rank: int, size: int, how: str, first: tuple[bool | None, ...]) -> list[str]:
    """Steps of which no version counter tells, with several microbatches each and an evaluation."""
    nets = [make(sharded, "current") for sharded in (False, True)]
    results = []
    for net in nets:
        data, found = Data(rank), []
        for _ in range(3):
            for each in first:
                found += step(net, data, first=each)
            UNSEEN[how](net)
            net.zero_grad()
            with torch.no_grad():
                found.append(net(data.draw()))
        results.append(found)
    return etp.differences(nets[1], nets[0], results[1], results[0])


@on_ranks(2)
def test_a_collective_writes_to_a_parameter(rank: int, size: int) -> None:
    """Rows that all ranks have alike are summed over them."""
    layer = Linear(8, 4 * size, bias=False, recipe="current", etp_group=dist.group.WORLD)
    with torch.no_grad():
        layer.weight.copy_(torch.linspace(-1, 1, 32).view(4, 8))
    x = torch.ones(2, 8, requires_grad=True)
    y = layer(x)
    y.sum().backward()
    with torch.no_grad():
        dist.all_reduce(layer.weight)
    assert torch.equal(layer(x), size * y)


# ---- several models ----


@on_ranks(2)
def test_models_one_after_another(rank: int, size: int) -> list[str]:
    """Training one model after the other, of which only one rank has collected the garbage."""
    wrong = []
    gc.disable()
    for number in range(3):
        nets = [make(False), make(True)]
        results = [etp.steps(net, Data(rank + 10 * number)) for net in nets]
        wrong += etp.differences(nets[1], nets[0], *results[::-1])
        for net in nets:
            sgd(net)
        del nets, net
        if rank == 0:
            gc.collect()
    gc.enable()
    return wrong


@pytest.mark.parametrize("how", ["trained", "first", "evaluated", "group"])
@on_ranks(2)
def test_a_deleted_model_is_freed(rank: int, size: int, how: str) -> None:
    """A deleted model, whose parameters and codes nothing keeps, nor gathers of them."""
    group = dist.new_group(list(range(size))) if how == "group" else dist.group.WORLD
    net = etp.Net(4, "current", torch.float32, etp.WIDTH, etp_group=group)
    gc.collect()
    if how == "evaluated":
        with torch.no_grad():
            for _ in range(2):
                net(torch.ones(2, etp.WIDTH))
    else:
        for _ in range(2):
            step(net, Data(rank), first=True if how == "first" else None)
            sgd(net)
    kept = [ref(each) for each in (*net.parameters(), *etp.sources(net))]
    queue_alive = ref(etp.sources(net)[0].queue)
    if how == "group":
        dist.destroy_process_group(group)
    del net, group
    gc.collect()
    assert not any(each() is not None for each in kept)
    assert (queue_alive() is None) == (how == "group")


@on_ranks(2)
def test_layers_that_are_replaced(rank: int, size: int) -> list[str]:
    """Layers that are put in the place of others, which only one rank has collected."""
    nets, results = [make(sharded) for sharded in (False, True)], []
    gc.disable()
    for net in nets:
        data, found = Data(rank), []
        for number in range(6):
            sgd(net)
            with torch.no_grad():
                found.append(net(data.draw()))
            found += step(net, data)
            net.layers[number % 4] = make(net is nets[1]).layers[0]
            if rank == 0:
                gc.collect()
        results.append(found)
    gc.enable()
    return etp.differences(nets[1], nets[0], results[1], results[0])


@on_ranks(2)
def test_each_model_has_its_own_prefetch(rank: int, size: int) -> None:
    """How many gathers two models over one group start ahead."""
    mesh, found = init_device_mesh("cpu", (size,), mesh_dim_names=("etp",)), []
    nets = [nn.Sequential(*[Linear(8, 8, recipe="current") for _ in range(6)]) for _ in range(2)]
    for net, depth in zip(nets, (3, 0), strict=True):
        parallelize(net, mesh, prefetch=depth)
    for net in nets:
        counts: list[int] = []
        for layer in net:
            layer.register_forward_hook(lambda *_, net=net, counts=counts: counts.append(len(queue(net)._prefetched)))
        for _ in range(3):
            net(torch.ones(2, 8)).sum().backward()
        found.append(max(counts))
    assert found == [3, 0]


# ---- memory and races ----


class Operations(TorchDispatchMode):
    """Counts what is computed inside, and the bytes of all results; gloo's threads allocate as they please."""

    def __init__(self) -> None:
        super().__init__()
        self.count = self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.count += 1
        self.nbytes += sum(leaf.nbytes for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor))
        return out


@each_once
@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("recipe", ["none", "current"])
@on_ranks(2)
def test_steps_allocate_alike_and_leave_no_memory_behind(rank: int, size: int, recipe: str, depth: int) -> None:
    """Steps compute equally many tensors and bytes, and leave equally many; a whole is freed after its product."""
    net, data, made, left = make(True, recipe, 5, bias=False), Data(rank), [], []
    set_prefetch(net, depth)
    ahead, wholes = queue(net), list[Any]()
    take = ahead.take

    def counted(*args: Any, **options: Any) -> Any:
        assert not [each for each in wholes if each() is not None]
        (gathered,) = take(*args, **options)
        wholes.append(ref(gathered.any.codes))
        assert len(ahead._prefetched) <= depth
        return [gathered]

    for _ in range(12):
        sgd(net)
        with Operations() as operations, mock.patch.object(ahead, "take", counted):
            step(net, data)
        made.append((operations.count, operations.nbytes))
        left.append(live_storages())
    assert len(wholes) == 120 and len(set(made[2:])) == 1, made
    assert min(left[7:]) <= min(left[2:7]), left  # after a step what was sent last is now and then still held


@pytest.mark.parametrize("recipe", ["none", "mxfp8"])  # exact for powers of two
@on_ranks(2)
def test_delays_change_no_number(rank: int, size: int, recipe: str) -> None:
    """Neighbours of one shape, filled with 1 and -1 times a power of two, written in each of 40 steps.

    Casts, collectives and what waits for them begin late, on each rank at another time.
    """
    net = nn.Sequential(*(Linear(8, 8, bias=False, etp_group=dist.group.WORLD, recipe=recipe) for _ in range(4)))
    set_prefetch(net, 2)
    dawdle = random.Random(10 + rank)

    def late(run: Any) -> Any:
        def after_a_while(*args: Any) -> Any:
            time.sleep(dawdle.random() * 0.0003)
            return run(*args)

        return after_a_while

    with (
        recorded(slow=0.0003),
        mock.patch.object(rows, "quantize_shards", late(rows.quantize_shards)),
        mock.patch.object(prefetch_queue.Pending, "wait", late(prefetch_queue.Pending.wait)),
    ):
        for repetition in range(40):
            value = 2.0 ** (repetition % 3 - 1)
            for i, layer in enumerate(net):
                nn.init.constant_(layer.weight, (-1.0) ** i * value)
            x = torch.full((2, 8), float(rank + 1), requires_grad=True)
            y = net(x)
            y.sum().backward()
            factor = (8 * value) ** 4
            assert torch.equal(y, x * factor) and torch.equal(x.grad, torch.full_like(x, factor)), repetition
            for i, layer in enumerate(net):
                expected = (2 * 1.5) * (8 * value) ** 3 * (-1) ** i
                assert torch.equal(layer.weight.grad, torch.full_like(layer.weight, expected)), (repetition, i)
            net.zero_grad()


@on_ranks(2)
def test_nothing_is_started_ahead_in_a_graph(rank: int, size: int) -> None:
    """A CUDA graph, as far as a CPU can tell: nothing is left started at its ends."""
    torch.manual_seed(0)
    net = nn.Sequential(*[Linear(16, 16, recipe="current", etp_group=dist.group.WORLD) for _ in range(3)])
    x, started = torch.randn(4, 16), []
    for layer in net:
        layer.register_forward_hook(lambda *_: started.append(len(queue(net)._prefetched)))
    with torch.no_grad():
        for _ in range(3):
            expected = net(x)
        assert started[-3:-1] == [1, 1]
        with (
            mock.patch.object(prefetch_queue, "capturing", lambda: True),
            mock.patch.object(weight, "capturing", lambda: True),
        ):
            assert torch.equal(net(x), expected) and started[-3:] == [0, 0, 0]
        assert torch.equal(net(x), expected)
