"""The activations' kernels and references against float64: interpreted on a CPU, compiled on a GPU.

Bounds: with u = 2^-24, 2^x and 1 / sqrt(x) of the GPU err by at most 2 ulp, 4 u, and the argument of the former, x, by
3 u |x|, for gelu's polynomial 5 u |x|. So f = exp(-|x|) errs by (5 u |x| + 4 u) f, and the sigmoid 1 / (1 + f), the
square of a root, by f / (1 + f) of that and 10 u, relative to itself: 14 u at most, as |x| f / (1 + f) < 0.28, and 10 u
where |x| is large. So x * sigmoid errs by less than 16 u |x|, and a derivative, which adds |x| f / (1 + f)^2 < 0.6
(gelu's polynomial included) with twice the error of the sigmoid and that of f, by less than 48 u (1 + |x|). Documented
errors are worst cases that never meet: the tests ask for half of that, 8 u and 16 u of ``conditioned`` sizes, which
hold the reference too, twice for derivatives.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from minifloat.formats import COLUMNWISE, ROWWISE, Format, parse
from minifloat.functional.norm_activation import Activation
from minifloat.ops import activation
from minifloat.ops.activation import gated, kernels, out_columns
from minifloat.ops.launch import count_launches
from minifloat.ops.quantize import reference as quantize
from minifloat.ops.tiles import Tile
from tests.helpers import triton_interpreter
from tests.helpers.activation_model import FOR_EACH_ACTIVATION, activation_float64, backward_inputs, error_scale
from tests.helpers.compare import DTYPES, U, assert_within
from tests.helpers.sample import each_twice, first_by_default

BF16, FP32 = torch.bfloat16, torch.float32
SHAPES = [(0, 4), (1, 2), (3, 10), (9, 66)]
FOR_EACH_SHAPE = pytest.mark.parametrize("shape", SHAPES, ids=str)
SMALL = Tile(32, 32, 4)
E4M3, E5M2 = "e4m3/tensor/given", "e5m2/tensor/given"
ORIENTATIONS = pytest.mark.parametrize(
    ("rowwise", "columnwise"), [(True, False), (False, True), (True, True)], ids=["row", "column", "both"]
)


def largest(x: Tensor) -> Tensor:
    """The amax, fp32 [1]."""
    return quantize.amax(x, Format(), ROWWISE)


def forward(x: Tensor, act: Activation, dtype: torch.dtype = FP32, with_amax: bool = False) -> tuple[Tensor, Tensor]:
    return kernels.forward(x, act.name, act.parameters, dtype, with_amax)


def backward(dy: Tensor, x: Tensor, act: Activation, dtype: torch.dtype = FP32, bias: bool = False) -> Any:
    return kernels.backward(dy, x, act.name, act.parameters, dtype, True, bias)


def definition(x: Tensor, act: Activation, dtype: torch.dtype) -> Tensor:
    """The value by the reference."""
    return activation.activation_forward.reference(x, act.name, act.parameters, dtype, False)[0]


def derivative(dy: Tensor, x: Tensor, act: Activation, dtype: torch.dtype) -> Tensor:
    """The gradient by the reference."""
    return activation.activation_backward.reference(dy, x, act.name, act.parameters, dtype, False, False)[0]


def check_codes(got: tuple[Tensor, ...], value: Tensor, scale: Tensor, spec: str, wanted: tuple[bool, bool]) -> None:
    """Codes, their layout, inverse scale and amax are the reference's cast of ``value``."""
    for codes, want, dim in zip(got, wanted, (ROWWISE, COLUMNWISE), strict=False):
        if not want:
            assert codes.shape == (0,)
            continue
        assert (codes if dim == ROWWISE else codes.t()).is_contiguous()
        assert torch.equal(codes, quantize.cast(value, scale, None, parse(spec), dim).codes)
    assert torch.equal(got[2], scale.reciprocal())
    assert torch.equal(got[4], largest(value))


# ---- values ----


@each_twice
@FOR_EACH_SHAPE
@FOR_EACH_ACTIVATION
def test_forward(act: Activation, shape: tuple[int, int], device: torch.device) -> None:
    for dtype in DTYPES if shape == (3, 10) else [BF16]:
        _, x = backward_inputs(act, shape, dtype, device)
        with count_launches() as launches:
            y, no_amax = forward(x, act)
        assert launches == ({"activation_kernel": 1} if shape[0] else {})
        assert no_amax.shape == (0,) and y.shape == (shape[0], out_columns(act.name, shape[1]))
        plain, exact = definition(x, act, FP32), activation_float64(x, act)
        for value in (y, plain):
            assert ((value - exact).abs() <= 8 * U * error_scale(x, act)).all()
        if act.name in ("relu", "srelu", "reglu", "sreglu"):
            assert torch.equal(y, activation.forward(x.float(), act.name, act.parameters))
        for out in DTYPES:
            rounded, amax = forward(x, act, out, True)
            assert torch.equal(rounded, y.to(out)) and torch.equal(amax, largest(rounded))
            assert torch.equal(definition(x, act, out), plain.to(out))


@each_twice
@FOR_EACH_SHAPE
@FOR_EACH_ACTIVATION
def test_backward(act: Activation, shape: tuple[int, int], device: torch.device) -> None:
    for dtype in DTYPES if shape == (3, 10) else [BF16]:
        dy, x = backward_inputs(act, shape, dtype, device)
        leaf = x.double().requires_grad_()
        (want,) = torch.autograd.grad(activation_float64(leaf, act), leaf, dy.double())
        with count_launches() as launches:
            dx, amax, no_bias = backward(dy, x, act)
        assert launches == ({"activation_backward_kernel": 1} if shape[0] else {})
        assert dx.shape == shape and no_bias.shape == (0,) and torch.equal(amax, largest(dx))
        bound = 8 * U * dy.double().abs() * error_scale(x, act)
        bound = torch.cat([bound, bound], -1) if act.gated else bound
        assert ((dx - want).abs() <= 2 * bound).all()
        plain = derivative(dy, x, act, FP32)
        assert_within(plain, want, bound, FP32)
        if act.name in ("relu", "srelu", "reglu", "sreglu"):
            assert torch.equal(dx, activation.backward(dy.float(), x.float(), act.name, act.parameters))
        for out in DTYPES:
            rounded, amax, _ = backward(dy, x, act, out)
            assert torch.equal(rounded, dx.to(out)) and torch.equal(amax, largest(rounded))
            assert torch.equal(derivative(dy, x, act, out), plain.to(out))


@FOR_EACH_ACTIVATION
def test_extremes_are_those_of_the_reference(act: Activation, device: torch.device) -> None:
    """Huge and infinite numbers, NaN, denormals and both zeros, in every combination of two halves.

    The reference's tanh cancels where x is negative: 1e-3 of gelu is its error there, seen when multiplied by 1e30.
    Left out are moderate numbers whose derivative or sigmoid is tiny or 0 by rounding: times infinity 0 is NaN.
    """
    special = [0.0, -0.0, 1e-42, -1e-42, 1.0, -1.0, 4.0, -4.0, 1e5, -1e5, 1e18, -1e18, 3e38, -3e38]
    special += [torch.inf, -torch.inf, torch.nan]
    a = torch.tensor(special, device=device).expand(len(special), -1)
    x = torch.cat([a, a.T], 1) if act.gated else a
    for dy in (torch.ones_like(a), -1e30 * a):
        y, dx = forward(x, act)[0], backward(dy, x, act)[0]
        want_y = activation.forward(x, act.name, act.parameters)
        want_dx = activation.backward(dy, x, act.name, act.parameters)
        torch.testing.assert_close(y, want_y, rtol=1e-3, atol=1e-6, equal_nan=True)
        far = want_dx.abs() > 1e20  # where dy is huge, the rounding of a derivative of 0 is seen
        assert torch.equal(dx.isnan(), want_dx.isnan())
        torch.testing.assert_close(dx[far], want_dx[far], rtol=1e-3, atol=1e24, equal_nan=True)
        if dy.max() == 1:
            torch.testing.assert_close(dx, want_dx, rtol=1e-3, atol=2e-6, equal_nan=True)


@pytest.mark.parametrize("name", ["sigmoid", "relu", "swiglu"])
def test_amax_of_nothing_but_nan_is_0(name: str, device: torch.device) -> None:
    act, x = Activation.of(name), torch.full((6, 40), torch.nan, device=device)
    scale = torch.ones(1, device=device)
    assert forward(x, act, BF16, True)[1].tolist() == [0]
    assert kernels.cast(x, act.name, (), scale, E4M3, True, True, True)[4].tolist() == [0]
    x[3, 5] = x[3, 25] = -2.0
    assert forward(x, act, FP32, True)[1].item() == forward(x, act)[0].nan_to_num(0.0).abs().max()
    dy = torch.ones(6, out_columns(name, 40), device=device)
    dx, amax, _ = backward(dy, x, act)
    assert torch.equal(amax, largest(dx))


# ---- casts ----


@each_twice
@ORIENTATIONS
@FOR_EACH_SHAPE
@FOR_EACH_ACTIVATION
def test_cast_is_that_of_the_value(
    act: Activation, shape: tuple[int, int], rowwise: bool, columnwise: bool, device: torch.device
) -> None:
    """Forward: of the fp32 value. Backward: of the fp32 gradient, which is rounded first where two are multiplied."""
    dy, x = backward_inputs(act, shape, BF16, device)
    scale, wanted = torch.tensor([3.7], device=device), (rowwise, columnwise)
    with count_launches() as launches:
        got = kernels.cast(x, act.name, act.parameters, scale, E4M3, *wanted, True)
        of_dx = kernels.backward_cast(dy, x, act.name, act.parameters, scale, E5M2, *wanted, True, False)
    assert launches == {"activation_kernel": 1, "activation_backward_kernel": 1}
    check_codes(got, forward(x, act)[0], scale, E4M3, wanted)
    dx = backward(dy, x, act, BF16 if gated(act.name) else FP32)[0]
    check_codes(of_dx, dx.float(), scale, E5M2, wanted)
    assert of_dx[5].shape == (0,)


@pytest.mark.parametrize("shape", [(48, 128), (50, 130), (129, 258)], ids=str)
@pytest.mark.parametrize("name", ["silu", "swiglu"])
def test_tiles_do_not_change_results(name: str, shape: tuple[int, int], device: torch.device) -> None:
    """Aligned sizes and others, more tiles than one in each direction."""
    act, scale = Activation.of(name), torch.tensor([0.3], device=device)
    dy, x = backward_inputs(act, shape, torch.float16, device)
    y, dx = forward(x, act)[0], backward(dy, x, act, torch.float16 if act.gated else FP32)[0].float()
    assert ((y - activation_float64(x, act)).abs() <= 8 * U * error_scale(x, act)).all()
    got = kernels.cast(x, name, (), scale, E5M2, True, True, True, choice=SMALL)
    check_codes(got, y, scale, E5M2, (True, True))
    of_dx = kernels.backward_cast(dy, x, name, (), scale, E4M3, True, True, True, True, choice=SMALL)
    check_codes(of_dx, dx, scale, E4M3, (True, True))


# ---- the bias gradient ----


@pytest.mark.parametrize("shape", [(0, 4), (3, 10), (129, 66)], ids=str)
@pytest.mark.parametrize("name", ["gelu", "swiglu"])
def test_bias_gradient(name: str, shape: tuple[int, int], device: torch.device) -> None:
    """The sum of M numbers in any order errs by at most M u times the sum of their magnitudes; runs repeat."""
    act = Activation.of(name)
    for dtype in (BF16, FP32):
        dy, x = backward_inputs(act, shape, dtype, device)
        for out in {dtype, FP32}:
            dx, _, dbias = backward(dy, x, act, out, bias=True)
            assert torch.equal(dx, backward(dy, x, act, out)[0])
            assert dbias.dtype == torch.float32 and dbias.shape == (shape[1],)
            bound = shape[0] * U * dx.double().abs().sum(0)
            want = dx.double().sum(0)
            rounding = 0 if dtype == FP32 else torch.finfo(dtype).eps * (want.abs() + bound) + 2.0**-24
            assert ((dbias - want).abs() <= bound + rounding).all()
            assert torch.equal(dbias, backward(dy, x, act, out, bias=True)[2])
        scale = torch.ones(1, device=device)
        cast = kernels.backward_cast(dy, x, name, (), scale, E4M3, True, True, True, True)[5]
        torch.testing.assert_close(cast, backward(dy, x, act, dtype if act.gated else FP32, bias=True)[2])


# ---- compiled, and on a GPU ----


@first_by_default
@pytest.mark.parametrize("name", ["gelu", "clamped_swiglu"])
def test_compiled_for_sm_90(name: str) -> None:
    """Accesses are 16 bytes wide, nothing spills, and no product is contracted."""
    formula = kernels.formula(name, activation.parameters_of(name))
    u8 = torch.uint8
    for value, kind in ((True, "activation"), (False, "activation_columnwise")):
        tile, target = kernels.tile(kind, torch.device("cpu")), BF16 if value else u8
        how = kernels.VALUE if value else how_given("e4m3")
        constants = (1, *formula, *how, False, False, True, False, True, True, tile.rows, tile.cols, None)
        tensors = (BF16, BF16, FP32, *[target, FP32, FP32] * 2)
        check_compiled(kernels.activation_kernel, tensors, constants, tile.warps)
    for value, kind in ((True, "activation_backward_bias"), (False, "activation_backward_columnwise")):
        tile, target = kernels.tile(kind, torch.device("cpu")), BF16 if value else u8
        how = kernels.VALUE if value else how_given("e5m2")
        constants = (1, *formula, *how, not value, False, True, True, False, True, True, tile.rows, tile.cols, None)
        tensors = (BF16, BF16, BF16, FP32, FP32, *[target, FP32, FP32] * 2)
        check_compiled(kernels.activation_backward_kernel, tensors, constants, tile.warps)


def how_given(element: str) -> tuple[Any, ...]:
    return kernels.cast_constants(torch.empty(0, dtype=BF16), parse(f"{element}/tensor/given"), True, True, True)


def check_compiled(kernel: Any, tensors: tuple[Any, ...], constants: tuple[Any, ...], warps: int) -> None:
    arguments = *[(each,) for each in tensors], BF16, (7,), *[7] * 7, *constants
    compiled = triton_interpreter.compile_for(kernel, *arguments, num_warps=warps, enable_fp_fusion=False)
    assert compiled.spills == 0
    assert "ld.global.v4.b32" in compiled.ptx and "st.global.v4.b32" in compiled.ptx
    assert "fma.rn.f32" not in compiled.ptx


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["swiglu", "gelu", "srelu"])
def test_large_on_a_gpu(name: str) -> None:
    """Through the operations: sizes of a model, codes past 2^31 bytes from their beginning included."""
    act, device = Activation.of(name), torch.device("cuda")
    for shape in ((16384, 28672), (1000, 4104), (131072 + 16, 2 * 16384)):
        x = torch.randn(shape, device=device, dtype=BF16)
        dy = torch.randn(shape[0], out_columns(name, shape[1]), device=device, dtype=BF16)
        scale = torch.tensor([13.0], device=device)
        formula = (name, act.parameters)
        with count_launches() as launches:
            got = activation.activation_cast(x, *formula, scale, E4M3, True, True, True)
            of_dx = activation.activation_backward_cast(dy, x, *formula, scale, E5M2, True, True, True, True)
        assert launches == {"activation_kernel": 1, "activation_backward_kernel": 1}
        rows = slice(shape[0] - 500, None)
        y = activation.activation_forward(x[rows], *formula, FP32, False)[0]
        dx = activation.activation_backward(dy[rows], x[rows], *formula, BF16 if act.gated else FP32, False, False)[0]
        for orientation in (0, 1):
            assert torch.equal(got[orientation][rows], quantize.cast(y, scale, None, parse(E4M3), ROWWISE).codes)
            want = quantize.cast(dx.float(), scale, None, parse(E5M2), ROWWISE).codes
            assert torch.equal(of_dx[orientation][rows], want)
        again = activation.activation_backward_cast(dy, x, *formula, scale, E5M2, True, True, True, True)
        assert all(torch.equal(a, b) for a, b in zip(of_dx, again, strict=True))
