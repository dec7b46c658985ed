"""CUDA graphs of modules: replays have the bits of eager code, and captures leave no trace.

On a CPU a stand-in is captured, which tells about all but the graphs themselves: inputs, amax histories, microbatches.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minifloat import (
    GroupedLinear,
    GroupedMLP,
    LayerNormLinear,
    LayerNormMLP,
    Linear,
    MoE,
    MultiheadAttention,
    QuantizedTensor,
    Recipe,
    TransformerLayer,
    autocast,
    checkpoint,
    make_graphed_callables,
    quantized_model_init,
    router_losses,
)
from minifloat.recipe import DelayedScaling, named

BF16 = torch.bfloat16
DELAYED = DelayedScaling(amax_history_len=3)
HIDDEN = 64


def recipe_of(name: str) -> Recipe | None:
    return None if name == "none" else DELAYED if name == "delayed" else named(name)


MODULES: dict[str, Callable[..., nn.Module]] = {
    "linear": lambda on: Linear(HIDDEN, HIDDEN, **on),
    "norm_linear": lambda on: LayerNormLinear(HIDDEN, HIDDEN, **on),
    "mlp": lambda on: LayerNormMLP(HIDDEN, 96, **on),
    "swiglu": lambda on: LayerNormMLP(HIDDEN, 96, activation="swiglu", **on),
    "attention": lambda on: MultiheadAttention(HIDDEN, 4, attention_dropout=0.0, **on),
    "layer": lambda on: TransformerLayer(HIDDEN, 96, 4, hidden_dropout=0.0, attention_dropout=0.0, **on),
    "dropout": lambda on: TransformerLayer(HIDDEN, 96, 4, hidden_dropout=0.2, attention_dropout=0.2, **on),
    "checkpoint": lambda on: LayerNormMLP(HIDDEN, 96, checkpoint=True, **on),
    "moe": lambda on: MoE(HIDDEN, 96, 4, aux_loss_coefficient=0.01, **on),
}

on_gpu = pytest.mark.parametrize("device", [pytest.param(torch.device("cuda"), marks=pytest.mark.gpu, id="cuda")])

PAIRS = [
    ("linear", "delayed"), ("linear", "block"), ("linear", "nvfp4"), ("linear", "none"), ("norm_linear", "mxfp8"),
    ("mlp", "delayed"), ("swiglu", "current"), ("attention", "rowwise"), ("layer", "delayed"), ("layer", "none"),
    ("dropout", "mxfp8"), ("checkpoint", "delayed"), ("moe", "delayed"), ("moe", "block"),
]  # fmt: skip


State = Mapping[Any, Tensor]


def state_of(module: nn.Module) -> dict[Any, Tensor]:
    """Parameters, buffers, gradients and main_grad, by name."""
    found: dict[Any, Any] = dict(module.named_buffers())
    for name, p in module.named_parameters():
        found |= {name: p, (name, "grad"): p.grad, (name, "main_grad"): getattr(p, "main_grad", None)}
    present = {name: each for name, each in found.items() if each is not None}
    return {
        n: t.detach().dequantize() if isinstance(t, QuantizedTensor) else t.detach().clone() for n, t in present.items()
    }


def numbered(tensors: Sequence[Tensor] | State) -> State:
    return tensors if isinstance(tensors, Mapping) else dict(enumerate(tensors))


def assert_same(found: Sequence[Tensor] | State, wanted: Sequence[Tensor] | State, what: str) -> None:
    """All of ``wanted`` is in ``found``, bit for bit."""
    by_name = numbered(found)
    wrong = [f"{name} {tuple(t.shape)}" for name, t in numbered(wanted).items() if not torch.equal(by_name[name], t)]
    assert not wrong, f"{what}: of {len(by_name)} tensors differ {', '.join(wrong)}"


def step(
    module: Callable[..., Any], x: Tensor, dy: Tensor, context: AbstractContextManager[Any], seed: int, **options: Any
) -> list[Tensor]:
    """Output and dX of one microbatch."""
    torch.manual_seed(seed)
    x = x.clone().requires_grad_()
    with context:
        y = module(x, **options)
    losses = router_losses(module) if isinstance(module, nn.Module) else 0.0
    ((y.float() * dy).sum() + losses).backward()
    assert x.grad is not None
    return [y.detach().clone(), x.grad]


def inputs(device: torch.device, size: float = 1.0) -> tuple[Tensor, Tensor]:
    x = torch.randn(32, 2, HIDDEN, device=device, dtype=BF16) * size
    return x, torch.randn(32, 2, HIDDEN, device=device, dtype=BF16)


def random_state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def sample_of(device: torch.device) -> tuple[Tensor]:
    return (inputs(device)[0].requires_grad_(),)


def on(device: torch.device) -> dict[str, Any]:
    return {"device": device, "dtype": BF16}


def context_of(recipe: Recipe | None) -> AbstractContextManager[Any]:
    return nullcontext() if recipe is None else autocast(recipe=recipe)


def twin_of(module: nn.Module) -> nn.Module:
    twin = copy.deepcopy(module)
    for mine, its in zip(module.parameters(), twin.parameters(), strict=True):
        if hasattr(mine, "main_grad"):
            its.main_grad = mine.main_grad.clone()
    return twin


@pytest.mark.parametrize(("name", "recipe_name"), PAIRS)
def test_replays_are_eager(graph_device: torch.device, name: str, recipe_name: str) -> None:
    """Five steps of two microbatches, with an update of the weights in between; then no gradients, and eval."""
    check_replays(name, recipe_of(recipe_name), graph_device)


def check_replays(name: str, recipe: Recipe | None, device: torch.device) -> None:
    check_module(MODULES[name](on(device)), recipe, device)


def check_module(module: nn.Module, recipe: Recipe | None, graph_device: torch.device) -> None:
    twin = twin_of(module)
    sample = sample_of(graph_device)
    before, random = state_of(module), random_state(graph_device)
    graphed = make_graphed_callables(module, sample, recipe=recipe)
    assert graphed is module and torch.equal(random_state(graph_device), random)
    assert_same(state_of(module), before, "a capture leaves a trace")
    for number in range(5):
        for part in range(2):
            x, dy = inputs(graph_device, number + 1.0)
            found = step(module, x, dy, context_of(recipe), number * 2 + part)
            wanted = step(twin, x, dy, context_of(recipe), number * 2 + part)
            assert_same(found, wanted, f"step {number}, microbatch {part}")
        assert_same(state_of(module), state_of(twin), f"state after step {number}")
        for each in (module, twin):
            torch.optim.SGD(each.parameters(), lr=0.01).step()
            each.zero_grad(set_to_none=number % 2 == 0)
    x, _ = inputs(graph_device)
    with torch.no_grad(), context_of(recipe):
        assert torch.equal(module.eval()(x), twin.eval()(x))


@pytest.mark.parametrize("recipe_name", ["delayed", "current"])
def test_own_recipes(graph_device: torch.device, recipe_name: str) -> None:
    """Layers with recipes of their own, inside of no autocast: each call is a region."""
    options = {"recipe": recipe_of(recipe_name), **on(graph_device)}
    check_module(nn.Sequential(Linear(HIDDEN, 96, **options), Linear(96, HIDDEN, **options)), None, graph_device)


@pytest.mark.parametrize("recipe_name", ["delayed", "current"])
def test_main_grad(graph_device: torch.device, recipe_name: str) -> None:
    """The first microbatch replaces it, others add to it; without a cache each casts the weights."""
    check_microbatches(graph_device, recipe_of(recipe_name), False)


@on_gpu
@pytest.mark.parametrize("recipe_name", ["delayed", "current", "block", "mxfp8", "nvfp4"])
def test_cached_weights(graph_device: torch.device, recipe_name: str) -> None:
    """A flag on the device skips the casts: what was cast is read, though the weight has changed."""
    check_microbatches(graph_device, recipe_of(recipe_name), True)


def test_a_fused_optimizer_makes_cached_weights_old(graph_on_cpu: None) -> None:
    """Its kernel raises no version of the parameters, and the next call casts them again all the same."""
    module = Linear(32, 32, bias=False)
    x = torch.randn(16, 32, requires_grad=True)
    make_graphed_callables(module, (x,), recipe="current", cache_quantized_params=True)
    cache = module.forward.cache  # type: ignore[attr-defined]
    skipped = []
    with autocast(recipe="current"):
        for first in (True, False, False):
            module(x, is_first_microbatch=first).sum().backward()
            skipped.append(cache.skipping)
            if len(skipped) == 2:
                torch.optim.AdamW(module.parameters(), fused=True).step()
    assert skipped == [False, True, False] and module._skip_weight_cast is None  # other calls cast


def test_a_gradient_of_x_alone_is_refused(graph_on_cpu: None) -> None:
    """A graph computes all gradients or none, and adds that of the weight to ``main_grad``."""
    module: Any = Linear(32, 32, bias=False, fuse_wgrad_accumulation=True)
    module.weight.main_grad = torch.zeros(32, 32)
    x = torch.randn(16, 32, requires_grad=True)
    make_graphed_callables(module, (x,), recipe="current")
    with autocast(recipe="current"), pytest.raises(RuntimeError, match=r"adds to main_grad.*without inputs"):
        torch.autograd.grad(module(x).sum(), x)
    assert not module.weight.main_grad.any()


def check_microbatches(device: torch.device, recipe: Recipe | None, caches: bool) -> None:
    module = LayerNormMLP(HIDDEN, 96, fuse_wgrad_accumulation=True, **on(device))
    for p in module.parameters():
        p.main_grad = torch.randn(p.shape, device=device)  # type: ignore[attr-defined]
    twin, before = twin_of(module), state_of(module)
    make_graphed_callables(module, sample_of(device), recipe=recipe, cache_quantized_params=caches)
    assert_same(state_of(module), before, "a capture leaves a trace")
    for number in range(5):
        for part in range(3):
            x, dy = inputs(device, number + 1.0)
            told = part == 0, True if part == 0 else False if caches else None
            found, wanted = (
                step(each, x, dy, context_of(recipe), number * 3 + part, is_first_microbatch=first)
                for each, first in zip((module, twin), told, strict=True)
            )
            assert_same(found, wanted, f"step {number}, microbatch {part}")
            for each in (module, twin) if caches and part == 1 else ():
                each.fc1.weight.data.copy_(each.fc1.weight.flip(0))  # behind PyTorch's back
        assert_same(state_of(module), state_of(twin), f"state after step {number}")
        with torch.no_grad():
            for p in (*module.parameters(), *twin.parameters()):
                p.mul_(0.9)


@pytest.mark.parametrize("recipe_name", ["delayed", "block"])
def test_quantized_parameters(graph_device: torch.device, recipe_name: str) -> None:
    with quantized_model_init(recipe=recipe_of(recipe_name)):
        module = LayerNormLinear(HIDDEN, HIDDEN, **on(graph_device))
    check_module(module, recipe_of(recipe_name), graph_device)


ORDER = [1, 1, 2, -2, -1, 1, 2, -2, -1, 2, -2, -1]


@pytest.mark.parametrize("recipe_name", ["delayed", "current"])
def test_pipeline_order(graph_device: torch.device, recipe_name: str) -> None:
    """Two stages and three microbatches, interleaved; the seeds of dropout are those of the calls."""
    check_pipeline(graph_device, recipe_of(recipe_name), False)


@on_gpu
@pytest.mark.parametrize("recipe_name", ["delayed", "current"])
def test_pipeline_with_cached_weights(graph_device: torch.device, recipe_name: str) -> None:
    """Later microbatches read what the first one cast."""
    check_pipeline(graph_device, recipe_of(recipe_name), True)


def check_pipeline(graph_device: torch.device, recipe: Recipe | None, caches: bool) -> None:
    stages: list[nn.Module] = [
        TransformerLayer(HIDDEN, 96, 4, hidden_dropout=0.1, attention_dropout=0.0, **on(graph_device)) for _ in range(2)
    ]
    twins = [twin_of(stage) for stage in stages]
    sample = sample_of(graph_device)
    graphed = make_graphed_callables(stages, [sample] * 2, recipe=recipe, cache_quantized_params=caches, _order=ORDER)
    for number in range(3):
        xs = [inputs(graph_device, number + 1.0) for _ in range(3)]
        found, wanted = (
            pipeline(calls, xs, recipe, number, caches) for calls in (graphed, [[twin] * 3 for twin in twins])
        )
        assert_same(found, wanted, f"step {number}")
        for stage, twin in zip(stages, twins, strict=True):
            assert_same(state_of(stage), state_of(twin), f"state after step {number}")


def pipeline(calls: Any, xs: list[Any], recipe: Recipe | None, number: int, caches: bool) -> list[Tensor]:
    done, results = {n: 0 for n in (1, 2, -1, -2)}, []
    ins: dict[Any, Tensor] = {}
    outs: dict[Any, Tensor] = {}
    for place, which in enumerate(ORDER):
        torch.manual_seed(number * 100 + place)
        stage, k = abs(which) - 1, done[which]
        done[which] += 1
        if which > 0:
            source = xs[k][0] if stage == 0 else outs[0, k]
            ins[stage, k] = source.detach().clone().requires_grad_()
            options = {"is_first_microbatch": k == 0} if caches else {}
            with context_of(recipe):
                outs[stage, k] = calls[stage][k](ins[stage, k], **options)
            results.append(outs[stage, k].detach().clone())
        else:
            grad = xs[k][1] if stage == 1 else ins[1, k].grad
            outs[stage, k].backward(grad)
            results.append(ins[stage, k].grad.clone())  # type: ignore[union-attr]
    return results


def test_two_models_and_several_modules(graph_device: torch.device) -> None:
    """Two models of other recipes, each with two graphed modules in one region, in turns."""
    pairs = []
    for name in ("delayed", "current"):
        model = nn.Sequential(*(LayerNormLinear(HIDDEN, HIDDEN, **on(graph_device)) for _ in range(2)))
        twin = copy.deepcopy(model)
        sample = sample_of(graph_device)
        make_graphed_callables(tuple(model), [sample] * 2, recipe=recipe_of(name))
        pairs.append((recipe_of(name), model, twin))
    for number in range(4):
        for recipe, model, twin in pairs:
            x, dy = inputs(graph_device, number + 1.0)
            found, wanted = (step(each, x, dy, context_of(recipe), number) for each in (model, twin))
            assert_same(found, wanted, f"step {number}")
            assert_same(state_of(model), state_of(twin), f"state after step {number}")


def test_grouped(graph_device: torch.device) -> None:
    """Counts are an input like others."""
    module = GroupedMLP(4, HIDDEN, 96, **on(graph_device))
    twin = copy.deepcopy(module)
    counts = torch.tensor([16, 16, 16, 16], device=graph_device)
    x, dy = (each.view(64, HIDDEN) for each in inputs(graph_device))
    make_graphed_callables(module, (x.clone().requires_grad_(), counts), recipe="current")
    for own in ((64, 0, 0, 0), (1, 30, 0, 33)):
        results = []
        for each in (module, twin):
            leaf = x.clone().requires_grad_()
            with autocast(recipe="current"):
                y = each(leaf, torch.tensor(own, device=graph_device))
            (y.float() * dy).sum().backward()
            results.append([y.detach().clone(), leaf.grad])
        assert_same(results[0], results[1], f"{own}")
        assert_same(state_of(module), state_of(twin), f"state after {own}")


def test_torch_autocast(graph_device: torch.device) -> None:
    module = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), Linear(HIDDEN, HIDDEN, recipe="current")).to(graph_device)
    twin = copy.deepcopy(module)
    x, dy = (each.float() for each in inputs(graph_device))
    with torch.autocast(graph_device.type, dtype=BF16):
        make_graphed_callables(module, (x.clone().requires_grad_(),))
    for number in range(3):
        found, wanted = (
            step(each, x, dy, torch.autocast(graph_device.type, dtype=BF16), number) for each in (module, twin)
        )
        assert_same(found, wanted, f"step {number}")
        for each in (module, twin):
            torch.optim.SGD(each.parameters(), lr=0.1).step()
    with pytest.raises(ValueError, match="captured under"):
        module(x)


class Microbatches(nn.Sequential):
    """All layers are told which microbatch is the first."""

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        for layer in self:
            x = layer(x, is_first_microbatch=is_first_microbatch)
        return x


def test_weights_that_torch_autocast_has_cast(graph_device: torch.device) -> None:
    """Around captures and steps it keeps them, as of before an update; a replay casts them all the same."""
    module = nn.Linear(HIDDEN, HIDDEN, device=graph_device)
    twin, (x, dy) = copy.deepcopy(module), (each.float() for each in inputs(graph_device))
    with torch.autocast(graph_device.type, dtype=BF16):
        module(x)
        make_graphed_callables(module, (x.clone().requires_grad_(),))
        for number in range(3):
            found = step(module, x, dy, nullcontext(), number)
            wanted = step(twin, x, dy, torch.autocast(graph_device.type, dtype=BF16, cache_enabled=False), number)
            assert_same(found, wanted, f"step {number}")
            for each in (module, twin):
                torch.optim.SGD(each.parameters(), lr=0.1).step()


@pytest.mark.parametrize("noted", [True, False])
@pytest.mark.parametrize("caches", [True, False])
def test_a_capture_leaves_no_trace(caches: bool, noted: bool, graph_device: torch.device) -> None:
    """Of what a step has noted before on parameters and modules: the same objects, or none; nor in ``main_grad``.

    A router's loss is let go of its autograd graph.
    """
    fused = {"fuse_wgrad_accumulation": True, **on(graph_device)}
    first = LayerNormMLP(HIDDEN, 96, **fused) if caches else MoE(HIDDEN, 96, 4, aux_loss_coefficient=0.01, **fused)
    module = Microbatches(first, Linear(HIDDEN, HIDDEN, **fused))
    for p in module.parameters():
        p.main_grad = torch.ones(p.shape, dtype=p.dtype if p.dim() < 2 else torch.float32, device=graph_device)  # type: ignore[attr-defined]
    if not caches:
        module[1].weight.requires_grad_(False)
        del module[1].weight.main_grad  # which it needs not have
    if noted:
        with autocast(recipe="current"):
            module(inputs(graph_device)[0], True).sum().backward()
    kept = "expert_counts", "_weight_cache", "_skip_weight_cast"
    loss = None if caches or not noted else float(first.router_loss.detach())

    def attributes() -> dict[Any, Any]:
        noted = {(part, name): vars(part)[name] for part in module.modules() for name in kept if name in vars(part)}
        return noted | {(p, name): each for p in module.parameters() for name, each in vars(p).items()}

    before, values = attributes(), state_of(module)
    make_graphed_callables(module, sample_of(graph_device), recipe="current", cache_quantized_params=caches)
    assert attributes().keys() == before.keys()
    assert [key for key, each in attributes().items() if each is not before[key]] == []
    assert_same(state_of(module), values, "a capture leaves a trace")
    if not caches:
        assert (first.router_loss if loss is None else float(first.router_loss)) == loss
        assert loss is None or not first.router_loss.requires_grad


def test_a_history_that_the_capture_makes_longer(graph_device: torch.device) -> None:
    """What warm-ups recorded is nowhere in it, nor in the rows that are new."""
    module = Linear(HIDDEN, HIDDEN, **on(graph_device))
    step(module, *inputs(graph_device), autocast(recipe=DelayedScaling(amax_history_len=2)), 0)
    before = state_of(module)
    make_graphed_callables(module, sample_of(graph_device), recipe=DelayedScaling(amax_history_len=6))
    for name, found in state_of(module).items():
        wanted = before[name]
        if "amax_history" in name:  # the newest step is in the last row
            wanted = torch.cat([wanted[:1], torch.zeros_like(found)[:4], wanted[1:]])
        assert torch.equal(found, wanted), name


def test_a_result_that_is_held(graph_device: torch.device) -> None:
    """Its graph would draw the stream of its step into the capture."""
    module = Linear(HIDDEN, HIDDEN, **on(graph_device))
    sample = sample_of(graph_device)
    held = module(*sample)
    with pytest.raises(RuntimeError, match=r"Linear.*holds the graph of weight.*del output"):
        make_graphed_callables(module, sample)
    del held
    make_graphed_callables(module, sample)


def test_grouped_linear_refuses_a_cache(graph_device: torch.device) -> None:
    module = GroupedLinear(2, HIDDEN, HIDDEN, **on(graph_device))
    sample = inputs(graph_device)[0].view(64, HIDDEN), torch.tensor([32, 32], device=graph_device)
    with pytest.raises(ValueError, match="not for grouped linears"):
        make_graphed_callables(module, sample, recipe="current", cache_quantized_params=True)


class Fails(nn.Module):
    """Its forward raises after ``good`` calls."""

    def __init__(self, device: torch.device, good: int) -> None:
        super().__init__()
        self.linear, self.good = Linear(HIDDEN, HIDDEN, **on(device)), good

    def forward(self, x: Tensor) -> Tensor:
        self.good -= 1
        y: Tensor = self.linear(x)
        return y if self.good >= 0 else self.fail(y)

    def fail(self, y: Tensor) -> Tensor:
        raise ArithmeticError("as it was told")


class Waits(Fails):
    """In place of that it waits for the GPU."""

    def fail(self, y: Tensor) -> Tensor:
        return y * float(y.sum())


def check_failure(module: Fails, device: torch.device, error: type[Exception]) -> None:
    sample = sample_of(device)
    before, random = state_of(module), random_state(device)
    with pytest.raises(error):
        make_graphed_callables(module, sample, recipe="delayed")
    assert torch.equal(random_state(device), random)
    assert_same(state_of(module), before, "a failed capture leaves a trace")
    torch.randn(4, device=device).sum().item()
    check_replays("dropout", recipe_of("delayed"), device)


@pytest.mark.parametrize("good", [1, 3])
def test_an_exception_leaves_the_process_usable(graph_device: torch.device, good: int) -> None:
    """In the warm-up or in the capture."""
    check_failure(Fails(graph_device, good), graph_device, ArithmeticError)


@on_gpu
def test_garbage_with_graphs_waits_for_the_end_of_a_capture(graph_device: torch.device) -> None:
    old = make_graphed_callables(Linear(HIDDEN, HIDDEN, **on(graph_device)), sample_of(graph_device))
    old.itself = [old]
    thresholds = gc.get_threshold()
    gc.disable()
    del old
    try:
        gc.set_threshold(1)
        gc.enable()
        check_replays("linear", recipe_of("current"), graph_device)
    finally:
        gc.set_threshold(*thresholds)


class Recomputes(nn.Module):
    """A part with dropout, which backward recomputes."""

    def __init__(self, device: torch.device, dropout: float, **options: Any) -> None:
        super().__init__()
        self.linear, self.dropout, self.options = Linear(HIDDEN, HIDDEN, **on(device)), dropout, options

    def part(self, x: Tensor) -> Tensor:
        return F.dropout(self.linear(x), self.dropout, self.training)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.part, x, **self.options)
        return y


@on_gpu
def test_a_checkpoint_that_draws_again_is_refused(graph_device: torch.device) -> None:
    """Unless the caller says that nothing is drawn."""
    with pytest.raises(RuntimeError, match="draws other random numbers in the recomputation"):
        make_graphed_callables(Recomputes(graph_device, 0.5), sample_of(graph_device), recipe="delayed")
    check_module(Recomputes(graph_device, 0.0, preserve_rng_state=False), recipe_of("delayed"), graph_device)


@on_gpu
def test_a_wait_in_a_capture_leaves_the_process_usable(graph_device: torch.device) -> None:
    """PyTorch's error of what no graph can hold."""
    stream = torch.cuda.current_stream()
    check_failure(Waits(graph_device, 3), graph_device, RuntimeError)
    assert torch.cuda.current_stream() == stream


def test_wrong_orders_raise(graph_device: torch.device) -> None:
    """What a graph has overwritten is not read."""
    module = Linear(HIDDEN, HIDDEN, **on(graph_device))
    make_graphed_callables(module, sample_of(graph_device), recipe="current")
    x, dy = inputs(graph_device)
    with autocast(recipe="current"):
        first, _ = module(x), module(x)
    with pytest.raises(RuntimeError, match="another graph has run"):
        first.backward(dy)
    with pytest.raises(ValueError, match="captured under Float8CurrentScaling"), autocast(recipe="mxfp8"):
        module(x)
    with pytest.raises(ValueError, match="argument 0 was"):
        module(x[:4])
    module.weight.data = module.weight.data.clone()
    with pytest.raises(RuntimeError, match="weight is in other memory"):
        module(x)
