"""A training under ``fully_shard`` that saves as it goes, for a rank of it to be killed at any moment.

A checkpoint is written under another name, by all ranks, and renamed by the first one as the last act: a folder
``step-N`` is complete whenever it has its name.
"""

from __future__ import annotations

import copy
import os
import shutil
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

import minifloat
from minifloat.distributed import full_state_dict
from minifloat.optim import MasterWeights
from tests.helpers.fsdp_cases import MODELS, Case, mesh_of, shard

EVERY = 2  # steps from one checkpoint to the next
BATCH = 192  # samples of a step, whatever the number of ranks: whole blocks of activations on 1, 2 and 3


def latest(folder: Path) -> int:
    """The step of the last complete checkpoint; 0 without one."""
    return max((int(path.name.removeprefix("step-")) for path in folder.glob("step-*")), default=0)


def process(rank: int, size: int, folder: Path, recipe: str, steps: int) -> None:
    """The life of a process that is one rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder / 'store'}", timedelta(seconds=60), size, rank)
    train(rank, size, folder, recipe, steps)
    os._exit(0)


def train(rank: int, size: int, folder: Path, recipe: str, steps: int) -> tuple[dict[str, Any], list[float]]:
    """Goes on from the last checkpoint in ``folder``, saving others; the state that it began with, and the losses."""
    torch.manual_seed(0)
    with minifloat.quantized_model_init(recipe=recipe):
        model: Any = MODELS["linears"](recipe)
    shard(model, Case("linears", recipe), mesh_of(size))
    optimizer = MasterWeights(model.parameters(), torch.optim.AdamW, lr=0.01, eps=1e-4)
    start = latest(folder)
    if start:
        _load(model, optimizer, folder / f"step-{start}")
    began = copy.deepcopy(full_state_dict(model, only_rank0=True))
    (folder / "losses").touch()
    losses = []
    for step in range(start, steps):
        loss = _step(model, optimizer, step, rank, size, recipe)
        losses.append(loss)
        if rank == 0:
            with (folder / "losses").open("a") as file:
                file.write(f"{step} {loss}\n")
        if (step + 1) % EVERY == 0:
            _save(model, optimizer, folder, step + 1, rank)
    return began, losses


def _step(model: Any, optimizer: Any, step: int, rank: int, size: int, recipe: str) -> float:
    """One on the same samples, and of the same gradients, whatever the number of ranks, but for the order of sums."""
    draws = torch.Generator().manual_seed(step)
    x, y = torch.randn(BATCH, 24, generator=draws), torch.randn(BATCH, 4, generator=draws)
    own = slice(rank * BATCH // size, (rank + 1) * BATCH // size)
    with minifloat.autocast(recipe=recipe):
        loss = (model(x[own]) - y[own]).square().sum() / y.numel()  # of the rank's samples: dY is that of all
    loss.backward()
    for parameter in model.parameters():
        parameter.grad.mul_(size)  # what FSDP2 has averaged
    optimizer.step()
    optimizer.zero_grad()
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item()


def _save(model: Any, optimizer: Any, folder: Path, step: int, rank: int) -> None:
    partial, target = folder / f".step-{step}", folder / f"step-{step}"
    if rank == 0:
        shutil.rmtree(partial, ignore_errors=True)  # of a run that was killed
    dist.barrier()
    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=partial)
    if rank == 0:
        os.rename(partial, target)


def _load(model: Any, optimizer: Any, path: Path) -> None:
    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=path)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
