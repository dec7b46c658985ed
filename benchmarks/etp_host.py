"""Host time of a layer whose weight's rows ranks share, beside the unsharded layer; on a CPU.

    python benchmarks/etp_host.py                                      # PyTorch's fake group: a gather is a copy
    torchrun --nproc-per-node 2 benchmarks/etp_host.py                 # gloo

Microseconds of CPU time of the calling thread, the least of many rounds, for a forward and a backward of one of two
equal layers: other processes and threads, waits and most of the communication do not count. Layers are so small that
Python is nearly all of it. ``new weights``: written before each step, and so cast; else cast once. A line a case and
recipe; ``--profile`` prints what functions take in that of the first case and recipe.
"""

from __future__ import annotations

import argparse
import cProfile
import os
import pstats
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import minifloat
from minifloat.distributed import parallelize

WIDTH, EXPERTS = 64, 64
SHARED = {"shared": 1, "no prefetch": 0}
"""How many gathers are started ahead."""


class Experts(nn.Module):
    """As many rows for each."""

    def __init__(self, single: bool, **options: Any) -> None:
        super().__init__()
        self.layer = minifloat.GroupedLinear(EXPERTS, WIDTH, WIDTH, single_grouped_weight=single, **options)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x, [len(x) // EXPERTS] * EXPERTS)
        return y


CASES: dict[str, Callable[..., nn.Module]] = {
    "linear": partial(minifloat.Linear, WIDTH, WIDTH),
    "64 experts, one parameter": partial(Experts, True),
    "64 experts, one each": partial(Experts, False),
}


def model_of(case: str, recipe: str, how: str) -> nn.Module:
    """``how``: whole, over a group of one rank, or of :data:`SHARED`."""
    torch.manual_seed(0)
    model = nn.Sequential(*[CASES[case](recipe=recipe, bias=False) for _ in range(2)])
    if how in SHARED:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("etp",))
        parallelize(model, mesh, prefetch=SHARED[how])
    elif how == "one rank":
        parallelize(model, init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("_", "etp"))["etp"])
    return model


def step(model: nn.Module, x: Tensor, write: bool) -> None:
    if write:
        for parameter in model.parameters():
            torch.autograd.graph.increment_version(parameter)
    model(x).sum().backward()


def microseconds(run: Callable[[], None], rounds: int, steps: int = 4) -> float:
    """Of one layer."""
    for _ in range(4):
        run()
    times = []
    for _ in range(rounds):
        start = time.thread_time()
        for _ in range(steps):
            run()
        times.append(time.thread_time() - start)
    return min(times) / steps / 2 * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipes", nargs="+", default=["none", "current", "mxfp8"])
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    x = torch.randn(EXPERTS, WIDTH, requires_grad=True)
    if options.profile:
        model, profile = model_of(options.cases[0], options.recipes[0], "shared"), cProfile.Profile()
        for _ in range(8):
            step(model, x, False)
        with profile:
            for _ in range(100):
                step(model, x, False)
        pstats.Stats(profile).sort_stats("tottime").print_stats(35)
        return
    for case in options.cases:
        for recipe in options.recipes:
            found = []
            for how in ("whole", "one rank", *SHARED):
                model = model_of(case, recipe, how)
                for write in (True, False) if how == "shared" else (False,):
                    each = microseconds(partial(step, model, x, write), options.rounds)
                    found.append(f"{how}{', new weights' * write} {each:.0f}")
            if dist.get_rank() == 0:
                print(f"{case}, {recipe}: {'; '.join(found)} us", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
