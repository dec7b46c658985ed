"""Weights of public checkpoints in MXFP4: loaded and saved bit for bit, and multiplied as they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from minifloat import (
    GroupedLinear,
    Linear,
    QuantizerRole,
    W4A8BlockScaling,
    autocast,
    convert,
    load_mxfp4,
    quantized_model_init,
    save_mxfp4,
)
from minifloat.formats import COLUMNWISE, ROWWISE, Format
from minifloat.ops.matmul import count_gemms
from minifloat.quantizer import Quantizer

N, K, G = 37, 160, 3
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
E2M1 = torch.cat([E2M1, -E2M1])


def checkpoint(*lead: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Any codes and scales, as gpt-oss has them."""
    torch.manual_seed(seed)
    blocks = torch.randint(0, 256, (*lead, N, K // 32, 16), dtype=torch.uint8)
    return blocks, torch.randint(100, 130, (*lead, N, K // 32), dtype=torch.uint8)


def decoded(blocks: Tensor, scales: Tensor) -> Tensor:
    """The values, as the authors of these checkpoints decode them: low halves first."""
    halves = torch.stack([E2M1[(blocks & 15).int()], E2M1[(blocks >> 4).int()]], -1).flatten(-2)
    return (halves * torch.exp2(scales[..., None].float() - 127)).flatten(-2)


def linear(recipe: Any = "w4a8") -> Linear:
    with quantized_model_init(recipe=recipe):
        return Linear(K, N, recipe=recipe, dtype=torch.bfloat16)


def grouped() -> GroupedLinear:
    with quantized_model_init(recipe="w4a8"):
        return GroupedLinear(G, K, N, bias=False, recipe="w4a8", dtype=torch.bfloat16)


def deepseek(blocks: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    return blocks.flatten(-2).view(torch.int8), scales.view(torch.float8_e8m0fnu)


@pytest.mark.parametrize("layout", ["gpt-oss", "deepseek"])
@pytest.mark.parametrize("groups", [False, True])
def test_round_trip(groups: bool, layout: Any) -> None:
    """Every byte comes back, in either layout; so it does through a state dict."""
    layer = grouped() if groups else linear()
    saved = checkpoint(*[G] * groups)
    wanted = saved if layout == "gpt-oss" else deepseek(*saved)
    parameters = dict(layer.named_parameters())
    load_mxfp4(layer, *[torch.stack([each, each], -1)[..., 0] for each in wanted])  # in memory of any strides
    again = grouped() if groups else linear()
    again.load_state_dict(layer.state_dict())
    for each in (layer, again):
        for found, want in zip(save_mxfp4(each, layout), wanted, strict=True):
            assert found.dtype == want.dtype and torch.equal(found.view(torch.uint8), want.view(torch.uint8))
    assert all(own is parameters[name] for name, own in layer.named_parameters())
    weights = torch.stack([w.dequantize() for w in layer._each("weight")]) if groups else layer.weight.dequantize()  # type: ignore[union-attr,operator]
    assert torch.equal(weights.float(), decoded(*saved))


@pytest.mark.parametrize("layout", ["gpt-oss", "deepseek"])
def test_split_parameters_are_one_weight(layout: Any) -> None:
    with quantized_model_init(recipe="w4a8"):
        layer = Linear(K, N, bias=False, parameters_split={"query_": 20, "key_": N - 20})
    saved = checkpoint()
    wanted = saved if layout == "gpt-oss" else deepseek(*saved)
    load_mxfp4(layer, *wanted)
    assert torch.equal(layer._weight_matrix().detach().float(), decoded(*saved))
    for found, want in zip(save_mxfp4(layer, layout), wanted, strict=True):
        assert found.dtype == want.dtype and torch.equal(found.view(torch.uint8), want.view(torch.uint8))


def step(layer: nn.Module, x: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    x = x.clone().requires_grad_()
    y = layer(x, *args)
    y.backward(torch.linspace(-1, 1, y.numel()).view_as(y).to(y.dtype))
    assert x.grad is not None
    return y.detach(), x.grad


@pytest.mark.parametrize("recipe", ["w4a8", "block"])
def test_linear_multiplies_by_the_codes(recipe: str) -> None:
    """Forward by the checkpoint's own codes; backward by a columnwise cast of the values they stand for."""
    layer, saved = linear(), checkpoint()
    layer.recipe = None
    load_mxfp4(layer, *saved)
    x = torch.randn(48, K, dtype=torch.bfloat16)
    with count_gemms() as gemms, autocast(recipe=recipe):
        y, dx = step(layer, x)
    assert {gemm.gemm: (gemm.a, gemm.b) for gemm in gemms} == {
        "fprop": ("e4m3/1x128/pow2", "e2m1/1x32/e8m0"),
        "dgrad": ("e4m3/1x128/pow2", "e2m1/1x32/e8m0"),
        "wgrad": ("e4m3/1x128/pow2", "e4m3/1x128/pow2"),
    }
    strips, mx = Quantizer(Format(block=128, scale_rule="pow2")), Quantizer(Format("e2m1", 32, scale_rule="e8m0"))
    values = decoded(*saved)
    want = strips(x).along(ROWWISE).dequantize(torch.float32) @ values.t() + layer.bias.float()
    torch.testing.assert_close(y.float(), want, rtol=2**-8, atol=1e-6 * float(want.abs().max()))
    dy = torch.linspace(-1, 1, y.numel()).view_as(y).to(y.dtype)
    column = mx(values).along(COLUMNWISE).dequantize(torch.float32)
    want = strips(dy).along(ROWWISE).dequantize(torch.float32) @ column
    torch.testing.assert_close(dx.float(), want, rtol=2**-8, atol=1e-6 * float(want.abs().max()))


def test_experts_equal_linears() -> None:
    """Each expert gives what a linear of its own codes gives, uneven and empty groups too."""
    layer, saved = grouped(), checkpoint(G)
    load_mxfp4(layer, *saved)
    counts = [11, 0, 33]
    x = torch.randn(sum(counts), K, dtype=torch.bfloat16)
    y, dx = step(layer, x, torch.tensor(counts))
    first = 0
    for i, count in enumerate(counts):
        alone = linear()
        nn.init.zeros_(alone.bias)
        load_mxfp4(alone, saved[0][i], saved[1][i])
        rows = slice(first, first + count)
        assert torch.equal(alone(x[rows]), y[rows])
        first += count
    assert dx.isfinite().all() and dx.any(1).all()


def test_values_of_a_checkpoint_are_cast_without_rounding() -> None:
    """So a model that was loaded in bf16 computes under w4a8 with the values of its MXFP4 checkpoint."""
    blocks, scales = checkpoint()
    values = decoded(blocks, scales)
    assert torch.equal(values.bfloat16().float(), values)
    found = W4A8BlockScaling().quantizer(QuantizerRole("linear", "weight"))(values.bfloat16())
    assert torch.equal(found.along(ROWWISE).dequantize(torch.float32), values)


@pytest.mark.parametrize("recipe", ["w4a8", "mxfp4"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_values_beyond_the_dtype_of_the_weight(dtype: torch.dtype, recipe: str) -> None:
    """fp16 ends at 65,504 and begins at 2^-24, and codes and scales of either orientation do not."""
    with quantized_model_init(recipe=recipe):
        layer = Linear(K, N, recipe=recipe, dtype=dtype)
    blocks, scales = checkpoint()
    scales = torch.randint(80, 180, scales.shape, dtype=torch.uint8)
    load_mxfp4(layer, blocks, scales)
    values, held = decoded(blocks, scales), layer.weight.operands  # type: ignore[union-attr,operator]
    assert (values.abs() > 65_504).any() and (values.abs() < 2**-24).any()
    assert torch.equal(held.along(ROWWISE).dequantize(torch.float32), values)
    wanted = Quantizer(Format("e2m1", 32, scale_rule="e8m0"), rowwise=False)(values).along(COLUMNWISE)
    assert torch.equal(held.along(COLUMNWISE).dequantize(torch.float32), wanted.dequantize(torch.float32))
    assert held.along(COLUMNWISE).dequantize(torch.float32).isfinite().all()


def test_a_converted_layer() -> None:
    model = nn.Sequential(nn.Linear(K, N, bias=False))
    convert(model, "w4a8", filter_fn=lambda module, name: True, quantize_weights=True)
    saved = checkpoint()
    load_mxfp4(model[0], *saved)  # type: ignore[arg-type]
    assert all(torch.equal(*pair) for pair in zip(save_mxfp4(model[0]), saved, strict=True))  # type: ignore[arg-type]


def test_inference_keeps_one_orientation() -> None:
    layer, both, saved = linear(), linear(), checkpoint()
    layer.load_state_dict(both.state_dict())
    layer.weight.update_usage(columnwise=False)  # type: ignore[operator]
    load_mxfp4(layer, *saved)
    load_mxfp4(both, *saved)
    assert layer.weight.operands.columnwise is None  # type: ignore[union-attr]
    x = torch.randn(5, K, dtype=torch.bfloat16)
    with torch.no_grad():
        assert torch.equal(layer(x), both(x))


def test_errors_name_the_layer_and_the_way_out() -> None:
    blocks, scales = checkpoint()
    plain = Linear(K, N, name="up")
    with pytest.raises(ValueError, match=r"'up'.*weight is kept as identity.*quantized_model_init"):
        load_mxfp4(plain, blocks, scales)
    with pytest.raises(ValueError, match="kept as e2m1/32x32/e8m0"):
        save_mxfp4(linear(W4A8BlockScaling(enable_2d_quantization=True)))
    with pytest.raises(ValueError, match=r"scales are \[36, 5\]; a weight of \[37, 160\] has \[37, 5\]"):
        load_mxfp4(linear(), blocks[1:], scales[1:])
    with pytest.raises(ValueError, match="16 bytes for each scale"):
        load_mxfp4(linear(), blocks[..., 1:], scales)
    with pytest.raises(ValueError, match=r"\[3, 37, 160\] has \[3, 37, 5\]"):
        load_mxfp4(grouped(), blocks, scales)
    with pytest.raises(TypeError, match=r"blocks are torch\.float32"):
        load_mxfp4(linear(), blocks.float(), scales)
    with pytest.raises(TypeError, match=r"scales are torch\.int64"):
        load_mxfp4(linear(), blocks, scales.long())
    with quantized_model_init(recipe="w4a8"):
        odd = Linear(33, 8)
    with pytest.raises(ValueError, match="33 columns"):
        save_mxfp4(odd)
    with pytest.raises(ValueError, match=r"a weight of \[8, 33\] has \[8, 1\]"):
        load_mxfp4(odd, blocks[:8, :1], scales[:8, :1])
