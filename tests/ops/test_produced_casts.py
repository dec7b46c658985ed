"""Norms, activations and their gradients followed by a cast: bit for bit that of the value, in every recipe."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from minifloat.formats import Format
from minifloat.functional.norm_activation import Activation, FusedOutput, Norm, act_value, dact_value, norm_value
from minifloat.ops.activation import NAMES, activation_backward, activation_forward, gated, out_columns
from minifloat.ops.norm import norm_forward
from minifloat.quantizer import Quantizer, cast_all
from tests.helpers import oracle
from tests.helpers.activation_model import activation_inputs
from tests.helpers.compare import DTYPES, assert_same_operands
from tests.helpers.fused_output import (
    RECIPE_NAMES,
    SCALE,
    SEED_AND_OFFSET,
    act_quantize,
    amaxes_for,
    dact_quantize,
    norm_quantize,
    quantizers,
)
from tests.helpers.norm_model import NORMS, norm_inputs
from tests.helpers.sample import each_once

BF16, FP32 = torch.bfloat16, torch.float32


class Producer(NamedTuple):
    """What is computed before a cast: the value in a dtype, what a layer calls, and that with its cast."""

    value: Callable[[torch.dtype], Tensor]
    phase: Callable[[Quantizer], FusedOutput]
    make: Callable[..., FusedOutput]
    saved: Callable[[], tuple[Tensor, ...]]
    reads_fp32: bool


def norm_producer(norm: Norm, dtype: torch.dtype, device: torch.device, shape: tuple[int, int] = (33, 80)) -> Producer:
    inputs = *norm_inputs(norm, shape, dtype, device), norm
    how = norm.normalization, norm.eps, norm.zero_centered_gamma

    def forward(out: torch.dtype) -> tuple[Tensor, ...]:
        return norm_forward(*inputs[:3], *how, out)[:3]  # type: ignore[no-any-return]

    make = partial(norm_quantize, *inputs)
    return Producer(lambda out: forward(out)[0], partial(norm_value, *inputs), make, lambda: forward(dtype)[1:], True)


def act_producer(name: str, dtype: torch.dtype, device: torch.device, shape: tuple[int, int] = (33, 96)) -> Producer:
    act, x = Activation.of(name), activation_inputs(shape, dtype, device)
    value = lambda out: activation_forward(x, act.name, act.parameters, out, False)[0]  # noqa: E731
    return Producer(value, partial(act_value, x, act), partial(act_quantize, x, act), tuple, True)


def dact_producer(name: str, dtype: torch.dtype, device: torch.device, shape: tuple[int, int] = (33, 96)) -> Producer:
    act, x = Activation.of(name), activation_inputs(shape, dtype, device)
    dy = activation_inputs((shape[0], out_columns(name, shape[1])), dtype, device)
    value = lambda out: activation_backward(dy, x, act.name, act.parameters, out, False, False)[0]  # noqa: E731
    make = partial(dact_quantize, dy, x, act)
    return Producer(value, partial(dact_value, dy, x, act), make, tuple, not gated(name))


PRODUCERS: dict[str, Callable[..., Producer]] = {
    **{f"norm {i}": partial(norm_producer, norm) for i, norm in enumerate(NORMS)},
    **{f"{name}": partial(act_producer, name) for name in NAMES},
    **{f"gradient of {name}": partial(dact_producer, name) for name in NAMES},
}
SOME = ["norm 0", "norm 3", "gelu", "swiglu", "gradient of gelu", "gradient of swiglu"]


@each_once
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("recipe", RECIPE_NAMES)
@pytest.mark.parametrize("name", PRODUCERS)
def test_it_is_the_cast_of_its_value(name: str, recipe: str, dtype: torch.dtype, device: torch.device) -> None:
    """Which the kernel returns: in fp32 for delayed scaling, else rounded."""
    made, rng = PRODUCERS[name](dtype, device), SEED_AND_OFFSET.to(device)
    for quantizer in quantizers(recipe):
        value = made.value(FP32 if recipe == "delayed" and made.reads_fp32 else dtype)
        amaxes = amaxes_for(quantizer, value)
        got = made.make(quantizer, amaxes, rng)
        assert_same_operands(got.quantized, quantizer.cast(value, amaxes, rng, gemm_ready=True))
        assert len(got.saved) == len(made.saved())
        assert all(torch.equal(a, b) for a, b in zip(got.saved, made.saved(), strict=True))
        assert all(operand is None or operand.dtype == dtype for operand in got.quantized)


@each_once
@pytest.mark.parametrize("recipe", RECIPE_NAMES)
@pytest.mark.parametrize("name", SOME)
def test_returned_value_is_what_was_cast(name: str, recipe: str, device: torch.device) -> None:
    """Who asks for the value gets that very one in the dtype of the input, delayed scaling too."""
    made, rng = PRODUCERS[name](BF16, device), SEED_AND_OFFSET.to(device)
    for quantizer in quantizers(recipe):
        rounded = made.value(BF16)
        amaxes = amaxes_for(quantizer, rounded)
        got = made.make(quantizer, amaxes, rng, return_value=True)
        assert got.value is not None and torch.equal(got.value, rounded)
        assert_same_operands(got.quantized, quantizer.cast(rounded, amaxes, rng, gemm_ready=True))


@each_once
@pytest.mark.parametrize("recipe", RECIPE_NAMES)
@pytest.mark.parametrize("name", SOME)
def test_phases_equal_the_whole(name: str, recipe: str, device: torch.device) -> None:
    """Value, amaxes, cast: alone, in one launch with another tensor's, and with a larger amax agreed between ranks."""
    made, rng = PRODUCERS[name](BF16, device), SEED_AND_OFFSET.to(device)
    weight = torch.randn(48, 80, device=device).bfloat16()
    for quantizer in quantizers(recipe):
        produced = made.phase(quantizer)
        amaxes = amaxes_for(quantizer, produced.value)
        agreed = tuple(None if amax is None else amax * 2 for amax in amaxes)
        for given in (amaxes, agreed):
            assert_same_operands(produced.cast(quantizer, given, rng), made.make(quantizer, given, rng).quantized)
        mx = Quantizer(Format("e4m3", 32, scale_rule="e8m0"))
        cast, other = cast_all(
            [produced.value, weight], [quantizer, mx], [amaxes, (None, None)], [rng, None], gemm_ready=True
        )
        assert_same_operands(produced.label(cast), made.make(quantizer, amaxes, rng).quantized)
        assert all(operand is None or operand.dtype == BF16 for operand in produced.label(cast))
        assert_same_operands(other, mx(weight))


@pytest.mark.parametrize("name", ["norm 0", "gelu"])
def test_delayed_scaling_is_not_rounded_first(name: str) -> None:
    """Codes and amax are the oracle's for the fp32 result; MXFP8's are the oracle's for the rounded one."""
    made = PRODUCERS[name](BF16, torch.device("cpu"), (64, 128))
    fp32 = made.value(FP32)
    operand = made.make(Quantizer(Format("e4m3", scale_rule="given")), (torch.tensor([SCALE]),)).quantized.any
    codes, scale_inv, amax = oracle.per_tensor_given(fp32.numpy(), "e4m3", SCALE)
    assert (operand.codes.numpy() == codes).all()
    assert operand.scale_inv is not None and operand.amax is not None
    assert operand.scale_inv.item() == scale_inv and operand.amax.item() == amax == fp32.abs().max()
    assert not (oracle.per_tensor_given(fp32.bfloat16().float().numpy(), "e4m3", SCALE)[0] == codes).all()
    assert operand.dequantize().dtype == BF16

    operand = made.make(Quantizer(Format("e4m3", 32, scale_rule="e8m0"))).quantized.any
    codes, scales = oracle.mxfp8(fp32.bfloat16().float().numpy(), "e4m3", -1)
    assert (operand.codes.numpy() == codes).all()
    assert operand.scale_inv is not None and (operand.scale_inv.numpy() == scales).all()


def test_unquantized_and_mixed_formats_are_rounded_first() -> None:
    """Delayed scaling in one orientation only, or a copy cast from the other, does not read fp32."""
    made = PRODUCERS["norm 0"](BF16, torch.device("cpu"))
    delayed, block = Format("e4m3", scale_rule="given"), Format("e4m3", 128, scale_rule="pow2")
    chained = Quantizer(delayed, block, columnwise_source="rowwise_dequantized")
    for quantizer in (Quantizer.identity(), Quantizer(delayed, block), chained, Quantizer(block, delayed)):
        assert made.phase(quantizer).value.dtype == BF16
    assert made.phase(Quantizer(delayed, block, columnwise=False)).value.dtype == FP32
    assert torch.equal(made.make(Quantizer.identity()).quantized.dequantize(), made.value(BF16))


def test_leading_dims(device: torch.device) -> None:
    norm, act, quantizer = Norm("RMSNorm"), Activation.of("swiglu"), quantizers("block")[0]
    x, gamma, beta = norm_inputs(norm, (24, 40), BF16, device)
    deep = x.view(2, 3, 4, 40)
    for make, size in (
        (lambda x, **more: norm_quantize(x, gamma, beta, norm, quantizer, **more), 40),
        (lambda x, **more: act_quantize(x, act, quantizer, **more), 20),
    ):
        got = make(deep, return_value=True)
        assert got.value is not None and got.value.shape == (2, 3, 4, size)
        assert_same_operands(got.quantized, make(x, return_value=True).quantized)
    saved = norm_quantize(deep, gamma, beta, norm, quantizer).saved
    assert norm.gradients(deep, deep, gamma, saved)[0].shape == deep.shape
    assert dact_value(deep[..., :20], deep, act, quantizer).value.shape == deep.shape


def test_label_keeps_what_is_shared() -> None:
    operand = Quantizer(Format("e4m3"))(torch.ones(2, 2))
    row, column = FusedOutput(torch.ones(2, 2), BF16).label(operand)
    assert row is column and row is not None and row.dtype == BF16


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x, g: Norm("BatchNorm"), "BatchNorm"),
        (lambda x, g: norm_value(x, g[:3], None, Norm(), Quantizer.identity()), r"gamma has shape \(3,\)"),
        (lambda x, g: norm_value(x, g, g[:3], Norm(), Quantizer.identity()), r"beta has shape \(3,\)"),
        (lambda x, g: norm_value(x, g, g, Norm("RMSNorm"), Quantizer.identity()), "RMSNorm has no beta"),
        (lambda x, g: norm_value(x.double(), g, None, Norm(), Quantizer.identity()), "float64"),
        (
            lambda x, g: norm_quantize(x, g, None, Norm(), Quantizer(Format("e4m3", scale_rule="given"))),
            r"amaxes=\(scale,\)",
        ),
        (
            lambda x, g: norm_value(x, g[:3], None, Norm(), quantizers("mxfp8")[0], fused=True),
            r"gamma has shape \(3,\)",
        ),
        (lambda x, g: Activation.of("mish"), "mish.*gelu"),
        (lambda x, g: Activation("mish"), "mish"),
        (lambda x, g: Activation("clamped_swiglu"), r"3 parameters, got 0; use Activation\.of"),
        (lambda x, g: Activation.of("swiglu", {"limit": 7.0}), "swiglu has no parameter limit; it has none"),
        (lambda x, g: Activation.of("clamped_swiglu", {"beta": 1.0}), "no parameter beta; it has limit, alpha"),
        (lambda x, g: act_value(x[:, :3], Activation("swiglu"), Quantizer.identity()), "which is 3; it must be even"),
        (lambda x, g: act_value(x.double(), Activation("gelu"), Quantizer.identity()), "float64"),
    ],
)
def test_mistakes_are_value_errors(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(torch.ones(2, 4), torch.ones(4))
