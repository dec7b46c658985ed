"""``Linear`` under every recipe: its numbers, what it computes and keeps, its state, and its answers to bad input.

Numbers are held to a float64 model of the same quantization: operands are cast anew, decoded by the oracle
(``tests.helpers.linear_model``) and multiplied in float64.
"""

from __future__ import annotations

import copy
import pickle
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from minifloat.autocast import autocast
from minifloat.convert import convert
from minifloat.formats import COLUMNWISE, ROWWISE
from minifloat.functional.gemm import wgrad
from minifloat.functional.quantize import LinearConfig, linear_config
from minifloat.nn import LayerNormMLP, Linear, prepare
from minifloat.operand import Operand
from minifloat.ops.matmul import count_gemms
from minifloat.optim import MasterWeights
from minifloat.recipe import CustomRecipe, DelayedScaling, DelayedScalingRequest, Recipe, named
from minifloat.recompute import checkpoint
from minifloat.tensor import QuantizedTensor
from tests.helpers import linear_model as model
from tests.helpers.count_casts import CountCasts
from tests.helpers.linear_model import as_is, gemm_model, operands_of
from tests.helpers.memory import Storages, blocks_in, operand_bytes
from tests.helpers.recipes import (
    DELAYED,
    LINEAR_NAMED,
    LINEAR_RECIPES,
    SOME_LINEAR,
    SOME_STATELESS,
    for_each,
    stochastic,
)
from tests.helpers.sample import each_once, each_pair, each_twice

pytestmark = pytest.mark.usefixtures("one_thread")

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


# ---- One step, and its model ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """Sizes, dtype of the input and options of one call."""

    lead: tuple[int, ...] = (2, 5)
    K: int = 37
    N: int = 53
    dtype: torch.dtype = BF16
    bias: bool = True
    torch_autocast: bool = False

    @property
    def compute_dtype(self) -> torch.dtype:
        return BF16 if self.torch_autocast else self.dtype

    def layer(self, **kwargs: Any) -> Linear:
        return Linear(self.K, self.N, self.bias, **kwargs)

    def context(self, recipe: Recipe) -> Any:
        return autocast(recipe=recipe)


CASES = {
    "ragged": Case(),
    "long": Case((3, 45), 140, 132, FP32),
    "aligned": Case((128,), 128, 64, BF16, bias=False),
    "one row": Case((1,), 40, 24, FP16),
    "vector": Case((), 33, 17, FP16, bias=False),
    "empty": Case((0,)),
    "autocast": Case((5, 3, 2), 48, 40, FP32, torch_autocast=True),
}


class Step(NamedTuple):
    """What a forward and a backward gave."""

    y: Tensor
    dx: Tensor | None
    dw: Tensor | None
    db: Tensor | None


def step(
    layer: Linear, x: Tensor, dy: Tensor, recipe: Recipe, torch_autocast: bool = False, seed: int = 1,
    zero_grad: bool = True, **kwargs: Any,
) -> Step:  # fmt: skip
    """One forward and backward under ``recipe``; with ``zero_grad`` gradients of earlier ones are dropped."""
    if zero_grad:
        layer.zero_grad()
    x = x.detach().requires_grad_()
    with autocast(recipe=recipe), torch.autocast("cpu", BF16) if torch_autocast else nullcontext():
        y = layer(x, **kwargs)
    torch.manual_seed(seed)
    y.backward(dy)
    return Step(y.detach(), x.grad, layer.weight.grad, None if layer.bias is None else layer.bias.grad)


def scales_of(layer: Linear, plan: LinearConfig) -> dict[str, Tensor]:
    """Delayed scaling's scales as they are now, by role; empty for other recipes."""
    if plan.delayed is None:
        return {}
    forward, backward = layer.forward_scaling.scale.clone(), layer.backward_scaling.scale.clone()
    return {"input": forward[:1], "weight": forward[1:2], "grad_output": backward[:1]}


class Expected(NamedTuple):
    """Float64 results of a step."""

    y: model.Product
    dx: model.Product
    dw: model.Product
    db: model.Product


def expect(
    layer: Linear,
    plan: LinearConfig,
    x: Tensor,
    dy: Tensor,
    scales: dict[str, Tensor],
    dtype: torch.dtype,
    seed: int = 1,
) -> Expected:
    """The model of a step: the same casts, exact products. ``x`` and ``dy`` are in the dtype that is computed in."""
    x, dy, w = x.reshape(-1, layer.in_features), dy.reshape(-1, layer.out_features), layer.weight.detach()
    xq = operands_of(x, plan.input, scales.get("input"))
    wq = operands_of(w, plan.weight, scales.get("weight"))
    torch.manual_seed(seed)
    dyq = operands_of(dy, plan.grad_output, scales.get("grad_output"))
    if plan.backward_override is not None:
        dyq = as_is(dy)
        source = (as_is(x), as_is(w)) if plan.backward_override == "high_precision" else (xq, wq)
        xb, wb = (as_is(v.along(ROWWISE).dequantize()) for v in source)
    else:
        xb, wb = xq, wq
    bias = None if layer.bias is None else layer.bias.detach().to(dtype).double().numpy()
    return Expected(
        gemm_model(xq, wq, (ROWWISE, ROWWISE), dtype, bias),
        gemm_model(dyq, wb, (ROWWISE, COLUMNWISE), dtype),
        gemm_model(dyq, xb, (COLUMNWISE, COLUMNWISE), dtype),
        model.product(dy.double().numpy().T, np.ones((1, len(dy)))),
    )


def assert_step(result: Step, expected: Expected, dtype: torch.dtype, rounds: int = 1) -> None:
    """Output and gradients are within fp32 accumulation, and ``rounds`` roundings to ``dtype``, of the model."""
    for name, found, product in zip(Step._fields, result, expected, strict=True):
        if found is None:
            assert name == "db"
            continue
        limit = model.bound(product, dtype) + (rounds - 1) * model.rounding(product.magnitude, dtype)
        model.assert_within(found.reshape(product.exact.shape), product, limit, name)


def batch(case: Case, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """A random input and output gradient."""
    x, dy = torch.randn(*case.lead, case.K) * scale, torch.randn(*case.lead, case.N) * scale
    return x.to(case.dtype), dy.to(case.compute_dtype)


GRADIENTS = [
    pytest.param(case, recipe, id=f"{size}-{name}")
    for name, recipe in LINEAR_RECIPES.items()
    for size, case in CASES.items()
    if name in LINEAR_NAMED or size in (("ragged", "long", "autocast") if name in SOME_LINEAR else ("ragged", "long"))
]


@pytest.mark.parametrize(("case", "recipe"), GRADIENTS)
def test_gradients(case: Case, recipe: Recipe) -> None:
    """Y, dX, dW and db are those of the float64 model, within the bound of an fp32 accumulation and one rounding.

    Three steps, so that delayed scaling has scales of its own. A product beside a high-precision operand is PyTorch's,
    which may round its bias on the way.
    """
    layer = case.layer()
    plan = layer._config(recipe)
    for scale in (1.0, 4.0, 0.25) if plan.delayed is not None else (1.0,):
        x, dy = batch(case, scale)
        scales = scales_of(layer, plan)
        result = step(layer, x, dy, recipe, case.torch_autocast)
        expected = expect(layer, plan, x.to(case.compute_dtype), dy, scales, case.compute_dtype)
        assert_step(result, expected, case.compute_dtype, rounds=1 if plan.weight.row_format.quantized else 2)
        assert result.y.dtype == case.compute_dtype and result.y.shape == (*case.lead, case.N)
        assert result.dx is not None and result.dx.dtype == case.dtype and result.dx.shape == x.shape
        assert result.dw is not None and result.dw.dtype == FP32


@each_once
@for_each({name: recipe for name, recipe in SOME_STATELESS.items() if not name.startswith("custom")})
@pytest.mark.parametrize("override", ["high_precision", "dequantized"])
@pytest.mark.parametrize("case", [CASES["ragged"], CASES["long"]], ids=["ragged", "long"])
def test_backward_override(case: Case, override: Any, recipe: Recipe) -> None:
    """The forward is quantized; the backward computes on what came, or on what the rowwise operands stand for."""
    recipe = replace(recipe, backward_override=override)  # type: ignore[type-var]
    layer = case.layer()
    x, dy = batch(case)
    with count_gemms() as counts:
        result = step(layer, x, dy, recipe)
    assert {gemm.gemm for gemm in counts if gemm.a == gemm.b == "identity"} == {"dgrad", "wgrad"}
    assert_step(result, expect(layer, layer._config(recipe), x, dy, {}, case.dtype), case.dtype)


# ---- What is computed -----------------------------------------------------------------------------------------------


def kinds(counts: Counter[Any]) -> Counter[str]:
    """How often each of the three GEMMs ran."""
    found: Counter[str] = Counter()
    for gemm, number in counts.items():
        found[gemm.gemm] += number
    return found


@each_twice
@for_each(LINEAR_NAMED | {"block 1d": LINEAR_RECIPES["block 1d"]})
@pytest.mark.parametrize("needs", ["x w b", "x w", "x b", "w b", "x", "w", "b", "none"])
def test_only_what_gradients_need_runs(needs: str, recipe: Recipe) -> None:
    wanted = set(needs.split())
    layer, x, dy = Linear(48, 40), torch.randn(32, 48), torch.randn(32, 40)
    full = copy.deepcopy(layer)
    reference = step(full, x, dy, recipe)
    plan = layer._config(recipe)
    layer.weight.requires_grad_("w" in wanted)
    layer.bias.requires_grad_("b" in wanted)
    x.requires_grad_("x" in wanted)
    with count_gemms() as counts, CountCasts() as casts, autocast(recipe=recipe):
        y = layer(x)
        assert y.requires_grad == bool(wanted - {"none"})
        if y.requires_grad:
            torch.manual_seed(1)
            y.backward(dy)
    expected = Counter({"fprop": 1, "dgrad": "x" in wanted, "wgrad": "w" in wanted})
    assert kinds(counts) == +expected
    usages = [
        (plan.input, True, "w" in wanted), (plan.weight, True, "x" in wanted),
        (plan.grad_output, "x" in wanted, "w" in wanted),
    ]  # fmt: skip
    needed = Counter(
        (fmt.spec, dim) for q, row, column in usages for fmt, dim in q.with_usage(rowwise=row, columnwise=column).casts
    )
    assert casts.formats == needed
    assert torch.equal(y, reference.y)
    for name, found, whole in [("x", x.grad, reference.dx), ("w", layer.weight.grad, reference.dw)]:
        assert (found is None) == (name not in wanted)
        assert found is None or torch.equal(found, whole)  # type: ignore[arg-type]
    assert (layer.bias.grad is None) == ("b" not in wanted)


@for_each(SOME_LINEAR)
def test_save_original_input(recipe: Recipe) -> None:
    """Keeping the input and casting it again in backward changes no bit, nor what delayed scaling records."""
    plain = Linear(37, 53)
    saving = Linear(37, 53, save_original_input=True)
    saving.load_state_dict(plain.state_dict())
    for scale in (1.0, 8.0, 0.5):
        x, dy = torch.randn(20, 37, dtype=BF16) * scale, torch.randn(20, 53, dtype=BF16) * scale
        for a, b in zip(step(plain, x, dy, recipe), step(saving, x, dy, recipe), strict=True):
            assert a is not None and b is not None and torch.equal(a, b)
        assert plain.state_dict().keys() == saving.state_dict().keys()
        assert all(torch.equal(saving.state_dict()[key], value) for key, value in plain.state_dict().items())


# ---- Weight gradients that go elsewhere -----------------------------------------------------------------------------


def fp32_wgrad(layer: Linear, x: Tensor, dy: Tensor, recipe: Recipe, seed: int = 1) -> Tensor:
    """dW of one microbatch in fp32."""
    plan = linear_config(recipe)
    xq = operands_of(x, plan.input, torch.ones(1))
    torch.manual_seed(seed)
    dyq = operands_of(dy, plan.grad_output, torch.ones(1))
    return wgrad(dyq, xq, out_dtype=FP32, fast_accum=plan.fast_wgrad)


@each_once
@for_each(SOME_STATELESS)
@pytest.mark.parametrize("first", [True, None], ids=["overwrite", "add"])
def test_fused_accumulation(first: bool | None, recipe: Recipe) -> None:
    """Microbatches add up in fp32 in ``main_grad``, which the first may overwrite; autograd gets no gradient."""
    layer = Linear(37, 53, fuse_wgrad_accumulation=True, dtype=BF16 if first else FP32)
    weight: Any = layer.weight
    weight.main_grad = torch.full((53, 37), float("nan") if first else 2.0)
    total = torch.zeros(53, 37) if first else torch.full((53, 37), 2.0)
    for index in range(3):
        x, dy = torch.randn(20, 37, dtype=BF16), torch.randn(20, 53, dtype=BF16)
        with autocast(recipe=recipe):
            y = layer(x, is_first_microbatch=None if first is None else index == 0)
        torch.manual_seed(1)
        y.backward(dy)
        total = total + fp32_wgrad(layer, x, dy, recipe)
        assert weight.grad is None and weight.grad_added_to_main_grad is True
        assert torch.equal(weight.main_grad, total)


@each_once
@for_each(SOME_STATELESS)
@pytest.mark.parametrize("split", [None, {"query": 20, "key": 33}], ids=["whole", "split"])
def test_wgrad_in_weight_dtype(split: Any, recipe: Recipe) -> None:
    layer, total = Linear(37, 53, parameters_split=split), torch.zeros(53, 37)
    layer.wgrad_in_weight_dtype = True
    for _ in range(2):
        x, dy = torch.randn(20, 37, dtype=BF16), torch.randn(20, 53, dtype=BF16)
        with autocast(recipe=recipe):
            y = layer(x)
        torch.manual_seed(1)
        y.backward(dy)
        total = total + fp32_wgrad(layer, x, dy, recipe)
    grads = [each.grad for name, each in layer.named_parameters() if name.endswith("weight")]
    assert torch.equal(torch.cat([each for each in grads if each is not None]), total)


@pytest.mark.parametrize("compiled", [False, True])
def test_wgrad_in_weight_dtype_without_a_recipe(compiled: bool) -> None:
    """The same under ``torch.autocast``: values of bf16, a product of fp32."""
    layer = Linear(37, 53)
    layer.wgrad_in_weight_dtype = True
    x, dy = torch.randn(20, 37, dtype=BF16, requires_grad=True), torch.randn(20, 53, dtype=BF16)
    with torch.autocast("cpu", torch.bfloat16):
        y = (torch.compile(layer, backend="aot_eager", fullgraph=True) if compiled else layer)(x)
    y.backward(dy)
    assert layer.weight.grad is not None and x.grad is not None
    assert torch.equal(layer.weight.grad, dy.float().t() @ x.detach().float())
    assert torch.equal(x.grad, dy @ layer.weight.detach().bfloat16())


def checkpointed(use_reentrant: bool, *args: Any) -> Tensor:
    y: Tensor = torch_checkpoint(*args, use_reentrant=use_reentrant)
    return y


RUNS = {
    "plain": lambda layer, *args: layer(*args),
    "checkpoint": lambda *args: checkpointed(False, *args),
    "reentrant": lambda *args: checkpointed(True, *args),
}


@each_pair
@pytest.mark.parametrize("delay", [False, True], ids=["now", "later"])
@pytest.mark.parametrize("tied", [False, True], ids=["one layer", "tied weight"])
@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS.keys())
def test_fused_accumulation_of_a_weight_used_twice(run: Any, tied: bool, delay: bool) -> None:
    """The first microbatch of each step replaces what is in ``main_grad`` once: both uses add up."""
    plain, options = Linear(32, 32, recipe="current"), {"fuse_wgrad_accumulation": True, "delay_wgrad_compute": delay}
    layer = Linear(32, 32, recipe="current", **options)  # type: ignore[arg-type]
    layer.load_state_dict(plain.state_dict())
    again = Linear(32, 32, recipe="current", **options) if tied else layer  # type: ignore[arg-type]
    again.weight, again.bias = layer.weight, layer.bias
    weight: Any = layer.weight
    weight.main_grad = torch.full((32, 32), float("nan"))
    for _ in range(2):
        total = torch.zeros(32, 32)
        for first in (True, False):
            x, dy = torch.randn(20, 32, requires_grad=True), torch.randn(20, 32)
            plain(plain(x)).backward(dy)
            run(again, run(layer, x, first), first).backward(dy)
            assert plain.weight.grad is not None
            total += plain.weight.grad
            plain.zero_grad()
            for waiting in [again, layer] if delay else []:
                waiting.backward_dw()
            torch.testing.assert_close(weight.main_grad, total)


def test_fused_accumulation_on_request() -> None:
    """``overwrite_main_grad`` replaces, ``zero_out_wgrad`` gives autograd zeros, so that the parameter's hooks run."""
    layer = Linear(37, 53, fuse_wgrad_accumulation=True, recipe="current")
    weight: Any = layer.weight
    weight.main_grad, weight.overwrite_main_grad, weight.zero_out_wgrad = torch.ones(53, 37), True, True
    calls: list[int] = []
    weight.register_post_accumulate_grad_hook(lambda _: calls.append(1))
    x, dy = torch.randn(20, 37), torch.randn(20, 53)
    layer(x).backward(dy)
    assert torch.equal(weight.main_grad, fp32_wgrad(layer, x, dy, named("current")))
    assert torch.equal(weight.grad, torch.zeros(53, 37)) and calls == [1]


def test_fused_accumulation_needs_a_buffer() -> None:
    """Without ``main_grad`` forward raises, naming the layer; where no gradient is needed it does not."""
    layer = Linear(37, 53, fuse_wgrad_accumulation=True, recipe="current", name="fc1")
    with pytest.raises(ValueError, match=r"fc1.*main_grad"):
        layer(torch.randn(2, 37))
    with torch.no_grad():
        layer(torch.randn(2, 37))


@each_once
@for_each(LINEAR_NAMED)
@pytest.mark.parametrize("fuse", [False, True], ids=["grad", "main_grad"])
def test_delayed_weight_gradient(fuse: bool, recipe: Recipe) -> None:
    """``backward_dw`` computes the oldest waiting dW: the bits of an immediate one, hooks after each."""
    immediate = Linear(37, 53)
    layer = Linear(37, 53, delay_wgrad_compute=True, fuse_wgrad_accumulation=fuse)
    layer.load_state_dict(immediate.state_dict())
    weight: Any = layer.weight
    weight.main_grad = torch.zeros(53, 37)
    hooks: list[int] = []
    layer.register_wgrad_accumulation_and_reduce_hooks(lambda: hooks.append(1))
    layer.register_wgrad_accumulation_and_reduce_hooks(lambda: hooks.append(2))
    expected = []
    for _ in range(2):
        x, dy = torch.randn(20, 37), torch.randn(20, 53)
        layer.bias.grad = None  # that of the weight is to wait
        now, later = step(immediate, x, dy, recipe), step(layer, x, dy, recipe, zero_grad=False)
        expected.append(now.dw)
        assert later.dw is None and not hooks
        assert later.db is not None and now.db is not None and torch.equal(later.db, now.db)
        assert later.dx is not None and now.dx is not None and torch.equal(later.dx, now.dx)
    for count, total in ((1, expected[0]), (2, expected[0] + expected[1])):  # type: ignore[operator]
        with count_gemms() as counts:
            layer.backward_dw()
        assert kinds(counts) == Counter(wgrad=1) and hooks == [1, 2] * count
        assert torch.equal(weight.main_grad if fuse else weight.grad, total)
    assert not fuse or weight.grad is None
    with pytest.raises(ValueError, match="no weight gradient is waiting"):
        layer.backward_dw()
    assert hooks == [1, 2] * 2


def test_delayed_weight_gradient_has_the_dtype_of_the_weight() -> None:
    """Of bf16 activations, as autograd would give it, the first one and their sum."""
    immediate = Linear(37, 53, recipe="current")
    layer = Linear(37, 53, recipe="current", delay_wgrad_compute=True)
    layer.load_state_dict(immediate.state_dict())
    for _ in range(2):
        x, dy = torch.randn(20, 37, dtype=BF16), torch.randn(20, 53, dtype=BF16)
        immediate(x).backward(dy)
        layer(x).backward(dy)
        layer.backward_dw()
        assert layer.weight.grad is not None and immediate.weight.grad is not None
        assert layer.weight.grad.dtype == FP32 and torch.equal(layer.weight.grad, immediate.weight.grad)


@pytest.mark.parametrize("recipe", [None, "current"])
@pytest.mark.parametrize("fuse", [False, True], ids=["grad", "main_grad"])
def test_delayed_weight_gradients_have_no_graph(fuse: bool, recipe: str | None) -> None:
    """Though what is multiplied has one; and nothing keeps the input alive any more."""
    layer = Linear(37, 53, recipe=recipe, delay_wgrad_compute=True, fuse_wgrad_accumulation=fuse)
    weight: Any = layer.weight
    weight.main_grad = torch.zeros(53, 37)
    for _ in range(2):
        x = torch.randn(20, 37, requires_grad=True) * 2
        layer(x).square().sum().backward()
        layer.backward_dw()
        grad = weight.main_grad if fuse else weight.grad
        assert grad.grad_fn is None and not grad.requires_grad
        alive = weakref.ref(x)
        del x
        assert alive() is None
    torch.nn.utils.clip_grad_norm_([weight], 1.0)
    layer.zero_grad(set_to_none=False)


@pytest.mark.parametrize("fuse", [False, True], ids=["grad", "main_grad"])
def test_waiting_weight_gradients_are_freed_with_their_layer(fuse: bool) -> None:
    """At once, with the operands that they would multiply: no cycle waits for the garbage collector."""
    layer = Linear(37, 53, recipe="current", delay_wgrad_compute=True, fuse_wgrad_accumulation=fuse)
    weight: Any = layer.weight
    weight.main_grad = torch.zeros(53, 37)
    layer(torch.randn(20, 37)).sum().backward()
    waiting = weakref.ref(layer._wgrad_tasks[0])
    del layer, weight
    assert waiting() is None


GIVE_UP: dict[str, Callable[[nn.Module], object]] = {
    "zero_grad": lambda model: model.zero_grad(),
    "zero_grad of the optimizer": lambda model: MasterWeights(model.parameters(), torch.optim.SGD, lr=1.0).zero_grad(),
    "first microbatch": lambda model: None,
}


@each_pair
@pytest.mark.parametrize("fuse", [False, True], ids=["grad", "main_grad"])
@pytest.mark.parametrize("make", [partial(Linear, 16, 8), partial(LayerNormMLP, 16, 24)], ids=["Linear", "MLP"])
@pytest.mark.parametrize("how", GIVE_UP)
def test_delayed_weight_gradients_of_a_step_given_up(how: str, make: Any, fuse: bool) -> None:
    """The next step's are its own, of each of its microbatches."""
    options = {"recipe": "current", "delay_wgrad_compute": True, "fuse_wgrad_accumulation": fuse}
    layer = make(**options)
    twin = copy.deepcopy(layer)
    for p in (*layer.parameters(), *twin.parameters()):
        p.main_grad = torch.zeros_like(p)
    first = [True, False] if how == "first microbatch" else [None, None]
    for _ in range(2):
        layer(torch.randn(20, 16), is_first_microbatch=first[0]).square().sum().backward()
    GIVE_UP[how](layer)
    for each in first:
        x = torch.randn(20, 16)
        for module in (layer, twin):
            module(x, is_first_microbatch=each).square().sum().backward()
    for module in (layer, twin):
        module.backward_dw()
        module.backward_dw()
    for name, p in layer.named_parameters():
        own = twin.get_parameter(name)
        if name.endswith("weight") and "norm" not in name:
            assert torch.equal(p.main_grad, own.main_grad) and (fuse or torch.equal(p.grad, own.grad))
    with pytest.raises(ValueError, match="no weight gradient is waiting"):
        layer.backward_dw()


@pytest.mark.parametrize("recipe", [None, "delayed"])
def test_delayed_weight_gradients_of_a_backward_that_raises(recipe: str | None) -> None:
    """They are dropped with it, and none of the next backward."""
    layer = Linear(16, 16, recipe=recipe, delay_wgrad_compute=True)
    layer(torch.randn(20, 16)).sum().backward()
    x = torch.randn(20, 16, requires_grad=True) * 1
    x.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        layer(x).sum().backward()
    layer.backward_dw()
    with pytest.raises(ValueError, match="no weight gradient is waiting"):
        layer.backward_dw()


def test_a_recomputation_is_no_first_microbatch() -> None:
    """The weight gradients that wait belong to its own step."""
    layer = Linear(16, 8, recipe="current", delay_wgrad_compute=True)
    first = checkpoint(layer, torch.randn(4, 16, requires_grad=True), True, use_reentrant=False)
    layer(torch.randn(4, 16), False).sum().backward()
    first.sum().backward()
    layer.backward_dw()
    layer.backward_dw()


@pytest.mark.parametrize(
    "make", [torch.optim.SGD, torch.optim.AdamW, partial(MasterWeights, optimizer_class=torch.optim.SGD)]
)
def test_no_optimizer_steps_while_a_weight_gradient_waits(make: Any) -> None:
    """It would miss it, or step with that of a step given up; of other parameters it steps."""
    layer, other = Linear(16, 8, name="fc1", delay_wgrad_compute=True, recipe="current"), nn.Linear(4, 4)
    optimizer, before = make(layer.parameters(), lr=1.0), layer.weight.detach().clone()
    for _ in range(2):
        layer(torch.randn(4, 16)).sum().backward()
    layer.backward_dw()
    with pytest.raises(ValueError, match=r"Linear 'fc1': an optimizer steps.*\(1\).*zero_grad"):
        optimizer.step()
    assert torch.equal(layer.weight, before)
    other(torch.randn(4, 4)).sum().backward()
    make(other.parameters(), lr=1.0).step()
    layer.backward_dw()
    optimizer.step()
    assert not torch.equal(layer.weight, before)


def test_backward_dw_of_a_layer_that_does_not_delay() -> None:
    with pytest.raises(ValueError, match=r"Linear\(4, 6\).*delay_wgrad_compute=True"):
        Linear(4, 6).backward_dw()


# ---- Microbatches ---------------------------------------------------------------------------------------------------


def weight_casts(layer: Linear, recipe: Recipe, first: bool | None) -> tuple[int, Tensor]:
    """Casts of the weight in one step, and its output. The input is not counted: its gradient is not wanted here."""
    x = torch.ones(8, layer.in_features).requires_grad_()
    plan = layer._config(recipe)
    specs = {fmt.spec for fmt, _ in plan.weight.casts}
    with CountCasts() as casts, autocast(recipe=recipe):
        y = layer(x, is_first_microbatch=first)
    inputs = Counter((fmt.spec, dim) for fmt, dim in plan.input.casts)
    casts.formats.subtract(inputs)
    return sum(number for (spec, _), number in casts.formats.items() if spec in specs), y.detach()


@for_each(LINEAR_NAMED)
def test_microbatches(recipe: Recipe) -> None:
    """True casts the weight, False reuses it so long as the parameter is the same, None casts and keeps nothing."""
    layer = Linear(48, 40)
    casts = len(layer._config(recipe).weight.casts)

    def run(first: bool | None) -> tuple[int, Tensor]:
        return weight_casts(layer, recipe, first)

    assert run(None)[0] == casts and layer._weight_cache is None
    assert run(False)[0] == casts  # nothing is kept yet
    assert [run(first)[0] for first in (True, False, False, True)] == [casts, 0, 0, casts]
    assert run(None)[0] == casts  # does not use what is kept
    assert run(False)[0] == 0  # nor replace it
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    layer.weight.grad = torch.ones_like(layer.weight)
    optimizer.step()
    assert run(False)[0] == casts  # the parameter has changed
    fresh = run(False)[1]
    layer.weight.data.mul_(2)  # PyTorch does not see this
    count, stale = run(False)
    assert count == 0 and torch.equal(stale, fresh)
    layer.invalidate()
    count, seen = run(False)
    assert count == casts and not torch.equal(seen, stale)
    layer.load_state_dict(Linear(48, 40).state_dict(), strict=False)
    assert run(False)[0] == casts


@for_each(SOME_STATELESS)
def test_microbatches_compute_the_same(recipe: Recipe) -> None:
    layer, x, dy = Linear(37, 53), torch.randn(20, 37), torch.randn(20, 53)
    plain = step(layer, x, dy, recipe)
    for first in (True, False):
        with torch.no_grad():  # keeps a weight that has no columnwise operand: the next call needs one
            assert torch.equal(layer_call(layer, x, recipe, first), plain.y)
        for found, expected in zip(step(layer, x, dy, recipe, is_first_microbatch=first), plain, strict=True):
            assert found is not None and expected is not None and torch.equal(found, expected)


def layer_call(layer: Linear, x: Tensor, recipe: Recipe, first: bool | None) -> Tensor:
    """Forward with a microbatch flag."""
    with autocast(recipe=recipe):
        y: Tensor = layer(x, is_first_microbatch=first)
    return y


@each_once
@for_each(LINEAR_NAMED)
@pytest.mark.parametrize("first", [None, True], ids=["plain", "microbatch"])
def test_inference_before_training(first: bool | None, recipe: Recipe) -> None:
    """A layer may run under ``inference_mode`` first: what it makes there does not stop it from training later."""
    layer, x, dy = Linear(48, 40), torch.randn(8, 48), torch.randn(8, 40)
    twin = copy.deepcopy(layer)
    with torch.inference_mode(), autocast(recipe=recipe):
        y = layer(x, is_first_microbatch=first)
    flag = None if first is None else False
    expected = step(twin, x, dy, recipe)
    assert torch.equal(y, expected.y)
    for a, b in zip(step(layer, x, dy, recipe, is_first_microbatch=flag), expected, strict=True):
        assert a is not None and b is not None and torch.equal(a, b)


def test_microbatches_of_inference_parameters() -> None:
    """A parameter made under ``inference_mode`` has no version: what is kept of it is never used, and never stale."""
    with torch.inference_mode():
        layer, x = Linear(48, 40, recipe="current"), torch.randn(8, 48)
        y = layer(x)
        assert torch.equal(layer(x, is_first_microbatch=True), y)
        layer.weight.mul_(-3)
        assert torch.equal(layer(x, is_first_microbatch=False), layer(x))


@pytest.mark.parametrize("fused", [True, False])
def test_a_kept_weight_is_not_older_than_a_step(fused: bool) -> None:
    """Fused optimizers write without raising the version of a parameter."""
    layer, x = Linear(48, 40, recipe="current"), torch.randn(8, 48)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1, fused=fused)
    layer(x, is_first_microbatch=True).sum().backward()
    optimizer.step()
    assert torch.equal(layer(x, is_first_microbatch=False), layer(x))


# ---- What is kept between forward and backward ----------------------------------------------------------------------


KEEPS = ["both", "input", "weight", "original", "nothing", "dequantized"]


@pytest.mark.parametrize(
    ("name", "keeps"),
    [(name, keeps) for name in LINEAR_NAMED for keeps in KEEPS if (name, keeps) != ("delayed", KEEPS[-1])],
)
def test_what_is_kept_for_backward(name: str, keeps: str) -> None:
    """Between forward and backward live the codes and scales that backward reads, once, and nothing else.

    One byte an element, half a byte for NVFP4, the input itself only where that was asked for. Counted are the storages
    that any operation in forward returned and that are still alive, wherever they are referred to from.
    """
    M, K, N = 48, 160, 96
    recipe = LINEAR_NAMED[name]
    if keeps == "dequantized":
        recipe = replace(recipe, backward_override="dequantized")  # type: ignore[type-var]
    layer = Linear(K, N, save_original_input=keeps == "original")
    layer._config(recipe)
    layer.weight.requires_grad_(keeps not in ("weight", "nothing"))
    leaf = torch.randn(M, K, dtype=BF16, requires_grad=keeps not in ("input", "nothing"))
    with Storages() as storages:
        x = leaf * 1
        with autocast(recipe=recipe):
            y = layer(x)
        del x
    mine = [*layer.parameters(), *layer.buffers()]
    of_x, of_w = operand_bytes(name, M, K, N)
    if keeps == "dequantized":
        rows = {"block": 4 * M * blocks_in(K, 128), "mxfp8": M * blocks_in(K, 32), "nvfp4": M * blocks_in(K, 16)}
        of_x = [of_x[0], rows.get(name, 4), *of_x[2:]]
        of_w = [of_w[0], N * blocks_in(K, 32)] if name == "mxfp8" else of_w
    if keeps == "original":
        # The input, and what casts it as forward did.
        of_x = [2 * M * K, 4] if name == "delayed" else [2 * M * K]
    expected = {"input": of_x, "weight": of_w, "nothing": []}.get(keeps, of_x + of_w)
    assert storages.alive([y, *mine]) == sorted(expected)
    if y.requires_grad:
        y.backward(torch.ones(M, N, dtype=BF16))
    del y
    assert storages.alive(mine) == []


def test_kept_weight_is_kept_once() -> None:
    M, K, N = 48, 160, 96
    layer = Linear(K, N, recipe="current")
    leaf = torch.randn(M, K, dtype=BF16, requires_grad=True)
    with Storages() as storages:
        outputs = [layer(leaf * 1, is_first_microbatch=index == 0) for index in range(3)]
    assert storages.alive([*outputs, *layer.parameters()]) == sorted([M * K, 4] * 3 + [N * K, 4])


# ---- Plans that are kept --------------------------------------------------------------------------------------------


def _half(layer: Linear) -> None:
    layer.to(torch.bfloat16)


def _freeze(layer: Linear) -> None:
    layer.weight.requires_grad_(False)


def _parametrize(name: str) -> Callable[[Linear], None]:
    return lambda layer: nn.utils.parametrize.register_parametrization(layer, name, nn.Tanh()) and None


def _recipe(layer: Linear) -> None:
    layer.recipe = "mxfp8"


@pytest.mark.parametrize("change", [_half, _freeze, _recipe, _parametrize("weight"), _parametrize("bias")])
def test_specs_follow_what_changes(change: Callable[[Linear], None]) -> None:
    """A layer that has run computes after a change what one does that is changed first."""
    used = Linear(37, 16, recipe="current")
    fresh = copy.deepcopy(used)
    x, dy = torch.randn(5, 37), torch.randn(5, 16)
    used(x.requires_grad_()).backward(dy)
    used.zero_grad()
    results = []
    for layer in (used, fresh):
        change(layer)
        leaf = x.detach().requires_grad_()
        y = layer(leaf)
        y.backward(dy.to(y.dtype))
        results.append((y, leaf.grad, *[p.grad for p in layer.parameters()]))
    for first, second in zip(*results, strict=True):
        assert (first is None and second is None) or torch.equal(first, second)
    plain = torch.nn.functional.linear(x.to(y.dtype), used.weight.to(y.dtype), used.bias.to(y.dtype))
    assert (y - plain).norm() < 0.1 * plain.norm()


# ---- State ----------------------------------------------------------------------------------------------------------

HISTORY_KEYS = {f"{side}_scaling.{name}" for side in ("forward", "backward") for name in ("scale", "amax_history")}


def trained(recipe: Recipe, **kwargs: Any) -> Linear:
    """A layer after two steps."""
    layer = Linear(37, 53, **kwargs)
    for scale in (1.0, 3.0):
        step(layer, torch.randn(8, 37) * scale, torch.randn(8, 53) * scale, recipe)
    return layer


@for_each(SOME_LINEAR)
def test_state_dict_keys(recipe: Recipe) -> None:
    extra = HISTORY_KEYS if linear_config(recipe).delayed is not None else set()
    assert set(Linear(4, 6).state_dict()) == {"weight", "bias"}
    assert set(Linear(4, 6, recipe=recipe).state_dict()) == {"weight", "bias"} | extra
    assert set(prepare(Linear(4, 6), recipe).state_dict()) == {"weight", "bias"} | extra
    assert set(trained(recipe).state_dict()) == {"weight", "bias"} | extra


def assert_same_state(a: nn.Module, b: nn.Module) -> None:
    """Equal keys and bits."""
    left, right = a.state_dict(), b.state_dict()
    assert left.keys() == right.keys()
    for key, value in left.items():
        assert value.dtype == right[key].dtype and torch.equal(value, right[key]), key


def test_missing_histories_start_anew() -> None:
    layer, before = trained(DELAYED), Linear(37, 53, recipe=DELAYED).state_dict()
    checkpoint = nn.Linear(37, 53).state_dict()
    layer.load_state_dict(checkpoint, strict=True)
    assert set(checkpoint) == {"weight", "bias"}
    assert all(torch.equal(layer.state_dict()[key], before[key]) for key in HISTORY_KEYS)


def test_extra_histories_do_not_disturb_other_recipes() -> None:
    saved, layer, plain = trained(DELAYED), Linear(37, 53, recipe="mxfp8"), Linear(37, 53, recipe="mxfp8")
    layer.load_state_dict(saved.state_dict(), strict=True)
    plain.load_state_dict({key: saved.state_dict()[key] for key in ("weight", "bias")}, strict=True)
    x = torch.randn(8, 37)
    assert torch.equal(layer(x), plain(x))


@pytest.mark.parametrize(
    "copier", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))], ids=["copy", "pickle"]
)
def test_waiting_gradients_are_not_copied(copier: Callable[[Linear], Linear]) -> None:
    """A weight gradient that waits belongs to the layer whose backward left it: a copy has none to compute."""
    layer = Linear(37, 53, recipe="current", delay_wgrad_compute=True)
    layer(torch.randn(8, 37)).sum().backward()
    twin = copier(layer)
    with pytest.raises(ValueError, match="no weight gradient is waiting"):
        twin.backward_dw()
    assert layer.weight.grad is None
    layer.backward_dw()
    assert layer.weight.grad is not None and twin.weight.grad is None


@pytest.mark.parametrize("convert", [nn.Module.half, nn.Module.double, lambda m: m.to(dtype=BF16)])
def test_histories_stay_fp32(convert: Callable[[nn.Module], nn.Module]) -> None:
    layer = trained(DELAYED)
    before = copy.deepcopy(layer.state_dict())
    converted = convert(nn.Sequential(layer))[0]
    assert converted.weight.dtype != FP32
    for key in HISTORY_KEYS:
        value = converted.state_dict()[key]
        assert value.dtype == FP32 and torch.equal(value, before[key])


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_is_an_nn_linear(dtype: torch.dtype, bias: bool) -> None:
    torch.manual_seed(7)
    plain = nn.Linear(37, 53, bias, dtype=dtype)
    torch.manual_seed(7)
    layer = Linear(37, 53, bias, dtype=dtype)
    assert isinstance(layer, nn.Linear)
    assert_same_state(layer, plain)
    x, dy = torch.randn(8, 37, dtype=dtype), torch.randn(8, 53, dtype=dtype)
    for own in (None, "none"):
        layer.recipe = own  # type: ignore[assignment]
        y, expected = layer(x), plain(x)
        layer.zero_grad(), plain.zero_grad()
        y.backward(dy), expected.backward(dy)
        assert torch.equal(y, expected) and torch.equal(layer.weight.grad, plain.weight.grad)  # type: ignore[arg-type]


# ---- Input that is not what it should be ----------------------------------------------------------------------------

MISTAKES: list[tuple[str, Tensor, type[Exception], str]] = [
    ("integers", torch.ones(2, 37, dtype=torch.int64), TypeError, r"fc1.*torch\.int64"),
    ("booleans", torch.ones(2, 37, dtype=torch.bool), TypeError, r"fc1.*torch\.bool"),
    ("last dim", torch.ones(2, 36), ValueError, r"fc1.*36.*in_features=37"),
    ("transposed", torch.ones(37, 2), ValueError, r"fc1.*\(37, 2\).*in_features=37"),
    ("no dims", torch.ones(()), ValueError, r"fc1.*\(\).*in_features=37"),
    ("float64", torch.ones(2, 37, dtype=torch.float64), ValueError, r"fc1.*float64"),
]


@each_twice
@for_each(LINEAR_NAMED | {"none": None})  # type: ignore[dict-item]
@pytest.mark.parametrize(("x", "error", "match"), [row[1:] for row in MISTAKES], ids=[name for name, *_ in MISTAKES])
def test_bad_input(x: Tensor, error: type[Exception], match: str, recipe: Recipe | None) -> None:
    """What a layer cannot take raises what its docstring says, with the layer's name and the number."""
    layer = Linear(37, 53, recipe=recipe, name="fc1")
    with pytest.raises(error, match=match):
        layer(x)
    assert not layer._wgrad_tasks and layer._weight_cache is None


def test_two_dtypes_without_a_recipe() -> None:
    """PyTorch cannot multiply them: the error says which layer; ``torch.autocast``, or a recipe, can."""
    layer, x = Linear(37, 53, name="fc1"), torch.randn(2, 37, dtype=BF16)
    with pytest.raises(ValueError, match=r"fc1.*torch\.bfloat16 input.*torch\.float32 weight.*torch\.autocast"):
        layer(x)
    with torch.autocast("cpu", dtype=BF16):
        assert layer(x).dtype == layer(x.float()).dtype == BF16
    with autocast(recipe="current"):
        assert layer(x).dtype == BF16


@for_each(LINEAR_NAMED | {"none": None})  # type: ignore[dict-item]
def test_forward_on_meta(recipe: Recipe | None) -> None:
    """Shapes and dtypes without numbers; ``torch.autocast`` does not know the device."""
    with torch.device("meta"):
        layer, x = Linear(64, 96, recipe=recipe), torch.randn(32, 64, requires_grad=True)
    y = layer(x)
    assert y.is_meta and y.shape == (32, 96) and y.dtype == FP32
    with torch.autocast("cpu", dtype=BF16):
        assert layer(x).dtype == FP32


def test_unnamed_layers_are_called_by_their_sizes() -> None:
    with pytest.raises(ValueError, match=r"Linear\(37, 53\).*36"):
        Linear(37, 53)(torch.ones(2, 36))


@each_once
@for_each(SOME_LINEAR)
@pytest.mark.parametrize(("K", "N"), [(0, 4), (4, 0)])
def test_zero_features(K: int, N: int, recipe: Recipe) -> None:
    with pytest.warns(UserWarning, match="zero-element"):
        layer = Linear(K, N)
        nn.init.ones_(layer.bias)
    result = step(layer, torch.randn(3, K), torch.randn(3, N), recipe)
    assert torch.equal(result.y, torch.ones(3, N))
    assert result.dx is not None and torch.equal(result.dx, torch.zeros(3, K))
    assert result.dw is not None and result.dw.shape == (N, K)


# ---- Inputs and gradients that are views ----------------------------------------------------------------------------


def views() -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """[20, 37] inputs that are not contiguous."""
    yield "transposed", lambda: torch.randn(37, 20).t()
    yield "every other column", lambda: torch.randn(20, 74)[:, ::2]
    yield "every third row", lambda: torch.randn(60, 37)[::3]
    yield "an offset", lambda: torch.randn(21, 40)[1:, 3:]
    yield "one token expanded", lambda: torch.randn(1, 37).expand(20, 37)
    yield "leading dims swapped", lambda: torch.randn(5, 4, 37).transpose(0, 1)
    yield "one number expanded", lambda: torch.randn(()).expand(20, 37)


@each_twice
@for_each(LINEAR_NAMED)
@pytest.mark.parametrize("view", [view for _, view in views()], ids=[name for name, _ in views()])
def test_inputs_that_are_views(view: Callable[[], Tensor], recipe: Recipe) -> None:
    """A view gives what its contiguous copy gives, bit for bit; so does an expanded gradient.

    But for the bias gradient: PyTorch adds up an expanded tensor in another order.
    """
    x, layer = view(), Linear(37, 53)
    twin = copy.deepcopy(layer)
    dy = torch.randn(()).expand(*x.shape[:-1], 53)
    found, expected = step(layer, x, dy, recipe), step(twin, x.contiguous(), dy.contiguous(), recipe)
    for a, b in zip(found[:3], expected[:3], strict=True):
        assert a is not None and b is not None and torch.equal(a, b)
    total = model.product(dy.reshape(20, 53).double().numpy().T, np.ones((1, 20)))
    assert found.db is not None
    model.assert_within(found.db[:, None], total, model.bound(total, FP32), "db")


# ---- Quantized outputs and gradients --------------------------------------------------------------------------------


def two_layers(
    layers: tuple[Linear, Linear], x: Tensor, dy: Tensor, recipe: Recipe, fused: bool
) -> tuple[Tensor, Tensor, list[Tensor | None]]:
    """Output, the gradient of the tensor in between and all gradients of two layers in a row."""
    first, second = layers
    x = x.detach().requires_grad_()
    between: list[Tensor] = []
    with autocast(recipe=recipe):
        hidden = first(x, fp8_output=fused)
        hidden.register_hook(between.append)
        y = second(hidden, fp8_grad=fused)
    assert isinstance(hidden, QuantizedTensor) == fused
    torch.manual_seed(1)
    y.backward(dy)
    return y.detach(), between[0], [x.grad, first.weight.grad, second.weight.grad, second.bias.grad, first.bias.grad]


FUSED = LINEAR_NAMED | {
    name: LINEAR_RECIPES[name] for name in ("current pow2", "block f32 hybrid", "mxfp8 2d hybrid", "nvfp4 plain")
}


@each_once
@for_each(FUSED)
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
def test_quantized_between_two_layers(dtype: torch.dtype, recipe: Recipe) -> None:
    """An output and a gradient that stay quantized between two layers change no bit, and save two casts.

    Delayed scaling has a scale for each slot, equal at first. The first layer's bias gradient is the sum of what the
    quantized gradient stands for, the one number that differs.
    """
    layers = Linear(48, 40), Linear(40, 24)
    twins = copy.deepcopy(layers)
    x, dy = torch.randn(32, 48, dtype=dtype), torch.randn(32, 24, dtype=dtype)
    with CountCasts() as plain_casts:
        y, between, grads = two_layers(layers, x, dy, recipe, fused=False)
    with CountCasts() as fused_casts:
        fused_y, fused_between, fused_grads = two_layers(twins, x, dy, recipe, fused=True)
    assert torch.equal(y, fused_y)
    for expected, found in zip(grads[:-1], fused_grads[:-1], strict=True):
        assert expected is not None and found is not None and torch.equal(expected, found)
    assert isinstance(fused_between, QuantizedTensor) and fused_between.shape == between.shape
    assert fused_grads[-1] is not None
    assert torch.equal(fused_grads[-1], fused_between.dequantize().sum(0).float())
    assert fused_casts.formats.total() == plain_casts.formats.total()


@for_each({name: LINEAR_NAMED[name] for name in ("current", "block", "mxfp8", "nvfp4")})
def test_quantized_output_is_the_cast_of_the_output(recipe: Recipe) -> None:
    """The operands of a quantized output are the cast of the plain output, in both orientations, 3-D inputs too."""
    layer, x = Linear(48, 40), torch.randn(2, 16, 48, dtype=BF16)
    plan = layer._config(recipe)
    with autocast(recipe=recipe):
        y, plain = layer(x, fp8_output=True), layer(x)
    assert isinstance(y, QuantizedTensor) and y.shape == plain.shape and y.dtype == plain.dtype
    expected = plan.output(plain.detach())
    for found, wanted in zip(y.operands, expected, strict=True):
        assert found is not None and wanted is not None and found.layout == wanted.layout
        for a, b in zip(found.tensors, wanted.tensors, strict=True):
            assert (a is None and b is None) or torch.equal(a, b)  # type: ignore[arg-type]
    assert torch.equal(y.dequantize(), expected.dequantize().reshape(y.shape))


@for_each(LINEAR_NAMED)
def test_quantized_output_into_another_module(recipe: Recipe) -> None:
    layer, x = Linear(48, 40), torch.randn(32, 48)
    with autocast(recipe=recipe):
        y = layer(x, fp8_output=True)
    out = torch.relu(y)
    assert torch.equal(out, torch.relu(y.detach().dequantize()))
    torch.manual_seed(1)
    out.sum().backward()
    twin = copy.deepcopy(layer)
    mask = (y.detach().dequantize() > 0).float()
    twin.load_state_dict({"weight": layer.weight, "bias": layer.bias}, strict=True)
    if not isinstance(recipe, DelayedScaling):
        expected = step(twin, x, mask, recipe)
        assert expected.dw is not None and layer.weight.grad is not None
        assert torch.equal(layer.weight.grad, expected.dw)
    assert layer.bias.grad is not None and torch.equal(layer.bias.grad, mask.sum(0))


@for_each(LINEAR_NAMED)
def test_permuted_quantized_output(recipe: Recipe) -> None:
    """A quantized output whose rows were permuted is read by its values: its operands are those of another matrix."""
    first, second, x = Linear(48, 40), Linear(40, 24), torch.randn(4, 8, 48)
    with autocast(recipe=recipe), torch.no_grad():
        hidden = first(x, fp8_output=True)
        expected = second(hidden.dequantize().transpose(0, 1))
        assert torch.equal(second(hidden.transpose(0, 1)), expected)


@for_each({name: LINEAR_NAMED[name] for name in ("current", "block", "mxfp8", "nvfp4")})
def test_permuted_quantized_gradient(recipe: Recipe) -> None:
    """A quantized gradient that autograd permutes on its way to the next layer is read by its values."""
    first, second, x = Linear(48, 40), Linear(40, 24), torch.randn(4, 8, 48)
    twin, between = copy.deepcopy(first), []
    with autocast(recipe=recipe):
        hidden = first(x).transpose(0, 1)
        hidden.register_hook(between.append)
        y = second(hidden, fp8_grad=True)
    y.sum().backward()
    assert isinstance(between[0], QuantizedTensor)
    if not stochastic(recipe):
        expected = step(twin, x, between[0].dequantize().transpose(0, 1), recipe)
        assert expected.dw is not None and torch.equal(first.weight.grad, expected.dw)  # type: ignore[arg-type]


def step_of(values: Tensor, operand: Operand) -> Tensor:
    """The distance between neighbouring values of the format around each of ``values``, at the operand's scales."""
    fmt = operand.format
    mantissa, least = {"e4m3": (3, -6), "e5m2": (2, -14), "e2m1": (1, 0)}[fmt.element]
    factor, divisor = model.whole_scale(operand)
    unit = torch.from_numpy(model.block_scales(operand).astype(np.float64) * factor.astype(np.float64) / divisor)
    exponent = (values.double().abs() / unit).log2().floor().clamp_min(least)
    return (exponent - mantissa).exp2() * unit


@for_each(LINEAR_NAMED)
def test_quantized_gradient_of_a_leaf_accumulates(recipe: Recipe) -> None:
    """The gradients of two backwards into an input add up.

    Their sum is cast once more. That rounds each element to nearest, by at most half of its step, or at random to
    either neighbour, by less than a whole one; 2^-20 of it allows for the fp32 roundings on the way to the code.
    """
    layer, x = Linear(48, 40), torch.randn(32, 48, requires_grad=True)
    grads: list[Tensor] = []
    x.register_hook(lambda grad: grads.append(grad.dequantize()))
    for _ in range(2):
        with autocast(recipe=recipe):
            y = layer(x, fp8_grad=True)
        y.backward(torch.randn(32, 40))
    assert isinstance(x.grad, QuantizedTensor) and not torch.equal(grads[0], grads[1])
    exact, operand = grads[0].double() + grads[1], x.grad.operands.along(ROWWISE)
    limit = step_of(exact, operand) * (1 if operand.format.rounding == "stochastic" else 0.5) * (1 + 2.0**-20)
    error = (x.grad.dequantize() - exact).abs()
    assert (error <= limit).all() and error.any()


@pytest.mark.parametrize("recipe", ["none", None])
def test_options_in_high_precision(recipe: str | None) -> None:
    """main_grad and the delayed weight gradient are kept to where nothing is quantized, the twin of a quantized run."""
    layer = Linear(16, 8, recipe=recipe, fuse_wgrad_accumulation=True, delay_wgrad_compute=True)
    layer.weight.main_grad = torch.zeros(8, 16)  # type: ignore[attr-defined]
    x, dy = torch.randn(5, 16, requires_grad=True), torch.randn(5, 8)
    layer(x).backward(dy)
    assert layer.weight.grad is None and not layer.weight.main_grad.any()  # type: ignore[attr-defined]
    layer.backward_dw()
    torch.testing.assert_close(layer.weight.main_grad, dy.t() @ x)  # type: ignore[attr-defined]
    torch.testing.assert_close(x.grad, dy @ layer.weight)


def test_cached_weight_does_not_survive_a_cast_of_the_module() -> None:
    """module.to() writes through .data, which no version counts."""
    layer = Linear(16, 8, recipe="current")
    x = torch.randn(5, 16)
    layer(x, is_first_microbatch=True)
    layer.to(torch.bfloat16)
    fresh = layer(x.bfloat16(), is_first_microbatch=True)
    layer(x.bfloat16(), is_first_microbatch=True)
    layer.float()
    with torch.no_grad():
        layer.weight.data.mul_(2)
    layer.to(torch.bfloat16)
    assert not torch.equal(layer(x.bfloat16(), is_first_microbatch=False), fresh)


def test_quantized_input_is_its_own_original() -> None:
    """save_original_input: wgrad reads the codes that fprop read, not a second cast of them with another scale."""
    producer = Linear(16, 32, recipe="delayed")
    results = []
    for keep in (False, True):
        layer = Linear(32, 8, recipe=producer.recipe, save_original_input=keep)
        with torch.no_grad():
            layer.weight.copy_(torch.linspace(-1, 1, 256).view(8, 32))
            layer.forward_scaling.scale.fill_(1e4)
        hidden = producer(torch.linspace(-3, 3, 80).view(5, 16), fp8_output=True).detach()
        layer(hidden).sum().backward()
        results.append(layer.weight.grad)
        producer.forward_scaling.reset_parameters()
    assert torch.equal(*results)


def test_calibration_leaves_a_layer_without_recipe_alone() -> None:
    """A layer of recipe "none" keeps the state dict of nn.Linear; a custom recipe's delayed scaling is calibrated."""
    x = torch.randn(5, 16)
    none, custom = Linear(16, 8, recipe="none"), Linear(16, 8)
    request = CustomRecipe(lambda role: DelayedScalingRequest(amax_history_len=2))
    with autocast(enabled=False, calibrating=True, recipe=request):
        none(x)
        custom(x)
    assert set(none.state_dict()) == {"weight", "bias"}
    assert custom.forward_scaling.amax_history[-1, 0] == x.abs().max()


# ---- How the parameters are kept and start --------------------------------------------------------------------------


@each_once
@for_each(LINEAR_NAMED | {"none": None})  # type: ignore[dict-item]
@pytest.mark.parametrize("bias", [True, False])
def test_return_bias(bias: bool, recipe: Recipe | None) -> None:
    """The bias is handed back, not added, and gets a gradient from what the caller does with it."""
    layer = Linear(37, 21, bias=bias, recipe=recipe, return_bias=True)
    twin = copy.deepcopy(layer)
    twin.return_bias = False
    twin.bias = None
    x = torch.randn(5, 37)
    y, b = layer(x)
    assert torch.equal(y, twin(x))
    assert b is layer.bias
    if bias:
        (y + b).sum().backward()
        assert torch.equal(layer.bias.grad, torch.full((21,), 5.0))  # type: ignore[arg-type]


SPLIT = {"query": 16, "key": 0, "value": 5}


@each_once
@for_each(LINEAR_NAMED | {"none": None})  # type: ignore[dict-item]
@pytest.mark.parametrize("bias", [True, False])
def test_parameters_split(bias: bool, recipe: Recipe | None) -> None:
    """Several parameters, one product: the start, the output and the gradients of the unsplit layer."""
    torch.manual_seed(3)
    whole = Linear(37, 21, bias=bias, recipe=recipe)
    torch.manual_seed(3)
    layer = Linear(37, 21, bias=bias, recipe=recipe, parameters_split=SPLIT)
    kinds = ("weight", "bias") if bias else ("weight",)
    names = [f"{name}_{kind}" for kind in kinds for name in SPLIT]
    assert [name for name, _ in layer.named_parameters()] == names
    assert torch.equal(torch.cat([layer.query_weight, layer.value_weight]), whole.weight)
    assert not hasattr(layer, "weight") and layer._has_bias == bias and "parameters_split" in repr(layer)
    x, dy = torch.randn(5, 37), torch.randn(5, 21)
    grads = []
    for each in (whole, layer):
        z = x.clone().requires_grad_()
        y = each(z)
        torch.manual_seed(1)
        y.backward(dy)
        grads.append([y.detach(), z.grad])
    grads[0] += [getattr(whole, kind).grad for kind in kinds]
    grads[1] += [torch.cat([getattr(layer, f"{name}_{kind}").grad for name in SPLIT]) for kind in kinds]
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    again = Linear(37, 21, bias=bias, recipe=recipe, parameters_split=SPLIT)
    again.load_state_dict(layer.state_dict())
    assert torch.equal(again.value_weight, layer.value_weight)
    copied = pickle.loads(pickle.dumps(layer))
    assert torch.equal(copied.query_weight, layer.query_weight)


def test_parameters_split_over_microbatches() -> None:
    """A kept weight follows a write to any of its parts."""
    layer = Linear(37, 21, recipe="current", parameters_split=SPLIT)
    x = torch.randn(5, 37)
    first = layer(x, is_first_microbatch=True)
    assert torch.equal(layer(x, is_first_microbatch=False), first)
    with torch.no_grad():
        layer.value_weight.mul_(2)
    assert torch.equal(layer(x, is_first_microbatch=False), layer(x))


@pytest.mark.parametrize("sizes", [{"a": 20}, {"a": 22}, ("a", "b")])
def test_rows_that_do_not_add_up(sizes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"parameters_split.*out_features=21|out_features=21.*parameters_split"):
        Linear(37, 21, parameters_split=sizes)
    for option in ("fuse_wgrad_accumulation", "delay_wgrad_compute"):
        with pytest.raises(ValueError, match=option):
            Linear(37, 21, parameters_split=SPLIT, **{option: True})


@pytest.mark.parametrize("split", [None, SPLIT])
def test_init_method(split: dict[str, int] | None) -> None:
    """It fills the whole weight before it is split; the bias starts as zeros. Once more in reset_parameters."""

    def init(weight: Tensor) -> None:
        nn.init.normal_(weight, std=0.02)

    torch.manual_seed(3)
    layer = Linear(37, 21, init_method=init, parameters_split=split)
    torch.manual_seed(3)
    assert torch.equal(layer._weight_matrix(), torch.empty(21, 37).normal_(std=0.02))
    bias = layer._bias_vector()
    assert bias is not None and not bias.any()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.fill_(9)
    torch.manual_seed(3)
    layer.reset_parameters()
    torch.manual_seed(3)
    bias = layer._bias_vector()
    assert torch.equal(layer._weight_matrix(), torch.empty(21, 37).normal_(std=0.02))
    assert bias is not None and not bias.any()


# What other libraries may look for, as PEFT does for bitsandbytes' ``compute_dtype``: methods for users and options.
PUBLIC = {"backward_dw", "invalidate", "register_wgrad_accumulation_and_reduce_hooks", "set_tensor_parallel_group"} | {
    *("name", "recipe", "init_method", "return_bias", "save_original_input", "parameters_split"),
    *("fuse_wgrad_accumulation", "delay_wgrad_compute", "wgrad_in_weight_dtype", "parallel_mode"),
    *("sequence_parallel", "whole_weight"),
}


@pytest.mark.parametrize("make", ["constructor", "convert"])
def test_public_names_beyond_those_of_nn_linear(make: str) -> None:
    layer: nn.Module = Linear(37, 21, recipe="current") if make == "constructor" else nn.Linear(37, 21)
    if make == "convert":
        convert(layer, "current", filter_fn=lambda *_: True)
    layer(torch.randn(2, 37)).sum().backward()
    own = {name for name in dir(layer) if not name.startswith("_")} - set(dir(nn.Linear(37, 21)))
    assert own == PUBLIC
