"""``GroupedLinear`` against one ``Linear`` for each expert: numbers, gradients, options, state, bad input."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.multiprocessing.reductions import StorageWeakRef

import minifloat
from minifloat.autocast import autocast
from minifloat.functional.grouped import GroupLayout
from minifloat.nn import GroupedLinear, GroupedMLP, Linear, prepare
from minifloat.recipe import DelayedScaling, Float8CurrentScaling, NVFP4BlockScaling
from tests.helpers.sample import each_pair, each_twice, first_by_default

pytestmark = pytest.mark.usefixtures("one_thread")

BF16 = torch.bfloat16
K, N = 40, 24
COUNTS = [(7, 0, 23, 15), (0, 0, 45), (45, 0), (1,), (0, 0), (130, 1, 3)]
RECIPES: dict[str, Any] = {
    "none": "none",
    **{name: name for name in ("current", "delayed", "block", "mxfp8", "rowwise", "mxfp4", "mxfp6")},
    "nvfp4": NVFP4BlockScaling(disable_stochastic_rounding=True),
    "high precision backward": Float8CurrentScaling(backward_override="high_precision"),
    "dequantized backward": Float8CurrentScaling(backward_override="dequantized"),
}
STORAGE = {
    "separate": (False, False),
    "single": (True, True),
    "single weight": (True, False),
    "single bias": (False, True),
}


def layers(counts: Sequence[int], **options: Any) -> tuple[GroupedLinear, list[Linear]]:
    """A grouped linear and one linear for each expert, with the same parameters; named options of both."""
    storage = {name: options.pop(name, False) for name in ("single_grouped_weight", "single_grouped_bias")}
    torch.manual_seed(0)
    grouped = GroupedLinear(len(counts), K, N, dtype=BF16, **storage, **options)
    torch.manual_seed(0)
    return grouped, [Linear(K, N, dtype=BF16, **options) for _ in counts]


def parameters(grouped: GroupedLinear, kind: str) -> list[Any]:
    """Those of each expert, or slices of what is single."""
    single = grouped.single_grouped_weight if kind == "weight" else grouped.single_grouped_bias
    if single:
        return list(grouped.get_parameter(kind))
    return [grouped.get_parameter(f"{i}.{kind}") for i in range(grouped.num_gemms)]


def gradients(grouped: GroupedLinear, kind: str) -> list[Any]:
    """Likewise."""
    single = grouped.single_grouped_weight if kind == "weight" else grouped.single_grouped_bias
    if single:
        return list(grouped.get_parameter(kind).grad)  # type: ignore[arg-type]
    return [parameter.grad for parameter in parameters(grouped, kind)]


def one_by_one(linears: Sequence[Linear], x: Tensor, counts: Sequence[int], **call: Any) -> Tensor:
    """Y [M, N] of the linears, 0 beyond the last expert's rows."""
    rows = [*counts, x.shape[0] - sum(counts)]
    *own, rest = x.split(rows)
    made = [linear(part, **call) for linear, part in zip(linears, own, strict=True)]
    return torch.cat([*made, rest.new_zeros(rows[-1], N)])


def batch(counts: Sequence[int], extra: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    """X twice and dY, with NaN in the rows that are no expert's."""
    total = sum(counts)
    x, dy = torch.randn(total + extra, K).to(BF16), torch.randn(total + extra, N).to(BF16)
    x[total:], dy[total:] = torch.nan, torch.nan
    return x.requires_grad_(), x.detach().clone().requires_grad_(), dy


def assert_step_alike(grouped: GroupedLinear, linears: Sequence[Linear], counts: Sequence[int], **call: Any) -> None:
    """Forward and backward give the same bits."""
    x, own_x, dy = batch(counts)
    y, expected = grouped(x, torch.tensor(counts), **call), one_by_one(linears, own_x, counts, **call)
    assert torch.equal(y, expected)
    y.backward(dy)
    expected[: sum(counts)].backward(dy[: sum(counts)])
    assert x.grad is not None and own_x.grad is not None
    assert torch.equal(x.grad[: sum(counts)], own_x.grad[: sum(counts)]) and not x.grad[sum(counts) :].any()
    if not grouped.fuse_wgrad_accumulation and not grouped.delay_wgrad_compute:
        for own, linear in zip(gradients(grouped, "weight"), linears, strict=True):
            assert torch.equal(own, linear.weight.grad)
    for own, linear in zip(gradients(grouped, "bias"), linears, strict=True):
        assert torch.equal(own, linear.bias.grad)


@each_twice
@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_as_one_linear_for_each_expert(recipe: str, counts: tuple[int, ...]) -> None:
    """Three steps, whose gradients add up; delayed scaling's scales move."""
    grouped, linears = layers(counts, recipe=RECIPES[recipe])
    for _ in range(3):
        assert_step_alike(grouped, linears, counts)


@each_pair
@pytest.mark.parametrize("recipe", ["current", "delayed", "block", "nvfp4"])
@pytest.mark.parametrize("storage", STORAGE)
@pytest.mark.parametrize("delay, fuse, save", list(product((False, True), repeat=3)))
def test_options(recipe: str, storage: str, delay: bool, fuse: bool, save: bool) -> None:
    """Every combination, two microbatches: each gradient arrives once."""
    counts = (7, 0, 23)
    single_weight, single_bias = STORAGE[storage]
    grouped, linears = layers(
        counts, recipe=RECIPES[recipe], single_grouped_weight=single_weight, single_grouped_bias=single_bias,
        delay_wgrad_compute=delay, fuse_wgrad_accumulation=fuse, save_original_input=save,
    )  # fmt: skip
    weights = [grouped.get_parameter("weight")] if single_weight else parameters(grouped, "weight")
    for weight in (*weights, *[linear.weight for linear in linears]) if fuse else ():
        weight.main_grad = torch.full(weight.shape, 7.0)
    for first in (True, False):
        assert_step_alike(grouped, linears, counts, is_first_microbatch=first)
        for layer in (grouped, *linears) if delay else ():
            layer.backward_dw()
    if fuse:
        mine = list(weights[0].main_grad) if single_weight else [weight.main_grad for weight in weights]
        assert all(weight.grad is None for weight in weights)
    else:
        mine = gradients(grouped, "weight")
    for own, linear in zip(mine, linears, strict=True):
        assert torch.equal(own, linear.weight.main_grad if fuse else linear.weight.grad)


@each_pair
@pytest.mark.parametrize("experts", [1, 2])
@pytest.mark.parametrize("storage", STORAGE)
@pytest.mark.parametrize("option", ["delay_wgrad_compute", "fuse_wgrad_accumulation"])
@pytest.mark.parametrize("recipe", ["current", "none"])
def test_gradients_find_their_parameters(recipe: str, option: str, storage: str, experts: int) -> None:
    """Also that of one expert, and those of fp32 weights that torch.autocast has in bf16 where nothing is quantized."""
    single_weight, single_bias = STORAGE[storage]
    options: Any = {"recipe": recipe, "single_grouped_weight": single_weight, "single_grouped_bias": single_bias}
    grouped = GroupedLinear(experts, K, N, **options, **{option: True})
    twin = GroupedLinear(experts, K, N, **options)
    twin.load_state_dict(grouped.state_dict())
    fuse, x = option == "fuse_wgrad_accumulation", torch.randn(5 * experts, K)
    weights = [(grouped.get_parameter(name), twin.get_parameter(name)) for name in grouped._weight_names]
    for weight, _ in weights:
        weight.main_grad = torch.zeros_like(weight)  # type: ignore[attr-defined]
    for layer in (grouped, twin):
        with torch.autocast("cpu", dtype=BF16):
            y = layer(x, [5] * experts)
        y.sum().backward()
    if not fuse:
        grouped.backward_dw()
    for mine, expected in weights:
        found = mine.main_grad if fuse else mine.grad  # type: ignore[attr-defined]
        assert expected.grad is not None and torch.equal(found.to(BF16), expected.grad.to(BF16)) and found.any()


@pytest.mark.parametrize("experts, frozen", [(1, False), (2, True)])
@pytest.mark.parametrize("option", ["delay_wgrad_compute", "fuse_wgrad_accumulation"])
def test_compiled_where_backward_writes_gradients(option: str, experts: int, frozen: bool) -> None:
    """Of one expert too, and where the first is frozen. No graph leaves work for later: there it runs uncompiled."""
    torch._dynamo.reset()
    grouped, _ = layers((5,) * experts, recipe="current", **{option: True})
    weights, (x, _, dy) = parameters(grouped, "weight"), batch((5,) * experts)
    weights[0].requires_grad_(not frozen)
    weights[-1].main_grad = torch.zeros_like(weights[-1])
    delayed = option == "delay_wgrad_compute"
    if delayed:
        with pytest.raises(RuntimeError, match=option):
            torch.compile(grouped, backend="aot_eager", fullgraph=True)(x, torch.tensor([5] * experts))
        torch._dynamo.reset()
    compiled = torch.compile(grouped, backend="aot_eager", fullgraph=not delayed)
    compiled(x, torch.tensor([5] * experts)).backward(dy)
    if delayed:
        grouped.backward_dw()
    found = weights[-1].grad if delayed else weights[-1].main_grad
    assert found is not None and found.any() and (not frozen or weights[0].grad is None)


@pytest.mark.parametrize("shared", [False, True])
def test_main_grads_of_experts_are_written_together(shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One addition and one copy of all; each main_grad keeps its dtype, and its own wish for a copy or a gradient."""
    counts = (4, 0, 7, 2, 5)
    grouped, linears = layers(counts, recipe="none", fuse_wgrad_accumulation=True)
    for linear in linears:
        linear.fuse_wgrad_accumulation = False
    weights: list[Any] = parameters(grouped, "weight")
    for weight in weights:
        weight.main_grad = torch.full((N, K), 3.0, dtype=torch.float32 if weight is weights[4] else BF16)
    if shared:
        weights[2].main_grad = weights[1].main_grad
    weights[1].overwrite_main_grad = weights[0].zero_out_wgrad = True
    weights[3].requires_grad_(False)
    calls: list[int] = []
    for name in ("_foreach_add_", "_foreach_copy_"):
        run = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda own, new, run=run: (calls.append(len(own)), run(own, new)))
    x, own_x, dy = batch(counts)
    grouped(x, counts).backward(dy)
    one_by_one(linears, own_x, counts)[: sum(counts)].backward(dy[: sum(counts)])
    for i, (weight, linear) in enumerate(zip(weights, linears, strict=True)):
        before = 0.0 if i == 1 else 3.0
        if shared and i in (1, 2):
            before = linears[3 - i].weight.grad
        added = 0.0 if i == 3 else linear.weight.grad.to(weight.main_grad.dtype)
        assert torch.equal(weight.main_grad, torch.full_like(weight.main_grad, 1.0) * before + added)
        assert getattr(weight, "grad_added_to_main_grad", False) == (i != 3)
        assert weight.grad is None if i == 3 else weight.grad.eq(0).all()  # of one gradient for autograd all are
    assert calls == ([] if shared else [3, 1])


@pytest.mark.parametrize("option", ["delay_wgrad_compute", "fuse_wgrad_accumulation"])
def test_frozen_experts_get_no_gradient_by_another_way(option: str) -> None:
    grouped = GroupedLinear(2, K, N, recipe="current", **{option: True})  # type: ignore[arg-type]
    frozen, other = parameters(grouped, "weight")
    frozen.requires_grad_(False)
    other.main_grad = torch.zeros_like(other)
    grouped(torch.randn(9, K), [4, 5]).sum().backward()
    if option == "delay_wgrad_compute":
        grouped.backward_dw()
    assert frozen.grad is None and (other.main_grad.any() or other.grad.any())


@settings(max_examples=25)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=6), st.sampled_from(["current", "block", "mxfp8"]))
def test_any_counts(counts: list[int], recipe: str) -> None:
    grouped, linears = layers(counts, recipe=recipe)
    assert_step_alike(grouped, linears, counts)


def test_weights_that_are_no_neighbours_any_more() -> None:
    counts = (3, 9)
    grouped, linears = layers(counts, recipe="current")
    for parameter, linear in zip(parameters(grouped, "weight"), linears, strict=True):
        parameter.data = linear.weight.data = torch.randn(N, K).to(BF16)
    assert_step_alike(grouped, linears, counts)
    grouped.double().to(BF16)  # which makes them neighbours again
    first, second = parameters(grouped, "weight")
    assert second.data_ptr() == first.data_ptr() + first.numel() * first.element_size()
    assert_step_alike(grouped, linears, counts)
    file = bytearray(2 * first.nbytes)  # neighbours, of which each is a storage, as loaders of checkpoints make them
    for i, (parameter, linear) in enumerate(zip((first, second), linears, strict=True)):
        own = torch.frombuffer(file, dtype=BF16, count=N * K, offset=i * first.nbytes).view(N, K)
        parameter.data = own.copy_(linear.weight.detach())
    assert second.data_ptr() == first.data_ptr() + first.nbytes
    assert_step_alike(grouped, linears, counts)
    first.data, second.data = torch.stack([first.detach(), second.detach()]).unbind()
    second.data = second.data.view(torch.float16).copy_(linears[1].weight)  # of another dtype, as wide
    x = torch.randn(sum(counts), K).to(BF16)
    y = grouped(x, counts)
    second.data = second.data.clone()
    assert torch.equal(grouped(x, counts), y)


@each_pair
@pytest.mark.parametrize("replaced", [0, 1, 2])
@pytest.mark.parametrize("how", ["parameter", "data", "transposed", "swapped"])
@pytest.mark.parametrize("recipe", ["none", "current"])
def test_a_weight_that_is_replaced(recipe: str, how: str, replaced: int) -> None:
    """Of any expert, after those of all lay in one piece of memory, which has the old ones."""
    counts, (grouped, linears) = (3, 9, 5), layers((3, 9, 5), recipe=recipe)
    assert_step_alike(grouped, linears, counts)
    own: Any = grouped.get_submodule(str(replaced))
    new = own.weight.detach().view(K, N).t() if how == "transposed" else torch.randn(N, K).to(BF16)
    if how == "swapped":
        other: Any = grouped.get_submodule(str((replaced + 1) % 3))
        own.weight, other.weight = other.weight, own.weight
    elif how == "parameter":
        own.weight = nn.Parameter(new)
    else:
        own.weight.data = new
    with torch.no_grad():
        for linear, weight in zip(linears, parameters(grouped, "weight"), strict=True):
            linear.weight.copy_(weight)
    grouped.zero_grad(), [linear.zero_grad() for linear in linears]
    assert_step_alike(grouped, linears, counts)


def test_shared_memory_stays_shared() -> None:
    grouped = GroupedLinear(3, K, N, recipe="current").share_memory()
    assert all(parameter.is_shared() for parameter in grouped.parameters())
    for parameter in parameters(grouped, "weight"):  # apart
        parameter.data = parameter.detach().clone().share_memory_()
    assert all(parameter.is_shared() for parameter in grouped.share_memory().parameters())


def test_frozen_experts_and_inputs() -> None:
    counts = (3, 9)
    grouped, _ = layers(counts, recipe="current")
    grouped.get_parameter("0.weight").requires_grad_(False)
    x, _, dy = batch(counts)
    grouped(x.detach(), counts).backward(dy)
    assert grouped.get_parameter("0.weight").grad is None and grouped.get_parameter("1.weight").grad is not None


def test_cached_weights_follow_their_parameters() -> None:
    counts = (3, 9)
    grouped, linears = layers(counts, recipe="block")
    for first in (True, False):
        assert_step_alike(grouped, linears, counts, is_first_microbatch=first)
    with torch.no_grad():
        for layer in (*parameters(grouped, "weight"), *[linear.weight for linear in linears]):
            layer.mul_(3)
    assert_step_alike(grouped, linears, counts, is_first_microbatch=False)


def test_delayed_scaling_under_autocast() -> None:
    """Histories of experts without tokens wait; the others are those of linears of their own."""
    counts = (7, 0, 23)
    grouped, linears = layers(counts)
    recipe = DelayedScaling(amax_history_len=4)
    for step in range(4):
        x, own_x, dy = batch(counts)
        with autocast(recipe=recipe):
            y, expected = grouped(x * 2**step, counts), one_by_one(linears, own_x * 2**step, counts)
        assert torch.equal(y, expected)
        y.backward(dy), expected[: sum(counts)].backward(dy[: sum(counts)])
        for name in ("forward_scaling", "backward_scaling"):
            own = getattr(grouped, name).scale.view(-1, len(counts))
            assert torch.equal(own, torch.stack([getattr(linear, name).scale for linear in linears], 1))
    prepare(GroupedLinear(2, K, N), recipe)


@first_by_default
@pytest.mark.parametrize("recipe", ["current", "block", "nvfp4", "none"])
@pytest.mark.parametrize("single", [False, True])
def test_compiled(recipe: str, single: bool) -> None:
    """One graph for all counts."""
    torch._dynamo.reset()
    grouped, _ = layers((0, 0, 0), recipe=RECIPES[recipe], single_grouped_weight=single, single_grouped_bias=single)
    compiled = torch.compile(copy.deepcopy(grouped), backend="aot_eager", fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for counts in ((7, 0, 23), (30, 0, 0), (0, 1, 2)):
            x, own_x, dy = torch.randn(30, K).to(BF16).requires_grad_(), None, torch.randn(30, N).to(BF16)
            own_x = x.detach().clone().requires_grad_()
            y, expected = compiled(own_x, torch.tensor(counts)), grouped(x, torch.tensor(counts))
            assert torch.equal(y, expected)
            y.backward(dy), expected.backward(dy)
            assert torch.equal(x.grad, own_x.grad)  # type: ignore[arg-type]
    for name, parameter in compiled._orig_mod.named_parameters():
        assert torch.equal(parameter.grad, grouped.get_parameter(name).grad)  # type: ignore[arg-type]


@pytest.mark.parametrize("recipe", ["current", "delayed", "block", "nvfp4", "none"])
def test_traced_with_counts_of_a_device(recipe: str) -> None:
    """Nothing asks for the values of the counts."""
    with FakeTensorMode():
        grouped = GroupedLinear(3, K, N, dtype=BF16, recipe=RECIPES[recipe])
        x = torch.randn(30, K, dtype=BF16, requires_grad=True)
        y = grouped(x, torch.tensor([7, 0, 23]))
        y.backward(torch.randn_like(y))
        assert y.shape == (30, N) and x.grad is not None and x.grad.shape == x.shape
        assert all(p.grad is not None and p.grad.shape == p.shape for p in grouped.parameters())


def test_a_layout_serves_several_layers() -> None:
    counts = (7, 0, 23)
    grouped, _ = layers(counts, recipe="current")
    x = torch.randn(30, K).to(BF16)
    layout = GroupLayout.of(torch.tensor(counts), 30, x.device, "here", False)
    assert torch.equal(grouped(x, layout), grouped(x, counts))
    with pytest.raises(ValueError, match="the layout is for 30 rows, and the input has 29"):
        grouped(x[:29], layout)


# ---- State ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("one, other", list(product(STORAGE, repeat=2)))
def test_state_dicts_of_either_storage(one: str, other: str) -> None:
    torch.manual_seed(1)
    saved = GroupedLinear(
        3, K, N, recipe="delayed", single_grouped_weight=STORAGE[one][0], single_grouped_bias=STORAGE[one][1]
    )
    loaded = GroupedLinear(
        3, K, N, recipe="delayed", single_grouped_weight=STORAGE[other][0], single_grouped_bias=STORAGE[other][1]
    )
    loaded.load_state_dict(saved.state_dict())
    for kind in ("weight", "bias"):
        assert all(map(torch.equal, parameters(saved, kind), parameters(loaded, kind)))


def test_state_dict_keys_are_those_of_a_list_of_linears() -> None:
    linears = nn.ModuleList([Linear(K, N) for _ in range(3)])
    grouped = GroupedLinear(3, K, N)
    assert list(grouped.state_dict()) == list(linears.state_dict())
    grouped.load_state_dict(linears.state_dict())
    x = torch.randn(30, K)
    assert torch.equal(grouped(x, [7, 0, 23]), one_by_one(list(linears), x, (7, 0, 23)))  # type: ignore[arg-type]


@pytest.mark.parametrize("storage", STORAGE)
def test_weights_without_values(storage: str) -> None:
    single_weight, single_bias = STORAGE[storage]
    grouped = GroupedLinear(
        2, K, N, device="meta", single_grouped_weight=single_weight, single_grouped_bias=single_bias, name="experts"
    )
    with pytest.raises(ValueError, match="'experts': the parameters are on the meta device"):
        grouped(torch.randn(9, K), (4, 5))


def test_calibration_does_not_count_a_recomputation() -> None:
    grouped, after, x = GroupedLinear(2, K, N), nn.Linear(N, N), torch.randn(9, K, requires_grad=True)
    with autocast(enabled=False, calibrating=True, recipe=DelayedScaling()):
        y = minifloat.checkpoint(lambda x: after(grouped(x, (4, 5))).exp(), x)
    recorded = grouped.forward_scaling.amax_history.clone()
    y.sum().backward()
    assert recorded.any() and torch.equal(grouped.forward_scaling.amax_history, recorded)


# ---- Bad input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "counts, error, message",
    [
        ((7, 0), ValueError, "m_splits has 2 numbers; give the rows of each of the 3 experts"),
        ((), ValueError, "m_splits has 0 numbers; give the rows of each of the 3 experts"),
        ((7, -1, 2), ValueError, "must not be negative"),
        ((7, 20, 4), ValueError, "adds up to 31, with 30 rows"),
        (torch.tensor([1.0, 2.0, 3.0]), TypeError, "m_splits is torch.float32; integers are needed"),
        (torch.tensor([True, True, False]), TypeError, "integers are needed"),
        (torch.tensor([[1, 2, 3]]), ValueError, "one number for each group"),
    ],
)
def test_wrong_counts(counts: Any, error: type[Exception], message: str) -> None:
    grouped = GroupedLinear(3, K, N, recipe="current", name="experts")
    with pytest.raises(error, match=message) as caught:
        grouped(torch.randn(30, K), counts)
    assert "experts" in str(caught.value)


@first_by_default
@pytest.mark.parametrize(("kind", "backend"), [(GroupedLinear, "aot_eager"), (GroupedMLP, "eager")])
def test_wrong_counts_in_compiled_code(backend: str, kind: Any) -> None:
    """What the host has is looked at when the graph runs, and no graph is made for a value of a tensor."""
    torch._dynamo.reset()
    grouped, x = kind(2, K, N), torch.randn(30, K)
    for counts, error in (([4, 9], ""), ([-3, 4], "negative"), ([20, 11], "adds up to 31, with 30 rows")):
        for splits in (counts, torch.tensor(counts)):
            compiled = torch.compile(grouped, backend=backend, fullgraph=True)
            with pytest.raises(ValueError, match=rf"{kind.__name__}: m_splits.*{error}") if error else nullcontext():
                assert torch.equal(compiled(x, splits), grouped(x, counts))


def test_counts_that_nobody_waits_for_stay_inside() -> None:
    """As on a GPU: what adds up to more rows than there are ends with the last row, and negative ones are 0."""

    def offsets(counts: Tensor) -> Tensor:
        return GroupLayout.of(counts, 30, counts.device, "here", False).offsets

    traced = make_fx(offsets, tracing_mode="fake")(torch.tensor([1, 2, 3]))  # which knows no values
    for counts, expected in (
        ([7, -5, 100], [0, 7, 7, 30]),
        ([-1, -1, -1], [0, 0, 0, 0]),
        ([40, 1, 0], [0, 30, 30, 30]),
        ([2**62, 2**62, 2**62], [0, 30, 30, 30]),  # whose sum is negative in int64
        ([7, 0, 20], [0, 7, 7, 27]),
    ):
        found = traced(torch.tensor(counts))
        assert found.tolist() == expected and found.dtype == torch.int32
    assert GroupLayout.of(torch.tensor([100, 127], dtype=torch.int8), 300, torch.device("cpu"), "", False).rows == 300


def test_a_capture_does_not_wait_for_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """It could not go on after a wait: an error before, which names the layer."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match=r"'experts': autocast\(check_finite=True\).* capture without it"):
        GroupLayout.of(torch.ones(2, dtype=torch.int64, device="meta"), 30, torch.device("cpu"), "'experts'", True)


@pytest.mark.parametrize("recipe", [None, "current"])
def test_dtypes(recipe: Any) -> None:
    grouped = GroupedLinear(2, K, N, recipe=recipe)
    x = torch.randn(9, K)
    with torch.autocast("cpu", dtype=BF16):
        assert grouped(x, [4, 5]).dtype == BF16
    if recipe is None:
        with pytest.raises(ValueError, match="input and torch.float32 weight".replace(".", r"\.")):
            grouped(x.to(BF16), [4, 5])


def test_not_finite() -> None:
    grouped = GroupedLinear(2, K, N, name="experts")
    x, _, _ = batch((4, 5))
    with autocast(recipe="current", check_finite=True):
        y = grouped(x.detach().float(), (4, 5))  # rows that are no expert's do not count
        dy = torch.ones_like(y)
        dy[9:] = torch.nan
        y.backward(dy, retain_graph=True)
        dy[8] = torch.inf
        with pytest.raises(FloatingPointError, match="experts"):
            y.backward(dy)
        with pytest.raises(FloatingPointError, match="experts"):
            grouped(x.detach().float(), (4, 6))


# ---- On a GPU -------------------------------------------------------------------------------------------------------

ON_GPU = {name: recipe for name, recipe in RECIPES.items() if "backward" not in name}


def sevens(*shape: int) -> Tensor:
    """7 and -7: every scale is a power of two times something that cancels, and every sum is exact in fp32."""
    return (torch.randint(0, 2, shape, device="cuda") * 14 - 7).to(BF16)


@pytest.mark.gpu
@pytest.mark.parametrize("counts", [(7, 0, 23, 15), (300, 1, 0, 200), (0, 0)])
@pytest.mark.parametrize("recipe", ON_GPU)
def test_gpu_computes_what_linears_do(recipe: str, counts: tuple[int, ...]) -> None:
    """Of 7 and -7 the same bits, under NVFP4 but for the last one; of other numbers within the order of sums."""
    inner, outer, total = 96, 64, sum(counts)
    grouped = GroupedLinear(len(counts), inner, outer, dtype=BF16, device="cuda", recipe=ON_GPU[recipe], bias=False)
    linears = [Linear(inner, outer, dtype=BF16, device="cuda", recipe=ON_GPU[recipe], bias=False) for _ in counts]
    for exact in (True, False):
        make = sevens if exact else lambda *shape: torch.randn(*shape, device="cuda").to(BF16)
        with torch.no_grad():
            for parameter, linear in zip(parameters(grouped, "weight"), linears, strict=True):
                linear.weight.copy_(parameter.copy_(make(outer, inner)))
        x, dy = make(total + 3, inner), make(total + 3, outer)
        x[total:], dy[total:] = torch.nan, torch.nan
        x.requires_grad_()
        own_x = x.detach()[:total].clone().requires_grad_()
        for layer in (grouped, *linears):
            layer.zero_grad()
        y = grouped(x, torch.tensor(counts, device="cuda"))
        expected = torch.cat([linear(part) for linear, part in zip(linears, own_x.split(counts), strict=True)])
        y.backward(dy)
        expected.backward(dy[:total])
        assert x.grad is not None and own_x.grad is not None
        assert not y[total:].any() and not x.grad[total:].any()
        pairs = [(y[:total], expected), (x.grad[:total], own_x.grad)]
        pairs += zip(gradients(grouped, "weight"), [linear.weight.grad for linear in linears], strict=True)  # type: ignore[arg-type]
        for mine, other in pairs:
            if exact and recipe not in ("nvfp4", "delayed"):
                assert torch.equal(mine, other)
            else:
                torch.testing.assert_close(
                    mine, other, rtol=0.01, atol=0.01 * float(other.abs().max()) if other.numel() else 0
                )


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ON_GPU)
def test_gpu_graph_with_other_counts(recipe: str) -> None:
    """A captured step, on other contents and counts, is the eager one bit for bit; nothing waits for the device."""
    torch.manual_seed(0)
    grouped = GroupedLinear(4, 96, 64, dtype=BF16, device="cuda", recipe=ON_GPU[recipe])
    x = torch.randn(160, 96, device="cuda").to(BF16).requires_grad_()
    dy, counts = torch.randn(160, 64, device="cuda").to(BF16), torch.tensor([40, 40, 40, 40], device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            grouped(x, counts).backward(dy)
    torch.cuda.current_stream().wait_stream(side)
    grouped.zero_grad(set_to_none=True)
    x.grad = None
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.graph(graph):
            y = grouped(x, counts)
            y.backward(dy)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    twin = copy.deepcopy(grouped)
    for own in ((160, 0, 0, 0), (1, 0, 99, 17), (40, 50, 30, 40)):
        with torch.no_grad():
            x.copy_(torch.randn_like(x)), dy.copy_(torch.randn_like(dy)), counts.copy_(torch.tensor(own))
        other = x.detach().clone().requires_grad_()
        twin.zero_grad(set_to_none=True)
        graph.replay()
        expected = twin(other, counts)
        expected.backward(dy)
        assert torch.equal(y, expected) and torch.equal(x.grad, other.grad)  # type: ignore[arg-type]
        for mine, its in zip(grouped.parameters(), twin.parameters(), strict=True):
            assert torch.equal(mine.grad, its.grad)  # type: ignore[arg-type]


@pytest.mark.gpu
def test_gpu_launches_do_not_depend_on_the_number_of_experts() -> None:
    from minifloat.ops.launch import count_launches  # which needs Triton

    def launches(experts: int) -> dict[str, int]:
        grouped = GroupedLinear(experts, 96, 64, dtype=BF16, device="cuda", recipe="current")
        x = torch.randn(160, 96, device="cuda").to(BF16).requires_grad_()
        counts = torch.full((experts,), 160 // experts, device="cuda")
        with count_launches() as counted:
            grouped(x, counts).sum().backward()
        return dict(counted)

    assert launches(2) == launches(40)


@pytest.mark.parametrize("recipe", [None, "current", "delayed", "block", "mxfp8"])
def test_memory_of_the_caller(recipe: str | None) -> None:
    """Y and dX are written there, in each of several steps, whatever was in it; backward knows Y by its own version."""
    grouped = GroupedLinear(3, K, N, recipe=recipe)
    other = copy.deepcopy(grouped)
    out, dgrad_out = torch.full((9, N), torch.nan), torch.full((9, K), torch.nan)
    for _ in range(2):
        x, dy = torch.randn(9, K, requires_grad=True), torch.randn(9, N)
        own_x = x.detach().clone().requires_grad_()
        y = grouped(x, [4, 0, 3], out=out, dgrad_out=dgrad_out)
        assert y.data_ptr() == out.data_ptr() and not out.requires_grad
        expected = other(own_x, [4, 0, 3])
        assert torch.equal(out, expected)
        y.backward(dy), expected.backward(dy)
        assert own_x.grad is not None and torch.equal(dgrad_out, own_x.grad)
        assert x.grad is not None and torch.equal(x.grad, own_x.grad)
    for mine, wanted in zip(grouped.parameters(), other.parameters(), strict=True):
        assert mine.grad is not None and wanted.grad is not None and torch.equal(mine.grad, wanted.grad)


def test_memory_of_the_caller_is_let_go() -> None:
    """While the graph of Y lives, Y and what it was written to may go."""
    out = torch.empty(5, N)
    total = GroupedLinear(2, K, N, recipe="current")(torch.randn(5, K), [2, 3], out=out).sum()
    memory = StorageWeakRef(out.untyped_storage())
    del out
    assert memory.expired()
    total.backward()


def test_memory_that_does_not_fit() -> None:
    grouped, x = GroupedLinear(2, K, N, recipe="current", name="experts"), torch.randn(5, K)
    for wrong in (
        torch.empty(4, N),
        torch.empty(5, N).bfloat16(),
        torch.empty(N, 5).t(),
        torch.empty(5, N).requires_grad_(),
    ):
        with pytest.raises(ValueError, match=r"'experts': out is .*without requires_grad, is needed"):
            grouped(x, [2, 3], out=wrong)
    with pytest.raises(ValueError, match="'experts': dgrad_out is"):
        grouped(x, [2, 3], dgrad_out=torch.empty(5, N + 1))
    with pytest.raises(RuntimeError, match="'experts': out and dgrad_out are written to"):
        torch.compile(grouped, backend="aot_eager", fullgraph=True)(x, torch.tensor([2, 3]), out=torch.empty(5, N))
