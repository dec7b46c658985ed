"""Tensor- and sequence-parallel modules: their numbers beside the oracle's, what they keep, how they start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from minifloat.recipe import DelayedScaling, Recipe, named
from tests.helpers.distributed_pool import Pools
from tests.helpers.fused_model import assert_same
from tests.helpers.recipes import LINEAR_RECIPES, NAMED
from tests.helpers.sample import each_once, each_pair, each_twice
from tests.helpers.tensor_parallel_cases import KINDS, Case, Results, expected, gathered, linears_of, run_case
from tests.helpers.tensor_parallel_oracle import in_rank_order, order_bound

pytestmark = pytest.mark.usefixtures("one_thread")  # as the ranks have

BF16, FP32 = torch.bfloat16, torch.float32
NAMED_OR_NONE: dict[str, Recipe | None] = (
    {"none": None} | NAMED | {name: named(name) for name in ("rowwise", "mxfp4", "mxfp6")}
)
RECIPES: dict[str, Recipe] = {name: recipe for name, recipe in LINEAR_RECIPES.items() if name not in NAMED_OR_NONE} | {
    "mxfp8 dequantized": replace(named("mxfp8"), backward_override="dequantized"),  # type: ignore[type-var]
    "block x 2d dequantized": replace(LINEAR_RECIPES["block x 2d"], backward_override="dequantized"),  # type: ignore[type-var]
    "nvfp4 high precision": replace(named("nvfp4"), backward_override="high_precision"),  # type: ignore[type-var]
}
ROWS = (
    *((1, 1), (7, 7), (129, 129), (130, 3), (0, 5)),
    *[pytest.param(rows, marks=pytest.mark.slow) for rows in ((127, 127), (128, 128))],
)
SEQUENCE = pytest.mark.parametrize("sequence_parallel", [True, False], ids=["sequence", "replicated"])


def as_matrices(results: Results) -> Results:
    """The activations among them flattened, as the oracle has them."""
    return {name: x.reshape(-1, x.shape[-1]) if name in ("x", "y") else x for name, x in results.items()}


def assert_case(pools: Pools, case: Case) -> None:
    """Every rank has the oracle's bits, in results and in what was gathered."""
    size = len(case.rows)
    steps, model = expected(case)
    for rank, (results, seen) in enumerate(pools(size).run(run_case, case)):
        for found, wanted in zip(results, (each[rank] for each in steps), strict=True):
            assert_same(as_matrices(found), wanted)
        kind = "input" if case.gathers_input else "grad_output"
        linear = linears_of(model)[0]
        if case.sequence_parallel and kind in linear.gathered and linear.plan.backward_override is None:
            wanted_operands = gathered(linear, kind)
            for found_operand, wanted_operand in zip((seen[0], seen[-1]), wanted_operands, strict=True):
                assert found_operand[3:6] == wanted_operand[3:6]  # format, dim and shape
                for mine, theirs in zip(found_operand.tensors, wanted_operand.tensors, strict=True):
                    assert (mine is None) == (theirs is None)
                    assert mine is None or torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))


def scales_of(recipe: Recipe | None) -> tuple[float, ...]:
    """Delayed scaling takes several steps to have scales of its own."""
    return (1.0, 8.0, 0.25, 3.0, 1.0) if isinstance(recipe, DelayedScaling) else (1.0,)


@each_twice
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", ROWS, ids=str)
@pytest.mark.parametrize("recipe", NAMED_OR_NONE.values(), ids=NAMED_OR_NONE.keys())
def test_numbers(worker_pool: Pools, recipe: Recipe | None, rows: tuple[int, ...], kind: str) -> None:
    """Two ranks add in one order only: outputs, gradients and gathered operands are the oracle's, to the bit.

    Without sequence parallelism, which gathers nothing, one number of rows will do.
    """
    scales = scales_of(recipe)[: 2 if sum(rows) > 20 else 5]
    assert_case(worker_pool, Case(kind, rows, True, recipe, scales))
    if rows == (129, 129):
        assert_case(worker_pool, Case(kind, rows, False, recipe, scales))


@pytest.mark.slow
@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [(129, 129), (1000, 1000), (1003, 997)], ids=str)
@pytest.mark.parametrize("recipe", NAMED_OR_NONE.values(), ids=NAMED_OR_NONE.keys())
def test_numbers_of_many_rows(
    worker_pool: Pools, recipe: Recipe | None, rows: tuple[int, ...], kind: str, sequence_parallel: bool
) -> None:
    """The same; delayed scaling over five steps."""
    assert_case(worker_pool, Case(kind, rows, sequence_parallel, recipe, scales_of(recipe)))


@each_once
@pytest.mark.parametrize(("kind", "sequence_parallel"), [("column", True), ("row", True), ("mlp", False)])
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES.keys())
def test_numbers_of_more_recipes(worker_pool: Pools, recipe: Recipe, kind: str, sequence_parallel: bool) -> None:
    """The same for every kind of format; blocks of 128 end inside of each rank's rows, and of its columns."""
    assert_case(worker_pool, Case(kind, (150, 23), sequence_parallel, recipe, scales_of(recipe)[:2], K=136))


@each_pair
@SEQUENCE
@pytest.mark.parametrize("kind", ["column", "row", "mlp"])
@pytest.mark.parametrize(
    ("rows", "recipe"),
    [((9, 0, 40), recipe) for recipe in NAMED_OR_NONE.values()]
    + [((17, 3, 30, 6), NAMED[name]) for name in ("block", "nvfp4")],
    ids=[*NAMED_OR_NONE, "four block", "four nvfp4"],
)
def test_more_ranks(
    worker_pool: Pools, rows: tuple[int, ...], recipe: Recipe | None, kind: str, sequence_parallel: bool
) -> None:
    """What is summed over three or four ranks may differ by the order of additions, all else is exact.

    That a sum of dN differs shows in what the norm makes of it, to which no simple bound applies.
    """
    case = Case(kind, rows, sequence_parallel, recipe, dtype=FP32, K=48, N=72, F=48)
    sums: list[Sequence[Tensor]] = []

    def add(parts: Sequence[Tensor]) -> Tensor:
        sums.append(parts)
        return in_rank_order(parts)

    steps, _ = expected(case, add)
    names = {"column": ["x"], "row": ["y", "bias"], "mlp": ["y", "fc2.bias"]}[kind]
    names = names if sequence_parallel else names[:1]
    bounds = {name: order_bound(parts) for name, parts in zip(names, sums, strict=False)}
    largest = float(torch.cat([each["x"] for each in steps[0]]).abs().max())
    for rank, (results, _) in enumerate(worker_pool(len(rows)).run(run_case, case)):
        found, wanted = as_matrices(results[0]), steps[0][rank]
        own = slice(sum(rows[:rank]), sum(rows[: rank + 1]))
        for name, value in wanted.items():
            if name in bounds:
                bound = bounds[name][own] if sequence_parallel and name in ("x", "y") else bounds[name]
                limit = bound + 2**-23 * value.abs()  # a bias is added, and rounded, after the sum
                assert ((found[name].double() - value.double()).abs() <= limit).all(), name
            elif kind == "mlp" and (name == "x" or "norm" in name):
                torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5 * largest)
            else:
                assert_same({name: found[name]}, {name: value})
