"""Casts on a GPU: recorded, replayed and captured ones, and the C launcher that they call."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from minifloat.formats import Format
from minifloat.nn import Linear
from minifloat.operand import Operand, Quantized
from minifloat.ops.launch import MOST_BY_VALUE, count_launches
from minifloat.ops.quantize.gpu import RecordedCasts
from minifloat.quantizer import Quantizer, cast_all, casts
from minifloat.recipe import named

pytestmark = pytest.mark.gpu

FORMATS = {
    "current": Format("e4m3"),
    "MXFP8": Format(block=32, scale_rule="e8m0"),
    "block": Format(block=128, scale_rule="pow2"),
    "NVFP4": Format("e2m1", 16, scale_rule="two_level"),
}


def matrices(count: int, scale: float = 1.0) -> list[Tensor]:
    return [(torch.randn(48 + 16 * (i % 5), 64 + 16 * (i % 7)) * scale * 1.5**i).bfloat16() for i in range(count)]


def assert_same(actual: list[Quantized], expected: list[Quantized]) -> None:
    for got, want in zip(actual, expected, strict=True):
        for a, b in zip(got, want, strict=True):
            assert (a is None) == (b is None)
            if a is not None and b is not None:
                assert same_bits(a, b)


def same_bits(a: Operand, b: Operand) -> bool:
    parts = [(x, y) for x, y in zip(a[:3], b[:3], strict=True) if isinstance(x, Tensor) and isinstance(y, Tensor)]
    return all(torch.equal(x.cpu(), y.cpu()) for x, y in parts)


@pytest.mark.parametrize("count", [1, 2, 8, 9, 64])
@pytest.mark.parametrize("name", FORMATS)
def test_lists_of_any_length_are_one_launch_a_phase(name: str, count: int) -> None:
    how = [Quantizer(FORMATS[name])] * count
    for call in range(3):  # recorded, then replayed, then on another stream
        xs = matrices(count, 10.0**call)
        on_gpu = [x.cuda() for x in xs]
        stream = torch.cuda.Stream() if call == 2 else torch.cuda.current_stream()
        torch.cuda.synchronize()
        with count_launches() as launches, torch.cuda.stream(stream):
            actual = cast_all(on_gpu, how)
        assert set(launches.values()) == {1} and len(launches) <= 2, launches
        torch.cuda.synchronize()
        assert_same(actual, cast_all(xs, how))


def test_memory_of_the_table_is_not_reused_too_early() -> None:
    """Tables of calls that follow each other without waiting, while the GPU has much to do."""
    how, lists = [Quantizer(FORMATS["current"])] * 20, [matrices(20, 3.0**i) for i in range(50)]
    on_gpu = [[x.cuda() for x in xs] for xs in lists]
    busy = torch.randn(8192, 8192, device="cuda")
    for _ in range(5):
        busy = busy @ busy * 1e-4
    results = [cast_all(xs, how) for xs in on_gpu]
    for xs, result in zip(lists, results, strict=True):
        assert_same(result, cast_all(xs, how))


@pytest.mark.parametrize("count", [2, 12])
def test_a_captured_graph_casts_what_its_inputs_then_are(count: int) -> None:
    how = [Quantizer(FORMATS["current"])] * count
    inputs = [x.cuda() for x in matrices(count)]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        cast_all(inputs, how)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), count_launches() as launches:
        captured = cast_all(inputs, how)
    assert set(launches.values()) == {1 if count <= MOST_BY_VALUE else 2}
    scratch = [torch.full((4096,), -1, dtype=torch.int64).pin_memory() for _ in range(50)]  # over what was freed
    for call in range(3):
        xs = matrices(count, 5.0**call)
        for target, x in zip(inputs, xs, strict=True):
            target.copy_(x)
        cast_all(inputs, how)  # between two replays
        graph.replay()
        torch.cuda.synchronize()
        assert_same(captured, cast_all(xs, how))
    del scratch


def test_a_replay_calls_the_launcher_in_c() -> None:
    how = [Quantizer(FORMATS["current"])] * 2
    prepared = casts(how, "cuda")
    for _ in range(2):
        prepared([x.cuda() for x in matrices(2)])
    (work,) = prepared._works.values()
    assert type(work) is RecordedCasts
    recordings = list(work.recorder.known.values())
    (replay,) = recordings
    launchers = re.findall(r"(\w+)\(\d+, 1, 1, stream", replay.source)
    assert launchers
    for name in launchers:
        assert type(replay.__globals__[name]).__name__ == "builtin_function_or_method"


def test_compiled_code_replays() -> None:
    """Of the operations, too, nothing but the first call of a shape is found step by step."""
    layer = Linear(256, 256, recipe=named("current"), device="cuda", dtype=torch.bfloat16)
    x = torch.randn(64, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    y = layer(x)
    compiled = torch.compile(layer)
    for _ in range(2):
        compiled(x).sum().backward()
    stepped: list[int] = []
    step = RecordedCasts._step_by_step
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RecordedCasts, "_step_by_step", lambda *args: (stepped.append(1), step(*args))[1])
        z = compiled(x)
        z.sum().backward()
    assert not stepped and torch.equal(y, z)
