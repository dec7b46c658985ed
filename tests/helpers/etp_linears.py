"""Linears under extended tensor parallelism beside the same ones unsharded: what ranks run with both."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import minifloat
from minifloat import Linear
from minifloat.comm.group import Group
from minifloat.distributed import reduce_replicated
from minifloat.functional.etp.prefetch_queue import PrefetchQueue, queue_of
from minifloat.functional.etp.weight import EtpWeight
from minifloat.nn.tensor_parallel import etp_weights
from minifloat.recipe import Recipe

WIDTH = 23  # of each layer: odd, so that ranks have different numbers of rows, and blocks straddle them
ROWS = 6


class Net(nn.Module):
    """Square linears with activations in between, which may run in any order."""

    def __init__(
        self, layers: int, recipe: Recipe | str | None, dtype: torch.dtype, width: int, **options: Any
    ) -> None:
        super().__init__()
        torch.manual_seed(3)
        made = [Linear(width, width, recipe=recipe, name=str(i), dtype=dtype, **options) for i in range(layers)]
        self.layers = nn.ModuleList(made)

    def forward(self, x: Tensor, order: Sequence[int] = (), first: bool | None = None) -> Tensor:
        for i in order or range(len(self.layers)):
            x = torch.tanh(self.layers[i](x, is_first_microbatch=first))
        return x


def make(
    etp: bool, recipe: Recipe | str | None = "current", layers: int = 4, dtype: torch.dtype = torch.float32, *,
    width: int = WIDTH, reduction: str = "mean", **options: Any,
) -> Net:  # fmt: skip
    """With ``etp`` over all ranks, else unsharded with gradients that are reduced alike."""
    if etp:
        options |= {"etp_group": dist.group.WORLD, "etp_reduction": reduction}
    net = Net(layers, recipe, dtype, width, **options)
    reduce_replicated(net, dist.group.WORLD, reduction)  # type: ignore[arg-type]
    return net


def set_prefetch(model: nn.Module, depth: int, most: int | None = None) -> None:
    """As ``parallelize(prefetch=depth, prefetch_bytes=most)``, before the first forward."""
    for weight in etp_weights(model):
        weight.rows.sharding = weight.sharding._replace(prefetch=(depth, most))


def set_recast(model: nn.Module) -> None:
    """As ``parallelize(recast=True)``, likewise."""
    for weight in etp_weights(model):
        weight.rows.sharding = weight.sharding._replace(recasts=True)


def queue(net: nn.Module) -> PrefetchQueue:
    """That of all ranks."""
    found = queue_of(Group.of(dist.group.WORLD))
    assert all(each.queue is found for each in sources(net))
    return found


def sources(net: nn.Module) -> list[EtpWeight]:
    return list(etp_weights(net))


def own(layer: Linear, whole: Tensor | None) -> Tensor | None:
    """This rank's rows of the weight's gradient."""
    assert layer._etp is not None
    return None if whole is None else whole[layer._etp.rows.range(0)]


class Data:
    """Inputs and gradients of outputs, other ones on each rank, and others each time."""

    def __init__(self, rank: int, dtype: torch.dtype = torch.float32, width: int = WIDTH) -> None:
        self.generator = torch.Generator().manual_seed(1000 + rank)
        self.dtype, self.width = dtype, width

    def draw(self, requires_grad: bool = False) -> Tensor:
        x = torch.randn(ROWS, self.width, generator=self.generator).to(self.dtype)
        return x.requires_grad_(requires_grad)


Scenario = Callable[[Net, Data], list[Tensor | None]]
"""What is computed with a net, its gradients aside: those of the parameters are compared where it ends."""


def sgd(net: nn.Module, clear: bool = True) -> None:
    with torch.no_grad():
        for p in net.parameters():
            if p.grad is not None:
                p.sub_(p.grad, alpha=0.5)
    if clear:
        net.zero_grad()


def step(net: Net, data: Data, order: Sequence[int] = (), **options: Any) -> list[Tensor | None]:
    """Y and dX of a forward and a backward."""
    x = data.draw(True)
    y = net(x, order, **options)
    y.backward(data.draw())
    return [y.detach(), x.grad]


def steps(net: Net, data: Data, orders: Sequence[Sequence[int]] = ((), (), ())) -> list[Tensor | None]:
    """Training; the last gradients are left."""
    results = []
    for order in orders:
        sgd(net)
        results += step(net, data, order)
    return results


def skipped(net: Net, data: Data) -> list[Tensor | None]:
    return steps(net, data, [(), (), (0, 2, 3), (), (1, 2)])


def reordered(net: Net, data: Data) -> list[Tensor | None]:
    return steps(net, data, [(), (), (3, 1, 0, 2), (), (2, 1)])


def used_twice(net: Net, data: Data) -> list[Tensor | None]:
    """The gradients of two uses are summed after those of ranks, or before: equal but for the order of sums."""
    return [each for _ in range(3) for each in step(net, data, (0, 1, 1, 2, 0))]


def evaluated(net: Net, data: Data) -> list[Tensor | None]:
    """Evaluations before the first step, between steps and between forward and backward."""
    results: list[Tensor | None] = []
    with torch.inference_mode():
        results.append(net(data.draw()).clone())
    for _ in range(2):
        results += step(net, data)
        sgd(net)
        with torch.no_grad():
            results += [net(data.draw()), net(data.draw())]
        with torch.inference_mode():
            results.append(net(data.draw()).clone())
    y = net(data.draw())
    with torch.no_grad():
        results.append(net(data.draw()))
    y.backward(data.draw())
    return [None if each is None else each.detach().clone() for each in results]


def alternating(net: Net, data: Data) -> list[Tensor | None]:
    """Two models that take turns, one of them inside of the other's step, as a GAN's."""
    generator, critic, results = (0, 1), (2, 3), []
    for _ in range(3):
        fake = net(data.draw(), generator).detach()
        net(torch.cat([fake, data.draw()]), critic).square().sum().backward()
        with torch.no_grad():
            for i in critic:
                weight = net.layers[i].weight
                weight.sub_(weight.grad, alpha=0.1)
        net.zero_grad()
        results.append(net(net(data.draw(), generator), critic))
        results[-1].square().sum().backward()
        with torch.no_grad():
            for i in generator:
                weight = net.layers[i].weight
                weight.sub_(weight.grad, alpha=0.1)
        net.zero_grad()
    step(net, data)
    return [each.detach() for each in results]


def microbatches(net: Net, data: Data, schedule: str, first: tuple[bool | None, ...]) -> list[Tensor | None]:
    """``schedule``: of each microbatch, in the order of their names, a forward and then a backward."""
    results: list[Tensor | None] = []
    for _ in range(3):
        sgd(net)
        inputs: dict[str, Tensor] = {}
        outputs: dict[str, Tensor] = {}
        for name in schedule:
            if name not in inputs:
                inputs[name] = data.draw(True)
                outputs[name] = net(inputs[name], first=first[min(len(inputs), len(first)) - 1])
            else:
                outputs[name].backward(data.draw())
        results += [outputs[name].detach() for name in outputs] + [inputs[name].grad for name in inputs]
    return results


def written_between(net: Net, data: Data) -> list[Tensor | None]:
    """Parameters change between a forward and its backward, which uses what the forward used."""
    steps(net, data)
    xs = [data.draw(True), data.draw(True)]
    first = net(xs[0])
    sgd(net, clear=False)
    second = net(xs[1])
    first.backward(data.draw())
    second.backward(data.draw())
    return [first.detach(), second.detach(), xs[0].grad, xs[1].grad]


def checkpointed(net: Net, data: Data, how: str) -> list[Tensor | None]:
    results: list[Tensor | None] = []
    for _ in range(2):
        sgd(net)
        x = data.draw(True)
        y = x
        for part in ((0, 1), (2, 3)):
            if how == "minifloat":
                y = minifloat.checkpoint(net, y, part)
            else:
                y = torch_checkpoint(net, y, part, use_reentrant=how == "reentrant")
        y.backward(data.draw())
        results += [y.detach(), x.grad]
    return results


def saved_on_cpu(net: Net, data: Data) -> list[Tensor | None]:
    """What autograd saves comes back as a copy."""
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t.clone()):
        return steps(net, data)


def retained(net: Net, data: Data) -> list[Tensor | None]:
    step(net, data)
    x = data.draw(True)
    y = net(x)
    y.backward(data.draw(), retain_graph=True)
    y.backward(data.draw())
    return [y.detach(), x.grad]


def frozen(net: Net, data: Data, which: int) -> list[Tensor | None]:
    net.layers[which].requires_grad_(False)
    results = [each for _ in range(2) for each in step(net, data)]
    net.layers[which].requires_grad_(True)
    return results + step(net, data)


def input_needs_none(net: Net, data: Data) -> list[Tensor | None]:
    for _ in range(2):
        sgd(net)
        y = net(data.draw())
        y.backward(data.draw())
    return [y.detach()]


def gradient_of_input(net: Net, data: Data) -> list[Tensor | None]:
    """``torch.autograd.grad`` adds to no parameter."""
    results = step(net, data)
    x = data.draw(True)
    return results + list(torch.autograd.grad(net(x), x, data.draw())) + step(net, data)


SCENARIOS: dict[str, Scenario] = {
    "steps": steps,
    "skipped": skipped,
    "reordered": reordered,
    "used twice": used_twice,
    "evaluated": evaluated,
    "alternating": alternating,
    "accumulated": lambda net, data: microbatches(net, data, "aabbcc", (None,)),
    "interleaved": lambda net, data: microbatches(net, data, "abab", (None,)),
    "1F1B": lambda net, data: microbatches(net, data, "abacbdcd", (True, False)),
    "written between": written_between,
    "checkpoint": lambda net, data: checkpointed(net, data, "minifloat"),
    "torch checkpoint": lambda net, data: checkpointed(net, data, "torch"),
    "reentrant checkpoint": lambda net, data: checkpointed(net, data, "reentrant"),
    "saved on CPU": saved_on_cpu,
    "retained": retained,
    "frozen": lambda net, data: frozen(net, data, 1),
    "frozen first": lambda net, data: frozen(net, data, 0),
    "frozen last": lambda net, data: frozen(net, data, 3),
    "input needs none": input_needs_none,
    "gradient of input": gradient_of_input,
}


def gradients(net: Net) -> list[Tensor | None]:
    """Of this rank's rows of each weight, and of each bias."""
    found = []
    for layer in net.layers:
        found += [layer.weight.grad, layer.bias.grad]
    return found


def differences(
    net: Net, reference: Net, got: Sequence[Tensor | None], want: Sequence[Tensor | None], bound: float = 0.0
) -> list[str]:
    """What is not the same to the bit, of results, gradients and weights; gradients within ``bound``."""
    wrong = [f"result {i}" for i, (a, b) in enumerate(zip(got, want, strict=True)) if not same(a, b)]
    for mine, theirs in zip(net.layers, reference.layers, strict=True):
        pairs = {
            "weight": (mine.weight, own(mine, theirs.weight)),
            "its gradient": (mine.weight.grad, own(mine, theirs.weight.grad)),
            "gradient of the bias": (mine.bias.grad, theirs.bias.grad),
        }
        wrong += [f"layer {mine.name}: {what}" for what, (a, b) in pairs.items() if not same(a, b, bound)]
    return wrong


def same(a: Tensor | None, b: Tensor | None, bound: float = 0.0) -> bool:
    """To the bit, or within ``bound``."""
    if a is None or b is None:
        return a is b
    close = torch.equal(a, b) or bool(((a - b).abs() <= bound).all())
    return a.dtype == b.dtype and a.shape == b.shape and close


# ---- what ranks send ----


METHODS = {
    "_allgather_base": "all-gather",
    "_reduce_scatter_base": "reduce-scatter",
    "reduce_scatter_single": "reduce-scatter",  # from PyTorch 2.13 on
    "allreduce": "all-reduce",
    "alltoall_base": "all-to-all",
}
"""Of a process group, and what they are."""


@contextmanager
def recorded(slow: float = 0.0) -> Iterator[list[tuple[str, int, str]]]:
    """Names, bytes and dtypes of the collectives inside; each begins up to ``slow`` seconds late."""
    calls: list[tuple[str, int, str]] = []
    dawdle = random.Random(dist.get_rank())

    def wrapped(name: str) -> Any:
        method = getattr(dist.ProcessGroup, name)

        def call(group: Any, *args: Any) -> Any:
            time.sleep(dawdle.random() * slow)
            sent = args[0] if name == "allreduce" else args[1]
            tensors = sent if isinstance(sent, list) else [sent]
            calls.append((METHODS[name], sum(t.nbytes for t in tensors), str(tensors[0].dtype)))
            return method(group, *args)

        return mock.patch.object(dist.ProcessGroup, name, call)

    with ExitStack() as stack:
        for name in METHODS:
            if hasattr(dist.ProcessGroup, name):
                stack.enter_context(wrapped(name))
        yield calls
