"""Bytecodes of a step of small linears, whose passes are replayed as on a GPU: what the host executes only falls.

Bounds are by hand, in pyproject.toml. Versions of Python differ in bytecodes; one without bounds is not measured.
"""

from __future__ import annotations

import sys
import tomllib
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("triton")

from minifloat import Linear, autocast, backends, casts
from minifloat.autocast import used
from minifloat.functional import spec
from minifloat.nn import linear_call
from minifloat.ops import library
from minifloat.ops.launch import Kernel
from minifloat.ops.matmul import native
from minifloat.ops.quantize import gpu
from tests.helpers.replay_on_cpu import replay_on_cpu

ROOT = Path(__file__).parents[1]
BOUNDS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["minifloat"]["bytecodes"]
VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
LAYERS, WARM_UP, STEPS = 12, 5, 2


def as_on_a_gpu(patch: pytest.MonkeyPatch) -> None:
    """Tapes launches of kernels that do nothing: the steps that a GPU would take, on a CPU."""
    replay_on_cpu(patch)
    make_spec, work = spec.make_spec, casts.Casts._work

    def product(a: Any, a_scale: Any, b: Any, b_scale: Any, dtype: torch.dtype, bias: Any, *rest: Any) -> Any:
        return torch._scaled_mm(a, b.t(), scale_a=a_scale, scale_b=b_scale, bias=bias, out_dtype=dtype)

    def prepared(self: Kernel, tensors: Any, integers: Any, constants: Any, warps: int) -> Any:
        return lambda *args: None, (0,) * 9, (*integers, *constants)

    patch.setattr(linear_call, "make_spec", lambda config, options: make_spec(config, options._replace(device="cuda")))
    patch.setattr(spec, "_bf16_dims", lambda *args: ((), ()))
    patch.setattr(backends, "kernels", lambda device: (True, ""))
    patch.setattr(torch.cuda, "current_device", lambda: 0)
    patch.setattr(casts.Casts, "_work", lambda self, key: work(self, (True, key[1])))
    patch.setattr(gpu, "most_matrices", lambda device: 8)
    patch.setattr(native, "per_tensor", product)
    patch.setattr(library, "directly", lambda x: "cuda")
    patch.setattr(Kernel, "_run", lambda *args: None)
    patch.setattr(Kernel, "_prepared", prepared)


def bytecodes(recipe: str, own: bool) -> Counter[str]:
    """Counts what the library's functions execute in a step, by file and function; ``own``: without autocast."""
    how = {"bias": False, "dtype": torch.bfloat16, "recipe": recipe if own else None}
    layers = nn.Sequential(*[Linear(256, 256, **how) for _ in range(LAYERS)])  # type: ignore[arg-type]
    x, dy = [torch.randn(64, 256, dtype=torch.bfloat16, requires_grad=needed) for needed in (True, False)]
    parameters, counts = [x, *layers.parameters()], Counter[str]()

    def step() -> None:
        if own:
            y = layers(x)
        else:
            with autocast(recipe=recipe):
                y = layers(x)
        y.backward(dy)
        for parameter in parameters:
            parameter.grad = None

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode" and frame.f_code.co_filename.startswith(str(ROOT / "minifloat")):
            counts[f"{Path(frame.f_code.co_filename).relative_to(ROOT)} {frame.f_code.co_qualname}"] += 1
        return trace

    for _ in range(WARM_UP):
        step()
    outside = sys.gettrace()
    sys._getframe().f_trace_opcodes = True  # without which Python 3.12 traces none
    sys.settrace(trace)
    try:
        for _ in range(STEPS):
            step()
    finally:
        sys.settrace(outside)
    return Counter({name: count // STEPS for name, count in counts.items()})


@pytest.mark.skipif(VERSION not in BOUNDS, reason="no bounds for this version of Python")
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("recipe", ["current", "delayed"])
def test_a_step_executes_no_more(recipe: str, own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    as_on_a_gpu(monkeypatch)
    for option in ("batch_invariant", "check_finite"):  # asked for once some context had them, in another test
        monkeypatch.setattr(used, option, False)
    counts, most = bytecodes(recipe, own), BOUNDS[VERSION][f"{recipe}, own" if own else recipe]
    assert counts["minifloat/casts.py Casts.__call__"] == 0, "a pass was not replayed"
    assert counts.total() <= most, (counts.total(), most, counts.most_common(12))
