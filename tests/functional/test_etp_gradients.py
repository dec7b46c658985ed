"""Extended tensor parallelism of linears: where gradients go, hooks, failures, delayed scaling and training."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest import mock
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import minifloat
from minifloat import DelayedScaling, LayerNormLinear, Linear, autocast
from minifloat.comm.collectives import Pending
from minifloat.comm.group import Group, ShardMap
from minifloat.distributed import reduce_replicated
from minifloat.functional.etp import weight
from minifloat.functional.etp.prefetch_queue import PrefetchQueue
from minifloat.functional.etp.weight import _send_buffer
from minifloat.functional.weight_source import computed as computed_gradient
from tests.helpers import etp_linears as etp
from tests.helpers.distributed_pool import Pools, on_ranks
from tests.helpers.etp_linears import Data, differences, make, own, queue, recorded, same, set_prefetch, sgd, step
from tests.helpers.sample import each_pair

# ---- where gradients go ----


@on_ranks(2)
def test_sum_of_gradients(rank: int, size: int, recipe: str = "current") -> list[str]:
    nets = [make(sharded, recipe, reduction="sum") for sharded in (False, True)]
    results = [etp.steps(net, Data(rank)) for net in nets]
    return differences(nets[1], nets[0], results[1], results[0])


@each_pair
@pytest.mark.parametrize("delay", [False, True])
@pytest.mark.parametrize("first", [(None,), (None, None), (True, False)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@on_ranks(2)
def test_main_grad_is_reduced_in_its_own_dtype(
    rank: int, size: int, dtype: torch.dtype, first: tuple[bool | None, ...], delay: bool
) -> None:
    """Of microbatches, against unsharded ones whose sums ranks reduce in the end; activations are in bf16."""
    options = dict(fuse_wgrad_accumulation=True, delay_wgrad_compute=delay)
    nets = [make(sharded, "current", 3, dtype, **options) for sharded in (False, True)]
    for net in nets:
        data = Data(rank, torch.bfloat16)
        for layer in net.layers:
            layer.weight.main_grad = torch.full(layer.weight.shape, 7.0 if first[0] else 0.0)
        with recorded() as calls:
            for each in first:
                y = net(data.draw(True), first=each)
                y.backward(data.draw())
                for layer in net.layers[::-1] if delay else ():
                    layer.backward_dw()
        kinds = [kind for name, _, kind in calls if name == "reduce-scatter"]
        assert net is nets[0] or kinds == ["torch.float32"] * 3 * len(first)
    for reference, layer in zip(nets[0].layers, nets[1].layers, strict=True):
        total = reference.weight.main_grad
        dist.all_reduce(total)
        torch.testing.assert_close(layer.weight.main_grad, own(layer, total / size), rtol=0, atol=1e-5)
        assert layer.weight.grad is None and layer.weight.grad_added_to_main_grad
        if len(first) == 1:  # else ranks' gradients are summed before those of microbatches
            assert same(layer.weight.main_grad, own(layer, total / size))


@on_ranks(2)
def test_gradients_of_fp32_parameters_are_not_rounded(rank: int, size: int) -> None:
    """fp32 parameters under torch.autocast: gradients are computed and sent in fp32, as no recipe's backward rounds."""
    for recipe in ("none", "current"):
        net, data = make(True, recipe), Data(rank)
        with torch.autocast("cpu", torch.bfloat16):
            y = net(data.draw(True))
        assert y.dtype == torch.bfloat16
        with recorded() as calls:
            y.backward(data.draw().bfloat16())
        sent = [kind for name, _, kind in calls if name == "reduce-scatter"]
        assert sent == ["torch.float32"] * 4
        assert any(bool((layer.weight.grad.bfloat16() != layer.weight.grad).any()) for layer in net.layers)


@on_ranks(2)
def test_delayed_gradients_of_weights(rank: int, size: int) -> None:
    nets = [make(sharded, "current", delay_wgrad_compute=True) for sharded in (False, True)]
    seen: list[Tensor] = []
    nets[1].layers[1].weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    for net in nets:
        step(net, Data(rank))
        assert all(layer.weight.grad is None for layer in net.layers) and not seen
        for layer in net.layers:
            layer.backward_dw()
    for reference, layer in zip(nets[0].layers, nets[1].layers, strict=True):
        dist.all_reduce(reference.weight.grad)
        assert same(layer.weight.grad, own(layer, reference.weight.grad / size))
    assert len(seen) == 1 and torch.equal(seen[0], nets[1].layers[1].weight.grad)


def split(rank: int, size: int) -> None:
    """Of parameters that make up a weight one is frozen; another is all on one rank."""
    layers = []
    for group in (None, dist.group.WORLD):
        torch.manual_seed(1)
        split = {"query": 20, "key": 3, "value": 4}
        layers.append(Linear(8, 27, recipe="current", parameters_split=split, etp_group=group))
        layers[-1].key_weight.requires_grad_(False)
    layer = layers[1]
    for each in layers:
        data = Data(rank, width=8)
        for _ in range(2):
            each(data.draw()).sum().backward()
    for name, (_, rows) in layer._etp.rows.extents().items():
        want, got = (getattr(each, name).grad for each in layers)
        assert (got is None) == (name == "key_weight")
        if want is not None:
            dist.all_reduce(want)
            torch.testing.assert_close(got, (want / size)[rows], rtol=0, atol=1e-5)
    assert layer.key_weight.shape[0] == (0, 3)[rank]


def test_split_parameters_of_which_one_is_frozen(worker_pool: Pools) -> None:
    worker_pool(2).run(split)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@on_ranks(4)
def test_replicas_of_rows(rank: int, size: int, reduction: str) -> None:
    """Rows on two ranks each, with other data on all four: as where all four share them out."""
    results = []
    for replicas in (True, False):
        group = dist.new_subgroups(2)[0] if replicas else dist.group.WORLD
        torch.manual_seed(1)
        layers = [Linear(8, 8, recipe="none", etp_group=group, etp_reduction=reduction) for _ in range(3)]
        if replicas:
            other = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
            for layer in layers:
                layer._etp.rows.sharding = layer._etp.sharding._replace(replicas=(Group.of(other),))
        data = Data(rank, width=8)
        for _ in range(2):
            x = data.draw()
            for layer in layers:
                x = layer(x)
            x.sum().backward()
        whole = [torch.zeros(4 if replicas else 2, 8) for _ in range(2 if replicas else 4)]
        for layer in layers:
            dist.all_gather(whole, layer.weight.grad, group=group)
            results.append(torch.cat(whole))
    for a, b in zip(results[:3], results[3:], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@on_ranks(2)
def test_no_stand_in_for_a_gradient_reaches_hooks(rank: int, size: int) -> None:
    """``zero_out_wgrad`` asks for one so that hooks run: they do without."""
    layer = Linear(8, 8, bias=False, recipe="current", fuse_wgrad_accumulation=True, etp_group=dist.group.WORLD)
    weight: Any = layer.weight
    weight.main_grad, weight.zero_out_wgrad = torch.zeros(weight.shape), True
    runs: list[bool] = []
    weight.register_post_accumulate_grad_hook(lambda p: runs.append(p.grad is None and bool(p.main_grad.any())))
    layer(torch.ones(4, 8, requires_grad=True)).sum().backward()
    assert runs == [True] and weight.grad is None


@on_ranks(2)
def test_a_computed_weight_is_refused(rank: int, size: int) -> None:
    """It would get no gradient."""
    layers = [Linear(8, 8, recipe=recipe, etp_group=dist.group.WORLD) for recipe in ("current", None)]
    for layer in layers:
        with pytest.raises(ValueError, match=r"Linear.*: weight is computed from other tensors"):
            torch.func.functional_call(layer, {"weight": 2 * layer.weight}, torch.ones(2, 8))
        with torch.no_grad():
            twice = torch.func.functional_call(layer, {"weight": 2 * layer.weight}, torch.ones(2, 8))
            torch.testing.assert_close(twice - layer.bias, 2 * (layer(torch.ones(2, 8)) - layer.bias))


@on_ranks(2)
def test_a_backward_that_asks_for_a_weight_is_refused(rank: int, size: int) -> None:
    """It would get no gradient."""
    net = nn.Sequential(*[Linear(8, 8, recipe="current", etp_group=dist.group.WORLD) for _ in range(2)])
    weight, x = net[0].weight, torch.ones(2, 8, requires_grad=True)
    for inputs in ([weight], [x, weight], [net[1].weight]):
        with pytest.raises(ValueError, match=r"Linear\(8, 8\): backward\(inputs=\.\.\.\)"):
            net(x).sum().backward(inputs=inputs)
        assert weight.grad is None
    x.grad = None
    with pytest.raises(ValueError, match=r"torch\.autograd\.grad give no gradient"):
        torch.autograd.grad(net(x).sum(), [x, weight])
    net(x).sum().backward(inputs=[x, net[0].bias])
    assert weight.grad is None and x.grad is not None and net[0].bias.grad is not None
    net(x).sum().backward()
    assert weight.grad is not None


class Use(torch.autograd.Function):
    """Whose backward starts a reduction over the rows, and one over replicas when that has arrived."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, queue: PrefetchQueue, number: int, log: list[str]) -> Tensor:
        ctx.given = queue, number, log
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        queue, number, log = ctx.given

        def pending(name: str) -> Pending[Tensor]:
            log.append(f"start {name}{number}")
            return Pending([], lambda: log.append(f"wait {name}{number}") or dy)

        def further(total: Tensor) -> None:
            queue.later(pending("b").wait)

        queue.reduce(Mock(sums_after=0), lambda: pending("a"), further)
        return dy, None, None, None


def test_no_reduction_is_awaited_as_soon_as_it_starts() -> None:
    queue, log = PrefetchQueue(), list[str]()
    x = torch.zeros((), requires_grad=True)
    y = x
    for number in (3, 2, 1):
        y = Use.apply(y, queue, number, log)
    y.backward()
    during = ["start a1", "start a2", "wait a1", "start b1", "start a3", "wait a2", "start b2", "wait b1"]
    assert log == [*during, "wait a3", "start b3", "wait b2", "wait b3"]


def small_first(rank: int, size: int) -> list[list[str]]:
    """The collectives of each backward of two norms and linears, and of a linear between them."""
    group, recipe = dist.group.WORLD, "current"
    options: Any = {"normalization": "RMSNorm", "recipe": recipe, "etp_group": group}
    norms = [LayerNormLinear(16, 16, bias=bias, **options) for bias in (True, False)]
    net = nn.Sequential(norms[0], Linear(16, 16, False, recipe=recipe, etp_group=group), norms[1])
    reduce_replicated(net, group)
    set_prefetch(net, 0)
    found = []
    for _ in range(3):
        y = net(torch.randn(4, 16, requires_grad=True))
        with recorded() as calls:
            y.sum().backward()
        found.append([name for name, *_ in calls])
    return found


def test_what_is_waited_for_at_once_does_not_queue_behind_a_reduction(worker_pool: Pools) -> None:
    """From the second backward on, which knows that a norm's gradient follows, and here a bias's; else none waits."""
    gather, scatter, reduce = "all-gather", "reduce-scatter", "all-reduce"
    first = [gather, scatter, reduce, gather, scatter, gather, scatter, reduce, reduce]
    later = [gather, reduce, scatter, gather, scatter, gather, reduce, reduce, scatter]
    assert worker_pool(2).run(small_first) == [[first, later, later]] * 2


class Sized(torch.autograd.Function):
    """Whose backward makes room for a reduction of some bytes, and gives it away."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, queue: PrefetchQueue, nbytes: int, log: list[str]) -> Tensor:
        ctx.given = queue, nbytes, log
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        queue, nbytes, log = ctx.given
        queue.make_room(nbytes)
        log.append(f"allocate {nbytes}")
        queue.reduce(
            Mock(sums_after=0), lambda: Pending([], lambda: dy), lambda _: log.append(f"free {nbytes}"), nbytes
        )
        return dy, None, None, None


def test_a_smaller_reduction_is_finished_before_a_larger_one_is_allocated() -> None:
    queue, log = PrefetchQueue(), list[str]()
    y = x = torch.zeros((), requires_grad=True)
    for nbytes in (2, 2, 1, 4, 2):
        y = Sized.apply(y, queue, nbytes, log)
    y.backward()
    allocated = ["allocate 2", "free 2", "allocate 4", "allocate 1", "free 4", "free 1", "allocate 2", "allocate 2"]
    assert log == [*allocated, "free 2", "free 2"] and x.grad is not None


@on_ranks(2)
def test_a_backend_that_averages_is_left_to_divide(rank: int, size: int) -> list[str]:
    """As where the backend divides as it sums, which gloo does not."""
    reduce, divided = weight.start_reduce_scatter_rows, list[bool]()

    def start(x: Tensor, *args: Any, mean: bool) -> Any:
        divided.append(mean)
        return reduce(x / size, *args)

    nets = [make(sharded) for sharded in (False, True)]
    patch = partial(mock.patch.object, weight)
    with patch("averages", return_value=True), patch("start_reduce_scatter_rows", start):
        results = [etp.steps(net, Data(rank)) for net in nets]
    assert divided == [True] * 12
    return differences(nets[1], nets[0], results[1], results[0])


def test_equal_rows_are_sent_from_where_the_product_is() -> None:
    """Not every library writes to memory that it is given."""
    dw = torch.randn(6, 4)
    assert _send_buffer(dw, 1, dw.dtype, partial(computed_gradient, dw), ShardMap.even(3, 2)) is dw


# ---- hooks ----


def watch(layer: Any, calls: dict[str, list[Any]], alone: bool, main_grad: bool) -> None:
    """Notes what hooks are given; ``alone``: no tensor hook, which changes the gradient."""

    def before(gradient: Tensor) -> Tensor:
        calls.setdefault(f"tensor {layer.name}", []).append(gradient.clone())
        return 2 * gradient

    def after(p: Any) -> None:
        calls.setdefault(f"post {layer.name}", []).append((p.main_grad if main_grad else p.grad).clone())

    if not alone:
        layer.weight.register_hook(before)
    layer.weight.register_post_accumulate_grad_hook(after)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 1, 1, 2, 0)])
@pytest.mark.parametrize("main_grad", [False, True])
@on_ranks(2)
def test_hooks_run_once_with_the_whole_gradient(rank: int, size: int, main_grad: bool, order: tuple[int, ...]) -> None:
    """Each runs once in a backward, with the whole gradient, or after it was added."""
    nets = [make(sharded, "none", fuse_wgrad_accumulation=main_grad and sharded) for sharded in (False, True)]
    seen: list[dict[str, list[Any]]] = []
    for net in nets:
        calls: dict[str, list[Any]] = {}
        for layer in net.layers:
            layer.weight.main_grad = torch.zeros_like(layer.weight)
        net(torch.zeros(1, etp.WIDTH))  # registers the hooks that reduce
        for layer in net.layers:
            watch(layer, calls, main_grad, main_grad and net is nets[1])
        seen.append(calls)
        data = Data(rank)
        for _ in range(2):
            step(net, data, order)
        y = net(data.draw(), order)
        y.backward(data.draw(), retain_graph=True)
        y.backward(data.draw())
        torch.autograd.grad(net(x := data.draw(True), order).sum(), x)
    reference, got = seen
    assert set(got) == set(reference) and all(len(each) == 4 for each in got.values())
    for name, values in got.items():
        layer = nets[1].layers[int(name[-1])]
        for a, b in zip(values, reference[name], strict=True):
            torch.testing.assert_close(a, own(layer, b), rtol=1e-5, atol=1e-5)


# ---- failures ----


class _Fails(torch.autograd.Function):
    """Raises in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        raise ArithmeticError


@on_ranks(2)
def test_steps_after_a_failure(rank: int, size: int) -> list[str]:
    """Of the backward that raised gradients are added whole or not at all, and what was under way is not.

    A forward and a backward that raise in the middle, between steps.
    """
    nets = [make(sharded) for sharded in (False, True)]
    results = []
    for net in nets:
        data = Data(rank)
        step(net, data)
        net.zero_grad()
        with pytest.raises(ValueError):
            net.layers[2](net(data.draw(), (0, 1)).repeat(1, 2))
        y = net(_Fails.apply(net(data.draw(True), (0, 1))), (2, 3))
        with pytest.raises(ArithmeticError):
            y.backward(data.draw())
        if net is nets[1]:
            ahead = queue(net)
            ahead.drain()
            assert not ahead._prefetched and not ahead._reducing and not ahead.sums
            assert [layer.weight.grad is None for layer in net.layers] == [True, True, True, False]
        net.zero_grad()
        results.append(etp.steps(net, data))
    return differences(nets[1], nets[0], results[1], results[0])


# ---- delayed scaling ----


@pytest.mark.parametrize("first", [(None,), (True, False)])
@pytest.mark.parametrize("schedule", ["aabb", "abab"])
@on_ranks(2)
def test_no_old_scale_is_kept_for_later_microbatches(
    rank: int, size: int, schedule: str, first: tuple[bool | None, ...]
) -> list[str]:
    """Several in a step: each is cast with the scale of its time, unless it is told that it is not the first."""
    recipe = DelayedScaling(amax_history_len=2)
    nets = [make(sharded, None) for sharded in (False, True)]
    results: list[list[Tensor | None]] = [[], []]
    for number, net in enumerate(nets):
        data = Data(rank)
        for i in range(3):
            sgd(net)
            with torch.no_grad():
                for layer in net.layers:
                    layer.weight.mul_(3.0)  # so that the scales of microbatches differ
            outputs: dict[str, Tensor] = {}
            for name in schedule:
                if name in outputs:
                    outputs[name].backward(data.draw())
                    continue
                with autocast(recipe=recipe, amax_reduction_group=dist.group.WORLD):
                    outputs[name] = net(data.draw() * 2.0**i, first=first[min(len(outputs), len(first) - 1)])
                results[number] += [net.layers[0].forward_scaling.scale.clone()]
            results[number] += [y.detach() for y in outputs.values()]
    return differences(nets[1], nets[0], results[1], results[0])


@pytest.mark.parametrize("how", ["plain", "checkpoint"])
@on_ranks(2)
def test_delayed_scales_are_those_of_the_whole(rank: int, size: int, how: str) -> list[str]:
    """Against unsharded layers whose amaxes are reduced over the ranks; inputs that grow."""
    recipe = DelayedScaling(amax_history_len=3)
    nets = [make(sharded, None) for sharded in (False, True)]
    results: list[list[Tensor | None]] = [[], []]
    for number, net in enumerate(nets):
        data = Data(rank)
        for i in range(4):
            sgd(net)
            x = (data.draw() * 2.0**i).requires_grad_()
            with autocast(recipe=recipe, amax_reduction_group=dist.group.WORLD):
                if how == "checkpoint":
                    y = minifloat.checkpoint(net, minifloat.checkpoint(net, x, (0, 1)), (2, 3))
                else:
                    y = net(x)
            y.backward(data.draw())
            results[number] += [y.detach(), x.grad]
            for direction in ("forward_scaling", "backward_scaling"):
                for layer in net.layers:
                    state = getattr(layer, direction)
                    results[number] += [state.scale.clone(), state.amax_history.clone()]
    return differences(nets[1], nets[0], results[1], results[0])


@on_ranks(2)
def test_delayed_scaling_without_reduction_is_refused(rank: int, size: int) -> None:
    layer = Linear(8, 8, etp_group=dist.group.WORLD, name="fc")
    with autocast(recipe=DelayedScaling(reduce_amax=False)), pytest.raises(ValueError, match=r"'fc'.*reduce_amax"):
        layer(torch.ones(2, 8))


# ---- dtypes and compilers ----


@on_ranks(2)
def test_without_a_recipe_and_in_other_dtypes(rank: int, size: int) -> None:
    net, reference, x = make(True, None), make(False, None), Data(rank).draw()
    for context in (nullcontext(), autocast(recipe="mxfp8"), torch.autocast("cpu", torch.bfloat16)):
        with context:
            assert torch.equal(net(x), reference(x))
    for each in (net, reference):
        for dtype in (torch.bfloat16, torch.float64):
            with pytest.raises(ValueError, match=r"bf16|dtype"):
                each(x.to(dtype))
        with autocast(recipe="current"), pytest.raises(ValueError, match="float64"):
            each(x.double())
    both = [each.bfloat16() for each in (reference, net)]
    results = [step(each, Data(rank, torch.bfloat16)) for each in both]
    assert differences(net, reference, results[1], results[0]) == []


@on_ranks(2)
def test_a_compiled_model_breaks_its_graph_at_the_layer(rank: int, size: int) -> list[str]:
    nets = [make(sharded) for sharded in (False, True)]
    with pytest.raises(Exception, match="etp_group"):
        torch.compile(nets[1], fullgraph=True, backend="eager")(torch.ones(2, etp.WIDTH))
    torch._dynamo.reset()
    nets[1].compile(backend="aot_eager")
    results = [etp.steps(net, Data(rank)) for net in nets]
    torch._dynamo.reset()
    return differences(nets[1], nets[0], results[1], results[0])


# ---- training ----


@pytest.mark.parametrize("steps", [30, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("recipe", "main_grad"), [("current", False), ("current", True), ("nvfp4", False)])
@on_ranks(2)
def test_training_is_that_of_the_whole(rank: int, size: int, recipe: str, main_grad: bool, steps: int) -> list[str]:
    nets = [make(sharded, recipe, 2, width=18, fuse_wgrad_accumulation=main_grad) for sharded in (False, True)]
    losses: list[list[Tensor | None]] = [[], []]
    for net, found in zip(nets, losses, strict=True):
        data = Data(rank, width=18)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        target = Data(99, width=18).draw()
        for layer in net.layers:
            layer.weight.main_grad = torch.empty_like(layer.weight) if main_grad else None
        for number in range(steps):
            torch.manual_seed(number)
            loss = (net(data.draw(), first=True) @ target.t()).sub(1).square().mean()
            loss.backward()
            for layer in net.layers if main_grad else ():
                layer.weight.grad = layer.weight.main_grad
                if net is nets[0]:
                    dist.all_reduce(layer.weight.grad)
                    layer.weight.grad /= size
            optimizer.step()
            optimizer.zero_grad(set_to_none=number % 2 == 0)
            found.append(loss.detach())
    assert losses[0][-1] < losses[0][0]
    return differences(nets[1], nets[0], losses[1], losses[0])
