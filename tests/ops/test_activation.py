"""Activations against float64 within derived bounds, and their fused casts bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from minifloat.formats import Format
from minifloat.functional.norm_activation import Activation, act_value, dact_value
from minifloat.ops.activation import (
    NAMES,
    activation_backward,
    activation_backward_cast,
    activation_cast,
    activation_forward,
    gated,
    out_columns,
    parameters_of,
    reference,
)
from minifloat.quantizer import Quantizer
from tests.helpers import oracle
from tests.helpers.activation_model import FOR_EACH_ACTIVATION, activation_float64, activation_inputs, error_scale
from tests.helpers.compare import DTYPES, U, assert_same_operands, assert_within
from tests.helpers.fused_output import (
    RECIPE_NAMES,
    SCALE,
    SEED_AND_OFFSET,
    act_quantize,
    amaxes_for,
    dact_quantize,
    quantizers,
)
from tests.helpers.sample import each_twice

SHAPES = [(1, 2), (3, 10), (16, 64), (7, 130)]
FOR_EACH_NAME = pytest.mark.parametrize("name", NAMES)


def forward(x: Tensor, act: Activation, dtype: torch.dtype) -> Tensor:
    return activation_forward(x, act.name, act.parameters, dtype, False)[0]


def backward(dy: Tensor, x: Tensor, act: Activation, dtype: torch.dtype) -> Tensor:
    return activation_backward(dy, x, act.name, act.parameters, dtype, False, False)[0]


@each_twice
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
@FOR_EACH_ACTIVATION
def test_forward(act: Activation, dtype: torch.dtype, shape: tuple[int, int], device: torch.device) -> None:
    x = activation_inputs(shape, dtype, device)
    want = activation_float64(x, act)
    got = forward(x, act, torch.float32)
    assert got.shape == want.shape == (shape[0], out_columns(act.name, shape[1]))
    assert ((got - want).abs() <= 8 * U * error_scale(x, act)).all()
    for out in DTYPES:
        assert torch.equal(forward(x, act, out), got.to(out))


@each_twice
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
@FOR_EACH_ACTIVATION
def test_backward(act: Activation, dtype: torch.dtype, shape: tuple[int, int], device: torch.device) -> None:
    """Against float64 autograd, which gives 0 where values are clamped and at relu's kink."""
    x = activation_inputs(shape, dtype, device)
    dy = torch.randn(shape[0], out_columns(act.name, shape[1]), device=device).to(dtype)
    leaf = x.double().requires_grad_()
    (want,) = torch.autograd.grad(activation_float64(leaf, act), leaf, dy.double())
    got = backward(dy, x, act, torch.float32)
    scale = dy.double().abs() * error_scale(x, act)
    bound = 8 * U * (torch.cat([scale, scale], -1) if act.gated else scale)
    assert_within(got, want, bound, torch.float32)
    for out in DTYPES:
        assert torch.equal(backward(dy, x, act, out), got.to(out))


@FOR_EACH_ACTIVATION
def test_derivatives_in_float64(act: Activation) -> None:
    """The reference is of one dtype throughout: in float64 its backward is autograd's of its forward."""
    x = activation_inputs((5, 12), torch.float32).double()
    dy = torch.randn(5, out_columns(act.name, 12), dtype=torch.float64)
    leaf = x.clone().requires_grad_()
    y = reference.forward(leaf, act.name, act.parameters)
    (want,) = torch.autograd.grad(y, leaf, dy)
    torch.testing.assert_close(y.detach(), activation_float64(x, act), rtol=1e-13, atol=1e-15)
    torch.testing.assert_close(reference.backward(dy, x, act.name, act.parameters), want, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("name", [name for name in reference.POINTWISE if name not in ("relu",)])
def test_gradcheck(name: str) -> None:
    function, derivative = reference.POINTWISE[name]

    class Checked(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return function(x)

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> Tensor:  # type: ignore[override]
            return dy * derivative(*ctx.saved_tensors)

    x = torch.linspace(-3, 3, 12, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(Checked.apply, (x,))


def test_gelu_is_the_tanh_form() -> None:
    x = torch.linspace(-6, 6, 201, dtype=torch.float64)
    torch.testing.assert_close(
        reference.POINTWISE["gelu"].function(x), F.gelu(x, approximate="tanh"), rtol=1e-6, atol=1e-8
    )


def test_clamped_swiglu_at_its_limits() -> None:
    """At the limits themselves the gradient passes; beyond them it is 0. The gate has no lower limit."""
    act = Activation.of("clamped_swiglu", {"limit": 2.0})
    gate, linear = [2.0, 2.5, -9.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 2.0, -2.5, 2.5]
    x = torch.tensor([gate + linear])
    dx = backward(torch.ones(1, 6), x, act, torch.float32)[0]
    assert (dx == 0).nonzero().flatten().tolist() == [1, 10, 11]
    assert forward(x, act, torch.float32)[0, 1] == forward(torch.tensor([[2.0, 1.0]]), act, torch.float32)[0, 0]


@FOR_EACH_ACTIVATION
def test_extremes(act: Activation, device: torch.device) -> None:
    """Finite in the far tails, derivatives too; zero gives zero but for sigmoid's half; NaN stays where it is."""
    largest = 1e4 if act.name in ("srelu", "sreglu") else 1e18
    x = torch.tensor([[largest, -largest, 0.0, 20.0, -20.0, -100.0]], device=device)
    x = torch.cat([x, torch.ones_like(x)], -1) if act.gated else x
    y, dx = forward(x, act, torch.float32), backward(torch.ones(1, 6, device=device), x, act, torch.float32)
    assert y.isfinite().all() and dx.isfinite().all()
    assert abs(y[0, 2] - (0.5 if act.name in ("sigmoid", "glu") else 0.0)) <= 2.0**-22  # a GPU approximates 1 / (1 + 1)
    x[0, 3] = torch.nan
    y = forward(x, act, torch.float32)
    assert y.isnan().nonzero().tolist() == [[0, 3]]
    dx = backward(torch.full((1, 6), torch.nan, device=device), x, act, torch.float32)
    assert dx.isnan().float().mean() >= 0.5


def test_gelu_derivative_does_not_overflow() -> None:
    x = torch.tensor([[3e38, -3e38, torch.inf, -torch.inf, 10.0, -10.0]])
    assert backward(torch.ones(1, 6), x, Activation.of("gelu"), torch.float32).tolist() == [[1, 0, 1, 0, 1, 0]]


@pytest.mark.parametrize("name", ["gelu", "relu", "srelu", "silu", "qgelu"])
def test_infinity(name: str) -> None:
    y = forward(torch.tensor([[torch.inf]]), Activation.of(name), torch.float32)
    assert y.item() == torch.inf


@FOR_EACH_ACTIVATION
def test_layout_of_the_input_is_no_matter(act: Activation, device: torch.device) -> None:
    x = activation_inputs((12, 20), torch.bfloat16, device)
    dy = activation_inputs((12, out_columns(act.name, 20)), torch.bfloat16, device)
    for view in (x.T.contiguous().T, torch.cat([x, x], 1)[:, :20]):
        y, dx = forward(view, act, torch.float32), backward(dy.T.contiguous().T, view, act, torch.float32)
        assert y.is_contiguous() and dx.is_contiguous()
        # Vectorised and scalar paths of PyTorch's transcendentals differ in their last bits.
        torch.testing.assert_close(y, forward(x, act, torch.float32), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(dx, backward(dy, x, act, torch.float32), rtol=1e-5, atol=1e-5)


@FOR_EACH_ACTIVATION
def test_operations_pass_opcheck(act: Activation, device: torch.device) -> None:
    utils: Any = ("test_schema", "test_autograd_registration", "test_faketensor")
    if act.name in ("gelu", "clamped_swiglu"):
        utils = (*utils, "test_aot_dispatch_dynamic")
    for dtype in (torch.bfloat16, torch.float32):
        x = activation_inputs((6, 20), dtype, device)
        dy = activation_inputs((6, out_columns(act.name, 20)), dtype, device)
        formula, scale = (act.name, list(act.parameters)), torch.full((1,), SCALE, device=device)
        for yes in (True, False):
            forwards = activation_forward.spelled(x, *formula, dtype, yes)
            backwards = activation_backward.spelled(dy, x, *formula, dtype, yes, yes)
            torch.library.opcheck(activation_forward.overload, forwards, test_utils=utils)
            torch.library.opcheck(activation_backward.overload, backwards, test_utils=utils)
            cast = (*formula, scale, "e4m3/tensor/given", yes, True, True)
            torch.library.opcheck(activation_cast.overload, (x, *cast), test_utils=utils)
            torch.library.opcheck(activation_backward_cast.overload, (dy, x, *cast, yes), test_utils=utils)


@each_twice
@pytest.mark.parametrize("shape", [(0, 4), (3, 6), (2, 0)])
@FOR_EACH_ACTIVATION
def test_fakes(act: Activation, shape: tuple[int, int]) -> None:
    def run(dtype: torch.dtype) -> list[Tensor]:
        x = torch.ones(shape, dtype=dtype)
        y = forward(x, act, torch.float32)
        return [y, backward(y, x, act, torch.bfloat16)]

    for dtype in DTYPES:
        with FakeTensorMode():
            fakes = run(dtype)
        for real, fake in zip(run(dtype), fakes, strict=True):
            assert (real.shape, real.dtype, real.stride()) == (fake.shape, fake.dtype, fake.stride())


# ---- Followed by a cast --------------------------------------------------------------------------------------------


@each_twice
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("recipe", RECIPE_NAMES)
@FOR_EACH_NAME
def test_producer_is_the_cast_of_its_value(name: str, recipe: str, dtype: torch.dtype, device: torch.device) -> None:
    """Bit for bit, and the value is the one the kernel returns: in fp32 for delayed scaling, else rounded."""
    act, x, rng = Activation.of(name), activation_inputs((33, 96), dtype, device), SEED_AND_OFFSET.to(device)
    dy = activation_inputs((33, out_columns(name, 96)), dtype, device)
    for quantizer in quantizers(recipe):
        fp32 = recipe == "delayed"
        value = forward(x, act, torch.float32 if fp32 else dtype)
        amaxes = amaxes_for(quantizer, value)
        got = act_quantize(x, act, quantizer, amaxes, rng)
        assert_same_operands(got.quantized, quantizer.cast(value, amaxes, rng, gemm_ready=True))
        assert got.saved == ()

        gradient = backward(dy, x, act, torch.float32 if fp32 and not gated(name) else dtype)
        amaxes = amaxes_for(quantizer, gradient)
        got_dx = dact_quantize(dy, x, act, quantizer, amaxes, rng)
        assert_same_operands(got_dx.quantized, quantizer.cast(gradient, amaxes, rng, gemm_ready=True))
        assert all(o is None or o.dtype == dtype for o in (*got.quantized, *got_dx.quantized))


@pytest.mark.parametrize("recipe", RECIPE_NAMES)
@pytest.mark.parametrize("name", ["gelu", "swiglu"])
def test_returned_value_is_what_was_cast(name: str, recipe: str, device: torch.device) -> None:
    """Who asks for the value gets that very one in the dtype of the input, delayed scaling too."""
    act, x, rng = Activation.of(name), activation_inputs((33, 96), torch.bfloat16, device), SEED_AND_OFFSET.to(device)
    dy = activation_inputs((33, out_columns(name, 96)), torch.bfloat16, device)
    for quantizer in quantizers(recipe):
        for rounded, produce in (
            (forward(x, act, torch.bfloat16), lambda *args: act_quantize(x, act, *args, return_value=True)),
            (backward(dy, x, act, torch.bfloat16), lambda *args: dact_quantize(dy, x, act, *args, return_value=True)),
        ):
            amaxes = amaxes_for(quantizer, rounded)
            got = produce(quantizer, amaxes, rng)
            assert got.value is not None and torch.equal(got.value, rounded)
            assert_same_operands(got.quantized, quantizer.cast(rounded, amaxes, rng, gemm_ready=True))


@pytest.mark.parametrize("recipe", RECIPE_NAMES)
def test_phases_equal_the_whole(recipe: str, device: torch.device) -> None:
    act, x, rng = (
        Activation.of("swiglu"),
        activation_inputs((33, 96), torch.bfloat16, device),
        SEED_AND_OFFSET.to(device),
    )
    dy = activation_inputs((33, 48), torch.bfloat16, device)
    for quantizer in quantizers(recipe):
        for produced, whole in (
            (act_value(x, act, quantizer), lambda *args: act_quantize(x, act, *args)),
            (dact_value(dy, x, act, quantizer), lambda *args: dact_quantize(dy, x, act, *args)),
        ):
            amaxes = amaxes_for(quantizer, produced.value)
            agreed = tuple(None if amax is None else amax * 2 for amax in amaxes)
            for given in (amaxes, agreed):
                assert_same_operands(produced.cast(quantizer, given, rng), whole(quantizer, given, rng).quantized)


def test_delayed_scaling_is_not_rounded_first() -> None:
    """Codes and amax are the oracle's for the fp32 result; MXFP8's are the oracle's for the rounded one."""
    act, x = Activation.of("gelu"), activation_inputs((64, 128), torch.bfloat16)
    fp32 = forward(x, act, torch.float32)
    operand = act_quantize(
        x, act, Quantizer(Format("e4m3", scale_rule="given")), (torch.tensor([SCALE]),)
    ).quantized.any
    codes, _, amax = oracle.per_tensor_given(fp32.numpy(), "e4m3", SCALE)
    assert (operand.codes.numpy() == codes).all()
    assert operand.amax is not None and operand.amax.item() == amax == fp32.abs().max()
    assert not (oracle.per_tensor_given(fp32.bfloat16().float().numpy(), "e4m3", SCALE)[0] == codes).all()

    operand = act_quantize(x, act, Quantizer(Format("e4m3", 32, scale_rule="e8m0"))).quantized.any
    codes, scales = oracle.mxfp8(fp32.bfloat16().float().numpy(), "e4m3", -1)
    assert (operand.codes.numpy() == codes).all()
    assert operand.scale_inv is not None and (operand.scale_inv.numpy() == scales).all()


def test_leading_dims() -> None:
    act, x = Activation.of("swiglu"), activation_inputs((24, 40), torch.bfloat16).view(2, 3, 4, 40)
    quantizer = quantizers("block")[0]
    got = act_quantize(x, act, quantizer, return_value=True)
    assert got.value is not None and got.value.shape == (2, 3, 4, 20)
    assert_same_operands(got.quantized, act_quantize(x.view(24, 40), act, quantizer).quantized)
    assert dact_value(got.value, x, act, quantizer).value.shape == x.shape


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Activation.of("mish"), "mish.*gelu"),
        (lambda: Activation("mish"), "mish"),
        (lambda: Activation("clamped_swiglu"), r"3 parameters, got 0; use Activation\.of"),
        (lambda: Activation.of("swiglu", {"limit": 7.0}), "swiglu has no parameter limit; it has none"),
        (lambda: Activation.of("clamped_swiglu", {"beta": 1.0}), "no parameter beta; it has limit, alpha"),
        (
            lambda: act_value(torch.ones(2, 5), Activation("swiglu"), Quantizer.identity()),
            "which is 5; it must be even",
        ),
        (lambda: act_value(torch.ones(2, 4).double(), Activation("gelu"), Quantizer.identity()), "float64"),
    ],
)
def test_mistakes_are_value_errors(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_parameters_by_name() -> None:
    assert parameters_of("clamped_swiglu") == (7.0, 1.702, 1.0)
    assert parameters_of("clamped_swiglu", {"glu_linear_offset": 0.0, "limit": 3.0}) == (3.0, 1.702, 0.0)
    assert parameters_of("gelu") == ()
    assert hash(Activation.of("clamped_swiglu")) == hash(Activation("clamped_swiglu", (7.0, 1.702, 1.0)))


@pytest.mark.gpu
@FOR_EACH_ACTIVATION
def test_gpu_agrees_with_the_cpu(act: Activation) -> None:
    """Within the freedom of exp and tanh; the casts of equal values are equal in every bit (test_quantize)."""
    x = activation_inputs((515, 770), torch.bfloat16)
    dy = torch.randn(515, out_columns(act.name, 770)).bfloat16()
    torch.testing.assert_close(
        forward(x.cuda(), act, torch.float32).cpu(), forward(x, act, torch.float32), rtol=1e-5, atol=1e-5
    )
    got, want = backward(dy.cuda(), x.cuda(), act, torch.float32).cpu(), backward(dy, x, act, torch.float32)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-4)
