"""Which recipe is in force, and delayed scaling's state: when it moves, where to, and how ranks agree on it."""

from __future__ import annotations

import copy
import gc
import pickle
import re
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from minifloat.autocast import autocast, current, get_default_recipe
from minifloat.functional import count_gemms, gemm
from minifloat.nn import LayerNormLinear, LayerNormMLP, Linear, prepare, quantized_model_init
from minifloat.nn.linear_call import recipe_in_force
from minifloat.operand import Operand
from minifloat.recipe import (
    CustomRecipe,
    DelayedScaling,
    DelayedScalingRequest,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    Recipe,
    named,
)
from minifloat.recompute import checkpoint
from minifloat.tensor import QuantizedTensor
from tests.helpers import oracle
from tests.helpers.distributed_pool import Pools, on_ranks
from tests.helpers.sample import each_once

LENGTH = 4
DELAYED = DelayedScaling(amax_history_len=LENGTH)
FORWARD_MAX, BACKWARD_MAX = 448.0, 57344.0


# ---- Which recipe is in force ----


def ran(layer: Linear) -> set[tuple[str, str]]:
    """The operand formats of the forward product that the layer runs now."""
    with count_gemms() as counts, torch.no_grad():
        layer(torch.randn(16, layer.in_features))
    return {(a, b) for _, a, b, _ in counts}


def formats(recipe: str) -> set[tuple[str, str]]:
    """Those that a recipe's forward product has; "none" is high precision."""
    return {("identity", "identity")} if recipe == "none" else {named(recipe).expected_gemms()["fprop"]}


@pytest.mark.parametrize("own", [None, "none", "current", "mxfp8"])
@pytest.mark.parametrize(
    ("contexts", "given"),
    [
        ([], "none"),
        ([autocast(recipe="block")], "block"),
        ([autocast(recipe="block"), autocast(recipe="nvfp4")], "nvfp4"),
        ([autocast(recipe="block"), autocast(enabled=False)], "none"),
        ([autocast(recipe="block"), autocast(enabled=False), autocast(recipe="current")], "current"),
        ([autocast(enabled=False, recipe="block")], "none"),
    ],
    ids=["outside", "inside", "nested", "disabled inside", "enabled again", "disabled"],
)
def test_precedence(own: str | None, contexts: list[autocast], given: str) -> None:
    """A layer's own recipe, "none" included, wins; else the innermost context decides; else high precision."""
    layer = Linear(32, 16, recipe=own)
    for context in contexts:
        context.__enter__()
    try:
        found, recipe = ran(layer), recipe_in_force(layer)
    finally:
        for context in reversed(contexts):
            context.__exit__(None, None, None)
    wins = given if own is None else own
    assert found == formats(wins)
    assert recipe == (None if wins == "none" else named(wins))


def test_leaving_a_nested_context_returns_to_the_outer_one() -> None:
    layer = Linear(32, 16)
    with autocast(recipe="block"):
        with autocast(recipe="mxfp8"):
            assert ran(layer) == formats("mxfp8")
        assert ran(layer) == formats("block")
        with autocast(enabled=False):
            assert ran(layer) == formats("none")
        assert ran(layer) == formats("block")
    assert ran(layer) == formats("none")


def test_default_recipe() -> None:
    if torch.cuda.is_available():
        pytest.skip("the default depends on the GPU")
    assert get_default_recipe() == DelayedScaling()
    assert autocast().recipe == DelayedScaling() and autocast().enabled
    layer = Linear(32, 16)
    with autocast():
        assert ran(layer) == formats("delayed")


@pytest.mark.parametrize(
    ("capability", "recipe"),
    [
        ((8, 9), DelayedScaling()),
        ((9, 0), DelayedScaling()),
        ((10, 0), MXFP8BlockScaling()),
        ((11, 0), MXFP8BlockScaling()),
        ((12, 0), Float8CurrentScaling()),
    ],
)
def test_default_recipe_of_a_gpu(capability: tuple[int, int], recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """What its tensor cores multiply natively, numerics 1."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert get_default_recipe() == recipe


def test_contexts_that_are_left_in_another_order() -> None:
    """The wrong recipe would be in force, here until both have ended, and else for good; no history is updated."""
    around, layer = autocast(recipe=DELAYED), Linear(8, 8)
    for outermost in (True, False):
        with nullcontext() if outermost else around as before:
            outer, inner = autocast(recipe=DELAYED), autocast(recipe="mxfp8")
            outer.__enter__()
            layer(torch.randn(4, 8))
            inner.__enter__()
            for context in (outer, inner, outer):
                with pytest.raises(RuntimeError, match="reverse order"):
                    context.__exit__(None, None, None)
                assert current() is before
            if outermost:
                assert (layer.forward_scaling.scale == 1).all() and not layer.forward_scaling.amax_history.any()
    with around, pytest.raises(RuntimeError, match="entered inside of itself"), around:
        pass
    assert current() is None and not (layer.forward_scaling.scale == 1).all()


def test_contexts_of_weights_that_are_left_in_another_order() -> None:
    outer, inner = quantized_model_init(recipe="mxfp8"), quantized_model_init(recipe="current")
    outer.__enter__()
    inner.__enter__()
    for context in (outer, inner):
        with pytest.raises(RuntimeError, match="reverse order"):
            context.__exit__(None, None, None)
        assert not isinstance(Linear(32, 32).weight, QuantizedTensor)


@pytest.mark.parametrize(("recipe", "error"), [("fp6", ValueError), (8, TypeError), (DelayedScaling, TypeError)])
def test_what_is_no_recipe(recipe: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="delayed, current"):
        autocast(recipe=recipe)
    assert current() is None


def test_two_threads_take_turns_in_one_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each gets what its own recipe gives, also where the other's whole forward comes in the middle of its own."""
    layer, x = Linear(16, 8), batch(0)
    outputs: dict[str, list[Tensor]] = {"current": [], "mxfp8": []}

    def forward(recipe: str) -> None:
        with autocast(recipe=recipe):
            outputs[recipe].append(layer(x))

    def interrupted() -> Any:
        monkeypatch.undo()
        thread = threading.Thread(target=forward, args=("mxfp8",))
        thread.start()
        thread.join()
        return layer._weight_and_bias()

    forward("mxfp8")
    forward("current")
    monkeypatch.setattr(layer, "_weight_and_bias", interrupted)
    forward("current")
    forward("mxfp8")
    for first, *others in outputs.values():
        assert all(torch.equal(each, first) for each in others)
    assert not torch.equal(outputs["current"][0], outputs["mxfp8"][0])


def test_a_context_may_be_entered_again() -> None:
    """Each time is a region of its own, whose end updates."""
    layer, context = Linear(8, 8), autocast(recipe=DELAYED)
    state = Expected()
    for _ in range(3):
        x = torch.randn(4, 8)
        with context:
            layer(x)
        state.record_forward(x, layer.weight)
        state.update("forward")
        state.check(layer, "forward")


# ---- Delayed scaling against the oracle ----


def largest(x: Tensor) -> np.float32:
    """The amax of a tensor as numerics.md defines it: a NaN is dropped."""
    return np.float32(oracle.amax_of(x.detach().float().numpy()).item())


class Expected:
    """What the oracle says a layer's state is."""

    def __init__(self, recipe: DelayedScaling = DELAYED) -> None:
        slots = {"forward": 3, "backward": 2}
        self.recipe = recipe
        self.history = {way: np.zeros((recipe.amax_history_len, n), np.float32) for way, n in slots.items()}
        self.scale = {way: np.ones(n, np.float32) for way, n in slots.items()}

    def record(self, way: str, slot: int, amax: np.float32) -> None:
        """Max-accumulates into the newest row what is finite."""
        newest = self.history[way][0]
        newest[slot] = max(newest[slot], amax) if np.isfinite(amax) else newest[slot]

    def record_forward(self, x: Tensor, weight: Tensor | None = None) -> None:
        """The amaxes of one forward, without that of a weight that is not quantized anew."""
        self.record("forward", 0, largest(x))
        if weight is not None:
            self.record("forward", 1, largest(weight))

    def record_backward(self, dy: Tensor | None) -> None:
        """The amax of one backward."""
        assert dy is not None
        self.record("backward", 0, largest(dy))

    def update(self, way: str, **options: Any) -> None:
        """The end of a step."""
        element_max = FORWARD_MAX if way == "forward" else BACKWARD_MAX
        self.history[way], self.scale[way] = oracle.delayed_update(
            self.history[way], self.scale[way], element_max, self.recipe.margin, **options
        )

    def check(self, layer: Linear, *ways: str) -> None:
        """Bit for bit."""
        for way in ways or ("forward", "backward"):
            found = getattr(layer, f"{way}_scaling")
            np.testing.assert_array_equal(found.amax_history.numpy(), self.history[way], err_msg=way)
            np.testing.assert_array_equal(found.scale.numpy(), self.scale[way], err_msg=way)


class TwoLayers(torch.nn.Module):
    """Two layers that remember what flowed between them, whose values are the true amaxes' sources."""

    def __init__(self, recipe: Recipe | str | None = None) -> None:
        super().__init__()
        self.first = Linear(16, 24, recipe=recipe)
        self.second = Linear(24, 8, recipe=recipe)
        self.states = Expected(), Expected()

    def forward(self, x: Tensor) -> Tensor:
        self.x = x
        self.hidden = self.first(x)
        self.out: Tensor = self.second(self.hidden)
        if self.out.requires_grad:
            self.hidden.retain_grad()
            self.out.retain_grad()
        return self.out

    def expect_forward(self) -> None:
        """Tells the oracle what the last forward saw."""
        self.states[0].record_forward(self.x, self.first.weight)
        self.states[1].record_forward(self.hidden, self.second.weight)

    def expect_backward(self) -> None:
        """And the last backward."""
        self.states[0].record_backward(self.hidden.grad)
        self.states[1].record_backward(self.out.grad)

    def expect_update(self, way: str, **options: Any) -> None:
        """Both layers' step ends."""
        for state in self.states:
            state.update(way, **options)

    def check(self, *ways: str) -> None:
        """Both layers' state is the oracle's."""
        self.states[0].check(self.first, *ways)
        self.states[1].check(self.second, *ways)


def batch(step: int, rows: int = 6, features: int = 16) -> Tensor:
    """An input whose size differs from step to step by powers of two and more."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(rows, features, generator=generator) * 3.0 ** (step % 4)


@pytest.mark.parametrize(
    ("options", "algorithm"),
    [
        ({}, {}),
        ({"margin": 2}, {}),
        ({"amax_history_len": 1}, {}),
        ({"amax_compute_algo": "most_recent"}, {"algo": "most_recent"}),
    ],
    ids=["max", "margin", "one step", "most recent"],
)
def test_steps_of_two_layers(options: dict[str, Any], algorithm: dict[str, Any]) -> None:
    """Forward state after the region, backward state after backward, over more steps than the history is long."""
    recipe = DelayedScaling(**{"amax_history_len": LENGTH, **options})
    model = TwoLayers()
    model.states = Expected(recipe), Expected(recipe)
    for step in range(LENGTH + 3):
        with autocast(recipe=recipe):
            y = model(batch(step))
        model.expect_forward()
        model.expect_update("forward", **algorithm)
        model.check("forward")
        (y * 10.0**-step).square().sum().backward()
        model.expect_backward()
        model.expect_update("backward", **algorithm)
        model.check()


Spy = dict[str, tuple[Operand, Operand]]


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Spy:
    """The operands that each of the three GEMMs got last."""
    seen: Spy = {}
    original = gemm.check_operands

    def watch(name: str, a: Operand, b: Operand) -> Any:
        seen[name] = a, b
        return original(name, a, b)

    monkeypatch.setattr(gemm, "check_operands", watch)
    return seen


def same_codes(operand: Operand, x: Tensor, element: str, scale: float) -> bool:
    """The operand holds the oracle's codes of ``x`` under a given scale."""
    codes, scale_inv, _ = oracle.per_tensor_given(x.detach().numpy(), element, scale)
    assert operand.scale_inv is not None
    return bool(np.array_equal(operand.codes.numpy(), codes) and np.array_equal(operand.scale_inv.numpy(), scale_inv))


def test_casts_use_the_scales_of_the_steps_before(spy: Spy) -> None:
    """Codes of X, W and dY in all three GEMMs are the oracle's under the scale that the last update left."""
    layer = Linear(16, 8, recipe=DELAYED)
    used = []
    for step in range(4):
        forward, backward = layer.forward_scaling.scale.tolist(), layer.backward_scaling.scale.tolist()
        x, dy = batch(step).requires_grad_(), batch(step + 7, features=8)
        layer(x).backward(dy)
        assert all(same_codes(spy[name][i], x, "e4m3", forward[0]) for name, i in (("fprop", 0), ("wgrad", 1)))
        assert all(same_codes(spy[name][1], layer.weight, "e4m3", forward[1]) for name in ("fprop", "dgrad"))
        assert all(same_codes(spy[name][0], dy, "e5m2", backward[0]) for name in ("dgrad", "wgrad"))
        used.append((forward[0], backward[0]))
    assert used[0] == (1.0, 1.0) and len(set(used)) == 4


@pytest.mark.parametrize("chained", [False, True])
@pytest.mark.parametrize("own", [False, True])
def test_a_layer_called_twice_in_a_region(own: bool, chained: bool) -> None:
    """Both calls cast with the same scales, their amaxes accumulate, and each direction is updated once."""
    layer, state = Linear(16, 16, recipe=DELAYED if own else None), Expected()
    for step in range(3):
        first = batch(step).requires_grad_()
        with autocast(recipe=DELAYED):
            middle = layer(first)
            second = middle if chained else batch(step + 1).requires_grad_()
            out = layer(second)
        middle.retain_grad()
        out.retain_grad()
        state.record_forward(first, layer.weight)
        state.record_forward(second)
        state.update("forward")
        state.check(layer)
        (out if chained else middle * 3 + out).square().sum().backward()
        state.record_backward(middle.grad)
        state.record_backward(out.grad)
        state.update("backward")
        state.check(layer)


SCHEDULES = {
    "accumulation over regions": "(A)a(B)b(C)c",
    "last first": "(ABC)cba(D)d",
    "first first": "(ABC)acb(DE)ed",
    "twice": "(A)aa(BC)cbcb",
    "regions in flight": "(A)(B)a(C)b(D)cd",
    "several in each": "(AB)(CD)badc(E)e",
    "backwards inside": "(AaBb(C)c)(D)d",
    "nested": "((A)(B))ba(C)c",
    "without that of the first": "(AB)b(CD)dc",
    "raising": "(A)a(B)b!(C)c",
    "raising, one of several": "(AB)ba!(C)(D)dc",
    "raising before others": "(ABC)c!ba(D)d",
    "raising and tried again": "(A)a!a(B)b!b(C)c",
    "two models": "(AX)ax(XA)ax",
    "two models, one at a time": "(AX)x(AX)x(AX)ax",
}
"""( and ): a region. A, B, ... and X, Y, ...: forwards of two layers; a, ...: their backwards. a!: one that raises."""


def _follow(schedule: str, call: Callable[[Linear, Tensor], Tensor], rank: int = 0, world_size: int = 1) -> None:
    """After each of its steps: all backwards of a region are one step, which the layer's first call in it ends."""
    layers = [Linear(16, 8, bias=False) for _ in "AX"]
    states = [[Expected() for _ in range(world_size)] for _ in "AX"]
    contexts: list[autocast] = []
    region, latest = 0, [0, 0]  # that a layer ran in
    firsts: set[str] = set()
    inputs: dict[str, Tensor] = {}
    outputs: dict[str, Tensor] = {}
    for step in re.findall(r"[()A-Z]|[a-z]!?", schedule):
        name, which = step[0].upper(), int(step[0].upper() >= "X")
        if step == "(":
            region += not contexts
            contexts.append(autocast(recipe=DELAYED).__enter__())
        elif step == ")":
            contexts.pop().__exit__(None, None, None)
        elif step.isupper():
            firsts = firsts - {name} if latest[which] == region else firsts | {name}
            latest[which] = region
            inputs[name] = batch(region).requires_grad_()
            outputs[name] = call(layers[which], inputs[name])
        else:
            amax, ranks = ord(name) * 7 % 11 + 1.0, states[which]
            hook = inputs[name].register_hook(_raise) if step.endswith("!") else None
            with nullcontext() if hook is None else pytest.raises(KeyError):
                (outputs[name] * (amax + rank)).sum().backward(retain_graph=True)
            for each, state in enumerate(ranks):
                state.record("backward", 0, np.float32(amax + each))
            if hook is not None:
                hook.remove()
            elif name in firsts:
                newest = np.max([state.history["backward"][0] for state in ranks], 0)
                for state in ranks:
                    state.history["backward"][0] = newest
                    state.update("backward")
        for layer, ranks in zip(layers, states, strict=True):
            if hasattr(layer, "backward_scaling"):
                ranks[rank].check(layer, "backward")


@each_once
@pytest.mark.parametrize("call", [Linear.__call__, checkpoint], ids=["plain", "checkpoint"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules(schedule: str, call: Callable[[Linear, Tensor], Tensor]) -> None:
    _follow(SCHEDULES[schedule], call)


@on_ranks(2)
def test_schedules_of_ranks(rank: int, world_size: int) -> None:
    for schedule in SCHEDULES.values():
        _follow(schedule, Linear.__call__, rank, world_size)


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_nothing_is_recorded_without_gradients(own: bool, context: Callable[[], Any]) -> None:
    """Evaluation reads the scales of training and changes nothing."""
    model = TwoLayers(recipe=DELAYED if own else None)
    with autocast(recipe=DELAYED):
        model(batch(1)).sum().backward()
    before = [buffer.clone() for buffer in model.buffers()]
    with context(), autocast(recipe=DELAYED):
        model(batch(2) * 100)
    assert len(before) == 8
    assert all(torch.equal(a, b) for a, b in zip(before, model.buffers(), strict=True))


def test_calibrating_records_while_computing_in_high_precision() -> None:
    """The output is that of nn.Linear; the amaxes of input and weight are in the history afterwards."""
    layer = Linear(16, 8)
    x = batch(1)
    with count_gemms() as counts, autocast(enabled=False, calibrating=True, recipe=DELAYED):
        y = layer(x)
    assert torch.equal(y, F.linear(x, layer.weight, layer.bias))
    assert {key[1:3] for key in counts} == {("identity", "identity")}
    history = layer.forward_scaling.amax_history
    np.testing.assert_array_equal(history.amax(0).numpy(), [largest(x), largest(layer.weight), 0.0])


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("option", ["fuse_wgrad_accumulation", "delay_wgrad_compute"])
def test_calibrating_where_the_weight_gradient_goes_elsewhere(option: str, grad: bool) -> None:
    """Whichever function computes: the same output and amaxes, alone and behind a norm."""
    options: dict[str, Any] = {option: True}
    for plain, layer in (
        (Linear(16, 8), Linear(16, 8, **options)),
        (LayerNormLinear(16, 8), LayerNormLinear(16, 8, **options)),
        (LayerNormMLP(16, 24), LayerNormMLP(16, 24, **options)),
    ):
        layer.load_state_dict(plain.state_dict())
        for p in layer.parameters():
            p.main_grad = torch.zeros_like(p)  # type: ignore[attr-defined]
        x = batch(1)
        with torch.set_grad_enabled(grad), autocast(enabled=False, calibrating=True, recipe=DELAYED):
            y, expected = layer(x), plain(x)
        assert torch.equal(y, expected)
        assert len(list(plain.buffers())) >= 4
        for a, b in zip(layer.buffers(), plain.buffers(), strict=True):
            assert torch.equal(a, b)
        histories = [buffer for name, buffer in layer.named_buffers() if "forward_scaling.amax_history" in name]
        assert all((history.amax(0)[:2] > 0).all() for history in histories)


@pytest.mark.parametrize("recipe", ["current", "mxfp8"])
def test_calibrating_without_delayed_scaling(recipe: str) -> None:
    layer = Linear(16, 8)
    with autocast(enabled=False, calibrating=True, recipe=recipe):
        layer(batch(1))
    assert not list(layer.buffers())


@pytest.mark.parametrize("context", [autocast(recipe="current"), autocast(enabled=False)])
def test_own_recipe_inside_a_context_of_another(context: autocast) -> None:
    """The surrounding region's end is this layer's, too."""
    layer, state = Linear(16, 8, recipe=DELAYED), Expected()
    x = batch(2).requires_grad_()
    with context:
        y = layer(x)
        state.record_forward(x, layer.weight)
        state.check(layer)
    state.update("forward")
    state.check(layer)
    y.retain_grad()
    y.sum().backward()
    state.record_backward(y.grad)
    state.update("backward")
    state.check(layer)


def test_nested_regions_update_at_the_outermost_end() -> None:
    model = TwoLayers()
    with autocast(recipe=DELAYED):
        with autocast(recipe=DELAYED):
            y = model(batch(1))
        model.expect_forward()
        model.check()
        with autocast(enabled=False):
            model(batch(2))
        model.check()
        with autocast(recipe="current"):
            y = y + model(batch(3))
        model.check()
    model.expect_update("forward")
    model.check()


def test_an_exception_skips_the_update() -> None:
    """A step that failed leaves scales and histories; the next one is as if it had not been."""
    model = TwoLayers()
    with pytest.raises(KeyError), autocast(recipe=DELAYED):
        model(batch(3))
        raise KeyError("inside")
    model.check()
    with autocast(recipe=DELAYED):
        model(batch(1))
    model.expect_forward()
    model.expect_update("forward")
    model.check("forward")


def _state_of(model: torch.nn.Module) -> list[Tensor]:
    return [buffer.clone() for buffer in model.buffers()]


def _assert_same_state(model: torch.nn.Module, expected: list[Tensor]) -> None:
    for found, wanted in zip(model.buffers(), expected, strict=True):
        assert torch.equal(found, wanted)


def _raise(*_: Any, **__: Any) -> Any:
    raise KeyError("inside")


@pytest.mark.parametrize("own", [False, True])
def test_amaxes_of_a_backward_that_raises_count_with_the_next(own: bool) -> None:
    """In each layer that it ran through; none is updated."""
    model, context = TwoLayers(DELAYED if own else None), nullcontext() if own else autocast(recipe=DELAYED)
    for step, fails in enumerate((False, True, False, False)):
        x = batch(step).requires_grad_()
        with context:
            y = model(x)
        model.expect_forward()
        model.expect_update("forward")
        if fails:
            x.register_hook(_raise)
        with pytest.raises(KeyError) if fails else nullcontext():
            (y * 10.0**step).square().sum().backward()
        model.expect_backward()
        if not fails:
            model.expect_update("backward")
        model.check()


class _BackwardInside(torch.autograd.Function):
    """The identity; its backward runs another one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, backward: Callable[[], None]) -> Tensor:
        ctx.other = backward
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        ctx.other()
        return dy, None


@pytest.mark.parametrize("depth", [1, 2])
def test_an_exception_after_a_backward_inside_of_the_backward(depth: int) -> None:
    """A layer that ran before it and after it is not updated; those of inner backwards, which ended well, are."""
    layer, inner = Linear(16, 16), [Linear(16, 16) for _ in range(depth)]
    x, other = batch(0).requires_grad_(), lambda: None
    for i, each in enumerate(inner):
        with autocast(recipe=DELAYED):
            other = each(_BackwardInside.apply(each(batch(i).requires_grad_()), other)).square().sum().backward
    with autocast(recipe=DELAYED):
        y = layer(_BackwardInside.apply(layer(x), other))
    before, inner_before = _state_of(layer.backward_scaling), [_state_of(each.backward_scaling) for each in inner]
    x.register_hook(_raise)
    with pytest.raises(KeyError):
        (y * 100).square().sum().backward()
    assert layer.backward_scaling.amax_history[0, 0] > 0
    layer.backward_scaling.forget_newest()
    _assert_same_state(layer.backward_scaling, before)
    for each, (scale, _) in zip(inner, inner_before, strict=True):
        assert not torch.equal(each.backward_scaling.scale, scale)


@pytest.mark.parametrize("context", [nullcontext, lambda: autocast(recipe=DELAYED)])
def test_an_exception_in_a_forward_of_its_own_recipe(context: Callable[[], Any]) -> None:
    """A layer outside of any context that raised after its casts has recorded nothing, nor have copies of it."""
    layer = Linear(16, 8, recipe=DELAYED)
    twin = copy.deepcopy(layer)
    with pytest.raises(KeyError), mock.patch.object(gemm, "check_operands", _raise):
        layer(batch(3) * 100)
    assert layer.forward_scaling.amax_history[0].any()
    made = layer, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))
    for each in (*made, twin):
        with context():
            each(batch(1))
    for each in made:
        _assert_same_state(each, _state_of(twin))


def test_an_exception_in_a_forward_keeps_no_model() -> None:
    """Nothing outside of it refers to a layer whose forward raised."""
    layer = Linear(16, 8, recipe=DELAYED)
    alive = weakref.ref(layer.forward_scaling)
    with pytest.raises(KeyError), mock.patch.object(gemm, "check_operands", _raise):
        layer(batch(3))
    del layer
    gc.collect()
    assert alive() is None


def test_two_regions_in_one_backward() -> None:
    """The second region is complete, and its scales are read, before the first one's backward begins."""
    models = TwoLayers(), TwoLayers()
    models[1].load_state_dict(models[0].state_dict())
    grads = []
    for together, model in enumerate(models):
        x, outputs = batch(0).requires_grad_(), []
        for step in range(2):
            with autocast(recipe=DELAYED):
                outputs.append(model(x * 10.0**step).square().sum())
        if together:
            (outputs[0] + outputs[1]).backward()
        else:
            outputs[1].backward()
            outputs[0].backward()
        grads.append(x.grad)
    assert torch.equal(grads[0], grads[1])  # type: ignore[arg-type]
    _assert_same_state(models[0], _state_of(models[1]))


def test_an_exception_caught_inside_does_not_skip_the_update() -> None:
    """Only what leaves the outermost context does."""
    model = TwoLayers()
    with autocast(recipe=DELAYED):
        model(batch(1))
        with suppress(KeyError), autocast(recipe=DELAYED):
            raise KeyError("inside")
    model.expect_forward()
    model.expect_update("forward")
    model.check("forward")


def test_history_length_follows_the_recipe() -> None:
    """A shorter one drops the oldest steps, a longer one has zeros before them; an evaluation changes nothing."""
    layer = Linear(16, 8)
    state = Expected()
    for step, length in enumerate((4, 4, 4, 4, 4, 2, 2, 6, 6, 1, 3)):
        recipe = DelayedScaling(amax_history_len=length)
        for way, history in state.history.items():
            rows = [*history[1:]][::-1][: length - 1][::-1]  # row 0 is of the step in progress
            state.history[way] = np.stack([history[0], *[0 * history[0]] * (length - 1 - len(rows)), *rows])
        with torch.no_grad(), autocast(recipe=DelayedScaling(amax_history_len=3)):
            layer(batch(99))
        x = batch(step).requires_grad_()
        with autocast(recipe=recipe):
            y = layer(x)
        state.record_forward(x, layer.weight)
        state.update("forward")
        y.retain_grad()
        y.square().sum().backward()
        state.record_backward(y.grad)
        state.update("backward")
        state.check(layer)


@pytest.mark.parametrize("way", ["loaded", "other recipe"])
@pytest.mark.parametrize("assign", [False, True])
def test_history_replaced_before_backward(way: str, assign: bool) -> None:
    """The backward records to the history that is there when it runs, and computes the scale from it."""
    layer, saved = Linear(16, 8, recipe=DELAYED), Linear(16, 8, recipe=DelayedScaling(amax_history_len=7))
    (saved(batch(0)).sum() * 64).backward()
    (layer(batch(0)).sum() * 1e6).backward()
    y = layer(batch(1))
    if way == "loaded":
        layer.load_state_dict(saved.state_dict(), assign=assign)
        newest = [64.0, 2.0]
    else:
        layer.recipe = DelayedScaling(amax_history_len=7)
        layer(batch(2))
        newest = [1e6, 2.0]
    (y.sum() * 2).backward()
    history = layer.backward_scaling
    assert history.amax_history[:, 0].tolist() == [0.0] * 5 + newest
    assert history.scale[0] == torch.tensor(57344.0) / newest[0]


def test_the_latest_recipe_of_a_region_decides() -> None:
    """Its margin, where a module runs under two: forward and backward, in which another region may come between."""
    layer, x = Linear(16, 8, bias=False), batch(0)
    with autocast(recipe=DelayedScaling(amax_history_len=LENGTH, margin=3)):
        y = layer(x).sum()
        with autocast(recipe=DELAYED):
            y = y + layer(x).sum()
    assert layer.forward_scaling.scale[0] == torch.tensor(448.0) / x.abs().amax()
    with autocast(recipe=DelayedScaling(amax_history_len=LENGTH, margin=5)):
        layer(x)
    y.backward()
    assert layer.backward_scaling.scale[0] == 57344.0


def test_cached_weights_leave_their_slot() -> None:
    """A weight that is not quantized anew records nothing and keeps its history."""
    recipe = DelayedScaling(amax_history_len=LENGTH)
    layer, state = Linear(16, 8), Expected(recipe)
    for step, first in enumerate((True, False, False, False, False, True, False)):
        x = batch(step)
        with autocast(recipe=recipe):
            layer(x, is_first_microbatch=first)
        state.record_forward(x, layer.weight if first else None)
        state.update("forward")
        state.check(layer, "forward")
        if step == 1:
            assert layer.forward_scaling.amax_history[:, 1].tolist() == [0.0, 0.0, 0.0, float(largest(layer.weight))]


def test_cached_weight_keeps_the_scale_that_it_was_cast_with(spy: Spy) -> None:
    """Its codes stay, whatever becomes of the scale."""
    layer = Linear(16, 8)
    for step, first in enumerate((True, False, False)):
        with autocast(recipe=DELAYED):
            layer(batch(step), is_first_microbatch=first)
        assert same_codes(spy["fprop"][1], layer.weight, "e4m3", 1.0)
    assert layer.forward_scaling.scale[1] != 1.0


@each_once
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_what_is_not_finite(value: float, compiled: bool) -> None:
    """An infinite amax is not recorded, NaN is dropped from the amax: scales follow the finite steps."""
    layer, state = prepare(Linear(16, 8), DELAYED), Expected()
    assert isinstance(layer, Linear)
    run = torch.compile(layer, backend="aot_eager", fullgraph=True) if compiled else layer
    for step in range(LENGTH + 2):
        x, dy = batch(step).requires_grad_(), batch(step + 7, features=8)
        if step == 1:
            with torch.no_grad():
                x[2, 3] = dy[1, 2] = value
        with autocast(recipe=DELAYED):
            y = run(x)
        state.record_forward(x, layer.weight)
        state.update("forward")
        y.backward(dy)
        state.record_backward(dy)
        state.update("backward")
        state.check(layer)
    assert layer.forward_scaling.scale[0] == FORWARD_MAX / largest(batch(3))


def test_zero_gradients_leave_the_state() -> None:
    """An amax of zero is no information: nothing rolls."""
    layer = Linear(16, 8, recipe=DELAYED)
    layer(batch(0)).sum().backward()
    before = layer.backward_scaling.amax_history.clone(), layer.backward_scaling.scale.clone()
    y = layer(batch(0))
    y.backward(torch.zeros_like(y))
    after = layer.backward_scaling.amax_history, layer.backward_scaling.scale
    assert torch.equal(before[0], after[0]) and torch.equal(before[1], after[1])


def test_outputs_that_stay_quantized() -> None:
    layer, state = Linear(16, 24), Expected()
    for step in range(3):
        x = batch(step)
        with autocast(recipe=DELAYED):
            with torch.no_grad():
                y = layer(x)  # with the same scales
            layer(x, fp8_output=True)
        state.record_forward(x, layer.weight)
        state.record("forward", 2, largest(y))
        state.update("forward")
        state.check(layer, "forward")
    assert layer.forward_scaling.scale[2] != 1.0


def test_input_gradients_that_stay_quantized() -> None:
    """The second slot of backward takes the amax of the input's gradient before its cast."""
    layer, state = Linear(16, 24, recipe=DELAYED), Expected()
    for step in range(3):
        x, dy = batch(step).requires_grad_(), batch(step + 5, features=24)
        twin = copy.deepcopy(layer)
        (dx,) = torch.autograd.grad(twin(x), x, dy)
        layer(x, fp8_grad=True).backward(dy)
        state.record_backward(dy)
        state.record("backward", 1, largest(dx))
        state.update("backward")
        state.check(layer, "backward")
    assert layer.backward_scaling.scale[1] != 1.0


def test_delayed_scaling_of_one_tensor_of_a_custom_recipe() -> None:
    """The others cast with their own amax and leave their slots."""

    def factory(role: Any) -> Any:
        if role.tensor_type == "input":
            return DelayedScalingRequest(amax_history_len=LENGTH)
        return Float8CurrentScaling().quantizer(role)

    layer, state = Linear(16, 8), Expected()
    recipe = CustomRecipe(factory)
    for step in range(3):
        x = batch(step).requires_grad_()
        with autocast(recipe=recipe):
            y = layer(x)
        y.sum().backward()
        state.record_forward(x)
        state.update("forward")
        state.check(layer)


# ---- Ranks ----


class Reductions(TorchDispatchMode):
    """Elements and group size of each all-reduce that PyTorch hands to a backend."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[int, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is torch.ops.c10d.allreduce_.default:
            (tensor,), group = args[:2]
            self.calls.append((tensor.numel(), dist.ProcessGroup.unbox(group).size()))
        return func(*args, **(kwargs or {}))


@contextmanager
def counted_reductions() -> Iterator[list[tuple[int, int]]]:
    """The all-reduces inside."""
    with Reductions() as mode:
        yield mode.calls


def _exchanged(values: list[float], group: dist.ProcessGroup | None) -> list[np.float32]:
    """The largest of each value over the ranks of a group, by another way than the package's."""
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, values, group=group)
    return [np.float32(max(column)) for column in zip(*everyone, strict=True)]


def _amaxes(model: TwoLayers, way: str) -> list[float]:
    if way == "forward":
        return [float(largest(t)) for t in (model.x, model.first.weight, model.hidden, model.second.weight)]
    assert model.hidden.grad is not None and model.out.grad is not None
    return [float(largest(model.hidden.grad)), float(largest(model.out.grad))]


def _expect(model: TwoLayers, way: str, group: dist.ProcessGroup | None, reduces: bool) -> None:
    """Tells the oracle of both layers the amaxes over the group and that a step ended."""
    amaxes = [np.float32(a) for a in _amaxes(model, way)]
    amaxes = _exchanged([float(a) for a in amaxes], group) if reduces else amaxes
    for state in model.states:
        for slot in range(2 if way == "forward" else 1):
            state.record(way, slot, amaxes.pop(0))
        state.update(way)


def _state(model: TwoLayers) -> list[list[Any]]:
    return [buffer.tolist() for buffer in model.buffers()]


def _steps_on_a_rank(rank: int, world_size: int, reduces: bool, split: bool) -> list[list[Any]]:
    """Some steps on data of this rank; the state must be the oracle's after each."""
    groups = [dist.new_group([0, 1]), dist.new_group(list(range(2, world_size)))] if split else [None, None]
    group = groups[0 if rank < 2 else 1]
    size = dist.get_world_size(group)
    recipe = DelayedScaling(amax_history_len=LENGTH, reduce_amax=reduces)
    model = TwoLayers()
    model.states = Expected(recipe), Expected(recipe)
    moments: list[str] = []
    for step in range(LENGTH + 1):
        with counted_reductions() as calls:
            with autocast(recipe=recipe, amax_reduction_group=group):
                y = model(batch(10 * step + rank) * (rank + 1))
                assert not calls
            expected = [(6, size)] if reduces and size > 1 else []
            assert calls == expected, "forward: one stacked reduction at the end of the region"
            _expect(model, "forward", group, reduces)
            model.check()
        with counted_reductions() as calls:
            moments.clear()
            model.hidden.register_hook(lambda _, seen=calls: moments.append(f"{len(seen)} before the first layer"))
            (y * 10.0 ** -(step + rank)).square().sum().backward()
            expected = [(4, size)] if reduces and size > 1 else []
            assert calls == expected, "backward: one stacked reduction"
            assert moments == ["0 before the first layer"], "at the end of the first layer's backward"
            _expect(model, "backward", group, reduces)
            model.check()
    return _state(model)


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_agree(worker_pool: Pools, world_size: int) -> None:
    """One MAX all-reduce a direction and region for all layers; state equal on all ranks and equal to the oracle's."""
    states = worker_pool(world_size).run(_steps_on_a_rank, True, False)
    assert all(state == states[0] for state in states)


def test_ranks_of_a_group_agree(worker_pool: Pools) -> None:
    """With a subgroup its ranks agree, and the rank that is alone communicates nothing."""
    states = worker_pool(3).run(_steps_on_a_rank, True, True)
    assert states[0] == states[1] != states[2]


def test_ranks_that_do_not_reduce(worker_pool: Pools) -> None:
    """reduce_amax=False: no collective, each rank's state follows its own data."""
    states = worker_pool(2).run(_steps_on_a_rank, False, False)
    assert states[0] != states[1]


def _frozen_first_layer(rank: int, world_size: int) -> list[list[Any]]:
    model = TwoLayers()
    model.first.requires_grad_(False)
    for step in range(2):
        with counted_reductions() as calls:
            with autocast(recipe=DELAYED):
                z = model.second(model.first(batch(step + rank)))
            z.retain_grad()
            (z * (rank + 1)).square().sum().backward()
            assert z.grad is not None
            (amax,) = _exchanged([float(largest(z.grad))], None)
            model.states[1].record("backward", 0, amax)
            model.states[1].update("backward")
            assert len(calls) == 2, "one reduction a direction"
        model.states[1].check(model.second, "backward")
    return _state(model)


def test_ranks_agree_where_the_first_layer_is_frozen(worker_pool: Pools) -> None:
    """The first layer that has a backward ends it: fine-tuning trains the layers on top only."""
    states = worker_pool(2).run(_frozen_first_layer)
    assert states[0] == states[1]


def _own_recipe(rank: int, world_size: int) -> list[list[Any]]:
    model = TwoLayers(recipe=DELAYED)
    for step in range(2):
        with counted_reductions() as calls:
            y = model(batch(step + rank) * (rank + 1))
            assert calls == [(3, world_size)] * 2
            _expect(model, "forward", None, True)
            model.check()
            y.square().sum().backward()
            assert calls[2:] == [(2, world_size)] * 2
            _expect(model, "backward", None, True)
            model.check()
    return _state(model)


def test_ranks_agree_outside_of_any_context(worker_pool: Pools) -> None:
    """A layer of its own recipe reduces over all ranks, by itself."""
    states = worker_pool(2).run(_own_recipe)
    assert states[0] == states[1]


def _two_groups_of_one_layer(rank: int, world_size: int, everyone_outside: bool) -> list[list[Any]]:
    """A layer under both: all ranks, and this one alone."""
    alone = [dist.new_group([r]) for r in range(world_size)][rank]
    groups = (dist.group.WORLD, alone) if everyone_outside else (alone, dist.group.WORLD)
    layer, state = Linear(16, 8, bias=False), Expected()
    for step in range(2):
        xs = [(batch(2 * step + i) * 10.0**rank).requires_grad_() for i in range(2)]
        with autocast(recipe=DELAYED, amax_reduction_group=groups[0]):
            ys = [layer(xs[0])]
            with autocast(recipe=DELAYED, amax_reduction_group=groups[1]):
                ys.append(layer(xs[1]))
        (amax,) = _exchanged([float(max(map(largest, xs)))], None)
        state.record("forward", 0, amax)
        state.record("forward", 1, largest(layer.weight))
        state.update("forward")
        state.check(layer)
        for y in ys:
            y.retain_grad()
        sum(y.square().sum() for y in ys).backward()  # type: ignore[union-attr]
        (amax,) = _exchanged([float(max(largest(y.grad) for y in ys))], None)  # type: ignore[arg-type]
        state.record("backward", 0, amax)
        state.update("backward")
        state.check(layer)
    return [buffer.tolist() for buffer in layer.buffers()]


@pytest.mark.parametrize("everyone_outside", [True, False])
def test_nested_contexts_of_two_groups_over_one_layer(worker_pool: Pools, everyone_outside: bool) -> None:
    """It is reduced over both, whichever comes first: ranks end with the same scales."""
    states = worker_pool(2).run(_two_groups_of_one_layer, everyone_outside)
    assert states[0] == states[1]


@on_ranks(2)
def test_nested_contexts_of_two_groups_in_compiled_code(rank: int, world_size: int) -> None:
    """Its backward could not know of the second group when it ends: an error."""
    alone = [dist.new_group([r]) for r in range(world_size)][rank]
    layer = prepare(Linear(16, 8), DELAYED)

    def twice(x: Tensor) -> Tensor:
        y: Tensor = layer(x)
        with autocast(recipe=DELAYED, amax_reduction_group=alone):
            y = y + layer(x)
        return y

    with pytest.raises(Exception, match="two amax_reduction_group in one compiled region"), autocast(recipe=DELAYED):
        torch.compile(twice, backend="aot_eager", fullgraph=True)(batch(0))


def _unused_layers(rank: int, world_size: int, solo: bool, differ: bool) -> list[list[Any]]:
    """Two layers beside each other, of which a backward runs through one."""
    alone = [dist.new_group([r]) for r in range(world_size)][rank]
    layers, states = (Linear(16, 8, bias=False), Linear(16, 8, bias=False)), (Expected(), Expected())
    group, used = (alone if solo else None), (rank if differ else 1)
    for step in range(2):
        with autocast(recipe=DELAYED, amax_reduction_group=group):
            ys = [layer(batch(step + rank)) for layer in layers]
        (ys[used] * (10.0 * rank + step + 1)).sum().backward()
        own = [10.0 * rank + step + 1 if each == used else 0.0 for each in range(2)]
        for layer, state, amax in zip(layers, states, own if solo else _exchanged(own, None), strict=True):
            state.record("backward", 0, np.float32(amax))
            state.update("backward")
            state.check(layer, "backward")
    return [layer.backward_scaling.scale.tolist() for layer in layers]


@pytest.mark.parametrize(("solo", "differ"), [(True, False), (False, False), (False, True)])
def test_layers_without_a_backward(worker_pool: Pools, solo: bool, differ: bool) -> None:
    """The others are updated all the same, and ranks agree also where they differ in which layers those are."""
    states = worker_pool(2).run(_unused_layers, solo, differ)
    assert solo or states[0] == states[1]


def test_prepare_gives_what_autocast_uses() -> None:
    """Of equal recipes, whichever of them came first: else a compiled forward would still have to make it."""
    layer, first, second = Linear(16, 8), MXFP8BlockScaling(), MXFP8BlockScaling()
    with autocast(recipe=first):
        Linear(16, 8)(batch(0))
    prepare(layer, second)
    prepared = layer._configs.latest
    with autocast(recipe=second):
        layer(batch(0))
    assert prepared is not None and layer._configs.latest is prepared


def test_scales_that_data_is_assigned_to() -> None:
    """A cast reads the scale that is there, as after a move of FSDP1's that assigns to ``.data``."""
    layer, x = Linear(16, 8, recipe=DELAYED), batch(0)
    layer(x)
    scale = layer.forward_scaling.scale
    scale.data = torch.full_like(scale, 0.25)
    y = layer(x)
    twin = Linear(16, 8, recipe=DELAYED)
    twin.load_state_dict({k: v for k, v in layer.state_dict().items() if "scaling" not in k})
    twin.forward_scaling.scale.fill_(0.25)
    assert torch.equal(y, twin(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("assign", [False, True])
def test_histories_stay_fp32_whatever_a_state_dict_has(assign: bool, dtype: torch.dtype) -> None:
    layer, other = (Linear(16, 16, recipe=DelayedScaling(amax_history_len=3)) for _ in range(2))
    layer(torch.randn(4, 16)).sum().backward()
    saved = {name: value.to(dtype) for name, value in layer.state_dict().items() if "scaling" in name}
    weights = {name: value for name, value in layer.state_dict().items() if "scaling" not in name}
    other.load_state_dict(weights | saved, assign=assign)
    for name, buffer in other.named_buffers():
        assert buffer.dtype == torch.float32 and torch.equal(buffer, saved[name].float()), name
    other(torch.randn(4, 16)).sum().backward()
