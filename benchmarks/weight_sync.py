"""Bytes and seconds of the weights that an engine is sent, in each layout, against a copy in bf16.

    python benchmarks/weight_sync.py  # on a GPU; --quick tries it on a CPU

Linears of a few of Llama-3-8B's 32 blocks, in bf16; each time is the median of `--rounds` streams after one that is not
counted. The last two columns extrapolate to all blocks, which are alike; the embedding and the head, 2.1 GB, go in bf16
in every layout and are in no column.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from minifloat import Linear, NVFP4BlockScaling, Recipe, autocast
from minifloat.convert import quantized_weights
from minifloat.convert.layouts import WeightLayout

RECIPES: dict[WeightLayout, Recipe | str] = {
    "fp8-block": "block", "fp8-tensor": "current", "fp8-channel": "rowwise", "mxfp8": "mxfp8",
    "nvfp4": NVFP4BlockScaling(disable_2d_quantization=True),
}  # fmt: skip
LAYERS = 32


def blocks(count: int, smaller: int, device: str) -> nn.Sequential:
    """Makes the linears of `count` blocks: q, k and v as one, o, gate and up as one, down."""
    sizes = [(4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096)]
    options = {"bias": False, "dtype": torch.bfloat16, "device": device}
    return nn.Sequential(
        *(Linear(k // smaller, n // smaller, **options) for _ in range(count) for k, n in sizes)  # type: ignore[arg-type]
    )


def measure(stream: Callable[[], Iterable[tuple[str, Tensor]]], rounds: int) -> tuple[int, float]:
    """Returns the bytes of a stream, and the median of its seconds; tensors are dropped as an engine would."""
    seconds, count = [], 0
    for _ in range(rounds + 1):
        start, count = time.perf_counter(), 0
        for _, tensor in stream():
            count += tensor.nbytes
        if tensor.is_cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return count, statistics.median(seconds[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="sides of a 16th, one block, one round")
    options = parser.parse_args()
    layers, rounds, smaller = (1, 1, 16) if options.quick else (options.layers, options.rounds, 1)
    name = torch.cuda.get_device_name() if options.device != "cpu" else f"CPU, {torch.get_num_threads()} threads"
    shapes = "Llama-3-8B" if smaller == 1 else f"Llama-3-8B, sides of 1/{smaller},"
    print(f"{name}, torch {torch.__version__}: linears of {layers} blocks of {shapes} in bf16\n")
    print(f"| layout | MB | seconds | GB/s of bf16 | GB, {LAYERS} blocks | seconds, {LAYERS} blocks |")
    print("|---|---|---|---|---|---|")
    model = blocks(layers, smaller, options.device)
    bf16 = sum(weight.nbytes for weight in model.parameters())

    def show(layout: str, stream: Callable[[], Iterable[tuple[str, Tensor]]]) -> None:
        size, seconds = measure(stream, rounds)
        all_bytes, all_seconds = (value * LAYERS / layers for value in (size, seconds))
        print(
            f"| {layout} | {size / 1e6:.1f} | {seconds:.4f} | {bf16 / seconds / 1e9:.1f} | {all_bytes / 1e9:.2f} "
            f"| {all_seconds:.3f} |"
        )

    show("bf16, a copy", lambda: ((name, weight.clone()) for name, weight in model.state_dict().items()))
    for layout, recipe in RECIPES.items():
        with autocast(recipe=recipe):
            show(layout, lambda to=layout: quantized_weights(model, to))  # type: ignore[misc]


if __name__ == "__main__":
    main()
