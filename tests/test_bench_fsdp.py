"""The contenders of suite ``fsdp`` train, from the same weights, and one that computes otherwise is refused."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from minifloat.bench.fsdp import CONTENDERS, Setting, gap
from minifloat.bench.fused import TINY
from minifloat.distributed.group import Group
from tests.conftest import Pools

LAYERS = 1


def first_steps(rank: int, size: int, names: list[str]) -> list[tuple[float, float, float]]:
    """Of each contender: its error, and its loss before and after three steps."""
    setting = Setting.of(Group.of(dist.group.WORLD), torch.device("cpu"), TINY, LAYERS)
    expected = CONTENDERS["torch bf16"](setting).step()[1:]
    found = []
    for name in names:
        trainer = CONTENDERS[name](setting)
        before, *results = trainer.step()
        for _ in range(3):
            after = trainer.step()[0]
        found.append((gap(name, trainer, results, expected, LAYERS), float(before), float(after)))
    return found


def other_weights(rank: int, size: int) -> None:
    setting = Setting.of(Group.of(dist.group.WORLD), torch.device("cpu"), TINY, LAYERS)
    expected = CONTENDERS["torch bf16"](setting).step()[1:]
    other = setting._replace(weights=[2 * weight for weight in setting.weights])
    trainer = CONTENDERS["minifloat current"](other)
    gap("minifloat current", trainer, trainer.step()[1:], expected, LAYERS)


def test_contenders(worker_pool: Pools) -> None:
    names = ["torch bf16", "minifloat current", "minifloat block, FP8 parameters"]
    ranks = worker_pool(2).run(first_steps, names)
    for name, *found in zip(names, *ranks, strict=True):
        for error, before, after in found:
            assert error == 0 if name == "torch bf16" else 0.01 < error < 0.2, name
            assert after < before, name
    assert ranks[0] != ranks[1]  # each has data of its own


def test_a_wrong_contender_is_refused(worker_pool: Pools) -> None:
    with pytest.raises(AssertionError, match="minifloat current: output or dX is"):
        worker_pool(2).run(other_weights)
