"""Passes of linears, norms and MLPs that are replayed on a GPU: the bits of those that are not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton")

from minifloat import (
    GroupedLinear,
    LayerNormLinear,
    LayerNormMLP,
    Linear,
    TransformerLayer,
    autocast,
    quantized_model_init,
)
from minifloat.functional import fused_layers, linear
from minifloat.nn import linear_call
from minifloat.ops.tape import MOST_TAPES, Recorder
from tests.helpers.compare import assert_same_bits
from tests.helpers.replay_on_cpu import counted_replays, replay_on_cpu

MODULES: dict[str, Callable[..., nn.Module]] = {
    "linear": lambda **how: Linear(256, 256, **how),
    "no bias": lambda **how: Linear(256, 256, bias=False, **how),
    "norm and linear": lambda **how: LayerNormLinear(256, 256, **how),
    "returned norm": lambda **how: LayerNormLinear(
        256, 256, normalization="RMSNorm", return_layernorm_output=True, **how
    ),
    "MLP": lambda **how: LayerNormMLP(256, 512, **how),
    "gated MLP": lambda **how: LayerNormMLP(256, 512, activation="swiglu", normalization="RMSNorm", **how),
    "layer": lambda **how: TransformerLayer(
        256, 512, 4, hidden_dropout=0.0, attention_dropout=0.0, attn_input_format="bshd", **how
    ),
    "experts": lambda **how: GroupedLinear(3, 256, 256, **how),
    "weights of two microbatches": lambda **how: Linear(256, 256, **how),
}


CALLS: dict[str, Callable[..., Any]] = {
    "experts": lambda layer, x, step: layer(x, [x.shape[:-1].numel() - 9, 0, 9]),
    "weights of two microbatches": lambda layer, x, step: layer(x, is_first_microbatch=step % 2 == 0),
}


def steps(module: str, recipe: str, shape: tuple[int, ...]) -> list[Tensor]:
    """Outputs, gradients and buffers of six steps on different data."""
    torch.manual_seed(0)
    layer, found = MODULES[module](device="cuda", params_dtype=torch.bfloat16), []
    for scale in range(1, 7):
        x = torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        with autocast(recipe=recipe):
            outputs = CALLS[module](layer, x, scale - 1) if module in CALLS else layer(x)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        torch.autograd.backward(outputs, [scale * torch.randn_like(y) for y in outputs])
        found += [y.detach().clone() for y in outputs]
        found += [p.grad for p in (x, *layer.parameters()) if p.grad is not None]
        found += [each.clone() for each in layer.buffers()]
        layer.zero_grad()
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(2, 64, 256), (3, 7, 256)])
@pytest.mark.parametrize("recipe", ["current", "delayed", "block", "mxfp8", "nvfp4", "rowwise", "mxfp4"])
@pytest.mark.parametrize("module", MODULES)
def test_replayed(module: str, recipe: str, shape: tuple[int, ...]) -> None:
    """The first steps tape, the others replay all passes, each with gradients and histories of its own."""
    with mock.patch.object(linear, "replayed", _never), mock.patch.object(fused_layers, "replayed", _never):
        want = steps(module, recipe, shape)
    with counted_replays() as replays:
        got = steps(module, recipe, shape)
    assert len(replays) >= 12 and all(replays[-8:])
    for one, other in zip(got, want, strict=True):
        assert_same_bits(one, other)


@pytest.mark.parametrize(("shape", "bias"), [((8, 32), True), ((2, 5, 32), False)])
@pytest.mark.parametrize("recipe", ["current", "delayed", "block"])
def test_replayed_references(recipe: str, shape: tuple[int, ...], bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU a linear's passes replay PyTorch's operations, with gradients and histories of each step."""
    replay_on_cpu(monkeypatch)
    make_spec = linear_call.make_spec

    def recorded(*args: Any) -> Any:
        return replace(make_spec(*args), forward=Recorder(), backward=Recorder())

    def steps() -> list[Tensor]:
        torch.manual_seed(0)
        layer, found = Linear(32, 48, bias=bias), []
        for scale in range(1, 7):
            x = torch.randn(shape, requires_grad=True)
            with autocast(recipe=recipe):
                y = layer(x, is_first_microbatch={5: True, 6: False}.get(scale))
            (y * 1).backward(scale * torch.randn_like(y))
            assert not y._is_view() and x.grad is not None
            found += [y.detach().clone(), x.grad, *[p.grad for p in layer.parameters() if p.grad is not None]]
            found += [each.clone() for each in layer.buffers()]
            layer.zero_grad()
        return found

    want = steps()
    monkeypatch.setattr(linear_call, "make_spec", recorded)
    with counted_replays() as replays:
        got = steps()
    assert replays == [False, False, *[True] * 6, False, False, True, True]
    for one, other in zip(got, want, strict=True):
        assert_same_bits(one, other)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["current", "delayed", "block", "mxfp8"])
def test_quantized_weights(recipe: str) -> None:
    """Whose operands are given to a pass."""
    found = []
    for replayed in (linear.replayed, _never):
        torch.manual_seed(0)
        with quantized_model_init(recipe=recipe):
            layer = Linear(256, 256, device="cuda", params_dtype=torch.bfloat16)
        with mock.patch.object(linear, "replayed", replayed), counted_replays() as replays:
            for _ in range(4):
                x = torch.randn(32, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
                with autocast(recipe=recipe):
                    y = layer(x)
                y.backward(torch.randn_like(y))
                found.append([y.detach(), x.grad, layer.weight.grad])
                layer.zero_grad()
            assert replayed is _never or all(replays[-4:])
    for got, want in zip(found[:4], found[4:], strict=True):
        for one, other in zip(got, want, strict=True):
            assert_same_bits(one, other)


def _never(
    recorder: object, key: object, tensors: list[Tensor], function: Callable[[], object], *held: object
) -> object:
    tensors.clear()
    return function()


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["current", "block", "mxfp8"])
def test_autocast_of_pytorch(recipe: str) -> None:
    """Products of a replay take the dtypes that they are given."""
    layer = LayerNormLinear(256, 256, device="cuda", recipe=recipe)
    x = torch.randn(32, 256, device="cuda")
    with torch.autocast("cuda", torch.float16):
        with mock.patch.object(fused_layers, "replayed", _never):
            want = layer(x)
        for _ in range(2):
            assert_same_bits(layer(x), want)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("recipe", "invariant"), [("block", False), ("mxfp8", False), ("nvfp4", False), ("block", True), ("mxfp8", True)]
)
def test_large_products(recipe: str, invariant: bool) -> None:
    """Of sizes that kernels multiply which Triton launches."""
    layer = Linear(2048, 2048, device="cuda", params_dtype=torch.bfloat16, recipe=recipe)
    x = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)
    with autocast(batch_invariant=invariant), torch.no_grad():
        want = layer(x)
        for _ in range(2):
            assert_same_bits(layer(x), want)


@pytest.mark.gpu
def test_no_output_is_a_view() -> None:
    """A caller may change outputs of a replay in place, and the memory of one is not that of the next."""
    layer = LayerNormLinear(256, 256, return_layernorm_output=True, device="cuda", recipe="current")
    kept = [layer(torch.randn(2, 8, 256, device="cuda")) for _ in range(3)]
    assert not any(y._is_view() for outputs in kept for y in outputs)
    assert len({y.data_ptr() for outputs in kept for y in outputs}) == 6
    kept[2][0].add_(1).sum().backward()


def test_what_follows_from_the_key_comes_along(monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing but the caller holds what is read."""
    replay_on_cpu(monkeypatch)
    x, calls = torch.randn(4, 4), []

    def function() -> tuple[list[Tensor], str]:
        calls.append(1)
        return [2 * x], "rest"

    recorder = Recorder()
    for call in range(3):
        tensors: list[Tensor | None] = [x, None]
        held = [x]
        (result,), rest = recorder(None, tensors, function, held)
        assert rest == "rest" and not tensors and bool(held) == (call == 0)
        assert_same_bits(result, 2 * x)
    assert len(calls) == 1
    for size in range(1, 2 * MOST_TAPES):
        recorder(None, [torch.zeros(4, size)], lambda: ([], None))
    assert len(recorder.known) <= MOST_TAPES
