"""``LayerNormLinear`` and ``LayerNormMLP`` by hand: what they are held to, bit for bit and in float64.

A model here computes a step cast by cast and product by product, from operations that are tested on their own, and
keeps delayed scaling's state itself. A module must give its bits. Each number in it must be that of float64
(:meth:`Model.check`): products of what the operands stand for, norms, activations and their gradients, each from the
very inputs that it had, within the bound of its fp32 arithmetic and one rounding. So a rounding that falls on the
border of two codes is nobody's error.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from minifloat import delayed
from minifloat.autocast import autocast
from minifloat.formats import COLUMNWISE, ROWWISE
from minifloat.functional import gemm
from minifloat.functional.norm_activation import Activation, Norm
from minifloat.functional.quantize import BACKWARD_SLOTS, FORWARD_SLOTS, linear_config
from minifloat.nn.fused_layers import LayerNormLinear, LayerNormMLP
from minifloat.nn.linear import Linear
from minifloat.operand import Quantized
from minifloat.ops.activation import activation_backward, activation_forward
from minifloat.ops.norm import norm_backward, norm_forward
from minifloat.quantizer import Quantizer
from minifloat.recipe import Recipe
from tests.helpers import linear_model as model
from tests.helpers.activation_model import activation_float64, error_scale
from tests.helpers.compare import U, assert_within
from tests.helpers.linear_model import as_is, gemm_model, operands_of
from tests.helpers.norm_model import assert_norm_gradients, norm_float64, normalized

FP32 = torch.float32
Results = dict[str, Tensor]
"""``y``, ``n`` and the stream ``s`` if returned, gradients: ``x``, ``residual``, parameters by their names there."""


def only_delayed(quantizer: Quantizer) -> bool:
    """Delayed scaling in both orientations: what comes before hands its fp32 result to the cast."""
    return all(fmt.scale_rule == "given" for fmt, _ in quantizer.casts)


class Checks:
    """Comparisons with float64 that were noted on the way."""

    def __init__(self) -> None:
        self.noted: list[Callable[[], None]] = []

    def note(self, function: Callable[..., None], *args: Any) -> None:
        self.noted.append(partial(function, *args))

    def run(self) -> None:
        for check in self.noted:
            check()


class LinearModel:
    """One linear and its state under a recipe."""

    def __init__(self, layer: Linear, recipe: Recipe, checks: Checks) -> None:
        self.layer, self.checks = layer, checks
        self.plan = linear_config(recipe, layer.name)
        self.histories: list[delayed.History] = []
        if self.plan.delayed is not None:
            layer._config(recipe)
            for state, forward in ((layer.forward_scaling, True), (layer.backward_scaling, False)):
                rule = self.plan.delayed.rules[0 if forward else 1]
                history = delayed.History(state.scale.clone(), state.amax_history.clone(), self.plan.delayed, rule)
                self.histories.append(history)

    def cast(self, kind: str, x: Tensor, quantizer: Quantizer) -> Quantized:
        """Quantizes in both orientations, and records the amax that delayed scaling measures."""
        if not self.histories:
            return operands_of(x, quantizer, None)
        slots = FORWARD_SLOTS if kind in FORWARD_SLOTS else BACKWARD_SLOTS
        history, slot = self.histories[kind not in FORWARD_SLOTS], slots.index(kind)
        result = operands_of(x, quantizer, history.scale[slot : slot + 1])
        for operand in result:
            if operand is not None and operand.format.scale_rule == "given" and operand.amax is not None:
                newest = history.amax_history[0]
                newest[slot] = torch.maximum(newest[slot], operand.amax[0])
        return result

    def forward(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Y; ``x`` [M, K] may be the fp32 result of a producer."""
        plan, weight = self.plan, self.layer._weight_matrix().detach()
        bias = self.layer._bias_vector()
        bias = None if bias is None or self.layer.return_bias else bias.detach()
        xq, wq = self.cast("input", x, plan.input), self.cast("weight", weight, plan.weight)
        y = gemm.fprop(xq, wq, bias, out_dtype=dtype, fast_accum=plan.fast_fprop)
        known = None if bias is None else model.numpy(bias.to(dtype)).astype(np.float64)
        self.note_product(y, xq, wq, (ROWWISE, ROWWISE), dtype, known)
        self.x, self.w, self.dtype = xq, wq, dtype
        if plan.backward_override is not None:
            source = (as_is(x), as_is(weight)) if plan.backward_override == "high_precision" else (xq, wq)
            self.x, self.w = (as_is(each.along(ROWWISE).dequantize()) for each in source)
        return y

    def backward(self, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """dX, dW, db."""
        plan, dtype = self.plan, self.dtype
        dyq = as_is(dy) if plan.backward_override is not None else self.cast("grad_output", dy, plan.grad_output)
        dx = gemm.dgrad(dyq, self.w, out_dtype=dtype, fast_accum=plan.fast_dgrad)
        dw = gemm.wgrad(dyq, self.x, out_dtype=dtype, fast_accum=plan.fast_wgrad)
        self.note_product(dx, dyq, self.w, (ROWWISE, COLUMNWISE), dtype)
        self.note_product(dw, dyq, self.x, (COLUMNWISE, COLUMNWISE), dtype)
        self.finish(1)
        db = dy.sum(0)
        self.checks.note(check_sum, db, dy)
        return dx, dw, db

    def finish(self, direction: int) -> None:
        """Delayed scaling's update at the end of forward (0) or backward (1)."""
        if self.histories:
            delayed.update([self.histories[direction]])

    def note_product(
        self, y: Tensor, a: Quantized, b: Quantized, dims: tuple[int, int], dtype: torch.dtype, bias: Any = None
    ) -> None:
        self.checks.note(check_product, y, a, b, dims, dtype, bias)


class Model:
    """A fused module by hand; ``step`` after ``step`` it moves delayed scaling's state on."""

    def __init__(self, module: LayerNormLinear | LayerNormMLP, recipe: Recipe) -> None:
        self.module, self.recipe, self.checks = module, recipe, Checks()
        names = ("linear",) if isinstance(module, LayerNormLinear) else ("fc1", "fc2")
        self.linears = {name: LinearModel(getattr(module, name), recipe, self.checks) for name in names}

    @torch.no_grad()
    def step(
        self, x: Tensor, dy: Tensor, dtype: torch.dtype, dn: Tensor | None = None, seed: int = 1,
        residual: Tensor | None = None, ds: Tensor | None = None,
    ) -> Results:  # fmt: skip
        """Output and gradients; ``dn`` and ``ds`` are those of the norm's result and of the stream, if returned."""
        self.checks.noted.clear()
        stream = x if residual is None else x + residual
        rows = stream.to(dtype).reshape(-1, x.shape[-1])
        norm, gamma, beta = self.module.norm.norm, self.module.norm.weight, self.module.norm.bias
        first, *rest = self.linears.values()
        wide = only_delayed(first.plan.input) and not self.module.return_layernorm_output
        n, *saved, _, _ = norm_forward(
            rows, gamma, beta, norm.normalization, norm.eps, norm.zero_centered_gamma, FP32 if wide else dtype
        )
        self.checks.note(check_norm, norm, rows, gamma, beta, n)
        h = first.forward(n, dtype)
        y = self.mlp_forward(h, rest[0]) if rest else h
        for linear in self.linears.values():
            linear.finish(0)
        torch.manual_seed(seed)
        found = dict(zip(("dx", "w", "b"), (rest[0] if rest else first).backward(self.rows(dy)), strict=True))
        grads = {f"{list(self.linears)[-1]}.{key}": found[key] for key in ("w", "b")}
        if rest:
            dh = self.mlp_backward(found["dx"], h)
            found = dict(zip(("dx", "w", "b"), first.backward(dh), strict=True))
            grads |= {f"fc1.{key}": found[key] for key in ("w", "b")}
        dn_all = found["dx"] if dn is None else found["dx"] + self.rows(dn)
        norm_of = norm.normalization, norm.zero_centered_gamma
        dx, dgamma, dbeta = norm_backward(dn_all, rows, gamma, *saved, *norm_of)
        self.checks.note(assert_norm_gradients, norm, rows, gamma, beta, dn_all, dx, dgamma, dbeta)
        if ds is not None:
            dx, *_ = norm_backward(dn_all, rows, gamma, *saved, *norm_of, self.rows(ds))
        results = {
            "y": y.reshape(*x.shape[:-1], y.shape[-1]),
            "x": dx.to(x.dtype).reshape(x.shape),
            "norm.weight": dgamma,
        }
        results |= {} if beta is None else {"norm.bias": dbeta}
        results |= {key.replace(".w", ".weight").replace(".b", ".bias"): grad for key, grad in grads.items()}
        results |= {"n": n.reshape(x.shape)} if self.module.return_layernorm_output else {}
        results |= {} if residual is None else {"residual": results["x"]}
        results |= {} if ds is None else {"s": stream}
        return results

    @staticmethod
    def rows(x: Tensor) -> Tensor:
        return x.reshape(-1, x.shape[-1])

    def mlp_forward(self, h: Tensor, second: LinearModel) -> Tensor:
        of: Activation = self.module.activation  # type: ignore[assignment]
        dtype = FP32 if only_delayed(second.plan.input) else h.dtype
        a, _ = activation_forward(h, of.name, of.parameters, dtype, False)
        self.checks.note(check_activation, h, of, a)
        return second.forward(a, h.dtype)

    def mlp_backward(self, da: Tensor, h: Tensor) -> Tensor:
        of: Activation = self.module.activation  # type: ignore[assignment]
        plan = self.linears["fc1"].plan
        wide = only_delayed(plan.grad_output) and plan.backward_override is None and not of.gated
        dh, _, _ = activation_backward(da, h, of.name, of.parameters, FP32 if wide else h.dtype, False, False)
        self.checks.note(check_activation_gradient, da, h, of, dh)
        return dh

    def state(self) -> dict[str, Tensor]:
        """Delayed scaling's state by its key in the module's state dict."""
        found = {}
        for name, linear in self.linears.items():
            for side, history in zip(("forward", "backward"), linear.histories, strict=False):
                found[f"{name}.{side}_scaling.scale"] = history.scale
                found[f"{name}.{side}_scaling.amax_history"] = history.amax_history
        return found


class NormOnStream(torch.autograd.Function):
    """X and its norm by a module of ours; the gradient of X, which goes on, is added before the norm's one rounding."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gamma: Tensor, beta: Tensor | None, of: Norm) -> tuple[Tensor, Tensor]:
        options = of.normalization, of.eps, of.zero_centered_gamma
        n, mean, rsigma, _, _ = norm_forward(x.reshape(-1, x.shape[-1]), gamma, beta, *options, x.dtype)
        ctx.save_for_backward(x, gamma, mean, rsigma)
        ctx.of = of
        return x.clone(), n.reshape(x.shape)

    @staticmethod
    def backward(ctx: Any, dx: Tensor, dn: Tensor) -> tuple[Tensor | None, ...]:
        x, gamma, mean, rsigma = ctx.saved_tensors
        dx, dn, rows = (t.reshape(-1, x.shape[-1]) for t in (dx, dn, x))
        of = ctx.of.normalization, ctx.of.zero_centered_gamma
        total, dgamma, dbeta = norm_backward(dn, rows, gamma, mean, rsigma, *of, dx)
        return total.reshape(x.shape), dgamma, dbeta if ctx.needs_input_grad[2] else None, None


def norm_on_stream(norm: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """:class:`NormOnStream` of a norm module."""
    return NormOnStream.apply(x, norm.weight, norm.bias, norm.norm)  # type: ignore[no-any-return, no-untyped-call]


# ---- one number against float64 ----


def check_product(y: Tensor, a: Quantized, b: Quantized, dims: tuple[int, int], dtype: torch.dtype, bias: Any) -> None:
    """A product beside an operand in high precision is PyTorch's, which may round its bias on the way."""
    product = gemm_model(a, b, dims, dtype, bias)
    limit = model.bound(product, dtype)
    if not (a.along(dims[0]).format.quantized and b.along(dims[1]).format.quantized):
        limit = limit + model.rounding(product.magnitude, dtype)
    if y.is_cuda:  # each step of 32 elements may lose 33 * 2^-13 of its largest term (tests.ops.test_matmul)
        limit = limit + -(-product.depth // 32) * 33 * 2.0**-13 * product.magnitude
    model.assert_within(y, product, limit, "product")


def check_sum(db: Tensor, dy: Tensor) -> None:
    """The gradient of a bias."""
    product = model.product(dy.double().cpu().numpy().T, np.ones((1, len(dy))))
    model.assert_within(db[:, None], product, model.bound(product, dy.dtype), "db")


def check_norm(norm: Norm, x: Tensor, gamma: Tensor, beta: Tensor | None, n: Tensor) -> None:
    """The bound is that of ``norm_model``."""
    gamma, beta = gamma.detach(), None if beta is None else beta.detach()
    exact = norm_float64(norm, x, gamma, beta)
    of = normalized(norm, x)
    scale = (gamma.double() + norm.zero_centered_gamma).abs()
    assert_within(n, exact, scale * (of.error + 2 * U * of.n.abs()) + U * exact.abs(), n.dtype)


def check_activation(h: Tensor, of: Activation, a: Tensor) -> None:
    """The bound is that of ``activation_model``."""
    assert_within(a, activation_float64(h, of), 8 * U * error_scale(h, of), a.dtype)


def check_activation_gradient(da: Tensor, h: Tensor, of: Activation, dh: Tensor) -> None:
    """Against autograd in float64."""
    leaf = h.double().requires_grad_()
    (exact,) = torch.autograd.grad(activation_float64(leaf, of), leaf, da.double())
    scale = da.double().abs() * error_scale(h, of)
    assert_within(dh, exact, 8 * U * (torch.cat([scale, scale], -1) if of.gated else scale), dh.dtype)


# ---- the module itself ----


def run(
    module: nn.Module, x: Tensor, dy: Tensor, recipe: Recipe | None, torch_autocast: bool = False,
    dn: Tensor | None = None, seed: int = 1, residual: Tensor | None = None, ds: Tensor | None = None, **kwargs: Any,
) -> Results:  # fmt: skip
    """One forward and backward of a module under ``recipe``; gradients of earlier ones are dropped."""
    module.zero_grad()
    x = x.detach().requires_grad_()
    kwargs |= {"return_residual": True} if ds is not None else {}
    if residual is not None:
        residual = kwargs["residual"] = residual.detach().requires_grad_()
    with (
        autocast(enabled=recipe is not None, recipe=recipe),
        torch.autocast(x.device.type, torch.bfloat16, enabled=torch_autocast),
    ):
        outputs = module(x, **kwargs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    torch.manual_seed(seed)
    named = {"s": outputs[-1]} if ds is not None else {}
    if getattr(module, "return_layernorm_output", False):
        named["n"] = outputs[-1 - len(named)]
    pairs = [(outputs[0], dy), (named.get("n"), dn), (named.get("s"), ds)]
    given = [(output, gradient) for output, gradient in pairs if output is not None and gradient is not None]
    torch.autograd.backward(*zip(*given, strict=True))
    results = {"y": outputs[0].detach(), "x": x.grad} | {name: p.grad for name, p in module.named_parameters()}
    results |= {name: output.detach() for name, output in named.items()}
    results |= {} if residual is None else {"residual": residual.grad}
    return {name: value for name, value in results.items() if value is not None}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """The same names and bits; NaN equals NaN.

    On a GPU the kernel of an activation's gradient sums its rows too, in an order that is not PyTorch's.
    """
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        got = found[name]
        assert got.shape == value.shape and torch.equal(got.isnan(), value.isnan()), name
        if got.is_cuda and name == "fc1.bias":
            torch.testing.assert_close(got, value.to(got.dtype), equal_nan=True, rtol=2**-7, atol=1e-3)
            continue
        assert torch.equal(got.nan_to_num(), value.to(got.dtype).nan_to_num()), name


def fill(module: nn.Module) -> None:
    """Parameters that are nowhere 0 or 1."""
    for name, parameter in module.named_parameters():
        nn.init.normal_(parameter, mean=0.5 if "norm" in name else 0.0, std=0.3)
