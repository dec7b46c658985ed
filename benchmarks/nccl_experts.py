"""Experts that GPUs share out: ``torchrun --nproc-per-node 2 benchmarks/nccl_experts.py``; gloo with ``--device cpu``.

The cases of ``tests/nn/test_expert_parallel.py`` on NCCL: each rank has the tokens of all, runs a whole MLP of experts
on them, and its share of the experts with the others. A line a case; ends with an error if any differs.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.nn.test_expert_parallel import CODES, EXACT, OPTIONS, compare

CASES: dict[str, dict[str, Any]] = (
    {f"exact, {name}": {"options": {"recipe": recipe}} for name, recipe in EXACT.items()}
    | {f"codes travel, {name}": {"options": {"recipe": recipe}} for name, recipe in CODES.items()}
    | {f"current, {name}": {"options": {"recipe": "current"} | options} for name, options in OPTIONS.items()}
    | {f"most experts, {name}": {"options": {"recipe": EXACT[name]}, "k": 5} for name in ("none", "current", "nvfp4")}
    | {"one expert gets all": {"options": {"recipe": "current"}, "skewed": True, "steps": 3}}
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    device = parser.parse_args().device
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    if device == "cuda":
        torch.cuda.set_device(rank)
    failed = False
    for name, case in CASES.items():
        torch.manual_seed(0)
        try:
            wrong = compare(rank, size, **case, device=device)
        except Exception:
            wrong = [traceback.format_exc()]
        failed |= bool(wrong)
        print(f"rank {rank}: {name}: {'; '.join(wrong) or 'equal'}", flush=True)
    dist.barrier()
    sys.exit(failed)


if __name__ == "__main__":
    main()
