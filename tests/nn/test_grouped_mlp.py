"""``GroupedMLP`` in one autograd function against its parts one after the other, and what it saves."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import minifloat
from minifloat.functional import permute, sort_by_expert
from minifloat.nn import GroupedMLP
from tests.helpers.sample import each_once, each_pair, first_by_default

pytestmark = pytest.mark.usefixtures("one_thread")

BF16 = torch.bfloat16
H, F = 48, 64
RECIPES = ["current", "delayed", "block", "rowwise", "mxfp8", "nvfp4", "mxfp4"]
COUNTS = [7, 0, 23, 3]


def make(recipe: Any, **options: Any) -> GroupedMLP:
    torch.manual_seed(0)
    return GroupedMLP(len(COUNTS), H, F, dtype=BF16, recipe=recipe, **options)


def in_parts(mlp: GroupedMLP) -> GroupedMLP:
    """A copy whose linears are called, for they have hooks."""
    copied = copy.deepcopy(mlp)
    for part in (copied.fc1, copied.fc2):
        part.register_forward_hook(lambda *_: None)
    return copied


def delayed_beside(blocks: str) -> minifloat.CustomRecipe:
    """Delayed scaling of all tensors but ``blocks``, which go to MXFP8."""
    quantizer = minifloat.MXFP8BlockScaling().quantizer(minifloat.QuantizerRole("linear", "input"))

    def factory(role: minifloat.QuantizerRole) -> Any:
        return quantizer if role.tensor_type == blocks else minifloat.DelayedScalingRequest(amax_history_len=2)

    return minifloat.CustomRecipe(factory)


def inputs(seed: int, rows: int = sum(COUNTS) + 2) -> tuple[Tensor, Tensor, Tensor]:
    """X, p, dY; rows that are no expert's are NaN."""
    torch.manual_seed(seed)
    x, p, dy = torch.randn(rows, H).to(BF16), torch.rand(rows), torch.randn(rows, H).to(BF16)
    x[sum(COUNTS) :] = dy[sum(COUNTS) :] = torch.nan
    return x.requires_grad_(), p.requires_grad_(), dy


def results(mlp: GroupedMLP, seed: int, weighted: bool = True, **options: Any) -> list[Tensor | None]:
    """Y and all gradients."""
    x, p, dy = inputs(seed)
    torch.manual_seed(seed)  # of stochastic rounding
    y = mlp(x, torch.tensor(COUNTS), probabilities=p if weighted else None, **options)
    y.backward(dy)
    return [y.detach(), x.grad, p.grad, *[parameter.grad for parameter in mlp.parameters()]]


def assert_equal(found: list[Tensor | None], expected: list[Tensor | None]) -> None:
    for mine, other in zip(found, expected, strict=True):
        assert (mine is None) == (other is None)
        assert mine is None or (torch.equal(mine, other) and mine.isfinite().all())  # type: ignore[arg-type]


def test_one_function_runs_it() -> None:
    y = make("current")(inputs(0)[0], COUNTS)
    assert "GroupedMLPFunction" in type(y.grad_fn).__name__
    y = in_parts(make("current"))(inputs(0)[0], COUNTS)
    assert "LinearFunction" in type(y.grad_fn).__name__


@each_once
@pytest.mark.parametrize("recompute", [False, True], ids=["saved", "recomputed"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_as_its_parts(recipe: str, recompute: bool) -> None:
    """Gradients add up over two microbatches, and delayed scaling has histories by the second."""
    options: dict[str, Any] = {"activation": "clamped_swiglu", "bias": True} if recompute else {}
    mlp = make(recipe, recompute_activation=recompute, **options)
    parts = in_parts(mlp)
    for seed, weighted in ((1, False), (2, True)):
        assert_equal(results(mlp, seed, weighted), results(parts, seed, weighted))


@pytest.mark.parametrize("recompute", [False, True], ids=["saved", "recomputed"])
@pytest.mark.parametrize("blocks", ["input", "grad_output"])
def test_delayed_scales_beside_blocks(blocks: str, recompute: bool) -> None:
    """Casts to blocks, which find their own scales, leave those of delayed scaling to the other tensors."""
    mlp = make(delayed_beside(blocks), recompute_activation=recompute)
    parts = in_parts(mlp)
    for seed in (1, 2, 3):
        assert_equal(results(mlp, seed), results(parts, seed))


@pytest.mark.parametrize("options", [{"bias": True}, {"activation": "gelu", "single_grouped_weight": True}], ids=str)
def test_some_of_the_gradients(options: dict[str, Any]) -> None:
    """Whatever is frozen."""
    for frozen in (("fc1",), ("fc2",), ("fc1", "fc2"), ("bias",), ("weight",)):
        mlp = make("block", **options)
        for name, parameter in mlp.named_parameters():
            parameter.requires_grad_(not any(part in name for part in frozen))
        assert_equal(results(mlp, 1), results(in_parts(mlp), 1))


@each_pair
@pytest.mark.parametrize("recipe", ["current", "mxfp8"])
@pytest.mark.parametrize("fuse", [False, True], ids=["autograd", "main_grad"])
@pytest.mark.parametrize("delay", [False, True], ids=["now", "later"])
def test_where_weight_gradients_go(recipe: str, fuse: bool, delay: bool) -> None:
    mlp = make(recipe, fuse_wgrad_accumulation=fuse, delay_wgrad_compute=delay)
    parts = in_parts(mlp)
    for model in (mlp, parts):
        for parameter in model.parameters():
            parameter.main_grad = torch.zeros(parameter.shape)  # type: ignore[attr-defined]
    for seed, first in ((1, True), (2, False)):
        assert_equal(
            results(mlp, seed, is_first_microbatch=first)[:3], results(parts, seed, is_first_microbatch=first)[:3]
        )
        if delay:
            mlp.backward_dw(), parts.backward_dw()
    for mine, other in zip(mlp.parameters(), parts.parameters(), strict=True):
        assert torch.equal(mine.main_grad, other.main_grad)  # type: ignore[attr-defined]
        assert_equal([mine.grad], [other.grad])
    assert any(bool(parameter.main_grad.any()) for parameter in mlp.parameters()) == fuse  # type: ignore[attr-defined]


def test_what_is_saved() -> None:
    """H, and codes of X and A; without those of A where backward casts it again. Nothing of Y."""

    def saved(mlp: GroupedMLP) -> int:
        found: dict[int, int] = {}

        def note(tensor: Tensor) -> Tensor:
            found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        x, p, _ = inputs(0)
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            mlp(x, COUNTS, probabilities=p)
        return sum(found.values())

    rows = sum(COUNTS) + 2
    mlp = make("current")
    weights = sum(parameter.numel() for parameter in mlp.parameters())
    of_a, rest = rows * F, 400  # scales and offsets
    expected = weights + rows * H + 2 * rows * 2 * F + 4 * rows
    assert expected <= saved(make("current", recompute_activation=True)) <= expected + rest
    assert expected + of_a <= saved(mlp) <= expected + of_a + rest


@first_by_default
@pytest.mark.parametrize("recipe", ["current", "delayed", "mxfp8"])
def test_compiled(recipe: str) -> None:
    mlp = make(recipe)
    other = copy.deepcopy(mlp)
    compiled = torch.compile(mlp, backend="aot_eager", fullgraph=True)
    for seed in (1, 2):
        assert_equal(results(compiled, seed), results(other, seed))  # type: ignore[arg-type]


@pytest.mark.parametrize("override", ["high_precision", "dequantized"])
def test_backward_in_high_precision_runs_in_parts(override: str) -> None:
    recipe = minifloat.Float8BlockScaling(backward_override=override)  # type: ignore[arg-type]
    mlp = make(recipe)
    assert_equal(results(mlp, 1), results(in_parts(mlp), 1))


@each_once
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("recipe", [*RECIPES, delayed_beside("input"), None])
def test_tokens(recipe: Any, bias: bool) -> None:
    """As permute, rows and unpermute; some choices are dropped, and one token goes nowhere."""
    mlp = make(recipe, bias=bias)
    parts = in_parts(mlp)
    for seed in (1, 2):
        found = []
        for model in (mlp, parts):
            torch.manual_seed(seed)
            indices = torch.randint(-1, len(COUNTS), (13, 2))
            indices[5] = -1
            routing = sort_by_expert(indices, len(COUNTS))
            x, dy = torch.randn(13, H).to(BF16), torch.randn(13, H).to(BF16)
            x[5] = torch.nan
            p = torch.rand(13, 2).requires_grad_()
            x.requires_grad_()
            y = model(x, routing, None, p)
            y.backward(dy)
            found.append([y.detach(), x.grad, p.grad, *[parameter.grad for parameter in model.parameters()]])
        assert_equal(*found)
        assert not found[0][0][5].any() and not found[0][1][5].any()


def test_results_with_a_bias_have_probabilities_of_fp32() -> None:
    """Rounded once, of rows and of tokens, which are sums of their rows."""
    mlp = make("current", bias=True)
    x, p = torch.randn(13, H).to(BF16), torch.rand(13, 2)
    routing = sort_by_expert(torch.randint(0, len(COUNTS), (13, 2)), len(COUNTS))
    y = mlp(permute(x, routing), routing.counts)
    of_rows = p.flatten()[routing.order.long()]
    products = y.float() * of_rows[:, None]
    assert torch.equal(mlp(permute(x, routing), routing.counts, None, of_rows), products.to(BF16))
    first, second = (products[routing.inverse[:, j].long()] for j in (0, 1))
    assert torch.equal(mlp(x, routing, None, p), (first + second).to(BF16))


class Wrapped(nn.Module):
    """What knows nothing of grouped linears, around one of them."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any) -> Any:
        return self.inner(*args)


@pytest.mark.parametrize("tokens", [False, True], ids=["rows", "tokens"])
def test_replaced_parts(tokens: bool) -> None:
    """They run; one that adds a bias after the activation gets its gradients, and its results their probabilities."""
    indices = torch.randint(0, len(COUNTS), (9, 2))
    counts: Any = sort_by_expert(indices, len(COUNTS)) if tokens else COUNTS
    rows = 9 if tokens else sum(COUNTS)
    x, p = torch.randn(rows, H).to(BF16), torch.rand(9, 2) if tokens else torch.rand(rows)
    mlp = make("current")
    wrapped = copy.deepcopy(mlp)
    wrapped.fc1 = Wrapped(wrapped.fc1)  # type: ignore[assignment]
    assert torch.equal(wrapped(x, counts, None, p), mlp(x, counts, None, p))

    whole, biased = make("current", bias=True), mlp
    biased.fc1, biased.fc2 = copy.deepcopy(whole.fc1), copy.deepcopy(whole.fc2)
    for each in (whole, biased):
        each(x, counts, None, p).float().square().sum().backward()
    for mine, other in zip(biased.parameters(), whole.parameters(), strict=True):
        assert_equal([mine.grad], [other.grad])


def test_a_routing_of_other_experts_or_tokens() -> None:
    mlp, routing = make("current"), sort_by_expert(torch.zeros(4, 2, dtype=torch.int64), len(COUNTS) + 1)
    with pytest.raises(ValueError, match="give the rows of each of the 4 experts"):
        mlp(torch.randn(4, H).to(BF16), routing)
    with pytest.raises(ValueError, match=r"\[T, H\] is needed, and T is 4"):
        mlp(torch.randn(5, H).to(BF16), routing)


def test_probabilities_that_are_none() -> None:
    mlp, (x, p, _) = make("current"), inputs(0)
    for wrong in (p[:-1], p[:, None], torch.ones(len(p), dtype=torch.int64)):
        with pytest.raises(ValueError, match=r"probabilities is .* one for each row"):
            mlp(x, COUNTS, probabilities=wrong)
