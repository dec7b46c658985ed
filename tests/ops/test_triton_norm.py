"""The norm kernels: interpreted on a CPU, compiled on a GPU; within the bounds of ``norm_model``, casts bit for bit."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from minifloat.formats import COLUMNWISE, parse
from minifloat.functional.norm_activation import Norm
from minifloat.ops import norm as operations
from minifloat.ops.launch import count_launches
from minifloat.ops.norm import kernels
from minifloat.ops.norm.kernels import NormTile
from minifloat.ops.quantize import reference as quantize
from tests.helpers import triton_interpreter
from tests.helpers.compare import DTYPES, U, assert_within
from tests.helpers.norm_model import FOR_EACH_NORM, assert_norm_forward, assert_norm_gradients, norm_inputs
from tests.helpers.sample import each_pair, each_twice

assert triton_interpreter
BF16, FP32 = torch.bfloat16, torch.float32
SHAPES = [(1, 1), (3, 5), (16, 64), (7, 129), (2, 1000)]
CHUNKED = NormTile(2, 16, False, 4)
"""Rows in chunks, as only those wider than 16384 elements are."""
SPEC = "e4m3/tensor/given"


class Forward(NamedTuple):
    """What the operation gives."""

    y: Tensor
    mean: Tensor
    rsigma: Tensor
    amax: Tensor
    total: Tensor


def run_forward(
    norm: Norm, x: Tensor, gamma: Tensor, beta: Tensor | None, dtype: torch.dtype = FP32, **options: Any
) -> Forward:
    residual, choice = options.get("residual"), options.get("choice")
    with count_launches() as launches:
        out = kernels.norm_forward(
            x, gamma, beta, norm.normalization, norm.eps, norm.zero_centered_gamma, dtype, True, residual, choice
        )
    assert launches["norm_forward_kernel"] == launches.total() == (x.shape[0] > 0)
    return Forward(*out)


def run_cast(norm: Norm, x: Tensor, gamma: Tensor, beta: Tensor | None, **options: Any) -> tuple[Tensor, ...]:
    scale = torch.tensor([options.get("scale", 56.0)], device=x.device)
    spec, wanted, choice = options.get("spec", SPEC), options.get("wanted", (True, True)), options.get("choice")
    with count_launches() as launches:
        out = kernels.norm_cast(
            x, gamma, beta, norm.normalization, norm.eps, norm.zero_centered_gamma,
            scale, spec, *wanted, True, options.get("residual"), sums=choice,
        )  # fmt: skip
    assert launches == {"norm_forward_kernel": 1, "norm_cast_kernel": 1} if x.shape[0] else {"norm_cast_kernel": 1}
    return out


def run_backward(
    norm: Norm, dy: Tensor, x: Tensor, gamma: Tensor, saved: tuple[Tensor, Tensor], **options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    with count_launches() as launches:
        out = kernels.norm_backward(
            dy, x, gamma, *saved, norm.normalization, norm.zero_centered_gamma,
            options.get("dresidual"), options.get("choice"),
        )  # fmt: skip
    assert launches["norm_backward_kernel"] == (x.shape[0] > 0) and launches["norm_parameters_kernel"] == 1
    return out


def assert_same_bits(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> None:
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def check_forward(norm: Norm, x: Tensor, gamma: Tensor, beta: Tensor | None, choice: NormTile | None = None) -> None:
    """Against float64, and against the fp32 reference: statistics within the sums' freedom of order."""
    got = run_forward(norm, x, gamma, beta, choice=choice)
    how = norm.normalization, norm.eps, norm.zero_centered_gamma
    plain = operations.norm_forward.reference(x, gamma, beta, *how, FP32, True)
    for y, mean, rsigma, *_ in (got, plain):
        assert_norm_forward(norm, x, gamma, beta, y, mean, rsigma)
    rounded = run_forward(norm, x, gamma, beta, x.dtype, choice=choice)
    assert torch.equal(rounded.y, got.y.to(x.dtype))
    assert torch.equal(rounded.amax, rounded.y.float().abs().amax().reshape(1))
    assert_same_bits((rounded.mean, rounded.rsigma), (got.mean, got.rsigma))


def check_cast(
    norm: Norm, x: Tensor, gamma: Tensor, beta: Tensor | None, choice: NormTile | None = None, **options: Any
) -> None:
    """The cast of what the forward kernel gives in fp32, in every bit."""
    value = run_forward(norm, x, gamma, beta, choice=choice)
    spec, wanted = options.get("spec", SPEC), options.get("wanted", (True, True))
    got = run_cast(norm, x, gamma, beta, choice=choice, **options)
    scale = torch.tensor([options.get("scale", 56.0)], device=x.device)
    codes, scale_inv, amax = quantize.cast(value.y, scale, None, parse(spec), COLUMNWISE)
    for each, want, strides in zip(got[:2], wanted, ((x.shape[1], 1), (1, x.shape[0])), strict=True):
        assert torch.equal(each, codes if want else codes.new_empty(0))
        assert not want or x.numel() == 0 or each.stride() == strides
    assert_same_bits(got[2:], (scale_inv, scale.new_empty(0), amax, value.mean, value.rsigma, x.new_empty(0)))


def check_backward(norm: Norm, x: Tensor, gamma: Tensor, beta: Tensor | None, choice: NormTile | None = None) -> None:
    """Against float64 autograd with the bounds of ``norm_model``, with another gradient of x and without."""
    rows, size = x.shape
    dy, other = torch.randn(2, rows, size).to(x.device, x.dtype)
    out = run_forward(norm, x, gamma, beta, choice=choice)
    got = run_backward(norm, dy, x, gamma, (out.mean, out.rsigma), choice=choice)
    exact, bound = assert_norm_gradients(norm, x, gamma, beta, dy, *got)
    how = out.mean, out.rsigma, norm.normalization, norm.zero_centered_gamma
    assert_norm_gradients(norm, x, gamma, beta, dy, *operations.norm_backward.reference(dy, x, gamma, *how))
    assert beta is not None or got[2].shape == (0 if norm.normalization == "RMSNorm" else size,)
    assert [t.dtype for t in got] == [x.dtype, gamma.dtype, gamma.dtype]

    added = run_backward(norm, dy, x, gamma, (out.mean, out.rsigma), dresidual=other, choice=choice)
    total = exact + other.double()
    assert_within(added[0], total, bound + U * (total.abs() + exact.abs()), x.dtype)
    assert_same_bits(added[1:], got[1:])
    assert_same_bits(run_backward(norm, dy, x, gamma, (out.mean, out.rsigma), choice=choice), got)


CHECKS = pytest.mark.parametrize("check", [check_forward, check_cast, check_backward])


@each_pair
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", [Norm(), Norm("RMSNorm", zero_centered_gamma=True)], ids=lambda n: n.normalization)
@CHECKS
def test_shapes(check: Any, norm: Norm, dtype: torch.dtype, shape: tuple[int, int], device: torch.device) -> None:
    check(norm, *norm_inputs(norm, shape, dtype, device))


@each_twice
@FOR_EACH_NORM
@CHECKS
def test_rows_wider_than_a_tile(check: Any, norm: Norm, device: torch.device) -> None:
    check(norm, *norm_inputs(norm, (5, 41), BF16, device), CHUNKED)
    check(norm, *norm_inputs(norm, (4, 48), FP32, device), CHUNKED)


@CHECKS
def test_parameters_of_another_dtype_and_any_layout(check: Any, device: torch.device) -> None:
    norm = Norm()
    x, gamma, beta = norm_inputs(norm, (12, 20), BF16, device)
    check(norm, x.float(), gamma, beta)
    check(norm, x.T.contiguous().T, gamma.float(), beta.float())
    check(norm, torch.cat([x, x], 1)[:, 1:21], gamma.float(), beta)
    check(norm, torch.cat([x.flatten(), x.flatten()])[1:41].view(2, 20), gamma, beta)  # no multiple of 16 bytes
    check(norm, x, gamma, None)  # LayerNorm without beta


@pytest.mark.parametrize("eps", [0.0, 1e-5, 1.0])
@CHECKS
def test_small_variances(check: Any, eps: float, device: torch.device) -> None:
    norm = Norm("RMSNorm", eps)
    x, gamma, _ = norm_inputs(norm, (4, 36), FP32, device)
    check(norm, x * 1e-6, gamma, None)


@each_pair
@pytest.mark.parametrize("spec", [SPEC, "e5m2/tensor/given"])
@pytest.mark.parametrize("wanted", [(True, False), (False, True)])
@FOR_EACH_NORM
def test_casts_along_one_dim(norm: Norm, wanted: tuple[bool, bool], spec: str, device: torch.device) -> None:
    check_cast(norm, *norm_inputs(norm, (33, 20), BF16, device), wanted=wanted, spec=spec, scale=300.0)


@FOR_EACH_NORM
def test_no_rows(norm: Norm, device: torch.device) -> None:
    x, gamma, beta = norm_inputs(norm, (0, 4), BF16, device)
    out = run_forward(norm, x, gamma, beta)
    assert out.y.shape == (0, 4) and out.amax.item() == 0
    check_cast(norm, x, gamma, beta)
    dx, dgamma, dbeta = run_backward(norm, x, x, gamma, (out.mean, out.rsigma))
    assert dx.shape == (0, 4) and not dgamma.any() and not dbeta.any()


@each_twice
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@FOR_EACH_NORM
def test_one_bad_row_spoils_no_other(norm: Norm, value: float, device: torch.device) -> None:
    x, gamma, beta = norm_inputs(norm, (4, 33), BF16, device)
    clean = run_forward(norm, x, gamma, beta)
    x[2, 5] = value
    out = run_forward(norm, x, gamma, beta)
    others = [0, 1, 3]
    assert torch.equal(out.y[others], clean.y[others])
    assert out.y[2, 5].isnan()
    assert out.y[2].isnan().all() if norm.normalization == "LayerNorm" or value != value else not out.y[2, :5].any()
    assert out.amax == out.y[others].abs().max()  # NaN is dropped
    check_cast(norm, x, gamma, beta)
    saved = out.mean, out.rsigma
    dx, _, _ = run_backward(norm, x, x, gamma, saved)
    want = operations.norm_backward(x, x, gamma, *saved, norm.normalization, norm.zero_centered_gamma)[0]
    assert torch.equal(dx.isnan(), want.isnan()) and not dx[others].isnan().any()


@each_pair
@pytest.mark.parametrize("choice", [None, CHUNKED])
@pytest.mark.parametrize("dtype", DTYPES)
@FOR_EACH_NORM
def test_residual_is_added_first(norm: Norm, dtype: torch.dtype, choice: NormTile | None, device: torch.device) -> None:
    x, gamma, beta = norm_inputs(norm, (5, 24), dtype, device)
    check_residual(norm, x, torch.randn_like(x), gamma, beta, choice)


def check_residual(
    norm: Norm, x: Tensor, residual: Tensor, gamma: Tensor, beta: Tensor | None, choice: NormTile | None = None
) -> None:
    """The sum, and all that the kernels give of it, in every bit."""
    total = x + residual
    got = run_forward(norm, x, gamma, beta, x.dtype, residual=residual, choice=choice)
    want = run_forward(norm, total, gamma, beta, x.dtype, choice=choice)
    assert_same_bits(got, (*want[:-1], total))
    got_cast = run_cast(norm, x, gamma, beta, residual=residual, choice=choice)
    want_cast = run_cast(norm, total, gamma, beta, choice=choice)
    assert_same_bits(got_cast, (*want_cast[:-1], total))


@pytest.mark.parametrize("shape", [(0, 4), (1, 1), (33, 70), (2, 1000)], ids=str)
def test_residuals_of_any_shape_and_value(shape: tuple[int, int], device: torch.device) -> None:
    """Odd sizes, no rows, other layouts, and sums that are NaN, infinite, zero, denormal or halfway between two."""
    norm = Norm()
    x, gamma, beta = norm_inputs(norm, shape, BF16, device)
    residual = torch.randn_like(x)
    for row, (a, b) in enumerate([(torch.inf, -torch.inf), (3e38, 3e38), (1e-39, 1e-39), (256.0, 1.0), (1.5, -1.5)]):
        x[row * 7 : row * 7 + 1, row % shape[1]], residual[row * 7 : row * 7 + 1, row % shape[1]] = a, b
    check_residual(norm, x, residual, gamma, beta)
    check_residual(norm, x.T.contiguous().T, residual.T.contiguous().T, gamma.float(), None)


@FOR_EACH_NORM
def test_operations_on_their_device(norm: Norm, device: torch.device) -> None:
    """On a GPU the operations launch the kernels; everywhere their fakes and schemas are right."""
    x, gamma, beta = norm_inputs(norm, (6, 20), BF16, device)
    of = norm.normalization, norm.eps, norm.zero_centered_gamma
    scale = torch.tensor([8.0], device=device)
    with count_launches() as launches:
        y, mean, rsigma, amax, _ = operations.norm_forward(x, gamma, beta, *of, FP32, True)
        *_, total = operations.norm_forward(x, gamma, beta, *of, BF16, False, x)
        row, column, scale_inv, _, cast_amax, *_ = operations.norm_cast(x, gamma, beta, *of, scale, SPEC, *[True] * 3)
        *_, total_too = operations.norm_cast(x, gamma, beta, *of, scale, SPEC, True, True, True, x)
        gradients = operations.norm_backward(x, x, gamma, mean, rsigma, of[0], of[2], x)
    names = {
        "norm_forward_kernel": 4, "norm_cast_kernel": 2, "norm_backward_kernel": 1, "norm_parameters_kernel": 1,
    }  # fmt: skip
    assert launches == (names if device.type == "cuda" else {})
    assert torch.equal(total, x + x) and torch.equal(total_too, x + x)
    want = quantize.cast(y, scale, None, parse(SPEC), COLUMNWISE)
    assert torch.equal(row, want.codes) and torch.equal(column, want.codes)
    assert_same_bits((scale_inv, cast_amax), want[1:])
    assert_same_bits((amax,), want[2:])
    assert [g.shape for g in gradients] == [x.shape, gamma.shape, gamma.shape if beta is not None else (0,)]
    for with_amax, residual in ((False, None), (True, x)):
        arguments = operations.norm_forward.spelled(x, gamma, beta, *of, FP32, with_amax, residual)
        torch.library.opcheck(operations.norm_forward.overload, arguments)
    for row_wise, column_wise, residual in ((True, True, None), (True, False, x), (False, True, None)):
        torch.library.opcheck(
            operations.norm_cast.overload, (x, gamma, beta, *of, scale, SPEC, row_wise, column_wise, True, residual)
        )  # fmt: skip
    for other in (None, x):
        torch.library.opcheck(operations.norm_backward.overload, (x, x, gamma, mean, rsigma, of[0], of[2], other))


def test_a_residual_of_another_shape_is_refused() -> None:
    x = torch.ones(2, 4)
    with pytest.raises(ValueError, match=r"residual has shape \(4,\)"):
        operations.norm_forward(x, x[0], None, "RMSNorm", 1e-5, False, FP32, False, x[0])


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape", [(16384, 4096), (4097, 768), (1000, 5120), (515, 8192), (100, 16384), (65, 65536), (33, 20001), (999, 15)]
)
@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("normalization", operations.NORMALIZATIONS)
@CHECKS
def test_large_shapes(check: Any, normalization: str, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    norm = Norm(normalization)
    check(norm, *norm_inputs(norm, shape, dtype, torch.device("cuda")))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(4097, 768), (1000, 5120), (515, 8192), (65, 65536), (33, 20001), (999, 15)])
@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("normalization", operations.NORMALIZATIONS)
def test_large_residuals(normalization: str, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    norm = Norm(normalization)
    x, gamma, beta = norm_inputs(norm, shape, dtype, torch.device("cuda"))
    check_residual(norm, x, torch.randn_like(x), gamma, beta)
