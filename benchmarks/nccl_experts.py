"""Experts that GPUs share out: ``torchrun --nproc-per-node 2 benchmarks/nccl_experts.py``; gloo with ``--device cpu``.

The cases of ``tests/nn/test_expert_parallel.py`` on NCCL: each rank has the tokens of all, runs a whole MLP of experts
on them, and its share of the experts with the others. Then those of meshes, FSDP2 and checkpoints in
``tests/parallel`` that need two ranks. A line a case; ends with an error if any differs.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.ranks import join
from tests.nn import test_router
from tests.nn.test_expert_parallel import CODES, EXACT, OPTIONS, compare
from tests.parallel import test_expert_checkpoints, test_expert_meshes

CASES: dict[str, dict[str, Any]] = (
    {f"exact, {name}": {"options": {"recipe": recipe}} for name, recipe in EXACT.items()}
    | {f"codes travel, {name}": {"options": {"recipe": recipe}} for name, recipe in CODES.items()}
    | {f"current, {name}": {"options": {"recipe": "current"} | options} for name, options in OPTIONS.items()}
    | {f"most experts, {name}": {"options": {"recipe": EXACT[name]}, "k": 5} for name in ("none", "current", "nvfp4")}
    | {"one expert gets all": {"options": {"recipe": "current"}, "skewed": True, "steps": 3}}
)


def routers(rank: int, size: int) -> list[str]:
    """The loss over all ranks, its gradient, and counts beside those of one process; and the bias that follows."""
    loss, gradient, counts, bias = test_router.loss_on_ranks(0, 1, "none")
    sums = [each.clone() for each in test_router.loss_on_ranks(rank, size, "none")[:3]]
    chosen, _, bias = test_router.balanced_on_ranks(rank, size, "none")
    for each in (*sums, chosen):
        dist.all_reduce(each)
    pairs = {
        "loss": (sums[0] / size, loss), "gradient": (sums[1] / size, gradient), "counts": (sums[2], counts),
        "bias": (bias, 0.25 * (22 * size - 8 * chosen).sign().float()),
    }  # fmt: skip
    return [name for name, (own, wanted) in pairs.items() if not torch.allclose(own, wanted, rtol=1e-5)]


def of_meshes(device: str) -> dict[str, Callable[[int, int], Any]]:
    """Cases of two ranks, each with a function that returns what differs, or raises."""
    meshes = {
        f"mesh, {name}": partial(test_expert_meshes.compare, case=case)
        for name, case in test_expert_meshes.CASES.items()
        if prod(case.dims.values()) == 2
    }
    sharded = partial(test_expert_meshes.shard_experts, dims={"dp": 1, "ep": 2}, recipe="mxfp8", single=False)
    folders = [""] + [f"/tmp/nccl_experts_{device}_{step}" for step in range(2)]
    checkpoints = {
        f"checkpoint {step}": partial(test_expert_checkpoints.load_and_save, way="ep 2", source=source, target=target)
        for step, (source, target) in enumerate(pairwise(folders))
    }
    return {**meshes, "FSDP2": sharded, **checkpoints, "routers": routers}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--only", default="", help="the cases whose names have this in them")
    arguments = parser.parse_args()
    device = arguments.device
    join(device)
    rank, size = dist.get_rank(), dist.get_world_size()
    cases = {name: partial(compare, **case, device=device) for name, case in CASES.items()}
    failed = False
    for name, case in (cases | (of_meshes(device) if size == 2 else {})).items():
        if arguments.only not in name:
            continue
        torch.set_default_device(device if name not in cases else None)
        torch.manual_seed(0)
        try:
            wrong = case(rank, size)
        except Exception:
            wrong = [traceback.format_exc()]
        failed |= bool(wrong)
        print(f"rank {rank}: {name}: {'; '.join(wrong or []) or 'equal'}", flush=True)
    dist.barrier()
    sys.exit(failed)


if __name__ == "__main__":
    main()
