"""Extended tensor parallelism on GPUs: ``torchrun --nproc-per-node 2 benchmarks/nccl_etp.py``, with 4 as well.

Models whose weights' rows are shared beside unsharded replicas that have the same data: outputs and gradients of inputs
to the bit, gradients of weights as the mean of all replicas'. Then races, with kernels that sleep before a cast, before
a gather and after one; parts captured as CUDA graphs; memory; how much of the gathers' time nothing hides; host time. A
line a case; ends with an error if any differs. On a CPU (``--device cpu``) the same over gloo, without sleeps.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import minifloat
from benchmarks.ranks import join
from minifloat.distributed import parallelize
from minifloat.functional.etp import prefetch_queue, rows, weight
from tests.helpers import etp_graphs
from tests.helpers.fsdp_cases import MODELS, RECIPES, loss, width

Check = Callable[[int, int, str], str]
"""Of a rank, the number of ranks and a device: what is wrong, or ""; or, in brackets, what there is to know."""
SLEEP = 3_000_000  # cycles, above a millisecond: longer than any kernel of these models


def twins(model: str, recipe: str, size: int, device: str, depth: int = 1) -> tuple[nn.Module, nn.Module]:
    """A whole model, and the same with shared weights."""
    found = []
    for shared in (False, True):
        torch.manual_seed(0)
        with torch.device(device):
            made = MODELS[model](recipe)
        if shared:
            parallelize(made, init_device_mesh(device, (size,), mesh_dim_names=("etp",)), prefetch=depth)
        found.append(made)
    return found[0], found[1]


def lockstep(model: str, recipe: str, depth: int, steps: int, rank: int, size: int, device: str) -> str:
    """After each step the replica takes the shared weights' gradients, so that both stay alike."""
    whole, shared = twins(model, recipe, size, device, depth)
    optimizers = [torch.optim.SGD(each.parameters(), 0.05) for each in (whole, shared)]
    for step in range(steps):
        torch.manual_seed(100 * step + rank)
        x = torch.randn(12, 2, width(whole), device=device)
        results = []
        for each in (whole, shared):
            leaf = x.clone().requires_grad_()
            torch.manual_seed(step)
            y = each(leaf)
            loss(y).backward()
            assert leaf.grad is not None
            results.append((y.detach(), leaf.grad))
        atol = 2e-6 if recipe == "none" and device == "cuda" else 0.0  # cuBLAS, which whole layers give another shape
        for name, a, b in zip(("Y", "dX"), *results, strict=True):
            if not torch.allclose(a, b, rtol=0, atol=atol):
                return f"{name} differs in step {step} by {(a - b).abs().max():.2g}"
        if wrong := _gradients(whole, shared, size, atol):
            return f"step {step}: {wrong}"
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return ""


def _gradients(whole: nn.Module, shared: nn.Module, size: int, atol: float) -> str:
    """What is wrong with the gradients of ``shared``, which ``whole`` takes over; ``atol``: of two ranks."""
    others = dict(shared.named_parameters())
    for name, parameter in whole.named_parameters():
        assert parameter.grad is not None
        mean, other = parameter.grad.clone(), others[name]
        dist.all_reduce(mean)
        mean /= size
        if other.grad is None or other.grad.shape != other.shape:
            return f"{name} has no gradient of its shape"
        found = other.grad
        if hasattr(other, "etp_group"):
            parts: list[Any] = [None] * size
            dist.all_gather_object(parts, found.cpu())
            found = torch.cat(parts).to(mean.device)
        if found.shape != mean.shape or not torch.allclose(found, mean, rtol=0, atol=atol if size == 2 else 1e-5):
            return f"the gradient of {name} differs by {(found - mean).abs().max():.2g}"
        parameter.grad = found
    return ""


# ---- races ----


@contextmanager
def sleeping(place: str, device: str) -> Iterator[None]:
    """Lets the device sleep in the stream that computes, before each cast, gather, or reduction."""
    targets: dict[str, tuple[Any, str]] = {
        "cast": (rows, "quantize_shards"),
        "gather": (weight, "start_gather"),
        "reduction": (weight, "start_reduce_scatter_rows"),
        "use": (prefetch_queue.Pending, "wait"),
    }
    holder, name = targets[place]
    run = getattr(holder, name)

    def late(*args: Any, **options: Any) -> Any:
        if device == "cuda":
            torch.cuda._sleep(SLEEP)
        return run(*args, **options)

    with mock.patch.object(holder, name, late):
        yield


def race(place: str, depth: int, repetitions: int, rank: int, size: int, device: str) -> str:
    """Neighbours of one shape, filled with 1 and -1, and a weight that an optimizer writes just before its gather."""
    torch.manual_seed(0)
    with torch.device(device):
        model = nn.Sequential(*[minifloat.Linear(256, 256, False, recipe="current") for _ in range(4)])
    for i, layer in enumerate(model):
        nn.init.constant_(layer.weight, (-1) ** i / 256)
    parallelize(model, init_device_mesh(device, (size,), mesh_dim_names=("etp",)), prefetch=depth)
    x = torch.ones(64, 256, device=device, requires_grad=True)
    with sleeping(place, device):
        for repetition in range(repetitions):
            factor = 2.0 ** (repetition % 3)
            with torch.no_grad():
                for layer in model:
                    layer.weight.mul_(factor)
            y = model(x)
            (dx,) = torch.autograd.grad(y.sum(), x)
            for what, found in (("Y", y), ("dX", dx)):
                if not bool(((found / factor**4 - 1).abs() < 1e-3).all()):
                    extent = f"{found.min():.4g} to {found.max():.4g}"
                    return f"{what} of repetition {repetition} is {extent}, not {factor**4}"
            with torch.no_grad():
                for layer in model:
                    layer.weight.div_(factor)
    return ""


def graphs(recipe: str, experts: bool, depth: int, rank: int, size: int, device: str) -> str:
    """Parts captured as CUDA graphs, beside the same that runs eagerly."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        return "; ".join(etp_graphs.compare(rank, size, recipe, experts, torch.bfloat16, depth, device)[:6])
    finally:
        torch.use_deterministic_algorithms(False)


# ---- memory and time ----


def memory(rank: int, size: int, device: str) -> str:
    """Nothing is allocated that was not in the second step; no more than two whole weights live beside the rows."""
    if device != "cuda":
        return "[needs a GPU]"
    layers, wide = 8, 2048
    with torch.device(device):
        model = nn.Sequential(*[minifloat.Linear(wide, wide, False, dtype=torch.bfloat16, recipe="current")
                                for _ in range(layers)])  # fmt: skip
    parallelize(model, init_device_mesh(device, (size,), mesh_dim_names=("etp",)))
    x = torch.randn(1024, wide, device=device, dtype=torch.bfloat16)

    def step() -> None:
        model(x).square().mean().backward()
        for parameter in model.parameters():
            parameter.grad = None

    for _ in range(3):
        step()
    torch.cuda.synchronize()
    before, segments = torch.cuda.memory_allocated(), torch.cuda.memory_stats()["segment.all.allocated"]
    with torch.no_grad():
        torch.cuda.reset_peak_memory_stats()
        model(x)
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
    for _ in range(20):
        step()
    torch.cuda.synchronize()
    grown = torch.cuda.memory_stats()["segment.all.allocated"] - segments
    left = torch.cuda.memory_allocated() - before
    most = 3 * wide * wide + 8 * x.nbytes  # codes of three weights, and activations
    wrong = f"{grown} segments more, " * (grown > 0) + f"{left} bytes more, " * (left > 2**20) + "peak " * (peak > most)
    return wrong or f"[forward takes {peak / 2**20:.1f} MiB beside the rows, at most {most / 2**20:.1f}]"


def hidden(rank: int, size: int, device: str) -> str:
    """Milliseconds of a step of wide linears, with gathers ahead and without, and of the unsharded model."""
    if device != "cuda":
        return "[needs a GPU]"
    said = []
    for recipe in ("current", "block"):
        times = []
        for depth in (None, 0, 1, 2):
            torch.manual_seed(0)
            with torch.device(device):
                model = nn.Sequential(*[minifloat.Linear(8192, 8192, False, dtype=torch.bfloat16, recipe=recipe)
                                        for _ in range(6)])  # fmt: skip
            if depth is not None:
                mesh = init_device_mesh(device, (size,), mesh_dim_names=("etp",))
                parallelize(model, mesh, prefetch=depth)
            x = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16, requires_grad=True)
            times.append(_milliseconds(lambda model=model, x=x: model(x).sum().backward()))
        said.append(f"{recipe}: whole {times[0]:.2f}, ahead 0 {times[1]:.2f}, 1 {times[2]:.2f}, 2 {times[3]:.2f} ms")
    return f"[{'; '.join(said)}]"


def host(kind: str, rank: int, size: int, device: str) -> str:
    """Microseconds of the host for forward and backward of one layer: whole, shared, and shared without prefetch.

    The device is idle when it begins, and no call waits for it.
    """
    options = {"dtype": torch.bfloat16, "recipe": "current"}
    times = []
    for depth in (None, 1, 0):
        torch.manual_seed(0)
        with torch.device(device):
            make = partial(minifloat.Linear, 256, 256) if kind == "linear" else partial(Experts, kind != "separate")
            model = nn.Sequential(make(**options), make(**options))
        if depth is not None:
            parallelize(model, init_device_mesh(device, (size,), mesh_dim_names=("etp",)), prefetch=depth)
        x = torch.randn(1024, 256, device=device, dtype=torch.bfloat16, requires_grad=True)
        times.append(_host_microseconds(lambda model=model, x=x: model(x).sum().backward()) / 2)
    return "[" + ", ".join(f"{each:.0f}" for each in times) + " us]"


class Experts(nn.Module):
    """64 of them, of equally many rows."""

    def __init__(self, single: bool, **options: Any) -> None:
        super().__init__()
        self.layer = minifloat.GroupedLinear(64, 256, 256, single_grouped_weight=single, **options)

    def forward(self, x: torch.Tensor) -> Any:
        return self.layer(x, [len(x) // 64] * 64)


def _host_microseconds(step: Callable[[], object], steps: int = 3) -> float:
    times = []
    for _ in range(9):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        dist.barrier()
        start = time.perf_counter()
        for _ in range(steps):
            step()
        times.append((time.perf_counter() - start) / steps * 1e6)
    return sorted(times)[len(times) // 2]


def _milliseconds(step: Callable[[], object]) -> float:
    for _ in range(4):
        step()
    torch.cuda.synchronize()
    dist.barrier()
    start = time.perf_counter()
    for _ in range(10):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) * 100


def cases(repetitions: int) -> dict[str, Check]:
    found: dict[str, Check] = {}
    for model, recipe in product(("linears", "fused", "transformer", "aligned"), (*RECIPES, "none")):
        found[f"{model} {recipe}"] = partial(lockstep, model, recipe, 1, 3)
    for recipe, depth in product(("current", "mxfp8"), (0, 2)):
        found[f"transformer {recipe}, {depth} ahead"] = partial(lockstep, "transformer", recipe, depth, 3)
    for place, depth in product(("cast", "gather", "use", "reduction"), (0, 1, 2)):
        found[f"race at {place}, {depth} ahead"] = partial(race, place, depth, repetitions)
    for recipe, experts, depth in product(("none", "current", "delayed", "block", "mxfp8"), (True, False), (1, 2)):
        if experts or recipe == "current":
            name = f"graphs of {'attention' if experts else 'blocks'}, {recipe}, {depth} ahead"
            found[name] = partial(graphs, recipe, experts, depth)
    found["graphs, main_grad"] = lambda rank, size, device: "; ".join(etp_graphs.in_main_grad(rank, size, device))
    for kind in ("linear", "single", "separate"):
        found[f"host of {'64 experts, ' * (kind != 'linear')}{kind}"] = partial(host, kind)
    return found | {"memory": memory, "hidden": hidden}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="a regular expression: those cases whose names it is found in")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--repetitions", type=int, default=100, help="of each race")
    options = parser.parse_args()
    join(options.device)
    rank, size, failed = dist.get_rank(), dist.get_world_size(), 0
    for name, check in cases(options.repetitions).items():
        if not re.search(options.only, name):
            continue
        start = time.monotonic()
        try:
            said = check(rank, size, options.device)
        except Exception:  # of all ranks, or the next collective ends the run
            said = traceback.format_exc()
        all_said: list[Any] = [None] * size
        dist.all_gather_object(all_said, said)
        wrong = [f"rank {i}: {each}" for i, each in enumerate(all_said) if each and not each.startswith("[")]
        failed += bool(wrong)
        if rank == 0:
            print(f"{name:40}{'; '.join(wrong) or said or 'the same'}  ({time.monotonic() - start:.1f} s)", flush=True)
    dist.destroy_process_group()
    if failed:
        raise SystemExit(f"{failed} cases differ")


if __name__ == "__main__":
    main()
