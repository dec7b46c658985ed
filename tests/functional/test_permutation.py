"""Tokens sorted by expert and back: against loops that autograd differentiates, exact on small integers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from minifloat import autocast
from minifloat.functional import Routing, permute, permute_probabilities, sort_by_expert, unpermute
from tests.helpers.compare import DTYPES, assert_same_bits
from tests.helpers.routing import CASES, KINDS, Case, loop_permute, loop_unpermute, some_indices, sorted_slots
from tests.helpers.sample import each_pair, each_twice, first_by_default

FOR_EACH_CASE = pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
FOR_EACH_KIND = pytest.mark.parametrize("kind", KINDS)


def integers(*shape: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """Of which sums and products of a few are exact in every dtype."""
    return torch.randint(-3, 4, shape).to(dtype).to(device)


def halves(*shape: int, device: torch.device | str = "cpu") -> Tensor:
    """Probabilities whose products are exact, too."""
    return (torch.randint(0, 5, shape) / 4).to(device)


# ---- the order ----


@each_twice
@FOR_EACH_KIND
@FOR_EACH_CASE
def test_order(case: Case, kind: str, device: torch.device) -> None:
    indices = some_indices(case, kind)
    slots = sorted_slots(indices, case.experts)
    counts = [len(each) for each in slots[:-1]]
    for dtype in (torch.int64, torch.int32, torch.int16):
        routing = sort_by_expert(indices.to(dtype).to(device), case.experts)
        assert all(each.dtype == torch.int32 and each.device.type == device.type for each in routing)
        assert routing.order.tolist() == [slot for each in slots for slot in each]
        assert routing.counts.tolist() == counts
        assert routing.offsets.tolist() == [sum(counts[:expert]) for expert in range(case.experts + 1)]
        assert routing.inverse.shape == indices.shape
        inverse = routing.inverse.flatten().tolist()
        assert [inverse[slot] for slot in routing.order.tolist()] == list(range(indices.numel()))


INDICES = st.integers(1, 4).flatmap(
    lambda k: st.lists(st.lists(st.integers(-1, 9), min_size=k, max_size=k), min_size=1, max_size=30)
)


@given(INDICES, st.integers(1, 8))
def test_properties(choices: list[list[int]], experts: int) -> None:
    """Any indices, -1 included, and the same expert twice."""
    indices = torch.tensor(choices).remainder(experts + 1) - 1
    routing = sort_by_expert(indices, experts)
    kept = (indices >= 0) & (indices < experts)
    assert routing.counts.sum() == kept.sum() == routing.offsets[-1]
    assert routing.order.sort().values.tolist() == list(range(indices.numel()))
    chosen = indices.flatten()[routing.order.long()][: int(kept.sum())]
    assert chosen.tolist() == sorted(chosen.tolist())
    x = torch.arange(indices.shape[0] * 3, dtype=torch.float16).view(-1, 3)
    back = unpermute(permute(x, routing), routing, torch.ones(indices.shape))
    assert torch.equal(back, x * kept.sum(1, keepdim=True))
    assert torch.equal(unpermute(permute(x, routing), routing), back)


@pytest.mark.parametrize("experts", [1, 2**15 - 1, 2**15, 100_000])
def test_many_experts(experts: int) -> None:
    """Whose numbers, that of no expert included, have 16 bits or more."""
    indices = torch.tensor([[experts - 1, -1], [0, experts - 1], [experts // 2, -1]])
    routing = sort_by_expert(indices, experts)
    *used, dropped = sorted_slots(indices, experts)
    assert routing.order.tolist() == [slot for slots in used for slot in slots] + dropped
    assert routing.counts.tolist() == [len(slots) for slots in used]
    few = torch.tensor([[0, -1], [min(1, experts - 1), 0]])
    for narrow in (few.to(torch.int8), few.to(torch.int16)):
        for found, expected in zip(sort_by_expert(narrow, experts), sort_by_expert(few, experts), strict=True):
            assert torch.equal(found, expected)


class Elsewhere(Tensor):
    """A tensor whose values the host does not know, as those of a device."""


@pytest.mark.parametrize("wrong", [-2, 5, 40_000, 65_536 + 1, -65_536 + 1, 2**32 + 1])
@pytest.mark.parametrize("experts", [5, 2**15])
def test_indices_that_are_no_experts(wrong: int, experts: int) -> None:
    """What the host knows is refused, and what it waits for; what it does not know has no part, as -1."""
    wrong = max(wrong, experts) if wrong > 0 else wrong
    indices = torch.tensor([[1, 4], [wrong, 0], [-1, 3]])
    message = rf"sort_by_expert: 1 of the indices \(3, 2\) are no expert's, the first {wrong} at \[1, 0\]; give 0 to "
    with pytest.raises(ValueError, match=message):
        sort_by_expert(indices, experts)
    elsewhere = indices.as_subclass(Elsewhere)
    dropped = sort_by_expert(torch.tensor([[1, 4], [-1, 0], [-1, 3]]), experts)
    for found, expected in zip(sort_by_expert(elsewhere, experts), dropped, strict=True):
        assert found.tolist() == expected.tolist()
    with autocast(check_finite=True), pytest.raises(ValueError, match=message):
        sort_by_expert(elsewhere, experts)


@pytest.mark.usefixtures("fresh_compiler")
def test_indices_that_are_no_experts_in_compiled_code() -> None:
    """The graph is compiled without their values, and finds them when it runs."""
    compiled = torch.compile(sort_by_expert, fullgraph=True, backend="aot_eager")
    good, wrong = torch.tensor([[1, -1]]), torch.tensor([[1, 5]])
    assert compiled(good, 5).counts.tolist() == [0, 1, 0, 0, 0]
    with pytest.raises(ValueError, match=r"sort_by_expert: 1 of the indices \(1, 2\) .* the first 5 at \[0, 1\]"):
        compiled(wrong, 5)
    with pytest.raises(RuntimeError, match="check_finite"), autocast(check_finite=True):
        compiled(good, 5)


@pytest.mark.gpu
def test_indices_that_are_no_experts_on_a_gpu() -> None:
    indices = torch.tensor([[0, 9]], device="cuda")
    assert sort_by_expert(indices, 2).counts.tolist() == [1, 0]
    with autocast(check_finite=True), pytest.raises(ValueError, match=r"the first 9 at \[0, 1\]; give 0 to 1"):
        sort_by_expert(indices, 2)


# ---- values and gradients ----


@each_pair
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@FOR_EACH_KIND
@FOR_EACH_CASE
def test_permute(case: Case, kind: str, dtype: torch.dtype, device: torch.device) -> None:
    indices = some_indices(case, kind)
    x = integers(case.tokens, case.columns, dtype=dtype).requires_grad_()
    dy = integers(indices.numel(), case.columns, dtype=dtype)
    want = loop_permute(x, indices, case.experts)
    (want_dx,) = torch.autograd.grad(want, x, dy)
    leaf = x.detach().to(device).requires_grad_()
    y = permute(leaf, sort_by_expert(indices.to(device), case.experts))
    (dx,) = torch.autograd.grad(y, leaf, dy.to(device))
    assert_same_bits(y.detach().cpu(), want.detach())
    assert dx.dtype == dtype and torch.equal(dx.cpu(), want_dx)


@each_pair
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@FOR_EACH_KIND
@FOR_EACH_CASE
def test_unpermute(case: Case, kind: str, dtype: torch.dtype, weighted: bool, device: torch.device) -> None:
    indices = some_indices(case, kind)
    y = integers(indices.numel(), case.columns, dtype=dtype).requires_grad_()
    probabilities = halves(*indices.shape).requires_grad_()
    dx = integers(case.tokens, case.columns, dtype=dtype)
    inputs = [y, probabilities] if weighted else [y]
    want = loop_unpermute(y, indices, case.experts, probabilities if weighted else None)
    gradients = torch.autograd.grad(want, inputs, dx.to(want.dtype))

    leaves = [each.detach().to(device).requires_grad_() for each in inputs]
    x = unpermute(leaves[0], sort_by_expert(indices.to(device), case.experts), *leaves[1:])
    got = torch.autograd.grad(x, leaves, dx.to(device))
    assert x.dtype == dtype and torch.equal(x.detach().cpu(), want.detach().to(dtype))
    for leaf, gradient, expected in zip(leaves, got, gradients, strict=True):
        assert gradient.dtype == leaf.dtype and gradient.shape == leaf.shape
        assert torch.equal(gradient.cpu(), expected)
    if weighted:  # probabilities that need no gradient
        x = unpermute(leaves[0], sort_by_expert(indices.to(device), case.experts), leaves[1].detach())
        assert torch.equal(*torch.autograd.grad(x, leaves[0], dx.to(device)), got[0])


def test_probabilities_of_rows() -> None:
    """Each row has that of its slot, and each slot the gradient of its row."""
    indices = torch.tensor([[2, 0], [-1, 2], [0, -1]])
    routing = sort_by_expert(indices, 3)
    p, grad = torch.rand(3, 2, dtype=torch.bfloat16, requires_grad=True), torch.randn(6)
    rows = permute_probabilities(p, routing)
    assert rows.dtype == torch.float32 and torch.equal(rows[routing.inverse], p.float())
    rows.backward(grad)
    assert p.grad is not None and torch.equal(p.grad, grad[routing.inverse].bfloat16())
    with pytest.raises(ValueError, match=r"permute_probabilities: probabilities is .* \[T, k\]"):
        permute_probabilities(p[:2], routing)


def test_tokens_are_summed_in_fp32_in_their_order_and_rounded_once(device: torch.device) -> None:
    """Expert 2 comes first among the choices of the token, and last among the rows."""
    routing = sort_by_expert(torch.tensor([[2, 0, 1]], device=device), 3)
    rows = torch.tensor([[1.0], [-1e8], [1e8]], device=device)  # of slots 1e8, 1, -1e8: the 1 is lost
    assert unpermute(rows, routing).item() == 0 and unpermute(rows[[2, 0, 1]], routing).item() == 1
    few = torch.tensor([[1.0], [1.0], [256.0]], device=device, dtype=torch.bfloat16)
    assert unpermute(few, routing).item() == 258  # 256 if each sum were rounded
    thirds = torch.full((1, 3), 1 / 3, device=device)
    leaf = torch.zeros(1, 1, device=device, dtype=torch.bfloat16, requires_grad=True)
    permute(leaf, routing).backward(few)
    assert leaf.grad is not None and leaf.grad.item() == 258
    exact = (few.float() * (1 / 3)).sum().item()
    assert unpermute(few, routing, thirds).item() == torch.tensor(exact).bfloat16().item()


@pytest.mark.parametrize("dtype", DTYPES)
def test_probabilities_are_not_rounded(dtype: torch.dtype, device: torch.device) -> None:
    """Products are of fp32 whatever the rows are, in both directions; a third of these differ otherwise."""
    indices = some_indices(Case(64, 2, 16, 5)).to(device)
    routing = sort_by_expert(indices, 5)
    y = torch.randn(128, 16, device=device).to(dtype).requires_grad_()
    p, dx = torch.rand(64, 2, device=device), torch.randn(64, 16, device=device).to(dtype)
    first, second = (y.detach()[routing.inverse[:, j].long()].float() * p[:, j, None] for j in (0, 1))
    x = unpermute(y, routing, p)
    assert torch.equal(x, (first + second).to(dtype))
    x.backward(dx)
    assert y.grad is not None
    for j in (0, 1):
        assert torch.equal(y.grad[routing.inverse[:, j].long()], (dx.float() * p[:, j, None]).to(dtype))


def test_probabilities_of_other_dtypes() -> None:
    routing = sort_by_expert(torch.tensor([[1, 0]]), 2)
    y = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.bfloat16)
    for dtype in (torch.bfloat16, torch.float64):
        probabilities = torch.tensor([[0.5, 0.25]], dtype=dtype, requires_grad=True)
        x = unpermute(y, routing, probabilities)
        x.sum().backward()
        assert x.dtype == y.dtype and x.tolist() == [[1.75, 2.5]]
        assert probabilities.grad is not None and probabilities.grad.dtype == dtype
        assert probabilities.grad.tolist() == [[7, 3]]


# ---- NaN ----


def test_rows_of_dropped_slots_are_not_read(device: torch.device) -> None:
    """What grouped products leave there, in both directions."""
    routing = sort_by_expert(torch.tensor([[0, -1], [1, -1], [-1, -1]], device=device), 2)
    y = torch.full((6, 5), torch.nan, device=device)
    y[:2] = torch.arange(10.0, device=device).view(2, 5)
    y.requires_grad_()
    probabilities = torch.full((3, 2), torch.nan, device=device)
    probabilities[0, 0], probabilities[1, 0] = 2.0, 3.0
    probabilities.requires_grad_()
    for weights in (None, probabilities):
        x = unpermute(y, routing, weights)
        first, second = (1, 1) if weights is None else (2, 3)
        assert torch.equal(x[0], first * y[0]) and torch.equal(x[1], second * y[1]) and not x[2].any()
        (dy,) = torch.autograd.grad(x, y, torch.ones_like(x), retain_graph=True)
        assert dy[:, 0].tolist() == [first, second, 0, 0, 0, 0]
    (dp,) = torch.autograd.grad(x, probabilities, torch.ones_like(x))
    assert dp.tolist() == [[10, 0], [35, 0], [0, 0]]

    leaf = torch.ones(3, 5, device=device, requires_grad=True)
    rows = permute(leaf, routing)
    assert rows[:, 0].tolist() == [1, 1, 0, 0, 0, 0]
    (dx,) = torch.autograd.grad(rows, leaf, y.detach())
    assert torch.equal(dx[:2], y.detach()[:2]) and not dx[2].any()


# ---- what is kept, and how it runs ----


def saved_rows(y: Tensor, routing: Routing, probabilities: Tensor | None) -> list[int]:
    """How many rows have the floating-point matrices that autograd keeps."""
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        unpermute(y, routing, probabilities)
    return [each.shape[0] for each in kept if each.is_floating_point()]


def test_what_autograd_keeps() -> None:
    """The rows, for the gradient of probabilities alone."""
    routing = sort_by_expert(torch.tensor([[0, 1], [1, 0], [0, 2]]), 3)
    y, probabilities = torch.ones(6, 4, requires_grad=True), torch.ones(3, 2)
    assert saved_rows(y, routing, None) == []
    assert saved_rows(y, routing, probabilities) == [3]
    assert sorted(saved_rows(y, routing, probabilities.requires_grad_())) == [3, 6]
    assert sorted(saved_rows(y.detach(), routing, probabilities)) == [3, 6]


def whole(x: Tensor, indices: Tensor, probabilities: Tensor) -> Tensor:
    """Of an expert that multiplies by 2."""
    routing = sort_by_expert(indices, 5)
    return unpermute(permute(x, routing) * 2, routing, probabilities) + unpermute(permute(x, routing), routing)


@first_by_default
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.usefixtures("fresh_compiler")
def test_compiled(dynamic: bool) -> None:
    """In one graph, also of other numbers of tokens, and none."""
    compiled = torch.compile(whole, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for tokens in (6, 9, 0):
        indices = some_indices(Case(tokens, 2, 4, 5), "dropped")
        results = []
        for function in (whole, compiled):
            torch.manual_seed(1)
            x = torch.randn(tokens, 4).bfloat16().requires_grad_()
            probabilities = torch.rand(tokens, 2, requires_grad=True)
            y = function(x, indices, probabilities)
            results.append([y.detach(), *torch.autograd.grad(y, [x, probabilities], torch.ones_like(y))])
        for eager, traced in zip(*results, strict=True):
            assert_same_bits(traced, eager)


def test_changed_in_place_before_backward() -> None:
    routing = sort_by_expert(torch.tensor([[0, 1]]), 2)
    y, probabilities = torch.ones(2, 3, requires_grad=True) * 1, torch.ones(1, 2, requires_grad=True) * 1
    x = unpermute(y, routing, probabilities)
    x.mul_(2).sum().backward()  # of the result nothing is kept
    x = unpermute(y, routing, probabilities)
    y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        x.sum().backward()


def test_no_value_is_read_by_the_host() -> None:
    """Fake tensors have none; the number of tokens is a symbol."""
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        indices = mode.from_tensor(torch.zeros(6, 2, dtype=torch.int64), static_shapes=False)
        x = mode.from_tensor(torch.ones(6, 4, dtype=torch.bfloat16), static_shapes=False).requires_grad_()
        routing = sort_by_expert(indices, 5)
        y = permute(x, routing)
        probabilities = torch.empty(indices.shape, requires_grad=True)
        out = unpermute(y, routing, probabilities)
        dx, dp = torch.autograd.grad(out.sum(), [x, probabilities])
    assert routing.counts.shape == (5,) and routing.offsets.shape == (6,) and routing.order.shape == (12,)
    assert y.shape == (12, 4) and out.shape == dx.shape == x.shape and dp.shape == indices.shape
    assert out.dtype == dx.dtype == torch.bfloat16 and dp.dtype == torch.float32


@pytest.mark.gpu
def test_no_synchronization_on_a_gpu() -> None:
    """With few slots and with many, which PyTorch sorts otherwise."""
    for tokens in (64, 5000):
        x = torch.randn(tokens, 32, device="cuda", requires_grad=True)
        indices = some_indices(Case(tokens, 3, 32, 5)).cuda()
        probabilities = torch.rand(tokens, 3, device="cuda", requires_grad=True)
        whole(x, indices, probabilities).sum().backward()  # which compiles
        torch.cuda.set_sync_debug_mode("error")
        try:
            whole(x, indices, probabilities).sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")


# ---- mistakes ----

ROUTING = sort_by_expert(torch.tensor([[0, 1], [1, 0], [0, 2]]), 3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: sort_by_expert(torch.zeros(3), 2), r"indices is .*float32.*\(3,\); .*\[T, k\]"),
        (lambda: sort_by_expert(torch.zeros(3, 2), 2), "integers"),
        (lambda: sort_by_expert(torch.zeros(3, 0, dtype=torch.int64), 2), r"\[T, k\]"),
        (lambda: sort_by_expert(torch.zeros(3, 1, dtype=torch.int64), 0), "num_experts is 0"),
        (lambda: permute(torch.ones(4, 5), ROUTING), r"x is .*\(4, 5\); \[T, H\] is needed, and T is 3"),
        (lambda: permute(torch.ones(3), ROUTING), r"\[T, H\] is needed"),
        (lambda: permute(torch.ones(3, 5, dtype=torch.int32), ROUTING), "x is of torch.int32; bf16"),
        (lambda: unpermute(torch.ones(3, 5), ROUTING), r"y is .*\(3, 5\); \[T k, H\] is needed, and T k is 6"),
        (lambda: unpermute(torch.ones(6, 5), ROUTING, torch.ones(6)), r"probabilities .*routing is of \(3, 2\)"),
        (lambda: unpermute(torch.ones(6, 5), ROUTING, torch.ones(3, 2).int()), "floating-point"),
    ],
)
def test_mistakes(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
