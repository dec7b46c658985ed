"""Blocks cast by the kernel that makes their value: the bits of value and cast, and the value is never written."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from minifloat.formats import Format
from minifloat.functional import norm_activation
from minifloat.functional.norm_activation import Activation, FusedOutput, Norm, act_value, dact_value, norm_value
from minifloat.nn import LayerNormLinear, LayerNormMLP
from minifloat.ops.activation import activation_backward_cast, activation_cast, out_columns
from minifloat.ops.norm import norm_cast
from minifloat.ops.quantize import casts_blocks
from minifloat.quantizer import Quantizer
from minifloat.recipe import Float8BlockScaling, Recipe, named
from tests.helpers.compare import assert_same_operands
from tests.helpers.fused_model import fill, run
from tests.helpers.sample import each_twice

BF16 = torch.bfloat16
STRIPS, MX = Format("e4m3", 128, scale_rule="pow2"), Format("e4m3", 32, scale_rule="e8m0")
FORMATS = [STRIPS, replace(STRIPS, tile=True, scale_rule="fp32"), replace(STRIPS, block=64, element="e5m2"), MX]
FOR_EACH_FORMAT = pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.spec)


class Operations(TorchDispatchMode):
    """Counts the operations of ours that are called inside."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func.namespace == "minifloat":
            self.calls[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def quantizers(fmt: Format) -> list[Quantizer]:
    """Along the rows, along the columns, and both."""
    return [Quantizer(fmt, columnwise=False), Quantizer(fmt, rowwise=False), Quantizer(fmt)]


def assert_fused(
    made: FusedOutput, value: FusedOutput, quantizer: Quantizer, operation: str, calls: Counter[str]
) -> None:
    """``made`` came quantized from one operation, and is the cast of ``value``."""
    assert calls == {operation: 1} and made.value is None and made.quantized is not None and value.value is not None
    assert_same_operands(made.cast(quantizer), value.cast(quantizer))
    for found, expected in zip(made.quantized, value.cast(quantizer), strict=True):
        assert found is None or expected is None or found.codes.stride() == expected.codes.stride()
    for name in ("stream", "column_sum"):
        found, expected = getattr(made, name), getattr(value, name)
        assert (found is None) == (expected is None)
        assert found is None or (found.dtype == expected.dtype and found.shape == expected.shape)
    assert made.dtype == value.dtype == BF16
    assert all(torch.equal(a, b) for a, b in zip(made.saved, value.saved, strict=True))


@FOR_EACH_FORMAT
def test_norms(fmt: Format, device: torch.device) -> None:
    x, residual = (torch.randn(2, 33, 144).to(device, BF16) for _ in range(2))
    gamma, beta = (torch.randn(144).to(device, BF16) for _ in range(2))
    for norm, b, other in (
        (Norm("LayerNorm"), beta, None),
        (Norm("RMSNorm", zero_centered_gamma=True), None, residual),
    ):
        for quantizer in quantizers(fmt):
            with Operations() as seen:
                made = norm_value(x, gamma, b, norm, quantizer, residual=other, fused=True)
            value = norm_value(x, gamma, b, norm, quantizer, residual=other)
            assert_fused(made, value, quantizer, "norm_cast", seen.calls)
            assert made.stream is not None and value.stream is not None and torch.equal(made.stream, value.stream)


@each_twice
@pytest.mark.parametrize("name", ["gelu", "swiglu", "clamped_swiglu"])
@FOR_EACH_FORMAT
def test_activations(fmt: Format, name: str, device: torch.device) -> None:
    act, x = Activation.of(name), torch.randn(3, 45, 256).to(device, BF16)
    dy = torch.randn(3, 45, out_columns(name, 256)).to(device, BF16)
    for quantizer in quantizers(fmt):
        with Operations() as seen:
            made = act_value(x, act, quantizer, fused=True)
        assert_fused(made, act_value(x, act, quantizer), quantizer, "activation_cast", seen.calls)
        for bias in (False, True):
            with Operations() as seen:
                made = dact_value(dy, x, act, quantizer, fused=True, with_column_sum=bias)
            value = dact_value(dy, x, act, quantizer, with_column_sum=bias)
            assert_fused(made, value, quantizer, "activation_backward_cast", seen.calls)
            if bias:
                assert made.column_sum is not None and value.column_sum is not None
                torch.testing.assert_close(made.column_sum, value.column_sum, rtol=2e-2, atol=1e-3)


def test_where_the_value_is_needed_first(device: torch.device) -> None:
    """Blocks that straddle two halves, an amax of the whole, two formats, a second step, and who asks for the value."""
    swiglu, gelu = Activation.of("swiglu"), Activation.of("gelu")
    x, dy = torch.randn(20, 192).to(device, BF16), torch.randn(20, 96).to(device, BF16)
    assert dact_value(dy, x, swiglu, Quantizer(STRIPS), fused=True).quantized is None
    assert dact_value(dy, x, swiglu, Quantizer(MX), fused=True).quantized is not None
    assert dact_value(dy, dy, gelu, Quantizer(STRIPS), fused=True).quantized is not None  # which has no halves
    nvfp4 = Format("e2m1", 16, scale_rule="two_level")
    for quantizer in (
        *[Quantizer(nvfp4), Quantizer(Format("e4m3")), Quantizer(STRIPS, replace(STRIPS, element="e5m2"))],
        *[Quantizer(replace(STRIPS, block=8)), Quantizer(STRIPS, columnwise_source="rowwise_dequantized")],
        *[Quantizer.identity(), Quantizer(STRIPS, rowwise=False, columnwise=False)],
    ):
        assert act_value(x, swiglu, quantizer, fused=True).quantized is None
    kept = act_value(x, swiglu, Quantizer(MX), fused=True, return_value=True)
    assert kept.quantized is None and kept.value is not None
    assert not casts_blocks(nvfp4) and not casts_blocks(Format("e4m3", scale_rule="given"))


def test_operations_pass_opcheck(device: torch.device) -> None:
    utils = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    x, dy = torch.randn(6, 64).to(device, BF16), torch.randn(6, 32).to(device, BF16)
    gamma = torch.randn(64).to(device, BF16)
    for i, wanted in enumerate([(True, False, True), (False, True, True), (True, True, False), (True, True, True)]):
        spec = "e4m3/32x32/e8m0" if i == 2 else "e4m3/1x32/e8m0"
        torch.library.opcheck(activation_cast.overload, (x, "swiglu", [], None, spec, *wanted), test_utils=utils)
        backward = (dy, x, "swiglu", [], None, spec, *wanted, i % 2 == 0)
        torch.library.opcheck(activation_backward_cast.overload, backward, test_utils=utils)
        how = (x, gamma, None, "RMSNorm", 1e-5, False, None, spec, *wanted, x if i == 0 else None)
        torch.library.opcheck(norm_cast.overload, how, test_utils=utils)


# ---- modules ----


RECIPES = {
    "block": named("block"),
    "mxfp8": named("mxfp8"),
    "tiles": Float8BlockScaling(x_block_scaling_dim=2, w_block_scaling_dim=1),
}
CASES = {
    "linear": (lambda recipe: LayerNormLinear(160, 48, bias=False, recipe=recipe), {"norm_cast": 1}),
    "mlp": (
        lambda recipe: LayerNormMLP(160, 256, bias=False, activation="swiglu", normalization="RMSNorm", recipe=recipe),
        {"norm_cast": 1, "activation_cast": 1, "activation_backward_cast": 1},
    ),
}


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize(("make", "expected"), CASES.values(), ids=CASES)
def test_a_step_is_the_same(
    make: Any, expected: dict[str, int], recipe: Recipe, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs and gradients, to the bit; no norm and no activation is written in high precision."""
    module = make(recipe)
    fill(module)
    module.to(device)
    x = torch.randn(2, 75, 160).to(device, BF16)
    dy = torch.randn_like(module(x))
    with Operations() as seen:
        made = run(module, x, dy, None)
    fused = {name: n for name, n in seen.calls.items() if name.startswith(("norm_", "activation_"))}
    assert fused == {**expected, "norm_backward": 1}
    monkeypatch.setattr(norm_activation, "casts_blocks", lambda fmt: False)
    with Operations() as seen:
        apart = run(module, x, dy, None)
    assert not expected.keys() & seen.calls.keys()
    assert made.keys() == apart.keys()
    for name, value in made.items():
        if isinstance(value, Tensor):
            assert torch.equal(value, apart[name]), name


def test_who_reads_the_value_gets_it() -> None:
    """A backward in high precision multiplies N itself."""
    module = LayerNormLinear(64, 48, recipe=replace(RECIPES["mxfp8"], backward_override="high_precision"))
    with Operations() as seen:
        module(torch.randn(40, 64)).sum().backward()
    assert seen.calls["norm_forward"] == 1 and "norm_cast" not in seen.calls
