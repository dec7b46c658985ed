"""Both cross entropies against PyTorch's in float64, and what they hold in memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from minifloat.functional.cross_entropy import cross_entropy, linear_cross_entropy
from minifloat.ops import cross_entropy as kernels
from tests.helpers.sample import each_pair, first_by_default

# Of gradients that are at most 1, which are rounded once to the dtype of the logits.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
OPTIONS = pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
REDUCTIONS = pytest.mark.parametrize("reduction", ["mean", "sum", "none"])


def some_targets(rows: int, classes: int) -> Tensor:
    """Every third one is ignored."""
    return torch.randint(classes, (rows,)).where(torch.arange(rows) % 3 != 1, -100)


def assert_close(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(actual.double(), expected.double(), rtol=tolerance, atol=tolerance, equal_nan=True)


@each_pair
@OPTIONS
@REDUCTIONS
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("shape", [(7, 13), (1, 1), (3, 5, 33)])
def test_values_and_gradients(
    shape: tuple[int, ...], dtype: torch.dtype, reduction: Any, smoothing: float, device: torch.device
) -> None:
    logits = (torch.randn(shape, device=device) * 5).to(dtype).requires_grad_()
    target = some_targets(logits[..., 0].numel(), shape[-1]).reshape(shape[:-1]).to(device)
    loss = cross_entropy(logits, target, smoothing, reduction=reduction, chunk_rows=4)
    exact = logits.detach().double().requires_grad_()
    expected = F.cross_entropy(
        exact.flatten(0, -2), target.flatten(), label_smoothing=smoothing, reduction=reduction
    ).reshape(loss.shape)
    assert loss.dtype == torch.promote_types(dtype, torch.float32)
    assert_close(loss, expected, 1e-12 if dtype == torch.float64 else 2e-6)
    dloss = torch.randn_like(expected)
    (gradient,) = torch.autograd.grad(loss, logits, dloss.to(loss.dtype))
    assert gradient.dtype == dtype
    assert_close(gradient, torch.autograd.grad(expected, exact, dloss)[0], TOLERANCE[dtype])


@each_pair
@OPTIONS
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_linear_values_and_gradients(
    dtype: torch.dtype, with_bias: bool, reduction: Any, smoothing: float, device: torch.device
) -> None:
    hidden = torch.randn(3, 7, 18, device=device).to(dtype).requires_grad_()
    weight = (torch.randn(29, 18, device=device) * 0.3).to(dtype).requires_grad_()
    bias = torch.randn(29, device=device).to(dtype).requires_grad_() if with_bias else None
    target = some_targets(21, 29).reshape(3, 7).to(device)
    leaves = [t for t in (hidden, weight, bias) if t is not None]
    loss = linear_cross_entropy(hidden, weight, target, bias, smoothing, reduction=reduction, chunk_rows=4)
    gradients = torch.autograd.grad(loss * 3, leaves)
    exact = [t.detach().double().requires_grad_() for t in leaves]
    logits = F.linear(*exact).flatten(0, 1)
    expected = F.cross_entropy(logits, target.flatten(), label_smoothing=smoothing, reduction=reduction)
    tolerance = TOLERANCE[dtype] * (4 if dtype in (torch.float16, torch.bfloat16) else 10)
    assert_close(loss, expected, tolerance)
    for actual, leaf, reference in zip(gradients, leaves, torch.autograd.grad(expected * 3, exact), strict=True):
        assert actual.dtype == leaf.dtype
        assert_close(actual, reference, tolerance * max(1.0, float(reference.abs().max())))


@pytest.mark.parametrize("chunk_rows", [1, 3, 10, 11, 100, None])
def test_chunks_do_not_change_the_numbers(chunk_rows: int | None) -> None:
    logits, target = torch.randn(11, 9, requires_grad=True), some_targets(11, 9)
    loss = cross_entropy(logits, target, 0.1, chunk_rows=chunk_rows)
    expected = cross_entropy(logits, target, 0.1)
    assert torch.equal(loss, expected)
    assert torch.equal(torch.autograd.grad(loss, logits)[0], torch.autograd.grad(expected, logits)[0])
    hidden, weight = torch.randn(11, 6, requires_grad=True), torch.randn(9, 6, requires_grad=True)
    one = linear_cross_entropy(hidden, weight, target, chunk_rows=chunk_rows)
    other = cross_entropy(F.linear(hidden, weight), target)
    torch.testing.assert_close(one, other)
    for a, b in zip(
        torch.autograd.grad(one, [hidden, weight]), torch.autograd.grad(other, [hidden, weight]), strict=True
    ):
        torch.testing.assert_close(a, b)


@OPTIONS
@pytest.mark.parametrize("rows", [0, 4])
def test_no_target_counts(rows: int, smoothing: float) -> None:
    """As in PyTorch: the mean over nothing is NaN, the sum is 0, and so is every gradient."""
    target = torch.full((rows,), -100)
    for reduction in ("mean", "sum"):
        logits = torch.randn(rows, 7, requires_grad=True)
        loss = cross_entropy(logits, target, smoothing, reduction=reduction)  # type: ignore[arg-type]
        loss.backward()
        assert loss.isnan() if reduction == "mean" else loss == 0
        assert logits.grad is not None and not logits.grad.any()
        hidden, weight = torch.randn(rows, 5, requires_grad=True), torch.randn(7, 5, requires_grad=True)
        loss = linear_cross_entropy(hidden, weight, target, None, smoothing, reduction=reduction)  # type: ignore[arg-type]
        loss.backward()
        assert loss.isnan() if reduction == "mean" else loss == 0
        assert hidden.grad is not None and weight.grad is not None
        assert hidden.grad.shape == hidden.shape and not hidden.grad.any() and not weight.grad.any()


def test_an_ignored_row_may_hold_anything() -> None:
    logits = torch.randn(3, 5)
    logits[1] = float("nan")
    logits.requires_grad_()
    loss = cross_entropy(logits, torch.tensor([0, -1, 4]), ignore_index=-1)
    loss.backward()
    assert loss.isfinite() and logits.grad is not None and not logits.grad[1].any() and logits.grad.isfinite().all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_bad_logits_show(bad: float) -> None:
    logits = torch.randn(3, 5)
    logits[1, 2] = bad
    loss = cross_entropy(logits, torch.tensor([0, 1, 4]), reduction="none")
    assert loss.isfinite().tolist() == [True, False, True]


def test_masked_classes() -> None:
    logits = torch.randn(3, 5)
    logits[:, 2] = float("-inf")
    logits.requires_grad_()
    target = torch.tensor([0, 1, 4])
    loss, expected = cross_entropy(logits, target), F.cross_entropy(logits, target)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(torch.autograd.grad(loss, logits)[0], torch.autograd.grad(expected, logits)[0])


def test_graphs_may_be_used_twice_and_losses_added() -> None:
    logits, target = torch.randn(6, 5, requires_grad=True), some_targets(6, 5)
    hidden, weight = torch.randn(6, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True)
    loss = cross_entropy(logits, target)
    first = torch.autograd.grad(loss, logits, retain_graph=True)[0]
    assert torch.equal(torch.autograd.grad(loss, logits)[0], first)
    loss = linear_cross_entropy(hidden, weight, target)
    first = torch.autograd.grad(loss, weight, retain_graph=True)[0]
    assert torch.equal(torch.autograd.grad(loss, weight)[0], first)
    twice = linear_cross_entropy(hidden, weight, target) + linear_cross_entropy(hidden, weight, target)
    torch.testing.assert_close(torch.autograd.grad(twice, weight)[0], 2 * first)


def test_a_linear_gradient_is_scaled_in_fp32() -> None:
    """By dloss over the number of targets, 1/3 of which in bf16 is another number."""
    target, grads = torch.tensor([0, 2, 4]), {}
    hidden, weight = torch.randn(3, 8).bfloat16(), torch.randn(5, 8).bfloat16()
    for reduction in ("sum", "mean"):
        x = hidden.clone().requires_grad_()
        linear_cross_entropy(x, weight, target, reduction=reduction).backward()  # type: ignore[arg-type]
        assert x.grad is not None
        grads[reduction] = x.grad
    assert torch.equal(grads["mean"], (grads["sum"].float() * (torch.ones(()) / 3)).bfloat16())


def test_autocast() -> None:
    hidden, weight = torch.randn(6, 16, requires_grad=True), torch.randn(5, 16, requires_grad=True)
    target = some_targets(6, 5)
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(hidden, weight, target)
        logits = F.linear(hidden, weight)
        plain = cross_entropy(logits, target)
    assert loss.dtype == plain.dtype == torch.float32 and logits.dtype == torch.bfloat16
    torch.testing.assert_close(loss, plain)
    gradients = torch.autograd.grad(loss, [hidden, weight])
    assert all(g.dtype == torch.float32 for g in gradients)
    for actual, expected in zip(gradients, torch.autograd.grad(plain, [hidden, weight]), strict=True):
        torch.testing.assert_close(actual, expected, rtol=2e-2, atol=2e-2)


def test_small_gradients_survive_fp16() -> None:
    """A mean over many tokens divides gradients until fp16 loses them: here that happens after the loss scale."""
    hidden = torch.randn(512, 8).half().requires_grad_()
    weight = (torch.randn(1000, 8) * 1e-3).half().requires_grad_()
    target = torch.randint(1000, (512,))
    (actual,) = torch.autograd.grad(linear_cross_entropy(hidden, weight, target) * 2.0**14, hidden)
    exact = hidden.detach().double().requires_grad_()
    loss = F.cross_entropy(F.linear(exact, weight.detach().double()), target) * 2.0**14
    (expected,) = torch.autograd.grad(loss, exact)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-2, atol=1e-2 * float(expected.abs().max()))


class Largest(TorchDispatchMode):
    """The largest number of elements, of each dtype, that any operation gave."""

    def __init__(self) -> None:
        super().__init__()
        self.numel: dict[torch.dtype, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, Tensor):
                self.numel[t.dtype] = max(self.numel.get(t.dtype, 0), t.numel())
        return out


def test_all_logits_are_never_there_in_fp32() -> None:
    """Counted inside the operations: fp32 tensors are of one chunk; no fused operation has more logits than that."""
    logits, target = torch.randn(64, 50).bfloat16(), some_targets(64, 50)
    with Largest() as forward:
        statistics = kernels.cross_entropy_statistics.reference(logits, target, 0.1, -100, 8, 0, 50)
        loss, lse = kernels.loss_of_parts(statistics[None], target == -100, 0.1, 50)
    with Largest() as backward:
        kernels.cross_entropy_backward.reference(torch.ones_like(loss), logits, target, lse, 0.1, -100, 8, 0, 50)
    for seen in (forward, backward):
        assert seen.numel[torch.float32] == 8 * 50
    assert forward.numel.get(torch.bfloat16, 0) <= 8 * 50
    with Largest() as fused:
        kernels.linear_cross_entropy.reference(
            torch.randn(64, 4).bfloat16(), torch.randn(50, 4).bfloat16(), None, target, 0, -100, 8, [True] * 3
        )
    assert fused.numel[torch.float32] == 8 * 50 and fused.numel[torch.bfloat16] == 8 * 50


@first_by_default
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("linear", [False, True])
def test_compiles_to_one_graph_with_dynamic_rows(linear: bool, backend: str) -> None:
    torch._dynamo.reset()
    weight = torch.randn(5, 8, requires_grad=True)

    def loss_of(x: Tensor, target: Tensor) -> Tensor:
        return linear_cross_entropy(x, weight, target) if linear else cross_entropy(x, target, 0.1)

    compiled = torch.compile(loss_of, fullgraph=True, dynamic=True, backend=backend)
    for rows in (6, 9, 12):
        x, target = torch.randn(rows, 8, requires_grad=True), some_targets(rows, 5)
        actual, expected = compiled(x, target), loss_of(x, target)
        torch.testing.assert_close(actual, expected)
        torch.testing.assert_close(torch.autograd.grad(actual, x)[0], torch.autograd.grad(expected, x)[0])


@pytest.mark.gpu
@pytest.mark.parametrize("linear", [False, True])
def test_never_waits_for_the_device(linear: bool) -> None:
    x, weight = torch.randn(33, 16, device="cuda", requires_grad=True), torch.randn(50, 16, device="cuda")
    target = some_targets(33, 16).cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss = linear_cross_entropy(x, weight, target) if linear else cross_entropy(x, target)
        loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_wrong_input_is_named() -> None:
    logits, target = torch.randn(3, 5), torch.tensor([0, 1, 2])
    for message, arguments in (
        (r"target has shape \(2,\).*\(3,\)", (logits, target[:2])),
        ("class indices", (logits, target.float())),
        ("input is torch.int64", (target[:, None], target)),
        ("label_smoothing is 2", (logits, target, 2.0)),
        ("reduction is 'max'", (logits, target, 0.0, -100, "max")),
        ("chunk_rows is 0", (logits, target, 0.0, -100, "mean", 0)),
    ):
        with pytest.raises(ValueError, match=message):
            cross_entropy(*arguments)  # type: ignore[arg-type]
    for message, arguments in (
        (r"hidden \(3, 5\) and weight \(7, 4\)", (logits, torch.randn(7, 4), target)),
        ("each of 7 rows", (logits, torch.randn(7, 5), target, torch.randn(5))),
        ("reduction is 'none'", (logits, torch.randn(7, 5), target, None, 0.0, -100, "none")),
    ):
        with pytest.raises(ValueError, match=message):
            linear_cross_entropy(*arguments)  # type: ignore[arg-type]
    for wrong in (5, -1):
        with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
            cross_entropy(logits, torch.tensor([0, wrong, 2]))
