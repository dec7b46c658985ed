"""Casts that are replayed from a recording give what the reference gives: compiled on a GPU, interpreted on a CPU."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from minifloat import backends, casts, quantizer
from minifloat.formats import COLUMNWISE, IDENTITY, ROWWISE, Format
from minifloat.operand import Quantized
from minifloat.ops import launch, quantize, tape
from minifloat.ops.launch import count_launches
from minifloat.ops.quantize import gpu, job, reference
from minifloat.quantizer import Amaxes, Quantizer, cast_all, find_amaxes
from minifloat.recipe import QuantizerRole, named
from tests.helpers import triton_interpreter  # noqa: F401
from tests.helpers.compare import assert_same_bits, strides
from tests.helpers.replay_on_cpu import replay_on_cpu
from tests.helpers.selection import diagonals

E4M3, E5M2 = Quantizer(Format("e4m3")), Quantizer(Format("e5m2"))
GIVEN = Quantizer(Format("e4m3", scale_rule="given"))
MX, STRIPS = Format(block=32, scale_rule="e8m0"), Format(block=128, scale_rule="pow2")
NV, NV_TILES = Format("e2m1", 16, scale_rule="two_level"), Format("e2m1", 16, tile=True, scale_rule="two_level")
NV_STOCHASTIC = Format("e2m1", 16, scale_rule="two_level", rounding="stochastic")


def of_recipe(name: str) -> list[Quantizer]:
    kinds = ("input", "weight", "grad_output")
    return [named(name).resolve(QuantizerRole("linear", kind, ""))[0] for kind in kinds]


NV_ROWS = Format("e2m1", 16, scale_rule="two_level", amax_per_row=True)

RECIPES = ("current", "delayed", "block", "mxfp8", "nvfp4", "rowwise", "mxfp4", "mxfp6")
CASES = {name: of_recipe(name) for name in RECIPES} | {
    "MXFP8 | current": [Quantizer(MX, E5M2.row_format), E4M3],
    "current | block": [Quantizer(E4M3.row_format, STRIPS), Quantizer(STRIPS, E5M2.row_format)],
    "two elements": [Quantizer(E4M3.row_format, E5M2.row_format), E5M2],
    "delayed | current": [Quantizer(GIVEN.row_format, E5M2.row_format), GIVEN, E4M3],
    "NVFP4 strips | tiles": [Quantizer(NV, NV_TILES), Quantizer(NV_TILES, NV), Quantizer(MX, NV)],
    "stochastic | nearest": [Quantizer(NV_STOCHASTIC, NV_STOCHASTIC), Quantizer(NV, NV_STOCHASTIC)],
    "identity | current": [Quantizer(IDENTITY, E5M2.row_format), Quantizer(E5M2.row_format, IDENTITY), E4M3],
    "NVFP4 with an amax for each row": [Quantizer(NV_ROWS), E4M3, GIVEN],
    "chained": [Quantizer(E4M3.row_format, E5M2.row_format, columnwise_source="rowwise_dequantized"), E4M3],
}


@pytest.fixture(autouse=True)
def _kernels(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets a CPU take the way of a GPU: the same layouts in memory, the same calls past the dispatcher."""
    monkeypatch.setattr(quantizer, "_casts", {})
    if device.type == "cuda":
        return
    if torch.cuda.is_available():
        pytest.skip("the compiled kernels are tested here, not the interpreted ones")
    prepare = quantizer.casts
    monkeypatch.setattr(quantizer, "casts", lambda quantizers, on="": prepare(quantizers, on and "cuda"))
    monkeypatch.setattr(casts, "can_skip_dispatcher", lambda xs: not torch.is_grad_enabled())
    monkeypatch.setattr(casts, "RequestedCasts", gpu.RecordedCasts)
    replay_on_cpu(monkeypatch)


def values(device: torch.device, *shapes: tuple[int, int], scale: float = 1.0) -> list[Tensor]:
    """Tensors of quite different amaxes, NaN and zeros among them."""
    xs = [torch.randn(shape, device=device) * scale * 7**i for i, shape in enumerate(shapes)]
    for x in xs:
        x.view(-1)[1:2] = torch.nan
        x.view(-1)[2:40] = 0.0
    return [x.bfloat16() for x in xs]


def replayed(xs: list[Tensor], how: list[Quantizer], amaxes: Any = None, scales: Any = None) -> list[Quantized]:
    with torch.no_grad():
        return cast_all(xs, how, amaxes, scales=scales, gemm_ready=True)


def by_reference(
    xs: list[Tensor], how: list[Quantizer], amaxes: Sequence[Amaxes | None] | None = None, scales: Any = None
) -> list[Quantized]:
    """By the definitions in plain PyTorch: nothing is recorded or replayed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(casts, "can_skip_dispatcher", lambda xs: False)
        patch.setattr(quantize, "amax", quantize.amax.reference)
        patch.setattr(quantize, "cast", quantize.cast.reference)
        patch.setattr(quantize, "dequantize", quantize.dequantize.reference)
        return cast_all(xs, how, amaxes, scales=scales, gemm_ready=True)


def assert_same(actual: list[Quantized], expected: list[Quantized]) -> None:
    for got, want in zip(actual, expected, strict=True):
        for a, b in zip(got, want, strict=True):
            assert (a is None) == (b is None)
            if a is not None and b is not None:
                assert a.layout == b.layout
                assert strides(a.codes) == strides(b.codes)
                for part, other in zip(a[:3], b[:3], strict=True):
                    assert_same_bits(part, other)


def known(how: list[Quantizer]) -> list[Any]:
    """What was recorded for these quantizers: words for what cannot be replayed."""
    works = quantizer.casts(how, "cuda")._works.values()
    return [recording for work in works for recording in work.recorder.known.values()]  # type: ignore[attr-defined]


@contextmanager
def nothing_else() -> Iterator[None]:
    """Inside, nothing may be cast but by replaying a recording."""

    def never(*args: Any) -> Any:
        raise AssertionError("a recording should have been replayed")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu.RecordedCasts, "_step_by_step", never)
        yield


@pytest.mark.parametrize(("case", "usage"), diagonals(2, CASES, [(True, True), (True, False), (False, True)]), ids=str)
def test_replays(case: str, usage: tuple[bool, bool], device: torch.device) -> None:
    row, column = usage
    how = [CASES[case][0].with_usage(rowwise=row, columnwise=column), *CASES[case][1:]]
    for call in range(2):
        xs = values(device, (32, 48), (17, 33), (16, 16), scale=10.0**call)[: len(how)]
        scales = [torch.full((1,), 3.0 + call + i, device=device) for i in range(len(xs))]
        torch.manual_seed(call)
        expected = by_reference(xs, how, scales=scales)
        torch.manual_seed(call)  # the same random bits
        with nothing_else() if call else count_launches() as counted:
            actual = replayed(xs, how, scales=scales)
        assert_same(actual, expected)
        assert counted is None or sum(counted.values()) >= 1
        assert list(map(callable, known(how))) == [True]


@pytest.mark.parametrize("case", ["current", "delayed", "nvfp4", "MXFP8 | current"])
def test_launches_are_the_recorded_ones_and_outputs_new(case: str, device: torch.device) -> None:
    how = CASES[case]
    scales = [torch.full((1,), 3.0, device=device)] * len(how)
    xs = values(device, (32, 48), (17, 33), (16, 16))[: len(how)]
    expected = by_reference(xs, how, scales=scales)
    counts, results = [], []
    for call in range(3):
        with count_launches() as launches:
            results.append(replayed([x * 3**call for x in xs] if call else xs, how, scales=scales))
        counts.append(launches)
    assert sum(counts[0].values()) > 0 and counts[0] == counts[1] == counts[2]
    if case != "nvfp4":  # whose gradient is rounded at random
        assert_same(results[0], expected)
    memory = [
        {part.data_ptr() for q in result for o in q if o for part in (o.codes, o.scale_inv)} for result in results
    ]
    assert not memory[0] & memory[1] and not memory[1] & memory[2]


@pytest.mark.parametrize("case", ["current", "nvfp4", "delayed", "rowwise", "NVFP4 with an amax for each row"])
def test_zeros_of_many_calls(case: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """One fill serves several calls, in inference too, and the last ones of it are left to nobody."""
    monkeypatch.setattr(tape, "MOST_ZEROS", 7 if case in ("current", "nvfp4", "delayed") else 300)
    monkeypatch.setattr(tape, "_zeros", tape._Zeros())
    how = CASES[case][:2]
    scales = [torch.full((1,), 3.0, device=device)] * 2
    kept = []
    for call in range(9):
        xs = values(device, (32, 48), (17, 33), scale=10.0 ** (call % 3 - 1))
        with torch.inference_mode(call == 3):
            actual = replayed(xs, how, scales=scales)
        kept.append((actual, by_reference(xs, how, scales=scales)))
        (taken,) = [taken for _, taken in tape._zeros.filled.values()] if call else [0]
        assert taken <= 300
    for call, (actual, expected) in enumerate(kept):  # what a call gave is not written to by later ones
        assert_same(actual, expected)
        assert call == 3 or not any(o.amax is not None and o.amax.is_inference() for q in actual for o in q if o)


def test_a_graph_fills_zeros_once(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """For all casts of one capture, and anew for the next one."""
    fills: list[int] = []
    filled = tape._filled
    monkeypatch.setattr(tape, "_filled", lambda count, on: fills.append(count) or filled(count, on))
    xs = values(device, (32, 48), (17, 33))
    replayed(xs, [E4M3, E5M2])
    before = dict(tape._zeros.filled)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    for _ in range(2):
        fills.clear()
        with tape.zeros_of_graph():
            for _ in range(3):
                assert_same(replayed(xs, [E4M3, E5M2]), by_reference(xs, [E4M3, E5M2]))
        assert fills == [tape.MOST_ZEROS] and tape._zeros.filled == before


@pytest.mark.parametrize("stream", [0, 7])
def test_fills_of_operations(stream: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor warms graphs up on a stream of its own, in the graph's memory, of which nothing may be left."""
    if device.type == "cuda":
        pytest.skip("another stream is only pretended here")
    monkeypatch.setattr(tape, "_zeros", tape._Zeros())
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: stream, raising=False)
    how = CASES["current"][:2]
    work = gpu.RecordedCasts(quantizer.casts(how, "cuda").request, True)
    nothing = [None] * len(work.request.cast_of)
    for call in range(3):
        xs = values(device, (32, 48), (17, 33), scale=10.0**call)
        made, _ = work(xs, nothing, nothing, None)
        want = [part for q in by_reference(xs, how) for part in q if part is not None]
        assert all(torch.equal(a[1], b.scale_inv) for a, b in zip(made, want, strict=False) if b.scale_inv is not None)
    assert bool(tape._zeros.filled) == (stream == 0)


def test_a_recording_keeps_no_tensor(device: torch.device) -> None:
    xs = values(device, (32, 48), (17, 33))
    result = replayed(xs, [E4M3, E5M2])
    parts = [*xs, *[part for q in result for part in (q.any.codes, q.any.scale_inv)]]
    left = [weakref.ref(part) for part in parts]
    assert len(known([E4M3, E5M2])) == 1
    del xs, result, parts
    gc.collect()
    assert not [each for each in left if each() is not None]


def test_which_tensors_are_the_same_does_not_matter(device: torch.device) -> None:
    how = [E4M3, E4M3, Quantizer(MX, E4M3.row_format)]
    a, b, c = values(device, (32, 48), (32, 48), (32, 48))
    assert_same(replayed([a, a, a], how), by_reference([a, a, a], how))
    alike = [[a, a, a], [a, b, c], [a, b, b], [a, b, a]]
    for xs in alike:
        replayed(xs, how)
    with nothing_else():
        for xs in (*alike, [c, c, c], [c, b, a], [b, a, a]):
            assert_same(replayed(xs, how), by_reference(xs, how))
    assert len(known(how)) == len(alike)


def test_one_scale_for_several_tensors_or_one_each(device: torch.device) -> None:
    how = [GIVEN, GIVEN]
    xs = values(device, (32, 48), (17, 33))
    one, other = torch.tensor([2.0], device=device), torch.tensor([30.0], device=device)
    for scales in ([one, one], [one, other], [other, other], [other, one]):
        assert_same(replayed(xs, how, scales=scales), by_reference(xs, how, scales=scales))
    assert list(map(callable, known(how))) == [True] * 2


def test_orientations_share_the_scale_of_one_level(device: torch.device) -> None:
    (x,) = values(device, (32, 48))
    a, b = torch.tensor([2.0], device=device), torch.tensor([30.0], device=device)
    how = [None] * 2, ["e4m3/tensor/fp32"] * 2, [ROWWISE, COLUMNWISE], [True] * 2, None
    for levels, shared in (((a, a), True), ((a, a), False), ((a, b), True)):
        made = gpu.cast([x, x], levels, *how, shared=shared)
        assert (made[1] is made[4]) == (shared and levels[0] is levels[1])
        assert_same_bits(made[4], reference.cast(x, levels[1], None, Format("e4m3"), COLUMNWISE).scale_inv)


@pytest.mark.parametrize("case", ["current", "nvfp4", "MXFP8 | current"])
def test_known_amaxes(case: str, device: torch.device) -> None:
    how = CASES[case][:2]
    for call in range(2):
        xs = values(device, (16, 32), (17, 33), scale=10.0**call)
        found = [tuple(level * 2 if level is not None else None for level in each) for each in find_amaxes(xs, how)]
        for amaxes in (None, found, [found[0], None], [None, found[1]]):
            expected = by_reference(xs, how, amaxes)
            with nothing_else() if call else count_launches():
                assert_same(replayed(xs, how, amaxes), expected)
    assert list(map(callable, known(how))) == [True] * 4


@pytest.mark.parametrize("case", ["current", "nvfp4", "delayed", "stochastic | nearest", "NVFP4 strips | tiles"])
def test_amaxes_alone(case: str, device: torch.device) -> None:
    """As before an agreement between ranks, which may put the result in their place."""
    how = CASES[case]
    before: list[Amaxes] = []
    for call in range(3):
        xs = values(device, (32, 48), (17, 33), (16, 16), scale=10.0**call)[: len(how)]
        expected = [
            tuple([reference.amax(x, fmt, dim) if fmt.needs_amax else None for fmt, dim in q.casts])
            for x, q in zip(xs, how, strict=True)
        ]
        with torch.no_grad(), nothing_else() if call else count_launches():
            found = find_amaxes(xs, how)
        for levels, others in zip(found, expected, strict=True):
            for level, other in zip(levels, others, strict=True):
                assert_same_bits(level, other)
        for level in [level for levels in before for level in levels if level is not None]:
            assert level == -1.0, "memory of an earlier call"
        before = found
        for level in [level for levels in found for level in levels if level is not None]:
            level.fill_(-1.0)


def test_levels_that_are_copied(device: torch.device) -> None:
    """Copies are made again by a replay; what begins at an odd address is cast step by step, among others."""
    (x,) = values(device, (32, 48))
    scales = torch.tensor([[2.0, 5.0], [9.0, 4.0]], device=device)
    for call in range(2):
        for scale in (scales[0, :1].double(), scales[0, :1].bfloat16(), scales[0, 1:], scales[1:, 0]):
            expected = by_reference([x], [GIVEN], scales=[scale.float()])
            assert_same(replayed([x], [GIVEN], scales=[scale]), expected)
        if not call:
            replayed([x], [GIVEN], scales=[scales[1, 1:]])
    assert known([GIVEN]) and all(map(callable, known([GIVEN])))
    how = [Quantizer(MX, columnwise=False)]
    (blocks,) = quantize.amax.reference([x], [MX.spec], [ROWWISE])  # as a group of ranks finds them, block by block
    for _ in range(2):
        replayed([x], how)
        for level in (blocks * 4, (blocks * 4).t().contiguous().t(), torch.stack([blocks, blocks * 4], -1)[..., 1]):
            assert_same(replayed([x], how, [(level,)]), by_reference([x], how, [(level.contiguous(),)]))
    how = [Quantizer(NV, columnwise=False)]
    for level in (scales[0, 1:], scales[1, 1:], scales[1, :1]):  # of which the first two are read as copies
        assert_same(replayed([x], how, [(level,)]), by_reference([x], how, [(level,)]))


def test_inputs_that_kernels_read_copies_of(device: torch.device) -> None:
    how = [E4M3, Quantizer(MX, E4M3.row_format)]
    (wide,) = values(device, (34, 48))
    other = values(device, (32, 48))[0]
    inputs = [wide.flatten()[3 : 3 + 32 * 48].view(32, 48), wide[:, :32].t(), wide[::2][:, 1:], wide[1:33]]
    for _ in range(2):
        for x in inputs:
            xs = [x, other]
            assert_same(replayed(xs, how), by_reference([x.contiguous(), other], how))
    assert list(map(callable, known(how))) == [True] * 2  # of those that begin where they should


def test_shapes_dtypes_and_leading_dims(device: torch.device) -> None:
    how = [E4M3, E5M2]
    for _ in range(2):
        for dtype in (torch.bfloat16, torch.float32, torch.float16):
            xs = [values(device, (8, 48))[0].to(dtype).view(2, 4, 48), torch.ones(16, dtype=dtype, device=device)]
            assert_same(replayed(xs, how), by_reference(xs, how))
    assert list(map(callable, known(how))) == [True] * 3


@pytest.mark.parametrize("case", ["current", "nvfp4"])
def test_inputs_in_any_memory_order(case: str, device: torch.device) -> None:
    """Attention's output is transposed in memory, and gates are halves of a matrix: replays read their values too."""
    how = CASES[case][:2]
    scales = [torch.full((1,), 3.0, device=device)] * 2
    for call in range(3):
        x, y = values(device, (4 * 32, 16), (17, 48), scale=10.0**call)
        for xs in ([x.view(4, 32, 16).transpose(0, 1), y], [x[:, :8], y[:, 16:]], [x, y.t()]):
            torch.manual_seed(call)
            expected = by_reference(xs, how, scales=scales)
            torch.manual_seed(call)
            assert_same(replayed(xs, how, scales=scales), expected)


@pytest.mark.parametrize("case", ["delayed", "block", "nvfp4"])
def test_empty_tensors(case: str, device: torch.device) -> None:
    how = CASES[case]
    scales = [torch.full((1,), 3.0, device=device)] * 3
    for shapes in ([(0, 32), (16, 32), (0, 32)], [(16, 32), (0, 32), (16, 0)], [(0, 32), (0, 16), (0, 32)]):
        for call in range(3):
            xs = values(device, *shapes, scale=10.0**call)
            torch.manual_seed(call)
            expected = by_reference(xs, how, scales=scales)
            torch.manual_seed(call)
            assert_same(replayed(xs, how, scales=scales), expected)


def test_what_has_no_kernel_is_replayed(device: torch.device) -> None:
    how = [Quantizer(Format(block=8, scale_rule="e8m0"), E4M3.row_format), E4M3]  # no kernel
    for call in range(3):
        xs = values(device, (32, 48), (17, 33), scale=10.0**call)
        assert_same(replayed(xs, how), by_reference(xs, how))
        assert list(map(callable, known(how))) == [True]


def test_recordings_are_bounded(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    assert tape.MOST_TAPES == 256
    monkeypatch.setattr(tape, "MOST_TAPES", 3)
    for rows in (1, 2, 3, 4, 5, 4, 1, 7, 9):
        xs = values(device, (rows, 48))
        assert_same(replayed(xs, [E4M3]), by_reference(xs, [E4M3]))
        assert 1 <= len(known([E4M3])) <= 3
        with nothing_else():
            assert_same(replayed(xs, [E4M3]), by_reference(xs, [E4M3]))


def test_a_missing_scale_is_an_error(device: torch.device) -> None:
    xs = values(device, (16, 16), (16, 16))
    scale = torch.ones(1, device=device)
    replayed(xs, [GIVEN, GIVEN], scales=[scale, scale])
    with pytest.raises(ValueError, match="delayed scaling casts with a scale"):
        replayed(xs, [GIVEN, GIVEN], scales=[scale, None])


@pytest.mark.parametrize("case", ["current", "delayed", "mxfp8", "nvfp4", "rowwise"])
def test_operations_replay_too(case: str, device: torch.device) -> None:
    """What compiled code calls; its outputs share no memory."""
    quantizers = CASES[case][:2]
    casts = [(i, fmt, dim) for i, q in enumerate(quantizers) for fmt, dim in q.layouts("cuda")]
    of, formats, dims = zip(*[(i, fmt.spec, dim) for i, fmt, dim in casts], strict=True)
    needs = [fmt.needs_amax for _, fmt, _ in casts]
    k_major = [backends.k_major(fmt) for _, fmt, _ in casts]
    for call in range(2):
        matrices = values(device, (32, 48), (17, 33), scale=10.0**call)
        xs = [matrices[i] for i in of]
        rng = torch.tensor([5, call], device=device)
        rngs = [rng if fmt.rounding == "stochastic" else None for _, fmt, _ in casts]
        given: list[Any] = [torch.full((1,), 3.0, device=device) if "given" in spec else None for spec in formats]
        with nothing_else() if call else count_launches():
            if any(needs):
                found = gpu.recorded_amax(xs, formats, dims)
                for got, want in zip(found, quantize.amax.reference(xs, formats, dims), strict=True):
                    assert_same_bits(got, want)
                given = found
            actual = gpu.recorded_cast(xs, given, rngs, formats, dims, k_major, None)
        expected = quantize.cast.reference(xs, given, rngs, formats, dims, k_major, None)
        for got, want in zip(actual, expected, strict=True):
            assert_same_bits(got, want)
            assert strides(got) == strides(want)
        memory = [each.data_ptr() for each in (*actual, *given) if each is not None and each.numel() > 0]
        assert len({*memory}) == len(memory)


@pytest.mark.parametrize("fmt", [MX, STRIPS, Format(block=32, tile=True, scale_rule="e8m0"), NV_ROWS, GIVEN.row_format])
def test_amaxes_of_every_kind(fmt: Format, device: torch.device) -> None:
    """Those of blocks are a grid."""
    for call in range(3):
        xs = values(device, (32, 48), (17, 33), scale=10.0**call)
        for dim in (ROWWISE, COLUMNWISE):
            found = gpu.recorded_amax(xs, [fmt.spec] * 2, [dim] * 2)
            for got, want in zip(found, quantize.amax.reference(xs, [fmt.spec] * 2, [dim] * 2), strict=True):
                assert got.shape == want.shape
                assert_same_bits(got, want)


def test_any_number_of_matrices_is_one_launch(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """But while a CUDA graph is captured, which would read the table of arguments again from the host."""
    how, shapes = [E4M3] * 11, [(8 + i, 16 + i % 3) for i in range(11)]
    for call in range(4):
        if call == 2:
            monkeypatch.setattr(launch, "most_matrices", lambda device: launch.MOST_BY_VALUE)
            monkeypatch.setattr(job, "most_matrices", lambda device: launch.MOST_BY_VALUE)
            monkeypatch.setattr(gpu, "most_matrices", lambda device: launch.MOST_BY_VALUE)
        xs = values(device, *shapes, scale=10.0 ** (call - 8))
        with count_launches() as launches, nothing_else() if call % 2 else contextlib.nullcontext():
            actual = replayed(xs, how)
        assert set(launches.values()) == {1 if call < 2 else 2}
        assert_same(actual, by_reference(xs, how))
    assert list(map(callable, known(how))) == [True] * 2
