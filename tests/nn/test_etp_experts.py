"""Experts whose rows are sharded over ranks with other data, beside unsharded ones, bit for bit."""

from __future__ import annotations

from itertools import product

import pytest

from tests.helpers.distributed_pool import Pools
from tests.helpers.etp_experts import Case, beside
from tests.helpers.recipes import NAMED

RECIPES = (None, *NAMED)
SINGLE = {"single_grouped_weight": True}


def assert_cases(pools: Pools, size: int, *cases: Case, steps: int = 3) -> None:
    for case in cases:
        pools(size).run(beside, case, steps)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("kind", ["linear", "mlp"])
def test_numbers(worker_pool: Pools, kind: str, size: int, recipe: str | None) -> None:
    """Rows of blocks that straddle ranks, uneven shards and empty ones; one parameter and several."""
    widths = (200, 1) if kind == "linear" else (72,)
    for width, options in product(widths, ({"bias": True}, SINGLE)):
        assert_cases(worker_pool, size, Case(kind, width, recipe, options))
