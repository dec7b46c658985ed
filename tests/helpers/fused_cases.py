"""Sizes and options of ``LayerNormLinear`` and ``LayerNormMLP``, and what each step of them is compared with."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from minifloat.nn.fused_layers import LayerNormLinear, LayerNormMLP
from minifloat.recipe import Recipe
from tests.helpers.fused_model import Model, assert_same, fill, run
from tests.helpers.recipes import batch_scales

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
LIMITS = {"limit": 1.5, "alpha": 1.1, "glu_linear_offset": 0.5}


@dataclass(frozen=True)
class LinearCase:
    """Sizes, dtypes and options of a layer and its input."""

    lead: tuple[int, ...] = (17,)
    K: int = 48
    N: int = 33
    dtype: torch.dtype = BF16
    params: torch.dtype = FP32
    norm: str = "LayerNorm"
    centered: bool = False
    bias: bool = True
    torch_autocast: bool = False

    @property
    def compute_dtype(self) -> torch.dtype:
        return BF16 if self.torch_autocast else self.dtype

    def module(self, **kwargs: Any) -> LayerNormLinear:
        module = LayerNormLinear(
            self.K, self.N, bias=self.bias, normalization=self.norm, zero_centered_gamma=self.centered,
            params_dtype=self.params, **kwargs,
        )  # fmt: skip
        fill(module)
        return module

    def batch(self, scale: float = 1.0, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
        x, dy = torch.randn(*self.lead, self.K) * scale, torch.randn(*self.lead, self.N) * scale
        return x.to(device, self.dtype), dy.to(device, self.compute_dtype)


@dataclass(frozen=True)
class MLPCase(LinearCase):
    """Sizes, dtypes and options of an MLP and its input; ``H`` is the width between its linears."""

    H: int = 40
    activation: str = "gelu"

    def module(self, **kwargs: Any) -> LayerNormMLP:  # type: ignore[override]
        module = LayerNormMLP(
            self.K, self.H, bias=self.bias, normalization=self.norm, zero_centered_gamma=self.centered,
            activation=self.activation, activation_params=LIMITS if self.activation == "clamped_swiglu" else None,
            params_dtype=self.params, **kwargs,
        )  # fmt: skip
        fill(module)
        return module

    def batch(self, scale: float = 1.0, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
        x, dy = torch.randn(*self.lead, self.K) * scale, torch.randn(*self.lead, self.K) * scale
        return x.to(device, self.dtype), dy.to(device, self.compute_dtype)


LINEAR_CASES = {
    "2d": LinearCase(),
    "3d fp32": LinearCase((3, 43), 80, 48, FP32, norm="RMSNorm", centered=True),
    "4d autocast": LinearCase((2, 3, 5), 33, 80, FP32, params=BF16, torch_autocast=True, centered=True),
    "one row fp16": LinearCase((1,), 80, 33, FP16, norm="RMSNorm", bias=False),
    "vector": LinearCase((), 48, 7),
    "127 rows bf16 parameters": LinearCase((127,), 128, 64, BF16, BF16, "RMSNorm"),
    "empty": LinearCase((0,)),
}
MLP_CASES = {
    "2d": MLPCase(),
    "3d fp32 gated": MLPCase((3, 43), 80, 0, FP32, norm="RMSNorm", centered=True, activation="swiglu"),
    "4d autocast": MLPCase((2, 3, 5), 33, 0, FP32, params=BF16, torch_autocast=True, centered=True, activation="srelu"),
    "one row fp16": MLPCase((1,), 80, 0, FP16, norm="RMSNorm", bias=False, activation="clamped_swiglu"),
    "7 rows": MLPCase((7,), 48, 0, H=80, activation="silu"),
    "127 rows bf16 parameters": MLPCase((127,), 64, 0, BF16, BF16, "RMSNorm", H=128, activation="geglu"),
    "empty": MLPCase((0,), activation="reglu"),
}
BOTH_CASES = dict(zip(LINEAR_CASES, zip(LINEAR_CASES.values(), MLP_CASES.values(), strict=True), strict=True))
"""By the layer's sizes: of both."""


def assert_state(module: nn.Module, model: Model) -> None:
    """Delayed scaling's histories and scales are those of the model."""
    found = {key: value for key, value in module.state_dict().items() if "_scaling." in key}
    assert_same(found, model.state())


def assert_steps(case: Any, recipe: Recipe, device: str = "cpu", **options: Any) -> None:
    """Some steps of ``case.module(**options)`` give the model's bits, and they are float64's."""
    module = case.module(**options).to(device)
    model = Model(module, recipe)
    names = {name for name, _ in module.named_parameters()} | {"x", "y", "n"}
    for scale in batch_scales(recipe):
        x, dy = case.batch(scale, device)
        dn = torch.randn_like(x, dtype=case.compute_dtype) if module.return_layernorm_output else None
        expected = model.step(x, dy, case.compute_dtype, dn)
        found = run(module, x, dy, recipe, case.torch_autocast, dn)
        assert_same(found, {name: value for name, value in expected.items() if name in names})
        assert found["y"].dtype == case.compute_dtype and found["x"].dtype == case.dtype
        assert all(parameter.grad.dtype == parameter.dtype for parameter in module.parameters())
        assert_state(module, model)
        model.checks.run()


def assert_special_rows(case: Any, recipe: Recipe, value: float) -> None:
    """Rows of zeros, and an input that holds ``value``, NaN or infinity, give what the model gives."""
    module = case.module()
    model = Model(module, recipe)
    x, dy = case.batch()
    x[3], x[5, 7], dy[4] = 0.0, value, 0.0
    assert_same(run(module, x, dy, recipe), model.step(x, dy, BF16))
    assert_state(module, model)


def unfused(module: Any) -> Any:
    """A copy that runs its parts one after the other, since one has a hook."""
    other = copy.deepcopy(module)
    other.norm.register_forward_hook(lambda *_: None)
    return other


def assert_as_parts(module: Any, case: Any, recipe: Recipe | None, device: Any = "cpu", **kwargs: Any) -> None:
    """The fused form gives the bits of its parts."""
    x, dy = case.batch(1.0, device)
    dn = torch.randn_like(x, dtype=case.compute_dtype) if module.return_layernorm_output else None
    expected = run(unfused(module), x, dy, recipe, case.torch_autocast, dn, **kwargs)
    assert_same(run(module, x, dy, recipe, case.torch_autocast, dn, **kwargs), expected)
