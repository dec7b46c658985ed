"""The thresholds of the table of backends: which backend multiplies what on GPUs that need not be here."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest
import torch

from minifloat import backends
from minifloat.backends import PAIRS
from minifloat.formats import Format
from minifloat.formats.elements import Quotient, define_scale_rule

GPU = torch.device("cuda", 0)
F32_STRIP, F32_TILE = (Format(block=128, tile=tile, scale_rule="fp32") for tile in (False, True))
STRIP, TILE = (Format(block=128, tile=tile, scale_rule="pow2") for tile in (False, True))
E5M2_STRIP = Format("e5m2", block=128, scale_rule="pow2")
FORMATS: dict[str, tuple[Format, Format]] = {name: (a, b) for name, a, b in PAIRS} | {
    "E5M2 by E5M2": (Format("e5m2"), Format("e5m2")),
    "fp32 scales": (F32_STRIP, F32_TILE),
    "tiles": (TILE, TILE),
    "E5M2 strips": (E5M2_STRIP, TILE),
    "strips by MXFP8": (STRIP, Format(block=32, scale_rule="e8m0")),
    "E5M2 by E5M2 in blocks": (E5M2_STRIP, E5M2_STRIP),
    "MXFP8 by NVFP4": (Format(block=32, scale_rule="e8m0"), Format("e2m1", 16, scale_rule="two_level")),
}
PER_TENSOR = {"FP8 per tensor", "FP8 per tensor, E5M2 gradient"}
FIND_SPEC = importlib.util.find_spec
SM_90 = PER_TENSOR | {"FP8 rowwise"}
STRIPS = {"FP8 1x128 by 128x128", "FP8 1x128 by 1x128", "fp32 scales", "FP8 1x128 by MXFP4"}
SM_100 = {name for name, a, b in PAIRS if a.block and b.block} | {"tiles", "E5M2 strips", "strips by MXFP8"}


def facts(monkeypatch: pytest.MonkeyPatch, sm: tuple[int, int], cuda: str) -> None:
    """Lets PyTorch report a GPU."""
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: sm)


@pytest.fixture(autouse=True)
def _nothing_cached(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What is found for a patched GPU is forgotten again."""
    caches = backends._device_facts, backends.choose, backends.kernels
    for cache in caches:
        cache.cache_clear()
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name == "triton" else found(name))
    yield
    for cache in caches:
        cache.cache_clear()


GPUS: dict[tuple[tuple[int, int], str], tuple[set[str], bool, bool]] = {
    ((7, 5), "12.9"): (set(), False, False),
    ((8, 0), "12.9"): (set(), True, False),
    ((8, 6), "13.0"): (set(), True, False),
    ((8, 9), "12.8"): (PER_TENSOR, True, True),
    ((8, 9), "12.9"): (PER_TENSOR, True, True),
    ((9, 0), "12.8"): (SM_90, True, True),
    ((9, 0), "12.9"): (SM_90 | STRIPS, True, True),
    ((9, 0), "13.0"): (SM_90 | STRIPS, True, True),
    ((10, 0), "12.7"): (SM_90, True, True),
    ((10, 0), "12.8"): (SM_90 | SM_100, True, True),
    ((10, 0), "13.0"): (SM_90 | SM_100, True, True),
    ((12, 0), "12.9"): (SM_90 | SM_100, True, True),
    ((12, 0), "13.0"): (SM_90 | SM_100, True, True),
}
"""By compute capability and CUDA version: what a library multiplies, whether bf16 products and Triton kernels run."""


@pytest.mark.parametrize(("gpu", "expected"), GPUS.items(), ids=[f"sm_{a}{b}-{cuda}" for (a, b), cuda in GPUS])
def test_rows(
    gpu: tuple[tuple[int, int], str], expected: tuple[set[str], bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each pair of formats is multiplied by a library, else in bf16 where that is exact, else by the reference."""
    facts(monkeypatch, *gpu)
    native, bf16, triton = expected
    for name, (a, b) in FORMATS.items():
        emulated = bf16 and "fp32" not in name
        wanted = "native" if name in native else "emulated" if emulated else "reference"
        chosen, reason = backends.choose(a, b, GPU)
        assert (name, chosen) == (name, wanted) and reason
        assert backends.supports(a, b, GPU)[0] == (name in native)
        assert backends.emulates(a, b, GPU)[0] == emulated
    assert backends.kernels(0)[0] == triton
    rows = {row.formats: row.backend for row in backends.table(GPU) if row.operation == "scaled product"}
    assert rows == {name: backends.backend(a, b, GPU) for name, a, b in PAIRS}
    for row in backends.table(GPU):
        if row.operation in ("amax, cast, dequantize", "norm, activation"):
            assert row.backend == ("triton" if triton else "reference")


REASONS = [
    ((8, 6), "12.9", "FP8 per tensor", "sm_86 has no FP8 tensor cores"),
    ((8, 9), "12.9", "FP8 1x128 by 128x128", "sm_89 has no cuBLASLt's 128-block scaling"),
    ((9, 0), "12.8", "FP8 1x128 by 128x128", "sm_90 has no cuBLASLt's 128-block scaling"),
    ((10, 0), "12.8", "FP8 1x128 by 1x128", "scaled_mm (MXFP8, cuBLASLt, sm_100; not tested on such a GPU)"),
    ((12, 0), "13.0", "NVFP4", "scaled_mm (NVFP4, cuBLASLt, sm_120; not tested on such a GPU)"),
    ((10, 0), "12.8", "fp32 scales", "sm_100 and later multiply blocks whose scales are powers of two"),
    ((10, 0), "12.8", "MXFP8 by NVFP4", "sm_100 has no product of these formats"),
    ((9, 0), "13.0", "E5M2 by E5M2", "no E5M2 by E5M2"),
    ((9, 0), "13.0", "tiles", "128x128 by 128x128"),
    ((9, 0), "13.0", "E5M2 strips", "takes E4M3 only"),
    ((9, 0), "13.0", "MXFP8", "sm_90 has no product of these formats"),
    ((7, 5), "13.0", "MXFP8", "sm_75 has no bf16 tensor cores"),
    ((9, 0), "12.8", "fp32 scales", "no powers of two do not fit bf16"),
]


@pytest.mark.parametrize(("sm", "cuda", "name", "reason"), REASONS)
def test_reasons(sm: tuple[int, int], cuda: str, name: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Why something slower runs."""
    facts(monkeypatch, sm, cuda)
    assert reason in backends.choose(*FORMATS[name], GPU)[1]


def test_a_gpu_without_cuda_runs_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as one of AMD's, which PyTorch calls cuda too."""
    monkeypatch.setattr(torch.version, "cuda", None)
    assert {backends.backend(a, b, GPU) for _, a, b in PAIRS} == {"reference"}
    assert not backends.kernels(0)[0]


def test_block_scales_of_a_rule_of_the_users_are_not_written_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing says that a code times such a scale fits bf16, whether or not it follows from the amax alone."""
    facts(monkeypatch, (9, 0), "13.0")
    for own in (True, False):
        define_scale_rule(Quotient(f"backends_{own}", own=own))
        fmt = Format(block=32, scale_rule=f"backends_{own}")
        emulated, reason = backends.emulates(fmt, fmt, GPU)
        assert not emulated and "no powers of two" in reason


def test_compiled_code_asks_for_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo refuses to trace what looks for an installed package."""
    facts(monkeypatch, (9, 0), "12.9")
    monkeypatch.setattr(importlib.util, "find_spec", FIND_SPEC)
    run = torch.compile(lambda x: x + backends.kernels(0)[0], backend="eager", fullgraph=True)
    assert run(torch.zeros(())) == backends.kernels(0)[0]
