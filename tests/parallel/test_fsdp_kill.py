"""A rank of a training under ``fully_shard`` is killed, and the training goes on, on another number of ranks."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import minifloat
from minifloat.tensor import QuantizedTensor
from tests.helpers.children import children
from tests.helpers.distributed_pool import Pools
from tests.helpers.fsdp_cases import MODELS
from tests.helpers.fsdp_kill import EVERY, latest, process, train

STEPS = 10
KILLS = 20
BOUND = 1e-4
"""Of a loss, relative. Sums in another order change it by some 1e-7; more where a code falls to the other side."""


def killed(folder: Path, rank: int, steps: int, delay: float) -> None:
    """Trains on two ranks and kills one, so many seconds after so many steps; it may be done by then."""
    ranks = [children().Process(target=process, args=(each, 2, folder, "mxfp8", STEPS)) for each in range(2)]
    for each in ranks:
        each.start()
    while any(each.is_alive() for each in ranks) and _logged(folder) < steps:
        time.sleep(0.001)
    time.sleep(delay)
    ranks[rank].kill()
    ranks[rank].join()
    time.sleep(0.2)  # the other one may go on until it misses the first
    ranks[1 - rank].kill()
    ranks[1 - rank].join()
    (folder / "store").unlink(missing_ok=True)


def _logged(folder: Path) -> int:
    """Steps that are done; -1 before the first one begins."""
    try:
        return (folder / "losses").read_text().count("\n")
    except FileNotFoundError:
        return -1


def parameters(folder: Path, step: int) -> dict[str, Any]:
    """Those of a checkpoint, in this process; of a new model for step 0."""
    torch.manual_seed(0)
    with minifloat.quantized_model_init(recipe="mxfp8"):
        state = MODELS["linears"]("mxfp8").state_dict()
    if step:
        dcp.load({"model": state}, checkpoint_id=folder / f"step-{step}", no_dist=True)
    return state


def same(mine: Any, theirs: Any) -> bool:
    if not isinstance(mine, QuantizedTensor):
        return torch.equal(mine, theirs)
    a, b = mine._buffers(), theirs._buffers()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_killed_at_any_moment(worker_pool: Pools, tmp_path: Path) -> None:
    """What is complete is what the uninterrupted training had, bit for bit; from there losses are the same."""
    draws, whole = random.Random(0), tmp_path / "whole"
    whole.mkdir()
    worker_pool(2).run(train, whole, "mxfp8", 0)  # starts the processes
    begun = time.perf_counter()
    _, wanted = worker_pool(2).run(train, whole, "mxfp8", STEPS)[0]
    a_step = (time.perf_counter() - begun) / STEPS
    found = []
    for number in range(KILLS):
        folder = tmp_path / str(number)
        folder.mkdir()
        killed(folder, draws.randrange(2), draws.randrange(STEPS), draws.random() * 2 * a_step)
        step = latest(folder)
        assert _logged(folder) - step <= EVERY
        began, losses = worker_pool(draws.choice((1, 3))).run(train, folder, "mxfp8", STEPS)[0]
        for state in (began, parameters(folder, step)):
            assert all(same(value, state[key]) for key, value in parameters(whole, step).items())
        assert losses == pytest.approx(wanted[step:], rel=BOUND)
        found.append((_logged(folder), step))
    assert len({step for _, step in found}) > 2, found
