"""Where the host's time goes in one small Linear: each step of its exchange and its weight source.

    python benchmarks/steps.py [current delayed ...] [--shape 64 256 256] [--device cuda] [--calls 300]
                               [--calling-thread] [--no-wait]

A row is a callable, and the microseconds that one forward and backward spend in it, those of the rows below it that are
indented included. What no step accounts for (the module, autograd, its thread) is the difference to the total. The
device is waited for between calls, outside of what is timed; after a wait the host is slow at first, so ``--no-wait``
shows what it spends in a loop. ``--calling-thread`` runs the backward without a thread of autograd's own
(docs/layers.md). Timing a step costs about 0.2 us.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import minifloat
from minifloat.functional.exchange import Exchange
from minifloat.functional.weight_source import WeightSource
from minifloat.ops.tape import Recorder


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


def synchronize(device: str) -> None:
    """Waits for what has been launched."""
    if device == "cuda":
        torch.cuda.synchronize()


def time_steps(
    recipe: str,
    shape: tuple[int, int, int],
    device: str,
    calls: int,
    *,
    calling_thread: bool = False,
    wait: bool = True,
) -> dict[tuple[str, ...], list[float]]:
    """By path of names: calls, and microseconds, of one forward and backward.

    Args:
        calling_thread: backward runs in this thread, on a GPU too.
        wait: for the device before each call.
    """
    with torch.autograd.set_multithreading_enabled(not calling_thread):
        return _time_steps(recipe, shape, device, calls, (lambda: synchronize(device)) if wait else (lambda: None))


def _time_steps(
    recipe: str, shape: tuple[int, int, int], device: str, calls: int, before_call: Callable[[], None]
) -> dict[tuple[str, ...], list[float]]:
    tokens, out, into = shape
    module: nn.Module = nn.Linear(into, out, device=device, dtype=torch.bfloat16)
    if recipe != "torch":
        module = minifloat.Linear(into, out, device=device, dtype=torch.bfloat16, recipe=recipe)
    x = torch.randn(tokens, into, device=device, dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(tokens, out, device=device, dtype=torch.bfloat16)

    def step(forward: Callable[..., Any], backward: Callable[..., Any]) -> None:
        module.zero_grad()
        x.grad = None
        before_call()
        backward(forward(x))

    for _ in range(20):
        step(module, lambda y: y.backward(dy))
    clock = Clock()
    steps = ("quantize_inputs", "fprop", "bias_gradient", "quantize_dy", "load_x", "dgrad", "wgrad")
    inner: list[tuple[Any, str]] = [(torch, "_scaled_mm"), *[(Exchange, step) for step in steps]]
    inner += [(WeightSource, step) for step in ("save", "for_dgrad", "accumulate")]
    if device == "cuda":
        inner.append((Recorder, "__call__"))
    before = [getattr(owner, name) for owner, name in inner]
    for (owner, name), function in zip(inner, before, strict=True):
        whose = "" if owner in (Exchange, WeightSource) else f"{owner.__name__}."
        setattr(owner, name, clock.timed(whose + name, function))
    forward = clock.timed("forward", module)
    backward = clock.timed("backward", lambda y: y.backward(dy))
    synchronize(device)
    for _ in range(calls):
        step(forward, backward)
    for (owner, name), function in zip(inner, before, strict=True):
        setattr(owner, name, function)
    return {path: [count / calls, seconds / calls * 1e6] for path, (count, seconds) in clock.spent.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", default=["torch", "current", "delayed", "block", "mxfp8", "nvfp4"])
    parser.add_argument("--shape", nargs=3, type=int, default=[64, 256, 256], metavar=("TOKENS", "OUT", "IN"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--calls", type=int, default=300)
    parser.add_argument("--calling-thread", action="store_true", help="run the backward in the calling thread")
    parser.add_argument("--no-wait", action="store_true", help="do not wait for the device between calls")
    given = parser.parse_args(arguments)
    options = {"calling_thread": given.calling_thread, "wait": not given.no_wait}
    told = ", backward in the calling thread" * given.calling_thread + ", no waits" * given.no_wait
    for recipe in given.recipes:
        print(f"\n{recipe}, {' x '.join(map(str, given.shape))}, torch {torch.__version__}, {given.device}{told}")
        found = time_steps(recipe, given.shape, given.device, given.calls, **options)
        for path, (count, spent) in sorted(found.items()):
            print(f"{'  ' * len(path) + path[-1]:40s} {count:5.1f} calls {spent:9.1f} us")


if __name__ == "__main__":
    main()
