"""Forward and backward of one Linear on a GPU: every recipe beside torch's bf16, interleaved, as ratios to it.

    python benchmarks/linear_step.py [--rounds 20] [--out FILE.json]

A recipe whose result is farther from bf16's than its format allows is reported as wrong, without a time.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import torch
from torch import Tensor, nn

from minifloat import Linear
from minifloat.recipe import NAMES

TOKENS, IN, OUT = 8192, 4096, 4096
LARGEST_ERROR = {"nvfp4": 0.3}  # relative, of output and gradients; FP8 recipes:
FP8_ERROR = 0.1


def step(layer: nn.Module, x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Output, dX and dW of one forward and backward."""
    x.grad = layer.weight.grad = None  # type: ignore[assignment]
    y = layer(x)
    y.backward(dy)
    return y.detach(), x.grad, layer.weight.grad  # type: ignore[return-value]


def milliseconds(layer: nn.Module, x: Tensor, dy: Tensor) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    step(layer, x, dy)
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    common = {"bias": False, "device": "cuda", "dtype": torch.bfloat16}
    layers: dict[str, nn.Linear] = {"torch bf16": nn.Linear(IN, OUT, **common)}
    layers |= {name: Linear(IN, OUT, recipe=name, **common) for name in NAMES}
    for layer in layers.values():
        layer.load_state_dict(layers["torch bf16"].state_dict())
    x = torch.randn(TOKENS, IN, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(TOKENS, OUT, device="cuda", dtype=torch.bfloat16)
    expected = step(layers["torch bf16"], x, dy)
    wrong = {}
    for name in NAMES:
        for _ in range(3):  # delayed scaling needs a step to find its scales
            got = step(layers[name], x, dy)
        errors = [float((g - e).norm() / e.norm()) for g, e in zip(got, expected, strict=True)]
        if max(errors) > LARGEST_ERROR.get(name, FP8_ERROR):
            wrong[name] = errors
    times = [{name: milliseconds(layer, x, dy) for name, layer in layers.items()} for _ in range(options.rounds)]
    for name in layers:
        ratio = statistics.median(round_["torch bf16"] / round_[name] for round_ in times)
        median = statistics.median(round_[name] for round_ in times)
        print(f"{name:<12}", f"WRONG {wrong[name]}" if name in wrong else f"{median:8.2f} ms   {ratio:.2f}x torch bf16")
    if options.out:
        where = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "shape": [TOKENS, IN, OUT]}
        options.out.write_text(json.dumps(where | {"wrong": wrong, "rounds_ms": times}, indent=1) + "\n")


if __name__ == "__main__":
    main()
