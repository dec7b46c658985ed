"""Bytes and seconds of the weights that an engine is sent, in each layout, against a copy in bf16.

    python benchmarks/weight_sync.py --hidden 4096 --layers 4 --device cuda

Blocks of linears as in Llama, in bf16; each time is the median of `--rounds` streams after one that is not counted.
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

from minifloat import Linear, NVFP4BlockScaling, Recipe
from minifloat.convert import quantized_weights
from minifloat.convert.layouts import WeightLayout

RECIPES: dict[WeightLayout, Recipe | str] = {
    "fp8-block": "block", "fp8-tensor": "current", "fp8-channel": "rowwise", "mxfp8": "mxfp8",
    "nvfp4": NVFP4BlockScaling(disable_2d_quantization=True),
}  # fmt: skip


def block(hidden: int, device: str, recipe: Recipe | str) -> nn.Module:
    """The matrices of a block: q, k, v and o as one each of [H, H], gate and up as one, down."""
    sizes = [(hidden, 3 * hidden), (hidden, hidden), (hidden, 7 * hidden), (7 * hidden // 2, hidden)]
    options = {"bias": False, "recipe": recipe, "dtype": torch.bfloat16, "device": device}
    return nn.Sequential(*(Linear(*size, **options) for size in sizes))  # type: ignore[arg-type]


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
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    name = torch.cuda.get_device_name() if options.device != "cpu" else f"CPU, {torch.get_num_threads()} threads"
    print(f"{name}, torch {torch.__version__}, {options.layers} blocks of hidden size {options.hidden}, bf16")
    print("| layout | MB | seconds | GB/s of bf16 weights |\n|---|---|---|---|")
    model = nn.ModuleList(block(options.hidden, options.device, "none") for _ in range(options.layers))
    plain, seconds = measure(lambda: ((k, v.clone()) for k, v in model.state_dict().items()), options.rounds)
    print(f"| bf16, a copy | {plain / 1e6:.1f} | {seconds:.4f} | {plain / seconds / 1e9:.2f} |")
    for layout, recipe in RECIPES.items():
        model = nn.ModuleList(block(options.hidden, options.device, recipe) for _ in range(options.layers))
        size, seconds = measure(lambda m=model, to=layout: quantized_weights(m, to), options.rounds)  # type: ignore[misc]
        print(f"| {layout} | {size / 1e6:.1f} | {seconds:.4f} | {plain / seconds / 1e9:.2f} |")


if __name__ == "__main__":
    main()
