"""Where the host's time goes in one small Linear: each step of its plan, in forward and in backward.

    python benchmarks/steps.py [current delayed ...] [--shape 64 256 256] [--device cuda] [--calls 300]

A row is a callable, and the microseconds that one forward and backward spend in it, those of the rows below it that are
indented included. What no step accounts for (the module, autograd, its thread) is the difference to the total. The
device is waited for between calls, outside of what is timed. Timing a step costs about 0.2 us.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import minifloat


class Clock:
    """Seconds and calls by name; a name that is entered inside of another one has that one's in front."""

    def __init__(self) -> None:
        self.spent: dict[tuple[str, ...], list[float]] = defaultdict(lambda: [0, 0.0])
        self.inside: tuple[str, ...] = ()

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            outer, self.inside = self.inside, (*self.inside, name)
            begin = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                spent = self.spent[self.inside]
                spent[0] += 1
                spent[1] += time.perf_counter() - begin
                self.inside = outer

        return run


def time_steps(recipe: str, shape: tuple[int, int, int], device: str, calls: int) -> dict[tuple[str, ...], list[float]]:
    """By path of names: calls, and microseconds, of one forward and backward."""
    tokens, out, into = shape
    module: nn.Module = nn.Linear(into, out, device=device, dtype=torch.bfloat16)
    if recipe != "torch":
        module = minifloat.Linear(into, out, device=device, dtype=torch.bfloat16, recipe=recipe)
    x = torch.randn(tokens, into, device=device, dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(tokens, out, device=device, dtype=torch.bfloat16)
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None

    def step(forward: Callable[..., Any], backward: Callable[..., Any]) -> None:
        module.zero_grad()
        x.grad = None
        wait()
        backward(forward(x))

    for _ in range(20):
        step(module, lambda y: y.backward(dy))
    clock = Clock()
    for plan in getattr(module, "_plans", {}).values():
        for field in fields(plan):
            value = getattr(plan, field.name)
            if callable(value) and field.name not in ("x_quantizer", "w_quantizer", "dy_quantizer"):
                object.__setattr__(plan, field.name, clock.timed(field.name, value))
    inner: list[tuple[Any, str]] = [(torch, "_scaled_mm")]
    if device == "cuda":
        from minifloat.ops.launch import Prepared
        from minifloat.ops.quantize.pipeline import Recording

        inner += [(Recording, "replay"), (Prepared, "run")]
    before = [getattr(owner, name) for owner, name in inner]
    for (owner, name), function in zip(inner, before, strict=True):
        setattr(owner, name, clock.timed(f"{owner.__name__}.{name}", function))
    forward = clock.timed("forward", module)
    backward = clock.timed("backward", lambda y: y.backward(dy))
    for _ in range(calls):
        step(forward, backward)
    for (owner, name), function in zip(inner, before, strict=True):
        setattr(owner, name, function)
    return {path: [count / calls, seconds / calls * 1e6] for path, (count, seconds) in clock.spent.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", default=["torch", "current", "delayed", "block", "mxfp8", "nvfp4"])
    parser.add_argument("--shape", nargs=3, type=int, default=[64, 256, 256], metavar=("TOKENS", "OUT", "IN"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--calls", type=int, default=300)
    given = parser.parse_args()
    for recipe in given.recipes:
        print(f"\n{recipe}, {' x '.join(map(str, given.shape))}, torch {torch.__version__}, {given.device}")
        for path, (count, spent) in sorted(time_steps(recipe, given.shape, given.device, given.calls).items()):
            print(f"{'  ' * len(path) + path[-1]:40s} {count:5.1f} calls {spent:9.1f} us")


if __name__ == "__main__":
    main()
