"""Products that gather or sum as they go: which of them do, and that they are the products that handles give.

PyTorch has these operations on GPUs only. Here stand-ins take their place behind the same schemas, over gloo: they
demand of their arguments what the GPU's demand, multiply what was gathered at once, and sum in fp32.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache, partial
from typing import Any, get_args
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from minifloat import capability
from minifloat.comm import symmetric_memory
from minifloat.comm.group import group_of_name
from minifloat.distributed import Group, ShardMap, parallelize, set_overlap
from minifloat.formats import IDENTITY, ROWWISE, Format
from minifloat.functional import count_gemms
from minifloat.functional.exchange import RowSequence
from minifloat.functional.linear_config import Overlap
from minifloat.nn import LayerNormMLP
from minifloat.operand import Operand
from minifloat.ops.matmul import native
from minifloat.recipe import DelayedScaling, Recipe, named
from tests.helpers.distributed_pool import Pools
from tests.helpers.fused_model import assert_same, run
from tests.helpers.tensor_parallel_cases import Case, Results

RECIPES: dict[str, Recipe | None] = {
    "none": None, "delayed": DelayedScaling(amax_history_len=3), "current": named("current"),
}  # fmt: skip
DEQUANTIZED = replace(named("current"), backward_override="dequantized")  # type: ignore[type-var]
FUSED = {"column": {"fprop"}, "norm": {"fprop"}, "row": {"fprop", "dgrad"}, "gated mlp": {"fprop", "dgrad"}}
PLAIN = capability.symmetric_memory
WHOLES: list[StorageWeakRef] = []  # what the stand-ins gathered

# ---- Stand-ins for PyTorch's operations -----------------------------------------------------------------------------


def gathered(shard: Tensor, group_name: str) -> Tensor:
    group = group_of_name(group_name)
    assert shard.is_contiguous() and shard.dim() == 2
    whole = torch.empty(group.size() * shard.shape[0], shard.shape[1], dtype=shard.dtype)
    dist.all_gather_into_tensor(whole.view(torch.uint8), shard.view(torch.uint8), group=group)
    WHOLES.append(StorageWeakRef(whole.untyped_storage()))
    return whole


def scattered(product: Tensor, group_name: str) -> Tensor:
    group = group_of_name(group_name)
    total = product.float()
    dist.all_reduce(total, group=group)
    return total.chunk(group.size())[group.rank()].to(product.dtype)


def scaled(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None, out: Any, fast: bool) -> Tensor:
    assert a.is_contiguous() and a.dtype.itemsize == b.dtype.itemsize == 1  # b is K-major where it is on a GPU
    assert b.shape[0] % 16 == b.shape[1] % 16 == 0 and scale_a.numel() == scale_b.numel() == 1
    assert bias is None or bias.dtype == out in (torch.bfloat16, torch.float16)
    return native.per_tensor(a, scale_a, b.t(), scale_b, out, bias, fast)


def all_gather_matmul(a: Tensor, bs: list[Tensor], dim: int, group_name: str, *, return_A: bool = True) -> Any:
    assert dim == 0 and return_A and all(a.dtype == b.dtype for b in bs)
    whole = gathered(a, group_name)
    return whole, [whole @ b for b in bs]


def all_gather_scaled_matmul(
    a: Tensor, bs: list[Tensor], a_scale: Tensor, b_scales: list[Tensor], dim: int, group_name: str,
    biases: list[Tensor | None], result_scales: list[Tensor | None], out_dtypes: list[Any], fast: list[bool],
) -> Any:  # fmt: skip
    from torch.distributed._symmetric_memory import _maybe_convert_scalar_types_to_dtypes as to_dtypes

    assert dim == 0 and result_scales == [None]
    whole = gathered(a, group_name)
    (out,) = to_dtypes(out_dtypes)
    return whole, [scaled(whole, bs[0], a_scale, b_scales[0], biases[0], out, fast[0])]


def matmul_reduce_scatter(a: Tensor, b: Tensor, op: str, dim: int, group_name: str) -> Tensor:
    assert (op, dim) == ("sum", 0) and a.dtype == b.dtype
    return scattered(a @ b, group_name)


def scaled_matmul_reduce_scatter(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, op: str, dim: int, dim_2d: int, group_name: str,
    output_shape: list[int], bias: Tensor | None = None, result_scale: Tensor | None = None, out_dtype: Any = None,
    use_fast_accum: bool = False,
) -> Tensor:  # fmt: skip
    assert (op, dim, dim_2d, bias, result_scale) == ("sum", 0, 0, None, None)
    assert output_shape == [a.shape[0], b.shape[1]]
    return scattered(scaled(a, b, a_scale, b_scale, None, out_dtype, use_fast_accum), group_name)


@cache
def _library() -> torch.library.Library:
    symmetric_memory.operations()  # else there is nothing to implement
    library = torch.library.Library("symm_mem", "IMPL")  # kept: with it goes what it registered
    for function in (all_gather_matmul, all_gather_scaled_matmul, matmul_reduce_scatter, scaled_matmul_reduce_scatter):
        library.impl(f"fused_{function.__name__}", function, "CPU")
    return library


def _as_on_gpus(a: Format, b: Format, device: torch.device) -> capability.Support:
    facts = mock.patch.multiple(capability, _device_facts=lambda device: ((9, 0), (13, 0)))
    with (
        facts,
        mock.patch.object(torch.cuda, "device_count", lambda: 2),
        mock.patch.object(torch.version, "cuda", "13"),
    ):
        return PLAIN(a, b, torch.device("cuda"))


@contextmanager
def stand_ins() -> Iterator[Counter[Any]]:
    """Operations for CPUs, which are GPUs that reach each other; counts the products that ran."""
    _library()
    with ExitStack() as held:
        held.enter_context(mock.patch.object(capability, "symmetric_memory", _as_on_gpus))
        held.enter_context(mock.patch.object(symmetric_memory, "reachable", lambda group: True))
        yield held.enter_context(count_gemms())


# ---- The numbers ----------------------------------------------------------------------------------------------------


def _steps(rank: int, size: int, case: Case, frozen: bool, overlap: str) -> tuple[list[Results], Counter[Any]]:
    module = case.make(dist.group.WORLD)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(not (frozen and "weight" in name))
    set_overlap(module, overlap)  # type: ignore[arg-type]
    results = []
    with stand_ins() as counted:
        for number in range(2):
            xs, dys = case.shares(*case.batch(number))
            extra = {} if case.rows_per_rank is None else {"rows_per_rank": case.rows_per_rank}
            results.append(run(module, xs[rank], dys[rank], case.recipe, **extra))
    return results, counted


def _both(rank: int, size: int, case: Case, frozen: bool = False) -> tuple[set[str], set[str]]:
    """The results are the same to the bit; which products went through symmetric memory, and which did not."""
    expected, _ = _steps(rank, size, case, frozen, "handles")
    found, counted = _steps(rank, size, case, frozen, "symmetric_memory")
    for got, wanted in zip(found, expected, strict=True):
        assert_same(got, wanted)
    deadline = time.monotonic() + 5  # gloo's thread may let go of what it has received a little later
    while not all(each.expired() for each in WHOLES):
        assert time.monotonic() < deadline, "something gathered outlives its products"
        time.sleep(0.001)
    WHOLES.clear()
    fused = {each.gemm for each in counted if each.backend == "symmetric memory"}
    return fused, {each.gemm for each in counted if each.backend != "symmetric memory"}


def case_of(kind: str, recipe: str, rows: tuple[int, ...] = (6, 6), **options: Any) -> Case:
    more = {"bias": False} if recipe == "none" else {}
    chosen = RECIPES[recipe] if recipe in RECIPES else named(recipe)
    sizes = {"K": 64, "N": 96, "F": 64} | {name: options.pop(name) for name in ("K", "N", "F") if name in options}
    return Case(kind, rows, recipe=chosen, scales=(1.0, 3.0), inner=(2,), options=more, **sizes, **options)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", FUSED)
def test_products_are_those_of_handles(worker_pool: Pools, kind: str, recipe: str) -> None:
    """To the bit where the products of parts are those of the whole, and the sum of two ranks is rounded once.

    In a column-parallel backward X and dX travel beside dgrad and wgrad.
    """
    for fused, others in worker_pool(2).run(_both, case_of(kind, recipe)):
        assert fused == FUSED[kind] and "wgrad" in others
        assert kind == "gated mlp" or not fused & others


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_sum_that_no_wgrad_hides_travels_during_dgrad(worker_pool: Pools, recipe: str) -> None:
    for fused, _ in worker_pool(2).run(_both, case_of("column", recipe), True):
        assert fused == {"fprop", "dgrad"}


@pytest.mark.parametrize("kind", ["column", "gated mlp"])
def test_a_backward_of_what_codes_stand_for(worker_pool: Pools, kind: str) -> None:
    """There wgrad reads X rowwise: it is gathered beside dgrad, not by a product."""
    case = replace(case_of(kind, "current"), recipe=DEQUANTIZED)
    for fused, _ in worker_pool(2).run(_both, case):
        assert "fprop" in fused


OTHERWISE: dict[str, tuple[Case, set[str]]] = {
    "ragged rows": (case_of("row", "current", (6, 3)), set()),
    "no rows": (case_of("column", "current", (0, 0)), set()),
    "blocks": (case_of("gated mlp", "block"), set()),
    "MXFP8": (case_of("row", "mxfp8"), set()),
    "no sequence parallelism": (case_of("row", "current", sequence_parallel=False), set()),
    "K is no multiple of 16": (case_of("column", "current", K=40), set()),
    # Known only when the weight is there, after the rows were not sent; dgrad's sum does not look at N.
    "N is no multiple of 16": (case_of("column", "current", N=80), set()),
    "a bias, which bf16 would round twice": (
        Case("column", (6, 6), scales=(1.0, 1.0), K=64, N=96, options={"bias": True}), set(),
    ),
    "a bias and an output in fp32": (case_of("column", "current", dtype=torch.float32), set()),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERWISE)
def test_all_else_has_handles(worker_pool: Pools, name: str) -> None:
    case, expected = OTHERWISE[name]
    for fused, others in worker_pool(2).run(_both, case):
        assert fused == expected and (others or name == "no rows")


# ---- The decision ---------------------------------------------------------------------------------------------------


def test_which_operands() -> None:
    cpu = torch.device("cpu")
    assert not capability.symmetric_memory(IDENTITY, IDENTITY, cpu)[0]
    taken = {name for name, a, b in capability.PAIRS if _as_on_gpus(a, b, cpu)[0]}
    assert taken == {"FP8 per tensor", "FP8 per tensor, E5M2 gradient"}
    assert _as_on_gpus(IDENTITY, IDENTITY, cpu)[0] and not _as_on_gpus(Format("e4m3"), IDENTITY, cpu)[0]
    assert not _as_on_gpus(Format("e5m2"), Format("e5m2"), cpu)[0]


def test_rows_of_the_table() -> None:
    def rows() -> list[capability.Row]:
        return [row for row in capability.table(torch.device("cpu")) if row.operation == "GEMM that communicates"]

    nowhere = "handles", "cpu: symmetric memory is that of several NVIDIA GPUs"
    assert rows() == [("GEMM that communicates", "all", *nowhere)]
    with mock.patch.object(capability, "symmetric_memory", _as_on_gpus):
        told = {row.backend: row.formats for row in rows()}
    assert told["symmetric memory"] == "bf16; FP8 per tensor; FP8 per tensor, E5M2 gradient"
    assert "MXFP8" in told["handles"]


def test_one_gpu_only() -> None:
    with (
        mock.patch.object(torch.cuda, "device_count", lambda: 1),
        mock.patch.object(capability, "choose", lambda *args: ("native", "")),
        mock.patch.object(capability, "kernels", lambda device: (True, "")),
    ):
        row = capability.table(torch.device("cuda"))[-1]
        assert row == ("GEMM that communicates", "all", "handles", "there is one GPU only")


PLACES = {
    "one host": ([("a", 0), ("a", 1)], True),
    "two hosts": ([("a", 0), ("b", 1)], False),
    "one GPU": ([("a", 0), ("a", 0)], False),
    "a GPU that is not visible here": ([("a", 0), ("a", 2)], False),
    "no peer access": ([("a", 1), ("a", 0), ("a", 3)], False),
}


@pytest.mark.parametrize("name", PLACES)
def test_reachable(name: str) -> None:
    places, expected = PLACES[name]

    def tell(found: list[Any], own: Any, group: Any) -> None:
        found[:] = [own] * len(places) if isinstance(own, bool) else places

    with (
        mock.patch.object(dist, "all_gather_object", tell),
        mock.patch.object(Group, "process_group", None),
        mock.patch.object(torch.cuda, "current_device", lambda: 0),
        mock.patch.object(torch.cuda, "device_count", lambda: max(2, len(places) + 1) if len(places) > 2 else 2),
        mock.patch.object(torch.cuda, "can_device_access_peer", lambda a, b: {a, b} != {0, 3}),
    ):
        assert symmetric_memory._find_reachable(Group("g", len(places), 0)) is expected


def test_compiled_graphs_have_functional_collectives() -> None:
    operand = Operand(torch.ones(8, 16), None, None, IDENTITY, ROWWISE, (8, 16), torch.float32)
    with stand_ins():
        assert symmetric_memory.carries(operand, ShardMap((8, 8)), Group("g", 2, 0))
        with mock.patch.object(torch.compiler, "is_compiling", lambda: True):
            assert not symmetric_memory.carries(operand, ShardMap((8, 8)), Group("g", 2, 0))


def test_set_overlap() -> None:
    group = Group("g", 2, 0)
    model = nn.ModuleList([nn.Identity(), nn.Identity(), nn.Identity()])
    model[0]._exchange, model[1]._exchange = RowSequence(group), "something else"  # type: ignore[assignment]
    set_overlap(model, "symmetric_memory")
    assert model[0]._exchange == RowSequence(group, "symmetric_memory")
    assert model[1]._exchange == "something else" and not hasattr(model[2], "_exchange")
    call = model[0]._exchange.of_call((8, 3), None, "layer")  # type: ignore[union-attr, operator]
    assert (call.overlap, call.lengths, call.shards) == ("symmetric_memory", (4, 4), ShardMap((4, 4)))
    for set_so in (set_overlap, partial(parallelize, mesh=Group())):
        with pytest.raises(ValueError, match="overlap is 'userbuffers'; 'handles' or 'symmetric_memory'"):
            set_so(model, overlap="userbuffers")  # type: ignore[arg-type]


def _parallelized(rank: int, size: int) -> tuple[list[str], list[Results]]:
    results: list[Results] = []
    for overlap in get_args(Overlap):
        torch.manual_seed(0)
        model = LayerNormMLP(64, 64, params_dtype=torch.bfloat16)
        parallelize(model, dist.group.WORLD, overlap=overlap)
        x, dy = torch.randn(2, 12, 64, dtype=torch.bfloat16).chunk(size, 1)[rank]
        with stand_ins() as counted:
            results.append(run(model, x, dy, named("current")))
    return sorted({each.gemm for each in counted if each.backend == "symmetric memory"}), results


def test_parallelize(worker_pool: Pools) -> None:
    for fused, (handles, found) in worker_pool(2).run(_parallelized):
        assert fused == ["dgrad", "fprop"]
        assert_same(found, handles)
