"""The operations of permutations as such: shapes, fakes, their definition in float64, and the order of sums."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from minifloat.functional import sort_by_expert
from minifloat.ops.permute import dot_width, permute_rows, precise, unpermute_rows, unpermute_rows_backward
from tests.helpers.compare import DTYPES, U, assert_same_bits, assert_within
from tests.helpers.routing import CASES, Case, loop_unpermute, some_indices
from tests.helpers.sample import each_once, each_twice

FOR_EACH_CASE = pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))


def inputs(case: Case, dtype: torch.dtype, device: torch.device, kind: str = "dropped") -> dict[str, Any]:
    indices = some_indices(case, kind)
    routing = sort_by_expert(indices.to(device), case.experts)
    return {
        "indices": indices,
        "x": torch.randn(case.tokens, case.columns).to(dtype).to(device),
        "y": torch.randn(indices.numel(), case.columns).to(dtype).to(device),
        "p": torch.rand(indices.shape, dtype=precise(dtype)).to(device),
        "where": (routing.inverse, routing.offsets),
    }


@each_twice
@pytest.mark.parametrize("dtype", DTYPES)
@FOR_EACH_CASE
def test_within_the_rounding_of_fp32(case: Case, dtype: torch.dtype, device: torch.device) -> None:
    """Of float64's autograd: n products and sums err by n u times the sum of magnitudes, a second order left out."""
    of = inputs(case, dtype, device)
    y, p = of["y"].cpu().double().requires_grad_(), of["p"].cpu().double().requires_grad_()
    grad = of["x"].cpu().double()
    want = loop_unpermute(y, of["indices"], case.experts, p)
    want_dy, want_dp = torch.autograd.grad(want, [y, p], grad)
    magnitudes = loop_unpermute(y.detach().abs(), of["indices"], case.experts, p.detach())

    got = unpermute_rows(of["y"], of["p"], *of["where"]).cpu()
    assert_within(got, want.detach(), (case.k + 1) * U * magnitudes, dtype)
    dy, dp = (each.cpu() for each in unpermute_rows_backward(of["x"], of["y"], of["p"], *of["where"]))
    assert_within(dy, want_dy, U * want_dy.abs(), dtype)
    assert dp.dtype == torch.float32
    inverse = of["where"][0].cpu().long()
    sizes = (grad.abs()[:, None] * y.detach().abs()[inverse]).sum(-1)
    assert_within(dp, want_dp, (case.columns + 1) * U * sizes, torch.float32)
    assert_same_bits(dy, permute_rows(of["x"], of["p"], *of["where"]).cpu())


def test_the_order_of_a_dot_product(device: torch.device) -> None:
    """The columns 1024 apart first, then neighbours: what the definition says, by hand."""
    assert [dot_width(n) for n in (0, 1, 2, 3, 1000, 1024, 1025, 7168)] == [1, 1, 2, 4, *[1024] * 4]
    columns = 1026
    a = torch.zeros(1, columns, device=device)
    a[0, [0, 1024, 1, 1025, 2]] = torch.tensor([1e8, -1e8, 1.0, 2.0, 1e8], device=device)
    b = torch.ones_like(a)
    routing = sort_by_expert(torch.tensor([[0]], device=device), 1)
    one = torch.ones(1, 1, device=device)

    def dot(a: Tensor) -> float:
        return float(unpermute_rows_backward(a, b, one, routing.inverse, routing.offsets)[1])

    assert dot(a) == 1e8  # (0 + 3) + (1e8 + 0)
    a[0, 2] = 0
    assert dot(a) == 3  # in the order of columns: 1e8 + 1 - 1e8 + 2, which is 2
    a[0, [0, 1024, 2]] = torch.tensor([1e8, 0.0, -1e8], device=device)
    assert dot(a) == 0  # (1e8 + 3) + (-1e8 + 0), neighbours first: the 3 is lost; (1e8 - 1e8) + (3 + 0) by halves


@each_twice
@each_once
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@FOR_EACH_CASE
def test_operations_pass_opcheck(case: Case, dtype: torch.dtype, device: torch.device) -> None:
    of = inputs(case, dtype, device)
    utils: Any = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    for p in (None, of["p"]):
        torch.library.opcheck(permute_rows.overload, (of["x"], p, *of["where"]), test_utils=utils)
        torch.library.opcheck(unpermute_rows.overload, (of["y"], p, *of["where"]), test_utils=utils)
    arguments = of["x"], of["y"], of["p"], *of["where"]
    torch.library.opcheck(unpermute_rows_backward.overload, arguments, test_utils=utils)
