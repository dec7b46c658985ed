"""Passes of linears, norms and MLPs that are replayed on a GPU: the bits of those that are not."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton")

from minifloat import LayerNormLinear, LayerNormMLP, Linear, TransformerLayer, autocast
from minifloat.functional import fused_layers, linear
from minifloat.ops import log
from minifloat.ops.replay import MOST_RECORDINGS, Recorder, Recording
from tests.helpers.compare import assert_same_bits
from tests.helpers.replay_on_cpu import replay_on_cpu

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
}


def steps(module: str, recipe: str, shape: tuple[int, ...]) -> list[Tensor]:
    """Outputs, gradients and buffers of four steps on different data."""
    torch.manual_seed(0)
    layer, found = MODULES[module](device="cuda", params_dtype=torch.bfloat16), []
    for scale in (1, 2, 3, 4):
        x = torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        with autocast(recipe=recipe):
            outputs = layer(x)
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
    """The first step records, the others replay, each with gradients and histories of its own."""
    with mock.patch.object(linear, "replayed", _never), mock.patch.object(fused_layers, "replayed", _never):
        want = steps(module, recipe, shape)
    replay = Recording.replay
    with mock.patch.object(Recording, "replay", autospec=True, side_effect=replay) as replays:
        got = steps(module, recipe, shape)
    assert replays.call_count >= (6 if recipe in ("current", "delayed", "block", "mxfp8") else 0)
    for one, other in zip(got, want, strict=True):
        assert_same_bits(one, other)


def _never(recorder: object, key: object, tensors: list[Tensor], function: Callable[[], object]) -> object:
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
    """And what is too large is called each time, with nothing but the caller holding its tensors."""
    replay_on_cpu(monkeypatch)
    x, calls = torch.randn(4, 4), []

    def function() -> tuple[list[Tensor], str]:
        calls.append(1)
        return [log.library(_double, [x])], "rest"

    recorder = Recorder(most_bytes=1 << 10)
    for _ in range(3):
        tensors: list[Tensor | None] = [x, None]
        (result,), rest = recorder(None, tensors, function)
        assert rest == "rest" and len(tensors) == 2
        assert_same_bits(result, 2 * x)
    assert len(calls) == 1
    large = Recorder(most_bytes=8)
    for _ in range(2):
        tensors = [x]
        large(None, tensors, function)
        assert not tensors
    assert len(calls) == 3
    for size in range(1, 2 * MOST_RECORDINGS):
        large(None, [torch.zeros(4, size)], function)
    assert len(large.known) <= MOST_RECORDINGS


def test_what_is_launched_past_the_log_is_not_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that Triton launches itself, as those that read by TMA, say so."""
    replay_on_cpu(monkeypatch)
    x, recorder = torch.randn(4, 4), Recorder()

    def function() -> tuple[list[Tensor], None]:
        y = log.made(torch.empty(4, 4))
        y.copy_(x)
        log.unlogged()
        return [y, log.library(_double, [x])], None

    for _ in range(3):
        (y, _), _ = recorder(None, [x], function)
        assert_same_bits(y, x)


def test_launches_past_the_log_say_so() -> None:
    ops = Path(log.__file__).parent
    for file in ops.rglob("*.py"):
        text = file.read_text() if file.name != "launch.py" else ""
        assert len(re.findall(r"_kernel\[\(", text)) == text.count("log.unlogged()"), file


def _double(tensors: list[Tensor]) -> Tensor:
    return 2 * tensors[0]
