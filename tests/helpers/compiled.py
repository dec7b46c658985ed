"""A model and its compiled copy on the same data: equal to the bit, in few graphs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from minifloat.formats import Format
from minifloat.nn import prepare
from minifloat.quantizer import Quantizer
from minifloat.recipe import (
    CustomRecipe,
    DelayedScaling,
    DelayedScalingRequest,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QuantizerRole,
    Recipe,
    named,
)

Call = Callable[..., Any]


def hybrid(role: QuantizerRole) -> Quantizer | DelayedScalingRequest:
    """MXFP8 forward and current scaling backward for inputs, delayed scaling for weights, a 4-bit copy cast twice."""
    if role.tensor_type == "weight":
        return DelayedScalingRequest(amax_history_len=4)
    if role.tensor_type == "grad_output":
        return Quantizer(Format("e5m2"))
    return Quantizer.hybrid(
        rowwise_quantizer=Quantizer(Format(block=32, scale_rule="e8m0")),
        columnwise_quantizer=Quantizer(Format("e2m1", 16, scale_rule="two_level")),
        columnwise_source="rowwise_dequantized",
    )


RECIPES: dict[str, Recipe] = {
    "delayed": DelayedScaling(amax_history_len=4),
    "current": Float8CurrentScaling(),
    "block": Float8BlockScaling(),
    "mxfp8": MXFP8BlockScaling(),
    "nvfp4": NVFP4BlockScaling(),
    "rowwise": named("rowwise"),
    "mxfp4": named("mxfp4"),
    "mxfp6": named("mxfp6"),
    "custom": CustomRecipe(hybrid),
    "current epsilon": Float8CurrentScaling(amax_epsilon=1e-3),
    "current pow2": Float8CurrentScaling(use_power_2_scales=True),
    "block fp32": Float8BlockScaling(use_f32_scales=True),
    "mxfp8 2d hybrid": MXFP8BlockScaling(enable_2d_quantization=True, fp8_format=MXFP8BlockScaling().fp8_format.HYBRID),
    "nvfp4 no rht": NVFP4BlockScaling(disable_rht=True),
    "nvfp4 nearest 1d": NVFP4BlockScaling(disable_stochastic_rounding=True, disable_2d_quantization=True),
    "nvfp4 row-scaled": NVFP4BlockScaling(disable_rht=True, row_scaled_activation=True),
    "nvfp4 4over6": NVFP4BlockScaling(disable_rht=True, nvfp4_4over6="all", nvfp4_4over6_err_mode="MSE"),
    "high precision backward": Float8CurrentScaling(backward_override="high_precision"),
    "dequantized backward": MXFP8BlockScaling(backward_override="dequantized"),
}


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """``torch.compile`` in one graph, without a backend's own numerics."""
    return torch.compile(function, **{"backend": "aot_eager", "fullgraph": True} | options)  # type: ignore[no-any-return]


def graphs() -> int:
    """How often something was compiled since the test began."""
    return counters["stats"]["unique_graphs"]


class Pair:
    """A model and a copy of it, each called by ``call``, that one in compiled code.

    Args:
        recipe: makes the buffers of delayed scaling beforehand.
        options: of ``torch.compile``.
    """

    exact_biases = True  # else their gradients may be sums in another order

    def __init__(
        self, model: nn.Module, call: Call = lambda model, x: model(x), recipe: Recipe | None = None, **options: Any
    ) -> None:  # fmt: skip
        self.eager, self.model, self.call = model, copy.deepcopy(model), call
        if recipe is not None:
            prepare(self.eager, recipe)
            prepare(self.model, recipe)
        self.run = compiled(lambda x, *more: call(self.model, x, *more), **options)

    def same(self, eager: Tensor | None, found: Tensor | None) -> bool:
        if eager is None or found is None:
            return eager is found
        return torch.equal(eager, found)

    def step(self, x: Tensor, seed: int = 0, training: bool = True, *more: Any) -> Tensor:
        """The output of compiled code, which must equal eager code's, as gradients and buffers must."""
        found = []
        for run in (lambda *given: self.call(self.eager, *given), self.run):
            torch.manual_seed(seed)  # of stochastic rounding
            own = x.clone().requires_grad_(training)
            with torch.set_grad_enabled(training):
                y = run(own, *more)
            if training:
                y.square().sum().backward()
            found.append((y.detach(), own.grad))
        (y, dx), (z, dz) = found
        assert self.same(y, z), "output"
        assert self.same(dx, dz), "input gradient"
        self.same_state()
        return z  # type: ignore[no-any-return]

    def same_state(self) -> None:
        """Gradients, main gradients and buffers are equal."""
        for (name, p), q in zip(self.eager.named_parameters(), self.model.parameters(), strict=True):
            if name.endswith("bias") and not self.exact_biases and p.grad is not None:
                torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=1e-5 * float(p.grad.abs().max()))
            else:
                assert self.same(p.grad, q.grad), name
            if hasattr(p, "main_grad"):
                assert self.same(p.main_grad, q.main_grad), name  # type: ignore[attr-defined]
        buffers = dict(self.model.named_buffers())
        assert buffers.keys() == dict(self.eager.named_buffers()).keys()
        for name, buffer in self.eager.named_buffers():
            assert self.same(buffer, buffers[name]), name
