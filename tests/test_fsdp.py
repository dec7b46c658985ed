"""``fully_shard`` in lockstep with unsharded replicas: every recipe and module, every way to shard and to step."""

from __future__ import annotations

import pytest

from tests.conftest import Pools
from tests.fsdp_cases import Case, lockstep

RECIPES = ("current", "delayed", "block", "mxfp8", "nvfp4")


@pytest.mark.parametrize(
    ("size", "recipe"), [(2, "delayed"), (2, "mxfp8"), (2, "nvfp4"), *((3, recipe) for recipe in RECIPES)]
)
def test_unaligned_and_empty_shards(worker_pool: Pools, size: int, recipe: str) -> None:
    assert worker_pool(size).run(lockstep, Case("linears", recipe), 3) == [""] * size


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(("model", "units"), [("fused", "nested"), ("transformer", "each")])
def test_modules(worker_pool: Pools, model: str, units: str, recipe: str) -> None:
    assert worker_pool(2).run(lockstep, Case(model, recipe, units), 2) == [""] * 2


@pytest.mark.parametrize(
    "case",
    [
        Case("linears", "mxfp8", reshard=True, options=("evaluate",)),
        Case("linears", "mxfp8", reshard=False, options=("evaluate", "accumulate")),
        Case("fused", "mxfp8", "root", options=("evaluate",)),
        Case("linears", "delayed", options=("autocast", "accumulate")),
        Case("fused", "mxfp8", options=("keep",)),
        Case("fused", "block", reshard=True, options=("keep", "frozen")),
        Case("fused", "mxfp8", dtype="bfloat16"),
        Case("fused", "mxfp8", options=("save_on_cpu",)),
        Case("transformer", "mxfp8", options=("checkpoint",)),
        Case("transformer", "delayed", "nested", options=("checkpoint", "autocast")),
    ],
    ids=lambda case: "-".join(str(value) for value in (*case[:3], case.reshard, case.dtype, *case.options)),
)
def test_ways_to_step(worker_pool: Pools, case: Case) -> None:
    assert worker_pool(2).run(lockstep, case, 2) == [""] * 2
