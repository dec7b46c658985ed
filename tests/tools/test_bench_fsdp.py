"""The contenders of suite ``fsdp`` train, from the same weights, and one that computes otherwise is refused."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist

from minifloat.comm.group import Group
from minifloat.tools.bench.fsdp import BOUNDS, CONTENDERS, Setting
from minifloat.tools.bench.fused import TINY
from minifloat.tools.bench.gate import check_step
from tests.helpers.distributed_pool import Pools

LAYERS = 1


def setting_of(factor: float = 1.0) -> Setting:
    setting = Setting.of(Group.of(dist.group.WORLD), torch.device("cpu"), replace(TINY, groups=2), LAYERS)
    return setting._replace(weights=[factor * weight for weight in setting.weights])


def first_steps(rank: int, size: int, names: list[str]) -> list[tuple[float, float, float]]:
    """Of each contender: its error before training, and its loss before and after a few steps."""
    setting = setting_of()
    expected = CONTENDERS["torch bf16"](setting).step(update=False)[1:]
    found = []
    for name in names:
        trainer = CONTENDERS[name](setting)
        before, *results = trainer.step(update=False)
        again, *_ = trainer.step()
        assert len(results) == len(expected) == 2 + len(setting.weights)
        assert torch.equal(again, before)  # weights were left alone
        for _ in range(3):
            after = trainer.step()[0]
        error = check_step(name, results, expected, BOUNDS[trainer.recipe].of(LAYERS))
        found.append((error, float(before), float(after)))
    return found


def test_contenders(worker_pool: Pools) -> None:
    ours = ("current", "block, FP8 parameters", "current, by linear", "bf16, ETP", "current, FP8 parameters, ETP")
    names = ["torch bf16", *[f"minifloat {each}" for each in ours]]
    ranks = worker_pool(2).run(first_steps, names)
    for name, *found in zip(names, *ranks, strict=True):
        for error, before, after in found:
            least = 0.0 if "bf16" in name else 0.01
            assert error == 0 if name == "torch bf16" else least < error < 0.2, name
            assert after < before, name
    assert ranks[0] != ranks[1]  # each has data of its own


def test_tensor_parallelism_beside_etp(worker_pool: Pools) -> None:
    """Ranks get back the outputs and input gradients of their own sequences, and their shards of gradients."""
    for found in worker_pool(4).run(first_steps, ["minifloat current, TP 2 x ETP", "minifloat block, TP 2 x ETP"]):
        assert all(0.01 < error < 0.2 and after < before for error, before, after in found)
