"""``fully_shard`` in lockstep with unsharded replicas: every recipe and module, every way to shard and to step."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest

from tests.helpers.distributed_pool import Pools
from tests.helpers.fsdp_cases import RECIPES, Case, lockstep, quantized_lockstep


def others_slow(cases: Iterable[tuple[Any, ...]], *kept: tuple[Any, ...]) -> list[Any]:
    """All cases, of which those that are not ``kept`` are slow: tests of the matrix have the like of them."""
    return [case if case in kept else pytest.param(*case, marks=pytest.mark.slow) for case in cases]


@pytest.mark.parametrize(
    ("size", "recipe"),
    others_slow(product((2, 3), RECIPES), (2, "delayed"), *product((3,), RECIPES)),
)
def test_unaligned_and_empty_shards(worker_pool: Pools, size: int, recipe: str) -> None:
    assert worker_pool(size).run(lockstep, Case("linears", recipe), 3) == [""] * size


@pytest.mark.parametrize(
    ("model", "units", "recipe"),
    others_slow(
        [(*each, recipe) for each in (("fused", "nested"), ("transformer", "each")) for recipe in RECIPES],
        ("fused", "nested", "mxfp8"),
        ("fused", "nested", "current"),
        ("transformer", "each", "nvfp4"),
    ),
)
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
        Case("transformer", "nvfp4", "root", options=("finish", "evaluate")),
        Case("transformer", "current", options=("finish",)),
        Case("fused", "delayed", reshard=False, dtype="bfloat16", options=("finish", "accumulate")),
        Case("experts", "current", options=("finish",)),
        Case("one parameter", "current", "nested", options=("finish", "keep")),
    ],
    ids=lambda case: "-".join(str(value) for value in (*case[:3], case.reshard, case.dtype, *case.options)),
)
def test_ways_to_step(worker_pool: Pools, case: Case) -> None:
    assert worker_pool(2).run(lockstep, case, 2) == [""] * 2


@pytest.mark.parametrize(
    "case", [Case("fused", "mxfp8", options=("finish",)), Case("transformer", "current", options=("finish",))]
)
def test_quantized_parameters_stay_codes_without_a_recipe(worker_pool: Pools, case: Case) -> None:
    assert worker_pool(2).run(quantized_lockstep, case, 2) == [""] * 2
