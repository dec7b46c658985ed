"""Calls of sharded modules: what they free and when, what runs beside what, groups, compilation, and bad input."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import minifloat
from minifloat.autocast import autocast
from minifloat.comm.collectives import Pending
from minifloat.functional import gemm
from minifloat.functional.tensor_parallel import Gathered, TensorParallel
from minifloat.nn import LayerNormLinear, LayerNormMLP, Linear
from minifloat.operand import Operand
from minifloat.recipe import DelayedScaling, Recipe, named
from tests.helpers.distributed_pool import Pools, on_ranks
from tests.helpers.fused_model import assert_same, run
from tests.helpers.recipes import NAMED
from tests.helpers.sample import each_twice
from tests.helpers.tensor_parallel_cases import KINDS, Case, Results

BF16, FP32 = torch.bfloat16, torch.float32
EACH = pytest.mark.parametrize("recipe", [None, *NAMED.values()], ids=["none", *NAMED])


# ---- What is freed, and what runs beside what -----------------------------------------------------------------------


class Watch:
    """Follows gathered operands: ``events`` in their order, and which of them are alive when something happens."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.gathered: list[StorageWeakRef] = []

    def assert_dead(self, *but: Tensor) -> None:
        """All are, ``but`` those in this memory. gloo's thread may let go of what it has received a little later."""
        read = {StorageWeakRef(x.untyped_storage()).cdata for x in but}
        deadline = time.monotonic() + 5
        while alive := {ref.cdata for ref in self.gathered if not ref.expired()} - read:
            assert time.monotonic() < deadline, (self.events, len(alive))
            time.sleep(0.001)

    @contextmanager
    def watching(self) -> Iterator[Watch]:
        along, check = Gathered.along, gemm.check_operands
        start_sum = TensorParallel.start_sum
        gather = TensorParallel.gather

        def watched_along(gathered: Gathered, dim: int) -> Operand:
            operand = along(gathered, dim)
            self.events.append("gathered")
            self.gathered.append(StorageWeakRef(operand.codes.untyped_storage()))
            return operand

        def watched_gather(*args: Any, **kwargs: Any) -> Gathered:
            self.events.append("gather")
            return gather(*args, **kwargs)

        def watched_sum(parallel: TensorParallel, x: Tensor) -> Pending[Tensor]:
            self.events.append("sum")
            pending = start_sum(parallel, x)

            def finish() -> Tensor:
                self.events.append("summed")
                self.assert_dead()
                return pending.wait()

            return Pending([], finish)

        def watched_gemm(name: str, *operands: Operand) -> Any:
            self.assert_dead(*(operand.codes for operand in operands))
            self.events.append(name)
            return check(name, *operands)

        with (
            mock.patch.object(Gathered, "along", watched_along),
            mock.patch.object(TensorParallel, "gather", watched_gather),
            mock.patch.object(TensorParallel, "start_sum", watched_sum),
            mock.patch.object(gemm, "check_operands", watched_gemm),
        ):
            yield self


def _watched(rank: int, size: int, case: Case) -> tuple[list[str], list[str]]:
    """The events of a forward and of its backward."""
    module, watch = case.make(dist.group.WORLD), Watch()
    xs, dys = case.shares(*case.batch(0))
    x = xs[rank].requires_grad_()
    with watch.watching():
        with autocast(enabled=case.recipe is not None, recipe=case.recipe):
            y = module(x)
        assert watch.gathered or case.kind == "row"
        watch.assert_dead()  # the graph and y are alive
        forward, watch.events = watch.events, []
        y.backward(dys[rank])
        watch.assert_dead()
        return forward, watch.events


@each_twice
@EACH
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_gathered_is_freed_after_its_last_gemm(worker_pool: Pools, kind: str, recipe: Recipe | None) -> None:
    """When a product starts, nothing gathered is alive but what it reads; when a sum is waited for, nothing is.

    And the order of things: transfers start before the products that they are not for, and end after them.
    """
    case = Case(kind, (64, 64), True, recipe)
    column = ["gather", "gathered", "fprop"], ["gather", "dgrad", "sum", "gathered", "wgrad", "summed"]
    rows = ["fprop", "sum", "summed"], ["gather", "gathered", "dgrad", "gathered", "wgrad"]
    mlp = column[0] + rows[0], rows[1] + column[1]
    expected = {"column": column, "norm": column, "row": rows}.get(kind, mlp)
    for events in worker_pool(2).run(_watched, case):
        assert events == expected


# ---- Groups ---------------------------------------------------------------------------------------------------------


def _two_groups(rank: int, size: int, kind: str, recipe: Recipe) -> None:
    """A grid of four ranks: its rows, then its columns."""
    grids = [[dist.new_group(ranks) for ranks in each] for each in ([(0, 1), (2, 3)], [(0, 2), (1, 3)])]
    mine = [grids[0][rank // 2], grids[1][rank % 2]]
    case = Case(kind, (20, 13), True, recipe)
    module = case.make(mine[0])

    def forward(number: int) -> tuple[Tensor, Tensor, Tensor]:
        module.set_tensor_parallel_group(mine[number])  # type: ignore[operator]
        place = dist.get_rank(mine[number])
        xs, dys = replace(case, scales=(1.0, 64.0)).shares(*replace(case, scales=(1.0, 64.0)).batch(number))
        x = xs[place].detach().requires_grad_()
        with autocast(recipe=recipe):
            return x, module(x, rows_per_rank=case.rows), dys[place]

    def backward(x: Tensor, y: Tensor, dy: Tensor) -> Results:
        module.zero_grad()
        torch.manual_seed(1)
        y.backward(dy)
        assert x.grad is not None
        return {"y": y.detach(), "x": x.grad} | {name: p.grad.clone() for name, p in module.named_parameters()}  # type: ignore[union-attr]

    alone = [backward(*forward(number)) for number in range(2)]
    both = [forward(number) for number in range(2)]
    for number in (0, 1):
        assert_same(backward(*both[number]), alone[number])
    for group in {group for grid in grids for group in grid if group is not dist.GroupMember.NON_GROUP_MEMBER}:
        dist.destroy_process_group(group)


@each_twice
@pytest.mark.parametrize("recipe", ["current", "block", "nvfp4"])
@pytest.mark.parametrize("kind", ["column", "row", "norm", "mlp"])
def test_two_groups(worker_pool: Pools, kind: str, recipe: str) -> None:
    """Two forwards over two groups, then two backwards, give what each group gives alone."""
    worker_pool(4).run(_two_groups, kind, named(recipe))


def _checkpointed_groups(rank: int, size: int, way: str, recipe: Recipe) -> None:
    """A forward over rows of a grid, recomputed after the columns have taken over, beside one that keeps everything."""
    grids = [[dist.new_group(ranks) for ranks in each] for each in ([(0, 1), (2, 3)], [(0, 2), (1, 3)])]
    mine, place = [grids[0][rank // 2], grids[1][rank % 2]], rank % 2
    own = way in ("plain", "reentrant")  # which do not bring autocast back
    case = Case("mlp", (20, 13), True, recipe, options={"recipe": recipe} if own else {})
    kept, again = case.make(mine[0]), case.make(mine[0])
    again.checkpoint = way == "option"  # type: ignore[assignment]
    xs, dys = case.shares(*case.batch(0))

    def step(module: Any, call: Callable[..., Tensor]) -> Results:
        x = xs[place].detach().requires_grad_()
        with nullcontext() if own else autocast(recipe=recipe):
            y = call(partial(module, rows_per_rank=case.rows), x)
        module.set_tensor_parallel_group(mine[1])
        y.backward(dys[place])
        assert x.grad is not None
        return {"y": y.detach(), "x": x.grad} | {name: p.grad for name, p in module.named_parameters()}

    def uncheckpointed(function: Callable[..., Tensor], x: Tensor) -> Tensor:
        return function(x)

    ways: dict[str, Callable[..., Tensor]] = {
        "option": uncheckpointed,
        "minifloat": minifloat.checkpoint,
        "plain": partial(torch_checkpoint, use_reentrant=False),
        "reentrant": partial(torch_checkpoint, use_reentrant=True),
    }
    if own:
        with pytest.raises(RuntimeError, match=r"set_tensor_parallel_group was called.*use minifloat\.checkpoint"):
            step(again, ways[way])
    else:
        assert_same(step(again, ways[way]), step(kept, uncheckpointed))
        assert_same(dict(again.named_buffers()), dict(kept.named_buffers()))
    for group in {group for grid in grids for group in grid if group is not dist.GroupMember.NON_GROUP_MEMBER}:
        dist.destroy_process_group(group)


@pytest.mark.parametrize(
    ("way", "recipe"),
    [("option", "current"), ("minifloat", "delayed"), ("plain", "current"), ("reentrant", "current")],
)
def test_recomputation_over_the_group_of_the_forward(worker_pool: Pools, way: str, recipe: str) -> None:
    """Another group that was set since does not matter, or raises in PyTorch's own checkpoint."""
    worker_pool(4).run(_checkpointed_groups, way, named(recipe))


@on_ranks(2)
def test_mesh(rank: int, size: int) -> None:
    """A dim of a device mesh will do for a group; one of a single rank is no parallelism."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    layer = Linear(40, 72, parallel_mode="column", sequence_parallel=True, tp_mesh=mesh["tp"], tp_size=2)
    assert layer(torch.ones(3, 40)).shape == (6, 36)
    alone = Linear(40, 72, parallel_mode="column", sequence_parallel=True, tp_mesh=mesh["dp"])
    assert alone(torch.ones(3, 40), rows_per_rank=[3]).shape == (3, 72)  # a group of one
    with pytest.raises(ValueError, match="one dim of a device mesh"):
        Linear(40, 72, parallel_mode="column", tp_mesh=mesh)


# ---- Compilation ----------------------------------------------------------------------------------------------------


def _compiled(rank: int, size: int, recipe: Recipe, rows: tuple[int, int]) -> None:
    """A column-parallel linear and the row-parallel one that reads it, as one graph."""
    torch.manual_seed(5)
    ranks = {"sequence_parallel": True, "tp_group": dist.group.WORLD}
    layers = [Linear(40, 72, parallel_mode="column", **ranks), Linear(72, 40, parallel_mode="row", **ranks)]  # type: ignore[arg-type]

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = layers

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x, rows_per_rank=rows), rows_per_rank=rows)

    pair = Pair()
    x, dy = (torch.randn(sum(rows), 40).split(list(rows))[rank] for _ in range(2))
    expected = run(copy.deepcopy(pair), x, dy, recipe)
    torch.compiler.reset()
    found = run(torch.compile(pair, fullgraph=True, backend="aot_eager"), x, dy, recipe)  # type: ignore[arg-type]
    assert_same({name.removeprefix("_orig_mod."): value for name, value in found.items()}, expected)


@pytest.mark.parametrize(
    ("recipe", "rows"), [("block", (20, 13)), pytest.param("current", (20, 20), marks=pytest.mark.slow)]
)
def test_compiled(worker_pool: Pools, recipe: str, rows: tuple[int, int]) -> None:
    """One graph without breaks, and the bits of eager mode."""
    worker_pool(2).run(_compiled, named(recipe), rows)


# ---- Bad input ------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_bad_input(rank: int, size: int) -> None:
    """Errors name the layer, the numbers and the way out, before anything is sent."""
    world, one = dist.group.WORLD, [dist.new_group([0]), dist.new_group([1])][rank]
    column: dict[str, Any] = {"parallel_mode": "column", "tp_group": world}
    wrong: list[tuple[str, Callable[[], object]]] = [
        ("Linear 'q': out_features=7 does not divide by tp_size=2", lambda: Linear(4, 7, name="q", **column)),
        ("in_features=5 does not divide", lambda: Linear(5, 8, parallel_mode="row", tp_group=world)),
        (r"fused_parts\[0\]=3 does not divide", lambda: Linear(4, 8, fused_parts=[3, 5], **column)),
        ("fused_parts .* must add up to out_features=8", lambda: Linear(4, 8, fused_parts=[2, 2], **column)),
        ("query=5 does not divide", lambda: Linear(4, 8, parameters_split={"query": 5, "key": 3}, **column)),
        ("query=5 does not", lambda: LayerNormLinear(4, 8, parameters_split={"query": 5, "key": 3}, **column)),
        ("fc1.*fused_parts.*=3 does not", lambda: LayerNormMLP(4, 3, set_parallel_mode=True, tp_group=world, name="m")),
        ("parallel_mode is 'both'", lambda: Linear(4, 8, parallel_mode="both")),  # type: ignore[arg-type]
        ("sequence_parallel=True needs parallel_mode", lambda: Linear(4, 8, sequence_parallel=True, tp_group=world)),
        ("tp_size=2 and no tp_group", lambda: Linear(4, 8, parallel_mode="column", tp_size=2)),
        ("tp_size=3 and a group of 2", lambda: Linear(4, 8, tp_size=3, **column)),
        ("parallel_mode='row' would split", lambda: LayerNormLinear(4, 8, parallel_mode="row", tp_group=world)),
        ("not for a group of 1 ranks", lambda: Linear(4, 8, **column).set_tensor_parallel_group(one)),
        ("for sequence_parallel=True only", lambda: Linear(4, 8, **column)(torch.ones(2, 4), rows_per_rank=[2, 4])),
        ("no recipe that would compute with both", lambda: Linear(4, 8, **column)(torch.ones(2, 4, dtype=BF16))),
    ]
    sharded = Linear(4, 8, name="s", sequence_parallel=True, **column)
    row = Linear(4, 8, sequence_parallel=True, parallel_mode="row", tp_group=world)
    wrong += [
        (r"'s': rows_per_rank=.* does not fit X \(2, 4\)", lambda: sharded(torch.ones(2, 4), rows_per_rank=[1, 1])),
        (r"rows_per_rank=\[2\] does not fit", lambda: sharded(torch.ones(2, 4), rows_per_rank=[2])),
        ("give it a dim of rows", lambda: sharded(torch.ones(4))),
        ("3 rows do not divide by tp_size=2; say", lambda: row(torch.ones(3, 2))),
        (r"rows_per_rank=\[1, 1\] does not fit X \(3, 2\)", lambda: row(torch.ones(3, 2), rows_per_rank=[1, 1])),
        ("in_features=2", lambda: row(torch.ones(4, 4))),
    ]  # fmt: skip
    for message, call in wrong:
        with pytest.raises(ValueError, match=message):
            call()

    def under(recipe: Recipe, module: nn.Module, group: Any = None) -> None:
        with autocast(recipe=recipe, amax_reduction_group=group):
            module(torch.ones(2, 4))

    norm = LayerNormLinear(4, 8, name="n", sequence_parallel=True, **column)
    mlp = LayerNormMLP(4, 8, name="m", set_parallel_mode=True, sequence_parallel=True, tp_group=world)
    for module, name in ((sharded, "s"), (norm, "n"), (mlp, "m.fc1")):
        with pytest.raises(ValueError, match=f"Linear '{name}'.*reduce_amax=False"):
            under(DelayedScaling(reduce_amax=False), module)
        with pytest.raises(ValueError, match=rf"Linear '{name}'.*leaves out ranks \[{1 - rank}\]"):
            under(DelayedScaling(), module, one)
    under(DelayedScaling(reduce_amax=False), Linear(4, 8, **column))  # gathers nothing
    under(DelayedScaling(), sharded, dist.new_group([0, 1]))
