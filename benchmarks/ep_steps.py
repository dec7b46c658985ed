"""Many optimizer steps of a small model on a mesh of 2 x 2 gloo ranks, beside one process that has all of the data.

    torchrun --nproc-per-node 4 benchmarks/ep_steps.py "one process" nvfp4 --experts --out FILE
    torchrun --nproc-per-node 4 benchmarks/ep_steps.py "ep x eetp" nvfp4 --out FILE

The losses of a recipe are not those of one process to the bit: dense layers of one process cast the tokens of all ranks
together, and stochastic rounding draws other numbers. How much that changes is measured on one process itself, whose
batch is cast in one or in two pieces, divided in two ways, from other seeds of the rounding: four runs, one a rank of
the first command. The distance of two runs is the root of the mean square, over all steps, of the relative difference
of their losses. A mesh is within the bound if it is no farther from the first run than two of the runs are from each
other, over all steps and over the first 20: later any two runs part, and gradients of experts that are twice what they
should be are 1.6 times the bound over all steps, over the first ones 6.5 times (current scaling). SGD with momentum,
since Adam would hide such a factor.

It runs on a CPU or, with ``--device cuda``, on two or four GPUs. Each command prints a line of JSON and appends it to
``--out``, where a mesh looks for the runs of one process.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from datetime import date
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import minifloat
from benchmarks.etp_steps import PLAN, VOCABULARY, Model, batch
from benchmarks.ranks import join
from minifloat.distributed import parallelize
from minifloat.optim import clip_grad_norm_
from minifloat.recipe import OwnRecipe, named

EXPERTS, LAYERS = 4, 1
EARLY = 20  # steps
MESHES = {"tp x etp": ("etp", "tp"), "ep x eetp": ("ep", "eetp"), "ep x etp": ("ep", "etp")}


class Run(NamedTuple):
    """A run of one process: into how many pieces its batch is cut, after how many sequences were moved to the end."""

    pieces: int = 1
    moved: int = 0
    seed: int = 0


RUNS = (Run(), Run(1, 1, 1), Run(2, 0, 2), Run(2, 1, 3))


def made(recipe: OwnRecipe, experts: bool) -> Model:
    torch.manual_seed(0)
    return Model(recipe, EXPERTS if experts else 0, LAYERS)


def made_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.2, momentum=0.9)


def one_process(recipe: OwnRecipe, experts: bool, steps: int, run: Run = RUNS[0], device: str = "cpu") -> list[float]:
    """Returns the loss of each step, on the data of all ranks: of four, of ``tp x etp`` two."""
    model = made(recipe, experts).to(device)
    optimizer = made_optimizer(model)
    losses = []
    for step in range(steps):
        torch.manual_seed(1000 * steps * run.seed + 4 * step)
        tokens = torch.cat([batch(step, rank) for rank in range(4 if experts else 2)], 1).roll(-run.moved, 1).to(device)
        total = 0.0
        for piece in tokens.chunk(run.pieces, 1):
            loss = minifloat.cross_entropy(model(piece[:-1]), piece[1:], classes=VOCABULARY) / run.pieces
            loss.backward()
            total += float(loss.detach())
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def on_mesh(kind: str, recipe: OwnRecipe, steps: int, device: str = "cpu") -> list[float]:
    """Returns the loss of each step, the mean of all ranks', whose data are parts of that of one process."""
    names = MESHES[kind]
    mesh = init_device_mesh(device, (2, 2), mesh_dim_names=names)
    dense, rank = "tp" in names, dist.get_rank()
    model = parallelize(made(recipe, not dense).to(device), mesh, plan=PLAN if dense else None)
    optimizer, tp = made_optimizer(model), mesh["tp"] if dense else None
    data_rank = rank // 2 if dense else rank
    losses = torch.zeros(steps, dtype=torch.float64, device=device)
    for step in range(steps):
        torch.manual_seed(4 * step + data_rank)  # noise that data ranks shared would not average out
        tokens = batch(step, data_rank).to(device)
        loss = minifloat.cross_entropy(model(tokens[:-1]), tokens[1:], tp_group=tp, classes=VOCABULARY)
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0, tp_group=tp)
        optimizer.step()
        optimizer.zero_grad()
        losses[step] = float(loss.detach())
    dist.all_reduce(losses)
    return (losses / 4).tolist()


def distance(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Returns the root of the mean square of the relative differences."""
    relative = [(a - b) / b for a, b in zip(ours, theirs, strict=True)]
    return float(torch.tensor(relative, dtype=torch.float64).square().mean().sqrt())


def bound(runs: Sequence[Sequence[float]]) -> float:
    """Returns how far two of the runs are apart at most."""
    return max(distance(*pair) for pair in combinations(runs, 2))


def late(losses: Sequence[float]) -> float:
    """Returns the mean loss of the second half."""
    half = losses[len(losses) // 2 :]
    return round(sum(half) / len(half), 4)


def compared(losses: Sequence[float], runs: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Returns how far a mesh is from one process, and how far it may be."""
    found: dict[str, Any] = {}
    for name, steps in {"": len(losses), f", first {EARLY} steps": EARLY}.items():
        apart, most = distance(losses[:steps], runs[0][:steps]), bound([run[:steps] for run in runs])
        found[f"distance{name}"], found[f"bound{name}"] = round(apart, 6), round(most, 6)
    return found | {
        "largest relative difference": round(max(abs(a / b - 1) for a, b in zip(losses, runs[0], strict=True)), 5),
        "mean loss of the second half": late(losses),
        "of one process": [late(run) for run in runs],
        "losses": [round(loss, 7) for loss in losses],
    }


def runs_in(path: Path, key: dict[str, Any]) -> list[list[float]]:
    for line in path.read_text().splitlines() if path.exists() else ():
        report = json.loads(line)
        if report["mesh"] == "one process" and key.items() <= report.items():
            runs: list[list[float]] = report["runs"]
            return runs
    raise SystemExit(f"{path} has no runs of one process with {key}: run the first command first")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mesh", choices=["one process", *MESHES])
    parser.add_argument("recipe", help="a recipe's name, or none: fp32")
    parser.add_argument("--experts", action="store_true", help="of one process: the model that the meshes of ep train")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    device: str = options.device
    join(device)
    rank, alone = dist.get_rank(), options.mesh == "one process"
    experts = options.experts if alone else options.mesh != "tp x etp"
    recipe: OwnRecipe = "none" if options.recipe == "none" else named(options.recipe)
    key = {"recipe": options.recipe, "experts": EXPERTS if experts else 0, "steps": options.steps}
    runs: list[Any] = [None] * 4 if alone else runs_in(options.out, key)
    begin = time.monotonic()
    if alone:
        dist.all_gather_object(runs, one_process(recipe, experts, options.steps, RUNS[rank], device))
        found = {"runs": [[round(loss, 7) for loss in run] for run in runs]}
    else:
        found = compared(on_mesh(options.mesh, recipe, options.steps, device), runs)
    if rank == 0:
        mesh = options.mesh if alone else " x ".join(f"{name} 2" for name in MESHES[options.mesh])
        about = {"date": str(date.today()), "torch": torch.__version__, "mesh": mesh, **key}
        report = about | {"seconds": round(time.monotonic() - begin)} | found
        print(json.dumps({name: value for name, value in report.items() if name not in ("losses", "runs")}), flush=True)
        with options.out.open("a") as file:
            file.write(json.dumps(report) + "\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
