"""``GroupedLinear``: many experts, how often gradients arrive, quantized outputs, wrong counts of a device."""

from __future__ import annotations

from collections import Counter
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from minifloat.autocast import autocast
from minifloat.nn import GroupedLinear, Linear
from minifloat.recipe import NVFP4BlockScaling
from minifloat.tensor import QuantizedTensor
from tests.helpers.sample import each_once

pytestmark = pytest.mark.usefixtures("one_thread")

BF16 = torch.bfloat16
K, N = 40, 24
RECIPES: dict[str, Any] = {
    **{name: name for name in ("none", "current", "delayed", "block", "mxfp8", "rowwise")},
    "nvfp4": NVFP4BlockScaling(disable_stochastic_rounding=True),
}


@each_once
@pytest.mark.parametrize("crowded", [False, True], ids=["spread", "one expert"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_256_experts(recipe: str, crowded: bool) -> None:
    """Some without tokens, or all but one: the bits of as many linears."""
    experts = 256
    torch.manual_seed(0)
    counts = torch.zeros(experts, dtype=torch.int64)
    counts[200] = 40
    counts = counts if crowded else torch.randint(0, 4, (experts,)) * (torch.rand(experts) < 0.2)
    grouped = GroupedLinear(experts, K, N, dtype=BF16, recipe=RECIPES[recipe])
    linears = [Linear(K, N, dtype=BF16, recipe=RECIPES[recipe]) for _ in range(experts)]
    for i, linear in enumerate(linears):
        linear.load_state_dict({name: grouped.get_parameter(f"{i}.{name}").detach() for name in ("weight", "bias")})
    total = int(counts.sum())
    x, dy = torch.randn(total, K).to(BF16).requires_grad_(), torch.randn(total, N).to(BF16)
    own_x = x.detach().clone().requires_grad_()
    y = grouped(x, counts)
    parts = zip(linears, own_x.split(counts.tolist()), strict=True)
    expected = torch.cat([linear(rows) for linear, rows in parts if len(rows)])
    y.backward(dy)
    expected.backward(dy)
    assert torch.equal(y, expected) and torch.equal(x.grad, own_x.grad)  # type: ignore[arg-type]
    for i, linear in enumerate(linears):
        for name, parameter in linear.named_parameters():
            mine: Any = grouped.get_parameter(f"{i}.{name}").grad
            assert not mine.any() if parameter.grad is None else torch.equal(mine, parameter.grad)


@pytest.mark.parametrize("fuse, delay, save, weight, bias", list(product((False, True), repeat=5)))
def test_each_gradient_arrives_once(fuse: bool, delay: bool, save: bool, weight: bool, bias: bool) -> None:
    """By autograd's count that of each bias, in each backward; that of each weight by its value."""
    grouped = GroupedLinear(
        3, K, N, dtype=BF16, recipe="current", single_grouped_weight=weight, single_grouped_bias=bias,
        fuse_wgrad_accumulation=fuse, delay_wgrad_compute=delay, save_original_input=save,
    )  # fmt: skip
    arrived: Counter[str] = Counter()
    parameters = dict(grouped.named_parameters())
    weights = [parameter for name, parameter in parameters.items() if name.endswith("weight")]
    biases = [name for name in parameters if name.endswith("bias")]
    for name in biases:
        parameters[name].register_post_accumulate_grad_hook(lambda _, name=name: arrived.update([name]))  # type: ignore[misc]
    for each in weights if fuse else ():
        each.main_grad = torch.zeros(each.shape)
    x, dy = torch.randn(30, K).to(BF16).requires_grad_(), torch.randn(30, N).to(BF16)
    found: list[list[torch.Tensor]] = []
    for microbatch in (1, 2):
        grouped(x, (7, 0, 23)).backward(dy)
        assert arrived == dict.fromkeys(biases, microbatch)
        assert not (fuse or (delay and microbatch == 1)) or all(each.grad is None for each in weights)
        if delay:
            grouped.backward_dw()
        found.append([(each.main_grad if fuse else each.grad).clone() for each in weights])  # type: ignore[union-attr]
    assert all(torch.equal(twice, 2 * once) for once, twice in zip(*found, strict=True))


@pytest.mark.parametrize(
    "recipe, compiled", [*product(("current", "block", "mxfp8", "nvfp4"), (False,)), ("block", True)]
)
def test_quantized_output(recipe: str, compiled: bool) -> None:
    """Y as one matrix, which the next layer takes as it is, and gradients come through."""
    torch._dynamo.reset()
    first, second = (GroupedLinear(3, 32, 32, dtype=BF16, recipe=RECIPES[recipe]) for _ in range(2))
    counts = torch.tensor([7, 0, 20])

    def run(x: torch.Tensor) -> tuple[Any, torch.Tensor]:
        y = first(x, counts, fp8_output=True)
        return y.dequantize(), second(y, counts)

    x = torch.randn(30, 32).to(BF16).requires_grad_()
    y, z = (torch.compile(run, backend="aot_eager") if compiled else run)(x)
    plain = first(x, counts)
    quantized = first(x, counts, fp8_output=True)
    assert isinstance(quantized, QuantizedTensor)
    assert torch.equal(quantized.dequantize(), quantized.quantizer(plain.detach()).any.dequantize())
    assert torch.equal(y, quantized.dequantize())
    leaf = quantized.dequantize().detach().requires_grad_()
    expected = second(leaf, counts)
    assert torch.equal(z, expected)
    dy = torch.randn_like(z)
    (dx,) = torch.autograd.grad(z, x, dy)
    (middle,) = torch.autograd.grad(expected, leaf, dy)
    assert torch.equal(dx, torch.autograd.grad(plain, x, middle)[0])


def test_no_quantized_output_under_delayed_scaling() -> None:
    grouped = GroupedLinear(2, 32, 32, recipe="delayed", name="experts")
    with pytest.raises(ValueError, match="'experts': fp8_output=True makes one scale for Y"):
        grouped(torch.randn(4, 32), [1, 3], fp8_output=True)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["none", "current", "block", "mxfp8"])
def test_wrong_counts_of_a_device(recipe: str) -> None:
    """An error where ``check_finite`` waits for them; else they end with the input, and nothing else is written to."""
    grouped = GroupedLinear(3, 32, 16, dtype=BF16, device="cuda", name="experts", recipe=recipe)
    memory = torch.full((2, 64, 32), 7.0, device="cuda", dtype=BF16)
    around = torch.ones(64, dtype=torch.bool, device="cuda")
    around[16:46] = False  # from a multiple of 256 bytes on, where products write without a copy
    x = torch.randn(30, 32, device="cuda").to(BF16).requires_grad_()
    out, dgrad_out = memory[0].view(128, 16)[16:46], memory[1][16:46]
    for wrong in ([7, -1, 2], [7, 20, 4], [40, 0, 0], [2**62, 2**62, 2**62]):
        counts = torch.tensor(wrong, device="cuda")
        with autocast(check_finite=True), pytest.raises(ValueError, match="'experts': m_splits"):
            grouped(x, counts)
        ends = torch.tensor([min(max(each, 0), 30) for each in wrong]).cumsum(0).clamp(max=30)
        right = ends.diff(prepend=torch.zeros(1, dtype=torch.int64))
        found: list[list[Tensor | None]] = []
        for each, given in ((counts, {"out": out, "dgrad_out": dgrad_out}), (right, {})):
            memory.fill_(7)
            x.grad = None
            grouped.zero_grad()
            y = grouped(x, each, **given)
            y.backward(torch.ones_like(y))
            assert x.grad is not None
            found.append([y.detach().clone(), x.grad.clone(), *[own.grad for own in grouped.parameters()]])
            if given:
                assert (memory[0].view(128, 16)[:16] == 7).all() and (memory[0].view(128, 16)[46:] == 7).all()
                assert (memory[1][around] == 7).all()
        for mine, expected in zip(*found, strict=True):
            assert mine is not None and expected is not None and torch.equal(mine, expected)
        assert not y[int(ends[-1]) :].any()
    for wrong_kind in (torch.ones(3, device="cuda"), torch.ones(2, dtype=torch.int64, device="cuda")):
        with pytest.raises((TypeError, ValueError), match="'experts': m_splits"):
            grouped(x, wrong_kind)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["none", "current"])
def test_wrong_counts_of_a_device_in_a_graph(recipe: str) -> None:
    """A capture that would wait is refused before; replays with wrong counts end with the input."""
    grouped = GroupedLinear(3, 32, 16, dtype=BF16, device="cuda", name="experts", recipe=recipe)
    x, counts = torch.randn(30, 32, device="cuda").to(BF16), torch.tensor([7, 3, 20], device="cuda")

    def run(check: bool = False) -> Tensor:
        with torch.no_grad(), autocast(check_finite=check):
            y: Tensor = grouped(x, counts)
        return y

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(RuntimeError, match=r"'experts': autocast\(check_finite=True\)"):
            run(check=True)
        y = run()
    for wrong in ([7, -1, 2], [40, 0, 0], [2**62, 2**62, 2**62], [7, 3, 20]):
        counts.copy_(torch.tensor(wrong))
        graph.replay()
        assert torch.equal(y, run())
