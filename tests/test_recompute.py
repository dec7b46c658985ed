"""Activation checkpointing changes nothing: outputs, gradients and delayed scaling's state are those of a run without.

Each way of recomputing runs beside the same steps without one, and everything is compared bit for bit.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import threading
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.utils import checkpoint as torch_checkpoint

import minifloat
from minifloat import CustomRecipe, DelayedScaling, Linear, Quantizer, Recipe, autocast, prepare, recompute
from minifloat.formats import Format
from minifloat.functional import count_gemms
from minifloat.recipe import QuantizerRole, named
from tests.helpers.sample import each_once, each_pair, first_by_default
from tests.helpers.selection import diagonals

pytestmark = pytest.mark.usefixtures("one_thread")

IN, HIDDEN = 24, 40
Way = Callable[..., Any]


def stochastic_inputs(role: QuantizerRole) -> Quantizer:
    """Inputs too round at random, so that the recomputation has to draw the same bits."""
    return Quantizer(Format("e2m1", 16, scale_rule="two_level", rounding="stochastic"))


RECIPES: dict[str, Recipe] = {
    "delayed": DelayedScaling(amax_history_len=3, amax_compute_algo="most_recent"),
    **{name: named(name) for name in ("current", "block", "mxfp8", "nvfp4")},
    "stochastic": CustomRecipe(stochastic_inputs),
}


def without(function: Way, *args: Any) -> Any:
    """No recomputation: the reference."""
    return function(*args)


def ours(function: Way, *args: Any, **kwargs: Any) -> Any:
    return minifloat.checkpoint(function, *args, **kwargs)


def with_contexts(function: Way, *args: Any, **kwargs: Any) -> Any:
    context_fn = minifloat.checkpoint_context_fn
    return torch_checkpoint.checkpoint(function, *args, use_reentrant=False, context_fn=context_fn, **kwargs)


def plain(function: Way, *args: Any, **kwargs: Any) -> Any:
    return torch_checkpoint.checkpoint(function, *args, use_reentrant=False, **kwargs)


def reentrant(function: Way, *args: Any) -> Any:
    return torch_checkpoint.checkpoint(function, *args, use_reentrant=True)


class Block(nn.Module):
    """Two layers, used ``uses`` times, around something that PyTorch saves for itself."""

    def __init__(self, recipe: Recipe | None, uses: int = 1) -> None:
        super().__init__()
        self.up = Linear(IN, HIDDEN, recipe=recipe, name="up")
        self.down = Linear(HIDDEN, IN, recipe=recipe, name="down")
        self.uses = uses

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.uses):
            x = self.down(torch.tanh(self.up(x)) * 3)
        return x


def twins(recipe: Recipe, own: bool, uses: int = 1) -> tuple[nn.Sequential, nn.Sequential]:
    """Two equal models; under autocast both get the very same recipe."""
    torch.manual_seed(0)
    model = nn.Sequential(Block(recipe if own else None, uses), Block(recipe if own else None, uses))
    pair = model, copy.deepcopy(model)
    for each in pair:
        if not own:
            prepare(each, recipe)
    return pair


def batch(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return (torch.randn(7, IN, generator=generator) * (step + 1)).requires_grad_()


def run_model(model: nn.Sequential, x: Tensor, way: Way) -> Tensor:
    for block in model:
        x = way(block, x)
    return x


def in_thread(work: Callable[[], None]) -> None:
    """As CUDA's backward, which no context of the caller reaches.

    ``set_num_threads`` holds for the thread that calls it alone: until then oneDNN and MKL multiply here with
    OMP_NUM_THREADS threads, whose sums may differ from the caller's in the last bit.
    """
    failures: list[BaseException] = []
    threads = torch.get_num_threads()

    def guarded() -> None:
        torch.set_num_threads(threads)
        try:
            work()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=guarded)
    thread.start()
    thread.join()
    if failures:
        raise failures[0]


def train(
    model: nn.Sequential,
    way: Way,
    around: Callable[[], Any] = contextlib.nullcontext,
    order: str = "f0 b0 f1 b1 f2 b2",
    backward: Callable[[Callable[[], None]], None] = lambda work: work(),
) -> list[Tensor]:
    """Forwards and backwards in the given order; all outputs, input gradients, gradients and buffers."""
    results: list[Tensor] = []
    outputs: dict[str, tuple[Tensor, Tensor]] = {}
    for what in order.split():
        number = what[1:]
        torch.manual_seed(int(number))
        if what[0] == "f":
            x = batch(int(number))
            with around():
                outputs[number] = x, run_model(model, x, way)
            results.append(outputs[number][1].detach().clone())
        else:
            x, y = outputs[number]
            backward(lambda: (y * (int(number) + 1)).square().sum().backward())  # noqa: B023
            assert x.grad is not None
            results.append(x.grad.clone())
    assert all(p.grad is not None for p in model.parameters())
    results += [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return [*results, *(buffer.clone() for buffer in model.buffers())]


def assert_same(expected: list[Any], found: list[Any]) -> None:
    assert len(expected) == len(found)
    for number, (a, b) in enumerate(zip(expected, found, strict=True)):
        assert torch.equal(a, b), f"number {number} of {len(expected)}, of shape {tuple(a.shape)}"


ORDERS = ["f0 f1 b0 b1 f2 b2", "f0 f1 b1 b0 f2 b2"]
EXACT = [(name, way) for name in RECIPES for way in (plain, reentrant, ours) if name != "delayed" or way is ours]


@each_pair
@pytest.mark.parametrize("uses", [1, 2])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("name", "way"), [each for each in EXACT if each[0] in ("delayed", "stochastic")])
def test_own_recipe(name: str, way: Way, order: str, uses: int) -> None:
    """PyTorch's own checkpoint too is exact for layers that have their recipe, but for delayed scaling."""
    first, second = twins(RECIPES[name], own=True, uses=uses)
    assert_same(train(first, without, order=order), train(second, way, order=order))


@pytest.mark.parametrize(("name", "way"), EXACT)
def test_threaded_backward_of_own_recipes(name: str, way: Way) -> None:
    first, second = twins(RECIPES[name], own=True)
    assert_same(train(first, without, backward=in_thread), train(second, way, backward=in_thread))


@each_pair
@pytest.mark.parametrize("threaded", [False, True])
@pytest.mark.parametrize("way", [ours, with_contexts])
@pytest.mark.parametrize("name", RECIPES)
def test_autocast(name: str, way: Way, threaded: bool) -> None:
    """The recomputation runs under the autocast of the forward, also in backward's own thread."""
    first, second = twins(RECIPES[name], own=False, uses=2)
    run: Any = in_thread if threaded else lambda work: work()
    around = lambda: autocast(recipe=RECIPES[name])  # noqa: E731
    order = ORDERS[threaded]
    assert_same(train(first, without, around, order, run), train(second, way, around, order, run))


def step_inside(model: nn.Sequential, way: Way, recipe: Recipe) -> list[Any]:
    """Backward inside of the region of its forward, or of an equal one."""
    results: list[Any] = []
    for number in range(3):
        x = batch(number)
        torch.manual_seed(number)
        with autocast(recipe=recipe):
            y = run_model(model, x, way)
            if number != 1:
                y.square().sum().backward()
        if number == 1:
            with autocast(recipe=copy.copy(recipe) if isinstance(recipe, DelayedScaling) else recipe):
                y.square().sum().backward()
        results += [y.detach(), x.grad]
    return [*results, *(p.grad for p in model.parameters()), *model.buffers()]


@pytest.mark.parametrize(("name", "way"), [each for each in EXACT if each[1] is not reentrant])
def test_backward_inside_of_autocast(name: str, way: Way) -> None:
    first, second = twins(RECIPES[name], own=False)
    assert_same(step_inside(first, without, RECIPES[name]), step_inside(second, way, RECIPES[name]))


@pytest.mark.parametrize("way", [plain, reentrant])
@pytest.mark.parametrize("name", ["current", "mxfp8", "nvfp4"])
def test_recomputation_outside_of_autocast_raises(name: str, way: Way) -> None:
    """Never bf16 in silence: the error names the layer and what to use."""
    model, _ = twins(RECIPES[name], own=False)
    with autocast(recipe=RECIPES[name]):
        y = run_model(model, batch(0), way)
    with pytest.raises(RuntimeError, match=r"Linear 'up' runs under no recipe .*minifloat\.checkpoint"):
        y.sum().backward()
    with autocast(recipe=RECIPES[name]):
        y = run_model(model, batch(0), way)
    other = "mxfp8" if name == "current" else "current"
    with autocast(recipe=other), pytest.raises(RuntimeError, match=r"runs under .* neither the recipe nor"):
        y.sum().backward()
    assert not recompute._local.regions and not recompute._inside


# ---- nested ----


def nested(outer: Way, inner: Way) -> Way:
    """Checkpoints the two layers of a block inside of a checkpoint of the block."""

    def way(block: Block, x: Tensor) -> Any:
        def body(x: Tensor) -> Any:
            return inner(block.down, torch.tanh(inner(block.up, x)) * 3)

        return outer(body, x)

    return way


UNTAPED = [(ours, plain), (plain, ours), (ours, reentrant), (reentrant, reentrant), (plain, with_contexts)]
NESTED = [("delayed", ours, ours), ("stochastic", ours, ours), *(("stochastic", *pair) for pair in UNTAPED)]


@pytest.mark.parametrize(("name", "outer", "inner"), NESTED)
def test_nested_own(name: str, outer: Way, inner: Way) -> None:
    first, second = twins(RECIPES[name], own=True)
    assert_same(train(first, without, order=ORDERS[1]), train(second, nested(outer, inner), order=ORDERS[1]))


@pytest.mark.parametrize("name", ["delayed", "nvfp4"])
def test_nested_autocast(name: str) -> None:
    first, second = twins(RECIPES[name], own=False)
    around = lambda: autocast(recipe=RECIPES[name])  # noqa: E731
    assert_same(train(first, without, around, ORDERS[1]), train(second, nested(ours, ours), around, ORDERS[1]))


# ---- options, and what counts once ----


def test_other_arguments() -> None:
    """Keyword arguments reach the function; the reentrant form is refused."""
    layer, x = Linear(IN, 8, recipe="delayed"), batch(0)
    minifloat.checkpoint(layer, x, fp8_grad=False).sum().backward()
    assert x.grad is not None
    with pytest.raises(ValueError, match="use_reentrant"):
        minifloat.checkpoint(layer, x, use_reentrant=True)


@pytest.mark.parametrize("way", [ours, with_contexts])
def test_two_backwards(way: Way) -> None:
    results: list[list[Any]] = []
    for model, how in zip(twins(RECIPES["delayed"], own=True, uses=2), (without, way), strict=True):
        x = batch(0)
        y = run_model(model, x, how)
        run_model(model, batch(1), without).sum().backward()
        y.sum().backward(retain_graph=True)
        y.square().sum().backward()
        results.append([x.grad, *(p.grad for p in model.parameters()), *model.buffers()])
    assert_same(*results)


def test_saved_tensors_read_outside_of_backward() -> None:
    """PyTorch recomputes for a look at grad_fn's saved tensors too, as often as somebody looks."""
    results: list[list[Any]] = []
    for model, way in zip(twins(RECIPES["delayed"], own=True), (without, ours), strict=True):
        for _ in range(2):
            x = batch(0)
            y = run_model(model, x, way)
            for _ in range(2):
                y.grad_fn.saved_tensors  # type: ignore[union-attr]  # noqa: B018
            y.sum().backward()
        results.append([x.grad, *(p.grad for p in model.parameters()), *model.buffers()])
    assert_same(*results)


@pytest.mark.parametrize("way", [ours, with_contexts, plain])
def test_calibration_counts_once(way: Way) -> None:
    results: list[list[Any]] = []
    for how in (without, way):
        torch.manual_seed(3)
        model = nn.Sequential(Block(None), Block(None))
        for number in range(2):
            x = batch(number)
            with autocast(enabled=False, calibrating=True, recipe=RECIPES["delayed"]):
                y = run_model(model, x, how)
            y.sum().backward()
        results.append([x.grad, *(p.grad for p in model.parameters()), *model.buffers()])
    assert len(results[0]) == 9 + 4 * 4
    assert_same(*results)


def test_recipes_that_take_turns() -> None:
    recipes = [RECIPES["mxfp8"], RECIPES["delayed"], RECIPES["current"]]
    results: list[list[Any]] = []
    for model, way in zip(twins(RECIPES["delayed"], own=False), (without, ours), strict=True):
        outputs, inputs = [], [batch(number) for number in range(4)]
        for x, recipe in zip(inputs, recipes, strict=False):
            with autocast(recipe=recipe):
                outputs.append(run_model(model, x, way))
        outputs.append(run_model(model, inputs[3], way))
        with count_gemms() as gemms:
            for y in outputs:
                y.square().sum().backward()
        assert len({gemm.a for gemm in gemms if gemm.gemm == "dgrad"}) == 3
        results.append([*(x.grad for x in inputs), *(p.grad for p in model.parameters()), *model.buffers()])
    assert_same(*results)


# ---- hooks on saved tensors ----


def offloaded(function: Way, *args: Any) -> Any:
    with torch.autograd.graph.save_on_cpu():
        return function(*args)


def offloaded_inside(checkpoint: Way) -> Way:
    return lambda function, *args: checkpoint(lambda *inner: offloaded(function, *inner), *args)


def offloaded_outside(checkpoint: Way) -> Way:
    return lambda function, *args: offloaded(lambda *inner: checkpoint(function, *inner), *args)


@pytest.mark.parametrize("name", RECIPES)
def test_save_on_cpu(name: str) -> None:
    around = lambda: autocast(recipe=RECIPES[name])  # noqa: E731
    expected = train(twins(RECIPES[name], own=False)[0], without, around, ORDERS[1])
    for way in (offloaded, offloaded_inside(ours), offloaded_outside(ours)):
        assert_same(expected, train(twins(RECIPES[name], own=False)[0], way, around, ORDERS[1]))


OFFLOADED = {"plain": offloaded_outside(plain), "reentrant": offloaded_outside(reentrant)}


# ---- recomputations without a tape ----


WAYS_WITHOUT_TAPE = {
    "plain": plain,
    "reentrant": reentrant,
    **{f"{outer.__name__}-{inner.__name__}": nested(outer, inner) for outer, inner in [*UNTAPED, (reentrant, ours)]},
    **{f"offloaded {name}": way for name, way in OFFLOADED.items()},
}


@each_once
@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("way", WAYS_WITHOUT_TAPE.values(), ids=WAYS_WITHOUT_TAPE)
def test_delayed_scaling_without_a_tape_raises(way: Way, own: bool) -> None:
    """The scales of the forward are not known: in forward if PyTorch's checkpoint alone is seen, else backward."""
    model, _ = twins(RECIPES["delayed"], own)
    with contextlib.nullcontext() if own else autocast(recipe=RECIPES["delayed"]):
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"Linear '\w+' runs under DelayedScaling .*minifloat\.checkpoint"):
                run_model(model, batch(0), way).sum().backward()
    assert not recompute._local.regions and not recompute._inside


def test_hooks_of_pytorchs_checkpoint_are_known() -> None:
    """If this fails, a new PyTorch makes the hooks of its checkpoint elsewhere: see ``recompute._in_checkpoint``."""
    seen: list[tuple[bool, bool]] = []

    def look(x: Tensor) -> Tensor:
        seen.append((recompute._in_checkpoint(), recompute.hooks_read()))
        return x.sin() * 2

    plain(look, batch(0)).sum().backward()
    ours(look, batch(0)).sum().backward()
    assert seen == [(True, False)] * 4
    seen.clear()
    offloaded(look, batch(0))
    look(batch(0))
    assert seen == [(False, True), (False, False)]


def test_a_layer_in_a_hook_of_backward() -> None:
    """A forward with gradients inside of a backward is an ordinary one, but of delayed scaling, which raises."""
    layer, other, delayed = (Linear(IN, IN, recipe=recipe) for recipe in ("current", "current", "delayed"))
    seen: list[Tensor] = []

    def hook(grad: Tensor) -> None:
        with torch.enable_grad():
            seen.append(other(grad))
            with pytest.raises(RuntimeError, match=r"inside of a backward.*use minifloat\.checkpoint"):
                delayed(grad)

    y = layer(batch(0))
    y.register_hook(hook)
    y.sum().backward()
    assert torch.equal(seen[0], other(torch.ones(7, IN)))


# ---- torch.compile ----


@pytest.fixture
def _fresh_compiler() -> Iterator[None]:
    """PyTorch's checkpoint of what raises ends with its generator, which the compiler's exception keeps in a cycle."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    gc.collect()
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None, "hooks of a checkpoint are left"


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize(
    ("name", "own", "inside"),
    [pytest.param("current", True, False, marks=pytest.mark.slow), ("mxfp8", False, False), ("current", True, True)],
)
def test_compiled(name: str, own: bool, inside: bool) -> None:
    """A checkpoint in a compiled function, or the reverse, is exact without state."""
    first, second = twins(RECIPES[name], own)
    around: Any = contextlib.nullcontext if own else lambda: autocast(recipe=RECIPES[name])
    expected = train(first, without, around)

    def way(block: Block, x: Tensor) -> Any:
        if inside:
            return ours(torch.compile(block, backend="aot_eager"), x)
        return torch.compile(lambda x: ours(block, x), fullgraph=True, backend="aot_eager")(x)

    for a, b in zip(expected, train(second, way, around), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5 * float(a.abs().max()))


@pytest.mark.usefixtures("_fresh_compiler")
def test_compiled_checkpoint_of_pytorch_with_our_contexts() -> None:
    """Exact without state, as a checkpoint of ours is."""
    first, second = twins(RECIPES["current"], own=True)
    compiled = torch.compile(lambda x: with_contexts(second[0], x), fullgraph=True, backend="aot_eager")
    x, same = batch(0), batch(0)
    first[0](x).square().sum().backward()
    compiled(same).square().sum().backward()
    for a, b in zip([x, *first[0].parameters()], [same, *second[0].parameters()], strict=True):
        assert a.grad is not None and b.grad is not None
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=1e-5 * float(a.grad.abs().max()))


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize(
    ("form", "way"),
    [
        ("method", ours),
        ("deep", plain),
        *[
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("module", ours), ("module", plain), ("closure", plain))
        ],
    ],
)
def test_compiled_checkpoint_of_delayed_scaling_is_refused(form: str, way: Way) -> None:
    """The graph would recompute with the scales of the next step. Without fullgraph it is run uncompiled."""
    model, expected = twins(RECIPES["delayed"], own=True)
    block = model[0]
    functions = {
        "module": block,
        "closure": lambda x: block(x),
        "method": block.forward,
        "deep": lambda x: plain(lambda x: block(x), x),
    }

    def step(x: Tensor) -> Tensor:
        return way(functions[form], x)

    with pytest.raises(RuntimeError, match="leave what is checkpointed uncompiled"):
        torch.compile(step, fullgraph=True, backend="aot_eager")(batch(0))
    compiled = torch.compile(step, backend="aot_eager")
    if way is plain:
        with pytest.raises(RuntimeError, match=r"use minifloat\.checkpoint"):
            compiled(batch(0))
        return
    for number in range(2):
        x, same = batch(number), batch(number)
        compiled(x).square().sum().backward()
        expected[0](same).square().sum().backward()
        assert torch.equal(x.grad, same.grad)
    assert_same(list(expected[0].buffers()), list(block.buffers()))


@pytest.mark.usefixtures("_fresh_compiler")
@first_by_default
@pytest.mark.parametrize("way", [ours, plain])
def test_checkpoint_of_compiled_delayed_scaling_is_refused(way: Way) -> None:
    """The same where the checkpoint is around the compiled function."""
    model, expected = twins(RECIPES["delayed"], own=True)
    with pytest.raises(RuntimeError, match="leave what is checkpointed uncompiled"):
        way(torch.compile(model[0], fullgraph=True, backend="aot_eager"), batch(0))
    x, same = batch(0), batch(0)
    compiled = torch.compile(model[0], backend="aot_eager")
    if way is plain:
        with pytest.raises(RuntimeError, match=r"use minifloat\.checkpoint"):
            way(compiled, x)
        return
    way(compiled, x).square().sum().backward()
    expected[0](same).square().sum().backward()
    assert torch.equal(x.grad, same.grad)


@pytest.mark.usefixtures("_fresh_compiler")
@first_by_default
@pytest.mark.parametrize(("own", "reentrant"), diagonals(2, [False, True], [False, True]))
def test_checkpoint_of_pytorch_around_what_was_compiled_before(own: bool, reentrant: bool) -> None:
    """The graph that exists is used there, and refuses to run; with another recipe it does run."""
    model, _ = twins(RECIPES["delayed"], own)
    compiled = torch.compile(model[0], fullgraph=True, backend="aot_eager")

    def step(checkpointed: bool, x: Tensor) -> None:
        with contextlib.nullcontext() if own else autocast(recipe=RECIPES["delayed"]):
            if checkpointed:
                y = torch_checkpoint.checkpoint(compiled, x, use_reentrant=reentrant)
            else:
                y = compiled(x)
        y.square().sum().backward()

    for _ in range(2):
        step(False, batch(0))
    with pytest.raises(RuntimeError, match="leave what is checkpointed uncompiled"):
        step(True, batch(1))
    step(False, batch(2))


@pytest.mark.usefixtures("_fresh_compiler")
def test_checkpoint_of_code_that_was_compiled_before() -> None:
    """The graph that exists is not used inside; outside it still is, however often the two alternate."""
    model, _ = twins(RECIPES["delayed"], own=True)
    block = model[0]
    graphs = CompileCounter()
    compiled = torch.compile(block, fullgraph=True, backend=graphs)
    compiled(batch(0))
    with pytest.raises(RuntimeError, match="leave what is checkpointed uncompiled"):
        ours(compiled, batch(0))
    compiled(batch(0))
    assert graphs.frame_count == 1


@pytest.mark.usefixtures("_fresh_compiler")
def test_checkpoint_of_code_that_was_compiled_before_runs_uncompiled() -> None:
    """Without fullgraph, with one warning, and exactly."""
    model, expected = twins(RECIPES["delayed"], own=True)
    compiled = torch.compile(model[0], backend="aot_eager")
    recompute._warn.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for number in range(3):
            x, same = batch(number), batch(number)
            (ours(compiled, x) if number else compiled(x)).square().sum().backward()
            expected[0](same).square().sum().backward()
            assert torch.equal(x.grad, same.grad)
    assert_same(list(expected[0].buffers()), list(model[0].buffers()))
    assert sum("delayed scaling inside of a checkpoint" in str(each.message) for each in caught) == 1


@pytest.mark.usefixtures("_fresh_compiler")
def test_compiled_module_that_checkpoints_itself() -> None:
    """Under delayed scaling it runs uncompiled, in training alone, or is refused."""
    torch.manual_seed(0)
    model = minifloat.LayerNormMLP(IN, IN, recipe=RECIPES["delayed"], checkpoint=True, name="mlp")
    expected = copy.deepcopy(model)
    with pytest.raises(RuntimeError, match=r"mlp\.fc1.*leave what is checkpointed uncompiled"):
        torch.compile(model, fullgraph=True, backend="aot_eager")(batch(0))
    compiled = torch.compile(model, backend="aot_eager")
    for number in range(3):
        x, same = batch(number), batch(number)
        compiled(x).square().sum().backward()
        expected(same).square().sum().backward()
        assert torch.equal(x.grad, same.grad)
        with torch.no_grad():
            assert torch.equal(compiled(x), expected(x))
    assert_same(list(expected.buffers()), list(model.buffers()))


@pytest.mark.usefixtures("_fresh_compiler")
def test_compiled_checkpoint_beside_delayed_scaling() -> None:
    torch.manual_seed(0)
    layer, other = Linear(IN, IN, recipe=RECIPES["delayed"]), torch.nn.Linear(IN, IN)

    def step(x: Tensor) -> Tensor:
        return layer(plain(other, layer(x)))  # type: ignore[no-any-return]

    x, same = batch(0), batch(0)
    torch.compile(step, fullgraph=True, backend="aot_eager")(x).square().sum().backward()
    assert x.grad is not None and x.grad.isfinite().all() and same.grad is None


def test_own_context_fn_is_refused() -> None:
    with pytest.raises(ValueError, match="context_fn of its own"):
        minifloat.checkpoint(torch.sin, torch.ones(1), context_fn=minifloat.checkpoint_context_fn)


def test_evaluation_inside_a_backward_hook_is_no_recomputation() -> None:
    """It has no gradients, which a recomputation has."""
    layer, x = minifloat.Linear(16, 16), torch.randn(4, 16, requires_grad=True)
    with autocast(recipe="current"):
        y = layer(x)
    seen = []

    def evaluate(grad: Tensor) -> None:
        seen.append(layer(x.detach()))

    y.register_hook(evaluate)
    y.sum().backward()
    assert torch.equal(seen[0], torch.nn.functional.linear(x.detach(), layer.weight, layer.bias))


def test_checkpoint_of_layers_with_different_recipes() -> None:
    """Each linear of the recomputation reads its own step, also where only some have delayed scaling or any recipe."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Linear(IN, IN, recipe=recipe) for recipe in ("current", "delayed", "none", "delayed")))
    expected = copy.deepcopy(model)
    for step in range(3):
        x, same = batch(step), batch(step)
        ours(model, x).square().sum().backward()
        expected(same).square().sum().backward()
        assert torch.equal(x.grad, same.grad)
    assert_same(list(model.state_dict().values()), list(expected.state_dict().values()))


@pytest.mark.parametrize("depth", [1, 2])
def test_a_failed_backward_of_checkpoints(depth: int) -> None:
    """One that fails at its end leaves what one without checkpoints does."""
    first, second = twins(RECIPES["delayed"], own=True)

    def deep(x: Tensor) -> Tensor:
        return ours(lambda x: ours(second, x), x) if depth == 2 else ours(second, x)  # type: ignore[no-any-return]

    for way in (first, deep):
        x = batch(0)
        y = way(x)
        x.register_hook(lambda _: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            (y * 50).square().sum().backward()
    assert_same(list(first.buffers()), list(second.buffers()))
    for number in (1, 2):
        grads = []
        for way in (first, deep):
            x = batch(number)
            way(x).square().sum().backward()
            grads.append(x.grad)
        assert torch.equal(*grads)
    assert_same(list(first.buffers()), list(second.buffers()))


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("make", [Linear, lambda k, n: minifloat.GroupedLinear(1, k, n)], ids=["linear", "experts"])
def test_kept_weights_are_those_of_the_forward(make: Any, nested: bool) -> None:
    """Not those that a later microbatch has cast, with other scales; nor does a recomputation replace them."""
    torch.manual_seed(0)
    whole, groups = make(IN, IN), [[16]] * (make is not Linear)
    for order in ((0, 2, 1), (1, 2, 0), (2, 1, 0)):
        found = []
        for checkpoints in range(2 + nested):
            way = layer = copy.deepcopy(whole)
            for _ in range(checkpoints):
                way = partial(minifloat.checkpoint, way)
            torch.manual_seed(1)
            xs, ys = [torch.randn(16, IN, requires_grad=True) for _ in range(3)], []
            for x, first in zip(xs, (True, False, True), strict=True):
                with autocast(recipe=RECIPES["delayed"]):
                    ys.append(way(x, *groups, first))
            kept = layer._weight_cache
            for i in order:
                ys[i].square().sum().backward()
            assert layer._weight_cache is kept
            found.append([x.grad for x in xs])
        for each in found[1:]:
            assert_same(found[0], each)
