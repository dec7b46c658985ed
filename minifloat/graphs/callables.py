"""``GraphedCallable``: a module's forward and backward as CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from minifloat.arguments import label_of
from minifloat.autocast import DelayedCall, autocast, captured, current
from minifloat.functional.autograd import autocast_off, first_order, is_wanted
from minifloat.graphs import capture
from minifloat.graphs.capture import Progress, SharedWeights, fused_weights, scratch_main_grads
from minifloat.nn.linear_state import LinearState
from minifloat.nn.moe import MoE
from minifloat.tensor import QuantizedTensor
from minifloat.tensor.base import versions


class WeightCache:
    """Casts of one module's weights, which the graph of its first microbatch makes, or skips by a flag."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self.layers = [each for each in module.modules() if isinstance(each, LinearState)]
        self.skip = torch.zeros(1, dtype=torch.float32, device=device)
        self.skipping = False
        self.versions: tuple[float, ...] | None = None  # of what was cast
        self.held: list[Any] = []

    def choose(self, first: bool | None) -> None:
        """Sets the flag before a replay: cast, but for a later microbatch whose weights are as they were."""
        weights = tuple(layer._weight(name) for layer in self.layers for name in layer._weight_names)
        now = versions(weights)
        skipping = first is False and now == self.versions
        if skipping != self.skipping:
            self.skip.fill_(float(skipping))
            self.skipping = skipping
        self.versions = now

    @contextmanager
    def casting(self) -> Iterator[None]:
        """Lets the flag skip the casts inside."""
        for layer in self.layers:
            layer._skip_weight_cast = self.skip
        try:
            yield
        finally:
            for layer in self.layers:
                layer._skip_weight_cast = None

    def hold(self) -> None:
        """Keeps what was cast: no other graph of the pool may take its memory."""
        self.held = [layer._weight_cache for layer in self.layers]


class GraphedCallable:
    """Graphs of one module for one microbatch: called as the module's forward, whose results it gives bit for bit.

    Outputs and gradients of inputs are in memory that the next call overwrites.

    Args:
        module: what is captured, with ``args`` and ``kwargs``, copies of which become its inputs.
        context: what it runs under.
        cache: of its weights; None: each call casts them.
        microbatch: those after 0 read the weights that 0 has cast.
        progress: of all graphs of the pool.
    """

    def __init__(
        self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], context: autocast,
        cache: WeightCache | None, microbatch: int, progress: Progress,
    ) -> None:  # fmt: skip
        self.module, self.context, self.cache, self.microbatch = module, context, cache, microbatch
        self.progress, self.places = progress, [-1, -1]
        self.forward = module.forward
        self.label = label_of(module)
        self.training, self.grad = module.training, torch.is_grad_enabled()
        self.autocast_dtype = _autocast_dtype()
        leaves, self.spec = tree_flatten((tuple(args), dict(kwargs)))
        own = [x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x for x in leaves]
        self.leaves: list[Any] = own
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        self.inputs = [i for i, leaf in enumerate(self.leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
        self.routed = [each for each in module.modules() if isinstance(each, MoE)]
        self.main_grads = [(weight, weight.main_grad.data_ptr()) for weight in fused_weights(module)]
        self.shared = SharedWeights(module)
        self.calls: list[DelayedCall] = []
        self.attached: list[Any] = []  # outputs with their autograd graph, until the backward is captured

    # ---- capture ----

    def warm_up(self, iterations: int, allow_unused_input: bool) -> None:
        """Runs forward and backward as they will be captured, which leave gradients alone.

        Raises:
            ValueError: an input's gradient is None; the output is quantized.
        """
        weights = [weight for weight, _ in self.main_grads]
        with scratch_main_grads(weights):
            for _ in range(iterations):
                self._run()
                given = [torch.zeros_like(output) for output in self._differentiable()]
                grads = self._gradients(given)
                unused = [i for i, grad in zip(self.inputs, grads, strict=False) if grad is None]
                if given and unused and not allow_unused_input:
                    raise ValueError(
                        f"{self.label}: no output depends on the input number {unused[0]}, which requires a gradient; "
                        "detach it, or pass allow_unused_input=True"
                    )

    def capture_forward(self, captured_by: capture.Graph, place: int) -> None:
        """Captures the forward as number ``place`` of the pool."""
        self.places[0], self.forward_graph = place, captured_by
        self.shared.drain()
        self.outputs = captured_by.capture(self._run)
        self.differentiable = [output.requires_grad for output in self.attached if isinstance(output, Tensor)]
        if self.cache is not None and self.microbatch == 0:
            self.cache.hold()
        held = [tensors for part in self.module.modules() for tensors in (part._parameters, part._buffers)]
        self.memory = [(each, name, _address(t)) for each in held for name, t in each.items() if t is not None]

    def capture_backward(self, captured_by: capture.Graph, place: int) -> None:
        """Captures the backward as number ``place`` of the pool, after the forward."""
        for weight, _ in self.main_grads:
            weight.main_grad_is_old = False  # added to: what replaces it is zeroed before
        self.given = [torch.zeros_like(output) for output in self._differentiable()]
        if self.given:
            self.places[1], self.backward_graph = place, captured_by
            self.shared.drain()
            self.gradients = captured_by.capture(lambda: self._gradients(self.given))

    def _run(self) -> list[Any]:
        """Runs the forward: outputs, flat, without their autograd graph, which is left in ``attached``."""
        args, kwargs = tree_unflatten(self.leaves, self.spec)
        first = self.cache is not None and self.microbatch == 0
        casting = self.cache.casting() if self.cache is not None and first else nullcontext()
        told = {} if self.cache is None else {"is_first_microbatch": first}
        with self.shared.in_graph(), captured(self.context) as calls, _torch_autocast(self.autocast_dtype), casting:
            result = self.forward(*args, **kwargs, **told)
        self.calls = calls
        result = result, [(moe.router_loss, moe.expert_counts) for moe in self.routed]
        self.attached, self.output_spec = tree_flatten(result)
        if any(isinstance(output, QuantizedTensor) for output in self.attached):
            raise ValueError(f"{self.label}: a graph returns no QuantizedTensor; leave out fp8_output, or dequantize()")
        return [output.detach() if isinstance(output, Tensor) else output for output in self.attached]

    def _differentiable(self) -> list[Tensor]:
        return [output for output in self.attached if isinstance(output, Tensor) and output.requires_grad]

    def _gradients(self, given: Sequence[Tensor]) -> Sequence[Tensor | None]:
        """Computes gradients of inputs and parameters, and frees what the forward has saved."""
        outputs, self.attached = self._differentiable(), []
        targets = [*[self.leaves[i] for i in self.inputs], *self.parameters]
        if not outputs or not targets:
            return [None] * len(targets)
        compute = partial(torch.autograd.grad, outputs, grad_outputs=given, allow_unused=True)
        with autocast_off(outputs[0]):  # as backward runs, whatever surrounds it
            return self.shared.gradients(targets, compute)

    # ---- replay ----

    def __call__(self, *args: Any, is_first_microbatch: bool | None = None, **kwargs: Any) -> Any:
        """Replays the forward. In another mode (``train``, gradients) than at the capture the module itself runs.

        Args:
            is_first_microbatch: as in :class:`~minifloat.Linear`; without ``cache_quantized_params`` each call casts
                the weights.

        Raises:
            TypeError, ValueError: arguments, the recipe in force or ``torch.autocast`` are not those of the capture.
            RuntimeError: parameters, buffers or ``main_grad`` are in other memory, or this is a recomputation.
        """
        if self.module.training != self.training or torch.is_grad_enabled() != self.grad:
            told = {} if is_first_microbatch is None else {"is_first_microbatch": is_first_microbatch}
            return self.forward(*args, **kwargs, **told)
        self._check_surroundings()
        if self.cache is not None and self.microbatch == 0:
            self.cache.choose(is_first_microbatch)
        elif self.cache is not None and is_first_microbatch:
            raise ValueError(
                f"{self.label}: microbatch {self.microbatch} reads the weights that microbatch 0 has cast; pass "
                "is_first_microbatch=True to microbatch 0 only"
            )
        given = self._filled(args, kwargs)
        run = _Run(self, bool(is_first_microbatch))
        if self.places[1] >= 0:
            outputs = iter(_replay(run, *[given[i] for i in self.inputs], *self.parameters))
        else:
            outputs = iter(run.forward())
        run.finish_forward()
        flat = [next(outputs) if isinstance(own, Tensor) else own for own in self.outputs]
        result, routed = tree_unflatten(flat, self.output_spec)
        for moe, (loss, counts) in zip(self.routed, routed, strict=True):
            moe.router_loss, moe.expert_counts = loss, counts
        return result

    def _check_surroundings(self) -> None:
        context = current()
        if context is not None and (context.enabled, context.recipe) != (self.context.enabled, self.context.recipe):
            raise ValueError(
                f"{self.label} was captured under {self.context.recipe if self.context.enabled else 'no recipe'} and "
                f"runs under {context.recipe if context.enabled else 'none'}; pass make_graphed_callables that recipe"
            )
        if _autocast_dtype() != self.autocast_dtype:
            raise ValueError(
                f"{self.label} was captured under torch.autocast of {self.autocast_dtype} and runs under that of "
                f"{_autocast_dtype()} (None: off); capture it under the same"
            )
        if torch._C._current_graph_task_id() != -1:
            raise RuntimeError(f"{self.label}: a graph cannot be recomputed; checkpoint inside of what is captured")
        for tensors, name, address in self.memory:
            if _address(tensors[name]) != address:
                raise RuntimeError(
                    f"{self.label}: {name} is in other memory than at the capture; capture again after module.to() or "
                    "load_state_dict"
                )

    def _filled(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """Copies the arguments to where the graph reads them; returns them flat."""
        given, spec = tree_flatten((tuple(args), dict(kwargs)))
        if spec != self.spec:
            raise TypeError(f"{self.label}: the arguments are nested otherwise than sample_args and sample_kwargs")
        for i, (own, each) in enumerate(zip(self.leaves, given, strict=True)):
            if not isinstance(own, Tensor):
                if each is not own and each != own:
                    raise ValueError(f"{self.label}: argument {i} was {own!r} at the capture and is {each!r}")
                continue
            if not isinstance(each, Tensor) or _form(each) != _form(own):
                found = _form(each) if isinstance(each, Tensor) else each
                raise ValueError(f"{self.label}: argument {i} was {_form(own)} at the capture and is {found}")
            if each.requires_grad and not own.requires_grad:
                raise ValueError(f"{self.label}: argument {i} required no gradient at the capture; detach it")
        with torch.no_grad():
            for own, each in zip(self.leaves, given, strict=True):
                if isinstance(own, Tensor) and own.data_ptr() != each.data_ptr():
                    own.copy_(each)
        return given


class _Run:
    """Call of a :class:`GraphedCallable`, and what delayed scaling and main_grad need to know of it."""

    def __init__(self, of: GraphedCallable, first: bool) -> None:
        self.of, self.first = of, first
        context = current()
        self.calls = [DelayedCall(call.states, call.histories[0].recipe, *call.records, context) for call in of.calls]
        for before, now in zip(of.calls, self.calls, strict=True):
            if any(a.amax_history is not b.amax_history for a, b in zip(before.histories, now.histories, strict=True)):
                raise RuntimeError(f"{of.label}: an amax history is in other memory than at the capture; capture again")

    def forward(self) -> list[Tensor]:
        of = self.of
        self.round = of.progress.forward(of.places[0])
        if self.first:
            for weight, _ in of.main_grads:
                weight.main_grad_is_old = of.grad or None
        of.shared.drain()
        of.forward_graph.replay()
        return [output.detach() for output in of.outputs if isinstance(output, Tensor)]

    def finish_forward(self) -> None:
        for call in self.calls:
            call.forward_finished()

    def backward(self, grads: Sequence[Tensor]) -> Sequence[Tensor | None]:
        of = self.of
        of.progress.backward(of.places[1], self.round, of.label)
        for weight, address in of.main_grads:
            if weight.main_grad.data_ptr() != address:
                raise RuntimeError(f"{of.label}: main_grad is in other memory than at the capture; capture again")
            if not is_wanted(weight):
                raise RuntimeError(
                    f"{of.label}: the graph of its backward adds to main_grad, and torch.autograd.grad or "
                    "backward(inputs=...) asks for no gradient of that weight; call backward() without inputs"
                )
            if getattr(weight, "main_grad_is_old", False):
                weight.main_grad.zero_()
                weight.main_grad_is_old = False
        for call in reversed(self.calls):
            call.backward_begins()
        for own, grad in zip(of.given, grads, strict=True):
            own.copy_(grad)
        of.shared.drain()
        of.backward_graph.replay()
        for weight, _ in of.main_grads:
            weight.grad_added_to_main_grad = True
        for call in reversed(self.calls):
            call.backward_finished()
        # The graph's own tensors: held by it, they are copied where autograd would keep them as .grad.
        return of.gradients


class _Replay(torch.autograd.Function):
    """Replays forward and backward of a :class:`GraphedCallable`."""

    @staticmethod
    def forward(ctx: Any, run: _Run, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.run = run
        outputs = run.forward()
        unwanted = [o for o, wanted in zip(outputs, run.of.differentiable, strict=True) if not wanted]
        ctx.mark_non_differentiable(*unwanted)
        return tuple(outputs)

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        wanted = [grad for grad, each in zip(grads, ctx.run.of.differentiable, strict=True) if each]
        return None, *ctx.run.backward(wanted)


_replay: Callable[..., tuple[Tensor, ...]] = _Replay.apply


def _form(x: Tensor) -> tuple[tuple[int, ...], torch.dtype, torch.device]:
    return tuple(x.shape), x.dtype, x.device


def _address(tensor: Any) -> int:
    codes = tensor._operands.any.codes if isinstance(tensor, QuantizedTensor) else tensor
    return int(codes.data_ptr())


def _autocast_dtype() -> torch.dtype | None:
    kind = capture.Graph.device_type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def _torch_autocast(dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    """Enters the surrounding ``torch.autocast`` without its cache of cast weights, which no replay would cast anew."""
    return (
        nullcontext() if dtype is None else torch.autocast(capture.Graph.device_type, dtype=dtype, cache_enabled=False)
    )
