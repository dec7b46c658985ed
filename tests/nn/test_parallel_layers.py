"""Tensor- and sequence-parallel ``MultiheadAttention`` and ``TransformerLayer``: beside one process and the oracle."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from minifloat import MultiheadAttention, TransformerLayer
from minifloat.functional.exchange import LOCAL
from minifloat.recipe import DelayedScaling, Recipe
from tests.helpers.distributed_pool import Pools
from tests.helpers.fused_model import assert_same
from tests.helpers.recipes import NAMED
from tests.helpers.sample import each_once, each_pair
from tests.helpers.tensor_parallel_layers import (
    BATCH,
    FFN,
    HEADS,
    HIDDEN,
    Case,
    as_oracle,
    expected,
    put_together,
    run_case,
    step,
)

pytestmark = pytest.mark.usefixtures("one_thread")  # as the ranks have

LLAMA: dict[str, Any] = {"num_gqa_groups": 4, "normalization": "RMSNorm", "activation": "swiglu", "bias": False}
SEQUENCE = pytest.mark.parametrize("sequence_parallel", [True, False], ids=["sequence", "replicated"])
LENGTH = 7
BIAS = torch.randn(BATCH, HEADS, LENGTH, LENGTH, generator=torch.Generator().manual_seed(3))

VARIANTS: dict[str, Case] = {
    "layer": Case(),
    "llama": Case(options=LLAMA, rotary=True),
    "qk norm": Case(rotary=True, options={"qk_norm_type": "LayerNorm", "num_gqa_groups": 6}),
    "qk norm before": Case(rotary=True, options={"qk_norm_type": "RMSNorm", "qk_norm_before_rope": True}),
    "fused qkv": Case(options={"fuse_qkv_params": True, "num_gqa_groups": 6}),
    "after the norm": Case(options={"apply_residual_connection_post_layernorm": True}),
    "side by side": Case(options={"parallel_attention_mlp": True}),
    "computed again": Case(options={"checkpoint_mlp": True}, call={"checkpoint_core_attention": True}),
    "decoder": Case(encoder_rows=(5, 4), options={"layer_type": "decoder", "fuse_qkv_params": True}),
    "window": Case(options={"window_size": (2, 0), "softcap": 5.0}),
    "attention": Case("attention"),
    "bias apart": Case("attention", options={"return_bias": True, "fuse_qkv_params": True}),
    "norm given": Case("attention", options={"input_layernorm": True, "return_layernorm_output": True}),
    "cross": Case("attention", encoder_rows=(0, 9), options={"attention_type": "cross", "attn_mask_type": "no_mask"}),
    "packed": Case("attention", packed=True, rotary=True, options={"qkv_format": "thd"}),
    "biased": Case("attention", options={"attn_mask_type": "no_mask"}, call={"core_attention_bias": BIAS}),
    "masked": Case("attention", options={"attn_mask_type": "arbitrary"}, call={"attention_mask": BIAS > 1}),
    "width": Case("attention", options={"kv_channels": 6}),
}


def assert_as_one(pools: Pools, case: Case, tolerance: float = 2e-5) -> None:
    """In fp32, output and all gradients are those of the unsharded layer."""
    by_rank, cuts = zip(*pools(len(case.rows)).run(run_case, case), strict=True)
    x, dy, encoder = case.batch(0)
    wanted = step(case.make(), x, dy, encoder, None, **case.arguments(uneven=False))
    options = case.options
    if case.sequence_parallel and options.get("return_layernorm_output"):
        by_rank = tuple([each[0] | {"output norm": each[0].pop("output 1")}] for each in by_rank)
        wanted["output norm"] = wanted.pop("output 1")
    if case.sequence_parallel and options.get("return_bias"):
        wanted["proj.bias"] = wanted["proj.bias"] * len(case.rows)  # every rank asked for the gradient of ones
    found = put_together(case, [results[0] for results in by_rank], cuts[0])
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        error = float((found[name].double() - value.double()).abs().max())
        assert error <= tolerance * max(1.0, float(value.abs().max())), (name, error)


@each_once
@SEQUENCE
@pytest.mark.parametrize("name", VARIANTS)
def test_as_one_process(worker_pool: Pools, name: str, sequence_parallel: bool) -> None:
    assert_as_one(worker_pool, replace(VARIANTS[name], sequence_parallel=sequence_parallel))


@SEQUENCE
def test_norm_at_the_end(worker_pool: Pools, sequence_parallel: bool) -> None:
    """Its parameters get the gradients of the rows of all ranks."""
    assert_as_one(worker_pool, Case(sequence_parallel=sequence_parallel, options={"output_layernorm": True}))


@SEQUENCE
@pytest.mark.parametrize("rows", [(2, 3, 1), (0, 3, 2, 4), (1, 1, 1, 1)], ids=str)
def test_more_ranks(worker_pool: Pools, rows: tuple[int, ...], sequence_parallel: bool) -> None:
    options = {"num_gqa_groups": 12 if len(rows) == 3 else 4}
    assert_as_one(worker_pool, Case(rows=rows, sequence_parallel=sequence_parallel, options=options, rotary=True))


def test_batch_first(worker_pool: Pools) -> None:
    case = Case(sequence_parallel=False, batch_first=True, options=LLAMA | {"attn_input_format": "bshd"}, rotary=True)
    assert_as_one(worker_pool, case)


@each_pair
@SEQUENCE
@pytest.mark.parametrize("rows", [(3, 4), (64, 64), (65, 62), (0, 5)], ids=str)
@pytest.mark.parametrize("recipe", NAMED.values(), ids=NAMED.keys())
def test_numbers(worker_pool: Pools, recipe: Recipe, rows: tuple[int, ...], sequence_parallel: bool) -> None:
    """Two ranks add in one order only: outputs, gradients and delayed scaling's state are the oracle's, to the bit."""
    scales = (1.0, 8.0, 0.25, 3.0, 1.0) if isinstance(recipe, DelayedScaling) and sum(rows) < 20 else (1.0,)
    case = Case(
        rows=rows, sequence_parallel=sequence_parallel, recipe=recipe, scales=scales, dtype=torch.bfloat16,
        options=LLAMA | {"bias": True}, rotary=True,
    )  # fmt: skip
    assert_oracle(worker_pool, case)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [(1, 1), (7, 7), (127, 127), (128, 128), (129, 129), (1000, 1000)], ids=str)
@pytest.mark.parametrize("recipe", NAMED.values(), ids=NAMED.keys())
def test_numbers_of_more_rows(worker_pool: Pools, recipe: Recipe, rows: tuple[int, ...]) -> None:
    """The same."""
    test_numbers(worker_pool, recipe, rows, True)


@each_pair
@SEQUENCE
@pytest.mark.parametrize("options", [{"fuse_qkv_params": True}, {"qk_norm_type": "RMSNorm"}], ids=str)
@pytest.mark.parametrize("recipe", NAMED.values(), ids=NAMED.keys())
def test_attention_numbers(
    worker_pool: Pools, recipe: Recipe, options: dict[str, Any], sequence_parallel: bool
) -> None:
    options = options | {"input_layernorm": True, "num_gqa_groups": 6, "params_dtype": torch.bfloat16}
    case = Case("attention", (17, 16), sequence_parallel, recipe=recipe, dtype=torch.bfloat16, options=options)
    assert_oracle(worker_pool, case)


def assert_oracle(pools: Pools, case: Case) -> None:
    wanted = expected(case)
    for rank, (results, _) in enumerate(pools(len(case.rows)).run(run_case, case)):
        for found, of_ranks in zip(results, wanted, strict=True):
            assert_same(as_oracle(found), of_ranks[rank])


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("size", [2, 4])
def test_starts_as_one_process(worker_pool: Pools, size: int, fused: bool) -> None:
    case = Case(options=LLAMA | {"fuse_qkv_params": fused, "qk_norm_type": "RMSNorm"}, rows=(1,) * size)
    by_rank = worker_pool(size).run(_start, case)
    cuts = by_rank[0][1]
    assert {name.rsplit(".", 1)[0] for name in cuts} == {
        "self_attention.qkv.linear", "self_attention.proj", "layernorm_mlp.fc1", "layernorm_mlp.fc2"
    }  # fmt: skip
    found = put_together(case, [parameters for parameters, _ in by_rank], cuts)
    assert_same(found, dict(case.make().named_parameters()))


def _start(rank: int, size: int, case: Case) -> Any:
    parameters = dict(case.sharded().named_parameters())
    cuts = {name: p for name, p in parameters.items() if getattr(p, "tensor_model_parallel", False)}
    detached = {name: p.detach() for name, p in parameters.items()}
    return detached, {name: (p.partition_dim, p.partition_parts) for name, p in cuts.items()}


# ---- errors ----


@pytest.mark.parametrize(
    ("size", "options", "message"),
    [
        (2, {"num_attention_heads": 3}, r"3 query heads \(num_attention_heads\) do not divide by tp_size=2"),
        (2, {"num_gqa_groups": 3}, r"3 key and value heads \(num_gqa_groups\) do not divide by tp_size=2"),
        (2, {"qkv_format": "bshd", "sequence_parallel": True}, "the batch in qkv_format='bshd'.*'sbhd' or 'thd'"),
        (2, {"tp_size": 4}, "tp_size=4 and a group of 2 ranks"),
        (2, {"set_parallel_mode": False, "sequence_parallel": True}, "sequence_parallel=True needs"),
    ],
    ids=["heads", "groups", "batch first", "size", "mode"],
)
def test_refused(worker_pool: Pools, size: int, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        worker_pool(size).run(_make, options)


def _make(rank: int, size: int, options: dict[str, Any]) -> None:
    MultiheadAttention(**{"hidden_size": 24, "num_attention_heads": 6, "set_parallel_mode": True} | options,
                       tp_group=dist.group.WORLD)  # fmt: skip


def test_one_rank_is_unsharded() -> None:
    layer = TransformerLayer(HIDDEN, FFN, HEADS, set_parallel_mode=True, sequence_parallel=True)
    assert layer.self_attention._exchange == LOCAL and layer.self_attention.heads == HEADS
    assert layer(torch.randn(3, BATCH, HIDDEN)).shape == (3, BATCH, HIDDEN)


# ---- groups ----


@pytest.mark.parametrize("options", [LLAMA, {"layer_type": "decoder"}], ids=["encoder", "decoder"])
def test_one_dim_of_a_mesh(worker_pool: Pools, options: dict[str, Any]) -> None:
    """Two replicas of two ranks each: every pair computes what the first does; another group may take over."""
    case = Case(encoder_rows=(5, 4) if "layer_type" in options else None, options=options)
    plain = worker_pool(2).run(run_case, case)
    for rank, (of_mesh, of_group) in enumerate(worker_pool(4).run(_on_mesh, case)):
        assert_same(of_mesh, plain[rank % 2][0][0])
        assert_same(of_group, of_mesh)


def _on_mesh(rank: int, size: int, case: Case) -> list[dict[str, Tensor]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    layer = case.make(set_parallel_mode=True, sequence_parallel=True, tp_mesh=mesh["tp"])
    x, dy, encoder = case.batch(0)
    own = None if encoder is None else case.share(encoder, case.encoder_rows)[rank % 2]
    results = []
    for group in (mesh["tp"], mesh["tp"].get_group()):
        layer.set_tensor_parallel_group(group)
        given = (case.share(x)[rank % 2], case.share(dy)[rank % 2], own, None)
        results.append(step(layer, *given, **case.arguments(uneven=True)))
    return results
