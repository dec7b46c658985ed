"""A small training step as one CUDA graph: its time beside that of its kernels, of eager code, and of bf16.

    python benchmarks/cuda_graphs.py [bf16 current+apart ...] [--layers 8] [--hidden 512] [--tokens 512] [--kernels 8]

A step is all of ``minifloat train``'s: forward, backward, clipping, AdamW. After a recipe's name ``+fp32_wgrad`` is
``--fp32-wgrad``, and with ``+apart`` each layer casts its weight by itself. Times are medians over rounds in which the
recipes take turns:

- ``eager`` and ``captured``: one step, from the batch on the host to the loss on the host;
- ``replay``: one of many replays, one after the other, by the GPU's clock;
- ``kernels``: the sum of the times of the replay's kernels, by PyTorch's profiler. What ``replay`` has above it is time
  in between.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from minifloat import cast_weights
from minifloat.recipe import named
from minifloat.tools.train import step
from minifloat.tools.train.captured import CapturedStep
from minifloat.tools.train.model import MODELS
from minifloat.tools.train.run import TrainConfig

CUDA = torch.device("cuda")


class Contender:
    """One recipe's model, twice: uncaptured, and captured."""

    def __init__(self, name: str, sizes: Any, tokens: int) -> None:
        self.name = name
        recipe_name, *ways = name.split("+")
        self.cast_weights: Callable[..., Any] = (lambda model: nullcontext()) if "apart" in ways else cast_weights
        self.config = TrainConfig(1, batch_size=1)
        drawn = torch.randint(256, (1, tokens + 1), generator=torch.Generator().manual_seed(0))
        self.batch = drawn[:, :-1].clone(), drawn[:, 1:].clone()
        recipe = None if recipe_name == "bf16" else named(recipe_name)
        self.model, captured = (sizes.make(recipe, 0).to(CUDA).train() for _ in range(2))
        for model in (self.model, captured) if "fp32_wgrad" in ways else ():
            step.keep_wgrads_unrounded(model)
        self.optimizer = step.make_optimizer(self.model, self.config)
        self.step = CapturedStep(captured, step.make_optimizer(captured, self.config), self.config, CUDA)
        self.times: dict[str, list[float]] = {"eager": [], "captured": [], "replay": []}
        losses = [(self.eager(), self.captured()) for _ in range(3)]
        same = all(torch.equal(*each) for each in zip(self.model.parameters(), captured.parameters(), strict=True))
        print(f"{name}: losses, eager and captured: {losses}; parameters are {'' if same else 'NOT '}equal", flush=True)

    def eager(self) -> float:
        step.cast_weights = self.cast_weights
        return step.train_step(self.model, self.optimizer, self.batch, 1e-4, self.config, CUDA)[0]

    def captured(self) -> float:
        step.cast_weights = self.cast_weights
        return self.step(self.batch, 1e-4).loss

    def measure(self, calls: int) -> None:
        """One round, in microseconds a step."""
        for way in ("eager", "captured"):
            run: Callable[[], float] = getattr(self, way)
            run()
            begin = time.perf_counter()
            for _ in range(calls):
                run()
            self.times[way].append((time.perf_counter() - begin) / calls * 1e6)
        assert self.step.graph is not None
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.step.graph.replay()
        start.record()
        for _ in range(calls):
            self.step.graph.replay()
        end.record()
        end.synchronize()
        self.times["replay"].append(start.elapsed_time(end) / calls * 1e3)

    def kernels(self, replays: int = 5) -> dict[str, tuple[float, float]]:
        """By name the microseconds and the launches of one replay."""
        assert self.step.graph is not None
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(replays):
                self.step.graph.replay()
            torch.cuda.synchronize()
        found = [each for each in profile.key_averages() if each.self_device_time_total > 0]
        return {each.key: (each.self_device_time_total / replays, each.count / replays) for each in found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", default=["bf16", "current", "delayed", "block"])
    for name, default in (
        ("layers", 8),
        ("hidden", 512),
        ("tokens", 512),
        ("rounds", 7),
        ("calls", 10),
        ("kernels", 0),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    sizes = replace(
        MODELS["small"], dim=options.hidden, hidden=3 * options.hidden, layers=options.layers, context=options.tokens
    )
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}: {sizes}")
    contenders = [Contender(name, sizes, options.tokens) for name in options.recipes]
    for _ in range(options.rounds):
        for each in contenders:
            each.measure(options.calls)
    header = "us a step", "eager", "captured", "replay", "kernels", "launches", "replay/kernels", "bf16 replay/replay"
    print("".join(f"{column:>19}" for column in header))
    first = statistics.median(contenders[0].times["replay"])
    for each in contenders:
        eager, captured, replay = (statistics.median(times) for times in each.times.values())
        kernels = each.kernels()
        total, launches = (sum(values) for values in zip(*kernels.values(), strict=True))
        numbers = f"{eager:.0f}", f"{captured:.0f}", f"{replay:.0f}", f"{total:.0f}", f"{launches:.0f}"
        print("".join(f"{n:>19}" for n in (each.name, *numbers, f"{replay / total:.3f}", f"{first / replay:.3f}")))
        for name, (spent, count) in sorted(kernels.items(), key=lambda item: -item[1][0])[: options.kernels]:
            print(f"      {spent:8.1f} us {count:6.0f} x {name[:110]}")


if __name__ == "__main__":
    main()
