"""Many optimizer steps under extended tensor parallelism, beside replicas that average their gradients.

    torchrun --nproc-per-node 4 benchmarks/etp_steps.py "tp x etp" current --steps 1000
    torchrun --nproc-per-node 4 benchmarks/etp_steps.py experts nvfp4 --steps 1000

Two models of one seed see the same data, which differs between data ranks: the weights of one are shared, those of the
other are replicated. Gradients are not clipped: their norm is a sum in another order. Meshes are ``tp`` 2 x ``etp`` 2,
``dp`` 2 x ``etp`` 2, and ``etp`` 2 x ``eetp`` 2 with layers of experts, on a CPU or, with ``--device cuda``, on two or
four GPUs. Prints, and appends to ``--out``, a line of JSON: losses on the way, and by how much the losses of the two
ever differed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import minifloat
from benchmarks.ranks import join
from minifloat.distributed import parallelize
from minifloat.recipe import OwnRecipe, named

VOCABULARY, HIDDEN, FFN, TOKENS = 32, 32, 48, 16
PLAN: dict[str, Any] = {"embedding": "vocabulary", "norm": "sequence", "head": "column"}
KINDS = {"tp x etp": ("etp", "tp"), "dp x etp": ("etp", "dp"), "experts": ("etp", "eetp")}
NAMES = {"tp x etp": "tp 2 x etp 2", "dp x etp": "dp 2 x etp 2", "experts": "etp 2 x eetp 2, experts"}


class Model(nn.Module):
    """Tokens [T, B] to logits [T, B, V]."""

    def __init__(self, recipe: OwnRecipe, experts: int = 0, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        options: dict[str, Any] = {"moe": {"num_experts": experts, "top_k": 2}} if experts else {}
        options |= {"recipe": recipe, "hidden_dropout": 0.0, "attention_dropout": 0.0, "dtype": torch.float32}
        self.layers = nn.ModuleList(minifloat.TransformerLayer(HIDDEN, FFN, 2, **options) for _ in range(layers))
        self.norm = minifloat.RMSNorm(HIDDEN)
        self.head = minifloat.Linear(HIDDEN, VOCABULARY, recipe=recipe)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def made(kind: str, recipe: str, shared: bool, device: str) -> tuple[nn.Module, torch.optim.Optimizer, DeviceMesh]:
    torch.manual_seed(0)
    model = Model(named(recipe), 3 if kind == "experts" else 0).to(device)
    names = KINDS[kind]
    with_tp = kind == "tp x etp"
    mesh = init_device_mesh(device, (2, 2), mesh_dim_names=("dp", "tp") if with_tp and not shared else names)
    if shared or with_tp:
        parallelize(model, mesh, plan=PLAN if with_tp else None)
    else:
        for name, parameter in model.named_parameters():  # gradients are summed in the order of the shared model
            order = names[::-1] if ".experts." in name and name.endswith("weight") else names
            parameter.register_hook(partial(mean, [mesh.get_group(each) for each in order]))
    return model, torch.optim.AdamW(model.parameters(), 3e-3, fused=True), mesh


def mean(groups: list[Any], gradient: Tensor) -> Tensor:
    total = gradient.clone()
    for group in groups:
        dist.all_reduce(total, group=group)
    return total / 4


def step(model: nn.Module, optimizer: torch.optim.Optimizer, mesh: DeviceMesh, tokens: Tensor, seed: int) -> float:
    torch.manual_seed(seed)  # of stochastic rounding
    tp = mesh["tp"] if "tp" in (mesh.mesh_dim_names or ()) else None
    loss = minifloat.cross_entropy(model(tokens[:-1]), tokens[1:], tp_group=tp, classes=VOCABULARY)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def batch(step: int, data_rank: int) -> Tensor:
    """Tokens [T + 1, 2], each the one before plus a number that the sequence keeps, with some noise."""
    generator = torch.Generator().manual_seed(1000 * step + data_rank)
    start, stride = torch.randint(VOCABULARY, (2, 1, 2), generator=generator)
    tokens = start + (1 + stride % 5) * torch.arange(TOKENS + 1)[:, None]
    noise = torch.rand(tokens.shape, generator=generator) < 0.1
    return torch.where(noise, torch.randint(VOCABULARY, tokens.shape, generator=generator), tokens) % VOCABULARY


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("recipe")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    device: str = options.device
    join(device)
    shared, replicated = (made(options.kind, options.recipe, each, device) for each in (True, False))
    rank = dist.get_rank()
    data_rank = rank // 2 if options.kind == "tp x etp" else rank
    losses, worst, first, begin = [], 0.0, None, time.monotonic()
    for number in range(options.steps):
        tokens = batch(number, data_rank).to(device)
        with sdpa_kernel(SDPBackend.MATH):  # the others' sums have no fixed order on a GPU
            mine, theirs = (step(*each, tokens, number) for each in (shared, replicated))
        losses.append(mine)
        if mine != theirs:
            worst, first = max(worst, abs(mine - theirs) / abs(theirs)), number if first is None else first
        if rank == 0 and number % 100 == 0:
            print(f"{options.kind}, {options.recipe}, step {number}: {mine:.6f} {theirs:.6f}", flush=True)
    found: list[Any] = [None] * 4
    dist.all_gather_object(found, (losses, worst, first))
    if rank == 0:
        report = {
            "date": str(date.today()),
            "torch": torch.__version__,
            "mesh": NAMES[options.kind],
            "recipe": options.recipe,
            "steps": options.steps,
            "seconds": round(time.monotonic() - begin),
            "largest relative difference of a loss": max(each[1] for each in found),
            "first step that differs": min([each[2] for each in found if each[2] is not None], default=None),
            "losses of rank 0": [round(loss, 4) for loss in losses[:: max(1, options.steps // 10)]] + [losses[-1]],
        }
        print(json.dumps(report), flush=True)
        if options.out is not None:
            with options.out.open("a") as file:
                file.write(json.dumps(report) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
