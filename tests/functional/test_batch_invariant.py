"""``autocast(batch_invariant=True)``: a row's bits for any number of rows, any order and any grouping; errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

import minifloat
from minifloat import autocast
from minifloat.autocast import used
from minifloat.comm.group import Group
from minifloat.functional import gemm
from minifloat.functional.quantize import Options, Ranks, linear_config
from minifloat.nn import GroupedLinear, LayerNormLinear, LayerNormMLP, Linear, MoE, TopKRouter
from minifloat.ops import grouped
from minifloat.recipe import Float8BlockScaling, NVFP4BlockScaling, as_recipe
from tests.helpers.compare import U, assert_same_bits, assert_within
from tests.helpers.distributed_pool import on_ranks

BF16 = torch.bfloat16
K, N = 140, 72
RECIPES = ["none", "rowwise", "block", "mxfp8", "mxfp6", "mxfp4", "w4a8", "delayed", "nvfp4 of rows"]
OF_ROWS = NVFP4BlockScaling(row_scaled_activation=True, disable_rht=True)
MODULES: dict[str, Callable[..., nn.Module]] = {
    "LayerNormLinear": lambda **options: LayerNormLinear(K, N, normalization="RMSNorm", **options),
    "LayerNormMLP": lambda **options: LayerNormMLP(K, N, activation="swiglu", **options),
    "MoE": lambda **options: MoE(K, N, 5, 2, shared_ffn_hidden_size=N, shared_gate=True, **options),
}
FOR_EACH_RECIPE = pytest.mark.parametrize("recipe", RECIPES)


def mode() -> autocast:
    """What has no recipe of its own is in high precision."""
    return autocast(enabled=False, batch_invariant=True)


def rows_of(rows: int, device: torch.device) -> Tensor:
    """Rows of different sizes, which have different scales."""
    return (torch.randn(rows, K) * torch.randn(rows, 1).exp()).to(device, BF16)


def pair(recipe: str, groups: int, device: torch.device) -> tuple[Linear, GroupedLinear]:
    """A linear, and a grouped one all of whose experts are that linear."""
    torch.manual_seed(0)
    own: Any = OF_ROWS if recipe == "nvfp4 of rows" else recipe
    linear = Linear(K, N, dtype=BF16, recipe=own, device=device)
    many = GroupedLinear(groups, K, N, dtype=BF16, recipe=own, device=device)
    with torch.no_grad():
        for i in range(groups):
            many.get_parameter(f"{i}.weight").copy_(linear.weight)
            many.get_parameter(f"{i}.bias").copy_(linear.bias)
    return linear, many


@FOR_EACH_RECIPE
@settings(max_examples=4, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(counts=st.lists(st.integers(0, 130), min_size=1, max_size=3), seed=st.integers(0, 99))
def test_splits_orders_and_groups(recipe: str, device: torch.device, counts: list[int], seed: int) -> None:
    """Rows in parts, in another order, in groups: the bits of all rows at once."""
    linear, many = pair(recipe, len(counts), device)
    torch.manual_seed(seed)
    x = rows_of(sum(counts), device)
    order = torch.randperm(len(x)).to(device)
    with torch.no_grad(), mode():
        y = linear(x)
        assert_same_bits(torch.cat([linear(part) for part in x.split(counts)]), y)
        assert_same_bits(linear(x[order]), y[order])
        assert_same_bits(many(x, counts), y)


@pytest.mark.gpu
@FOR_EACH_RECIPE
def test_each_number_of_rows(recipe: str) -> None:
    """Prefixes of 1 to 300 rows."""
    linear, _ = pair(recipe, 1, torch.device("cuda"))
    x = rows_of(300, torch.device("cuda"))
    with torch.no_grad(), mode():
        y = linear(x)
        for rows in range(1, 301):
            assert_same_bits(linear(x[:rows]), y[:rows])


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [(4096, 4096), (14336, 512), (1000, 520)], ids=str)
@FOR_EACH_RECIPE
def test_large_sizes(recipe: str, sizes: tuple[int, int]) -> None:
    """Depths of many steps; rows at the beginning, at the end and between."""
    own: Any = OF_ROWS if recipe == "nvfp4 of rows" else recipe
    linear = Linear(*sizes, dtype=BF16, recipe=own, device="cuda")
    x = torch.randn(4500, sizes[0], device="cuda", dtype=BF16)
    with torch.no_grad(), mode():
        y = linear(x)
        for first, end in ((0, 1), (0, 8), (17, 18), (100, 228), (4000, 4500), (1, 4097), (4371, 4500)):
            assert_same_bits(linear(x[first:end]), y[first:end])


@pytest.mark.parametrize("recipe", ["none", "rowwise", "block", "mxfp8"])
@pytest.mark.parametrize("kind", MODULES)
def test_modules(kind: str, recipe: str, device: torch.device) -> None:
    """Norms, activations, routers and experts, forward with gradients."""
    module = MODULES[kind](dtype=BF16, recipe=recipe).to(device)
    x, order = rows_of(90, device), torch.randperm(90).to(device)
    with mode():
        y = module(x)
        for rows in (order[:1], order[:38], order):
            assert_same_bits(module(x[rows]), y[rows])


@FOR_EACH_RECIPE
def test_numbers(recipe: str, device: torch.device) -> None:
    """Near the default product, and on a CPU, where both are exact, its bits; likewise gradients."""
    x, dy = rows_of(50, device), torch.randn(50, N).to(device, BF16)
    results = []
    for enabled in (True, False):
        own = x.clone().requires_grad_()
        linear, _ = pair(recipe, 1, device)
        with autocast(enabled=False, batch_invariant=enabled):
            y = linear(own)
        y.backward(dy)
        results.append([y.detach(), own.grad, *[each.grad for each in linear.parameters()]])
    for found, wanted in zip(*results, strict=True):
        if device.type == "cpu" and recipe != "none":
            assert_same_bits(found, wanted)
        torch.testing.assert_close(found, wanted, rtol=2**-6, atol=2**-7 * float(wanted.abs().max()))


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
def test_values(dtype: torch.dtype, device: torch.device) -> None:
    """Products of values: within the bound of fp32 sums, zeros in rows that are no group's, gradients of fp32."""
    x, w, bias = torch.randn(40, K).to(dtype), torch.randn(2 * N, K).to(dtype), torch.randn(2, N)
    offsets, weights = torch.tensor([0, 9, 37], dtype=torch.int32), torch.tensor([0, N, 2 * N], dtype=torch.int32)
    own = [each.to(device) for each in (x, offsets, w, weights, bias)]
    y = grouped.rowwise_mm(*own, dtype).cpu()
    assert_same_bits(y[37:], torch.zeros(3, N, dtype=dtype))
    for rows, (weight, added) in zip((slice(9), slice(9, 37)), zip(w.split(N), bias, strict=True), strict=True):
        left, right = x[rows].double(), weight.double()
        bound = (left.abs() @ right.t().abs() + added.double().abs()) * U * (K + 2)
        assert_within(y[rows], left @ right.t() + added.to(dtype).double(), bound, dtype)
    x, w = torch.randint(-3, 4, x.shape).to(x), torch.randint(-3, 4, w.shape).to(w)  # exact but for the bias
    y = grouped.rowwise_mm(*[each.to(device) for each in (x, offsets, w, weights, bias)], dtype).cpu()
    for rows, group in ((slice(9), 0), (slice(9, 37), 1)):
        product = x[rows].float() @ w.split(N)[group].float().t()
        assert_same_bits(y[rows], (product + bias[group].to(dtype).float()).to(dtype))
    a, b = (each[:N].to(device).requires_grad_() for each in (x, w))
    logits = gemm.multiply_values(a, b, torch.float32)
    dy = torch.randn(logits.shape).to(device)
    logits.backward(dy)
    exact = [each.double().detach().requires_grad_() for each in (a, b)]
    (exact[0] @ exact[1].t()).backward(dy.double())
    for each, wanted in zip((a, b), exact, strict=True):
        torch.testing.assert_close(each.grad, wanted.grad.to(dtype), rtol=2**-7, atol=1e-3)


def test_scope(device: torch.device) -> None:
    """Nested contexts have it too, layers with a recipe of their own as well, and a checkpoint repeats it."""
    seen: list[str] = []
    multiply = gemm.multiply_rows

    def counted(*args: Any) -> Tensor:
        seen.append(args[0])
        return multiply(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gemm, "multiply_rows", counted)
        own, other = (Linear(K, K, dtype=BF16, recipe=recipe, device=device) for recipe in ("block", None))
        x = rows_of(3, device).requires_grad_()
        with mode(), autocast(recipe="rowwise"):
            other(own(x))
        assert len(seen) == 2
        other(own(x))
        assert len(seen) == 2
        with mode():
            y = minifloat.checkpoint(lambda x: other(own(x)), x)
        y.sum().backward()
        assert len(seen) == 6


def test_compiled(device: torch.device) -> None:
    """Compiled code has the bits of eager code, under the mode and after it."""
    (linear, _), (_, many) = pair("none", 1, device), pair("rowwise", 2, device)
    x = rows_of(40, device)
    torch.compiler.reset()
    run = torch.compile(lambda x: (linear(x), many(x, [12, 28])), backend="aot_eager", fullgraph=True)
    for enabled in (True, False, True):
        with torch.no_grad(), autocast(enabled=False, batch_invariant=enabled):
            for found, wanted in zip(run(x), (linear(x), many(x, [12, 28])), strict=True):
                assert_same_bits(found, wanted)


def test_compiled_before_its_first_use(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch 2.11 guards no attribute of a class: a layer with its own recipe went on as it was compiled."""
    monkeypatch.setattr(used, "batch_invariant", False)
    torch.compiler.reset()
    linear, graphs = Linear(K, N, recipe="block", device=device), CompileCounter()
    compiled, x = torch.compile(linear, backend=graphs, fullgraph=True), torch.randn(3, K, device=device)
    compiled(x)
    with mode():
        compiled(x)
    assert graphs.frame_count == 2


def _options(**options: Any) -> Options:
    return Options("cpu", BF16, BF16, True, True, True, batch_invariant=True, **options)


def test_refused() -> None:
    """Recipes whose scales span rows, sums of more than two ranks, fp64 logits."""
    block = Float8BlockScaling(x_block_scaling_dim=2, w_block_scaling_dim=1)
    for recipe in ("current", "nvfp4", block):
        layer = Linear(K, N, dtype=BF16, recipe=recipe, name="fc")
        with (
            mode(),
            pytest.raises(ValueError, match=r"'fc': autocast.batch_invariant=True., but a row cast to .*rowwise"),
        ):
            layer(torch.randn(3, K, dtype=BF16))
    config = linear_config(as_recipe("block"))
    gemm.check_rows_alone("fc", config, _options(ranks=Ranks("row", False, Group("g", 2))))
    with pytest.raises(ValueError, match="sums 3 ranks"):
        gemm.check_rows_alone("fc", config, _options(ranks=Ranks("row", False, Group("g", 3))))
    with pytest.raises(ValueError, match="e4m3/tensor"):
        mixed = linear_config(as_recipe("delayed"))
        current = linear_config(as_recipe("current"))
        mixed = type(mixed)(**{**vars(mixed), "output": current.output})
        gemm.check_rows_alone("fc", mixed, _options(quantize_output=True))
    with mode(), pytest.raises(ValueError, match="logits_dtype"):
        TopKRouter(K, 4, 2, logits_dtype=torch.float64)(torch.randn(3, K))


@pytest.mark.parametrize("recipe", ["none", "block"])
@on_ranks(2)
def test_tensor_parallel(rank: int, world_size: int, recipe: str) -> None:
    """Each rank multiplies its part of the weight so; two ranks have one sum."""
    torch.manual_seed(0)
    group = torch.distributed.group.WORLD
    layers = nn.Sequential(
        Linear(K, 2 * N, dtype=BF16, recipe=recipe, parallel_mode="column", tp_group=group),
        Linear(2 * N, K, dtype=BF16, recipe=recipe, parallel_mode="row", tp_group=group),
    )
    x = rows_of(50, torch.device("cpu"))
    with torch.no_grad(), mode():
        y = layers(x)
        assert_same_bits(torch.cat([layers(part) for part in x.split([1, 16, 33])]), y)
