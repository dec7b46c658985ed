"""``benchmarks/ep_steps.py``: meshes of 2 x 2 ranks have the losses of one process that has all of the data."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from benchmarks import ep_steps
from minifloat.recipe import OwnRecipe, named
from tests.helpers.distributed_pool import Pools

Far = tuple[float, float]


def train(rank: int, size: int, kind: str, recipe: OwnRecipe, steps: int) -> tuple[Far, Far]:
    """How far the mesh is from one process, and runs of one process from each other: all steps, the first 20."""
    runs: list[list[float]] = [[]] * size
    dist.all_gather_object(runs, ep_steps.one_process(recipe, kind != "tp x etp", steps, ep_steps.RUNS[rank]))
    losses = ep_steps.on_mesh(kind, recipe, steps)
    early, of_early = losses[: ep_steps.EARLY], [run[: ep_steps.EARLY] for run in runs]
    everything = ep_steps.distance(losses, runs[0]), ep_steps.bound(runs)
    return everything, (ep_steps.distance(early, of_early[0]), ep_steps.bound(of_early))


@pytest.mark.parametrize("kind", ep_steps.MESHES)
def test_losses_in_fp32(worker_pool: Pools, kind: str) -> None:
    """But for the order of sums."""
    for (apart, _), _ in worker_pool(4).run(train, kind, "none", 6):
        assert 0 < apart < 1e-5


@pytest.mark.parametrize(
    ("kind", "recipe", "steps"),
    [
        ("ep x eetp", "nvfp4", 4),
        ("ep x etp", "current", 6),
        pytest.param("ep x eetp", "current", 200, marks=pytest.mark.slow),
        pytest.param("ep x etp", "current", 200, marks=pytest.mark.slow),
    ],
)
def test_losses_within_the_bound(worker_pool: Pools, kind: str, recipe: str, steps: int) -> None:
    """Experts' gradients of twice or half the size would be 4 times the bound of the first steps, or more."""
    for everything, early in worker_pool(4).run(train, kind, named(recipe), steps, timeout=600):
        assert everything[0] <= 1.5 * everything[1]
        assert early[0] <= 1.5 * early[1]
