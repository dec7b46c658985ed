"""Captures one CUDA graph, leaves the state of modules as it was, and keeps the order of graphs in a pool."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from minifloat.arguments import label_of
from minifloat.delayed import AmaxHistory, resized
from minifloat.nn.linear_state import LinearState
from minifloat.nn.moe import MoE
from minifloat.nn.tensor_parallel import etp_weights

T = TypeVar("T")


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Stops garbage collection: a graph that is destroyed while another is captured breaks the capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class CaptureStream:
    """Stream of warm-ups and captures."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)

    @contextmanager
    def current(self) -> Iterator[None]:
        """Runs what is inside after all before it, and before all after it."""
        outside = torch.cuda.current_stream(self.stream.device)
        self.stream.wait_stream(outside)
        with torch.cuda.stream(self.stream):
            yield
        outside.wait_stream(self.stream)


class Graph:
    """Launches of one function on a GPU: captured once, and replayed on the stream that is then current.

    Args:
        stream: where it is captured. What warms the function up runs there too: autograd's nodes stay on their stream.
        pool: of ``torch.cuda.graph_pool_handle()``: graphs of one pool take memory that earlier ones have freed, and
            are replayed in the order of their capture. None: a pool of its own.
    """

    device_type: ClassVar[str] = "cuda"
    Stream = CaptureStream

    def __init__(self, stream: CaptureStream, pool: Any = None) -> None:
        self.stream = stream.stream
        self.pool = torch.cuda.graph_pool_handle() if pool is None else pool
        self.graph = torch.cuda.CUDAGraph()

    def capture(self, function: Callable[[], T]) -> T:
        """Captures ``function``; its result has no values before the first replay, and new ones after each.

        Its backward runs in this thread. Other threads may use the GPU meanwhile.

        Raises:
            RuntimeError: PyTorch's, of an operation that no graph can hold, as one that waits for the GPU.
        """
        from minifloat.ops.tape import zeros_of_graph  # which needs Triton

        before = torch.cuda.current_stream(self.stream.device)
        capture = torch.cuda.graph(self.graph, self.pool, self.stream, capture_error_mode="thread_local")
        try:
            capture.__enter__()
            with no_garbage_collection(), torch.autograd.set_multithreading_enabled(False), zeros_of_graph():
                result = function()
        except BaseException:
            with suppress(RuntimeError):  # PyTorch's own about a capture that has failed
                capture.__exit__(None, None, None)
            self._recover(before)
            raise
        capture.__exit__(None, None, None)
        return result

    def replay(self) -> None:
        """Computes again, from what is in the memory that the function read."""
        self.graph.replay()

    def _recover(self, stream: torch.cuda.Stream) -> None:
        """Ends what PyTorch leaves begun where an operation has ended the capture."""
        torch.cuda.set_stream(stream)
        with suppress(RuntimeError):  # it was ended
            torch._C._cuda_endAllocateToPool(stream.device_index, self.pool)
        generator = torch.cuda.default_generators[stream.device_index]
        generator.graphsafe_set_state(generator.clone_state())  # the old one still counts for the graph


def fused_weights(module: nn.Module) -> list[Any]:
    """Lists the weights whose gradients backward adds to ``main_grad``."""
    layers = [each for each in module.modules() if isinstance(each, LinearState) and each.fuse_wgrad_accumulation]
    weights = [layer._weight(name) for layer in layers for name in layer._weight_names]
    return list({id(weight): weight for weight in weights if weight.requires_grad and weight.is_leaf}.values())


@contextmanager
def unchanged(
    modules: Sequence[nn.Module], device: torch.device, also: Sequence[dict[str, Any]] = ()
) -> Iterator[None]:
    """Restores values of buffers, attributes of modules and fused weights, random numbers, and ``also`` afterwards.

    Gradients are not looked at: use ``torch.autograd.grad``, and :func:`scratch_main_grads`.
    """
    everyone = list({id(part): part for module in modules for part in module.modules()}.values())
    buffers = [(part, {n: None if b is None else b.clone() for n, b in part._buffers.items()}) for part in everyone]
    weights = [weight for module in modules for weight in fused_weights(module)]
    owners: list[Any] = [*map(vars, (*everyone, *weights)), *also]
    attributes = [(owner, dict(owner)) for owner in owners]
    random = [device] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(random):
            yield
    finally:
        for part, saved in buffers:
            _restore_buffers(part, saved)
        for owner, before in attributes:
            owner.clear()
            owner.update(before)


def free_accumulators(modules: Sequence[nn.Module]) -> None:
    """Lets go of graphs whose nodes would accumulate gradients on another stream than that of the capture.

    Raises:
        RuntimeError: someone else than torch.autocast's cache or a router's loss holds one.
    """
    torch.clear_autocast_cache()
    for module in modules:
        for part in module.modules():
            if isinstance(part, MoE) and part.router_loss is not None:
                part.router_loss = part.router_loss.detach()
        for name, weight in module.named_parameters():
            if weight.requires_grad and _is_held(weight):
                raise RuntimeError(
                    f"{label_of(module)}: a result of an earlier step, or DistributedDataParallel, holds the graph of "
                    f"{name}, which breaks the capture; drop it (del output, loss), or capture first"
                )


def _is_held(leaf: Tensor) -> bool:
    """Whether a graph ends in ``leaf``: the node that accumulates its gradient is made anew where none does."""
    get_gradient_edge(leaf).node.metadata[_is_held] = True  # type: ignore[index]
    return bool(get_gradient_edge(leaf).node.metadata.pop(_is_held, False))  # type: ignore[attr-defined]


@torch.no_grad()
def _restore_buffers(module: nn.Module, saved: dict[str, Tensor | None]) -> None:
    """Writes saved values to the same tensors; a history that a recipe has cut or made longer stays so."""
    for name, before in saved.items():
        buffer = module._buffers[name]
        if buffer is None or before is None:
            continue
        if isinstance(module, AmaxHistory) and buffer.shape != before.shape:
            before = resized(before, buffer.shape[0])
        buffer.copy_(before)


@contextmanager
def scratch_main_grads(weights: Sequence[Any]) -> Iterator[None]:
    """Lets backward add to other memory than ``main_grad``, one for all weights."""
    before = [weight.main_grad for weight in weights]
    most = {dtype: max(grad.numel() for grad in before if grad.dtype == dtype) for dtype in {g.dtype for g in before}}
    scratch = {dtype: torch.zeros(most[dtype], dtype=dtype, device=before[0].device) for dtype in most}
    try:
        for weight, grad in zip(weights, before, strict=True):
            weight.main_grad = scratch[grad.dtype][: grad.numel()].view(grad.shape)
        yield
    finally:
        for weight, grad in zip(weights, before, strict=True):
            weight.main_grad = grad


class Step(NamedTuple):
    """Forward or backward of one microbatch through one module."""

    module: int
    microbatch: int
    forward: bool


def steps_of(order: Sequence[int] | None, modules: int) -> list[Step]:
    """Lists the steps of an ``_order`` of :func:`make_graphed_callables`; None: all forwards, then all backwards.

    Raises:
        ValueError: a number names no module, a backward comes before its forward, or modules differ in microbatches.
    """
    if order is None:
        order = [*range(1, modules + 1), *range(-modules, 0)]
    counts = [[0, 0] for _ in range(modules)]
    steps = []
    for place, number in enumerate(order):
        if not 1 <= abs(number) <= modules:
            raise ValueError(
                f"_order: {number} at {place} names none of {modules} modules; forwards are 1 to {modules}, backwards "
                f"-1 to {-modules}"
            )
        done = counts[abs(number) - 1]
        if number < 0 and done[1] == done[0]:
            raise ValueError(f"_order: {number} at {place} is a backward before its forward; give each one after it")
        steps.append(Step(abs(number) - 1, done[number < 0], number > 0))
        done[number < 0] += 1
    backwards = any(number < 0 for number in order)
    if any(done != [counts[0][0], counts[0][0] * backwards] or not done[0] for done in counts):
        raise ValueError(
            f"_order has {[done[0] for done in counts]} forwards and {[done[1] for done in counts]} backwards of the "
            "modules; each needs as many of both, one for each microbatch"
        )
    return steps


class Progress:
    """Notes which graph of a pool ran last: memory that one has freed belongs to those captured after it."""

    def __init__(self) -> None:
        self.latest = -1
        self.round = 0

    def forward(self, place: int) -> int:
        """Notes a forward; returns the round that it is part of: one that comes a second time begins another."""
        if place <= self.latest:
            self.round += 1
        self.latest = place
        return self.round

    def backward(self, place: int, round_: int, label: str) -> None:
        """Notes a backward, of a forward of ``round_``.

        Raises:
            RuntimeError: what the forward saved has been overwritten.
        """
        if round_ != self.round or place <= self.latest:
            raise RuntimeError(
                f"{label}: another graph has run since this backward's forward, or this backward before, and what it "
                "reads is overwritten; run forwards and backwards in the order of their capture, with an _order that "
                "gives each microbatch in flight graphs of its own"
            )
        self.latest = place


class SharedWeights:
    """Sharded weights of ``module`` and its submodules.

    A graph gathers and reduces by itself: nothing is in flight over its group where it begins or ends, and no gather is
    predicted across. Gradients are results of the graph of a backward, which autograd adds to ``.grad`` after each
    replay; those that go to ``main_grad`` are added in the graph.
    """

    def __init__(self, module: nn.Module) -> None:
        self.weights = list(etp_weights(module))
        self.queues = list(dict.fromkeys(weight.queue for weight in self.weights))

    def drain(self) -> None:
        """Lets the stream wait for all that was started over these weights' groups."""
        for queue in self.queues:
            queue.drain()

    @contextmanager
    def in_graph(self, collected: dict[Tensor, Tensor] | None = None) -> Iterator[None]:
        """Lets a capture or its warm-up inside finish what it starts.

        A forward casts; ``collected``: a backward puts there the gradients that autograd adds.
        """
        self.drain()
        for queue in self.queues:
            queue.in_graph = {each: None for each in self.weights if collected is None and each.queue is queue}
            queue.collected = collected
        try:
            yield
            self.drain()
        except BaseException:
            for queue in self.queues:
                queue.fail()
            raise
        finally:
            for queue in self.queues:
                queue.in_graph = queue.collected = None

    def gradients(
        self, targets: Sequence[Tensor], compute: Callable[[list[Tensor]], Sequence[Tensor | None]]
    ) -> list[Tensor | None]:
        """Computes the gradients of ``targets``; ``compute``: gives those that autograd sees."""
        leaves = [each.leaf for each in self.weights if each.leaf is not None and each.leaf.requires_grad]
        collected: dict[Tensor, Tensor] = {}
        with self.in_graph(collected):
            seen = compute([*targets, *leaves])
        return [collected.get(target, grad) for target, grad in zip(targets, seen, strict=False)]
