"""``parallelize`` on meshes of ``dp``, ``etp`` and ``tp``, against one process that has all data in turn."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from minifloat import Linear
from minifloat.distributed import parallelize
from tests.helpers.distributed_pool import Pools
from tests.helpers.etp_cases import LLAMA, PLAN, Case, compare
from tests.helpers.etp_layers import compare_layers
from tests.helpers.etp_wrappers import (
    embeddings,
    made_on_meta,
    refuse_models,
    refuse_wrappers,
    sharded_rest,
    whole_weight,
)
from tests.helpers.recipes import NAMED

SUM = {"etp_reduction": "sum"}
EXPERTS: dict[str, Any] = {"moe": {"num_experts": 3, "top_k": 2}}
FP32 = {"dtype": torch.float32}
ETP, DP_ETP, ETP_TP = {"etp": 2}, {"dp": 2, "etp": 2}, {"etp": 2, "tp": 2}
CASES = {
    "etp": Case(ETP, arguments=SUM),
    "etp, current": Case(ETP, NAMED["current"], LLAMA | {"save_memory": True}),
    "etp, delayed": Case(ETP, NAMED["delayed"], {"save_memory": True}, SUM),
    "etp, block, no prefetch": Case(ETP, NAMED["block"], arguments={"prefetch": 0}),
    "etp, mxfp8, much prefetch": Case(ETP, NAMED["mxfp8"], LLAMA, {"prefetch": 3, "prefetch_bytes": 10**6}),
    "etp, checkpointed": Case(ETP, NAMED["current"], {"checkpoint_mlp": True, "fuse_qkv_params": True}),
    "etp, whole head": Case(ETP, NAMED["current"], arguments={"plan": {"head": "replicated"}}),
    "etp, quantized weights": Case(ETP, NAMED["mxfp8"], quantized=True),
    "etp, tied": Case(ETP, NAMED["current"], FP32 | {"tied": True}, steps=1, tolerance=1e-6),
    "etp, experts": Case(ETP, NAMED["current"], EXPERTS),
    "etp, eetp": Case({"etp": 2, "eetp": 2}, NAMED["current"], FP32 | EXPERTS, steps=1, tolerance=1e-6),
    "eetp, sum": Case({"eetp": 3}, None, FP32 | EXPERTS, SUM, steps=1, tolerance=1e-6),
    "uneven": Case({"etp": 3}, None, FP32 | LLAMA, steps=1),
    "uneven, current": Case({"etp": 3}, NAMED["current"], FP32, SUM, steps=1),
    "dp": Case({"dp": 2}, NAMED["current"]),
    "dp, etp": Case(DP_ETP, NAMED["current"], arguments=SUM),
    "dp, etp, delayed": Case(DP_ETP, NAMED["delayed"], LLAMA),
    "etp, tp": Case(ETP_TP, NAMED["block"], LLAMA),
    "etp, tp, delayed": Case(ETP_TP, NAMED["delayed"], arguments=SUM),
    "etp, tp, head of positions": Case(ETP_TP, NAMED["current"], LLAMA, {"plan": PLAN | {"head": "sequence"}}),
    "etp, tp, replicated": Case(ETP_TP, NAMED["current"], LLAMA, {"sequence_parallel": False}),
}


@pytest.mark.parametrize("name", CASES)
def test_is_one_process_with_all_data(worker_pool: Pools, name: str) -> None:
    """Outputs and all gradients of two steps: bit for bit where sums have one order, else within that of the orders."""
    case = CASES[name]
    for different in worker_pool(math.prod(case.dims.values())).run(compare, case):
        assert not different


@pytest.mark.parametrize("recipe", ["none", "current", "mxfp8"])
def test_options_of_layers(worker_pool: Pools, recipe: str) -> None:
    """Fused layers with each of their options, two microbatches: bit for bit."""
    for different in worker_pool(2).run(compare_layers, recipe):
        assert not different


@pytest.mark.parametrize("case", [embeddings, whole_weight])
def test_whole_weights(worker_pool: Pools, case: Callable[..., list[str]]) -> None:
    """Uneven rows; lookups and losses read what all ranks have."""
    for size in (2, 3):
        for different in worker_pool(size).run(case):
            assert not different


@pytest.mark.parametrize("dims", [{"etp": 3}, ETP_TP], ids=["etp", "etp, tp"])
def test_starts_on_meta_as_the_whole_model(worker_pool: Pools, dims: dict[str, int]) -> None:
    for different in worker_pool(math.prod(dims.values())).run(made_on_meta, dims):
        assert not different


def _reduced(rank: int, size: int) -> tuple[Tensor, ...]:
    """Gradients of rows and of a bias, fp32, reduced in bf16; and of this rank's data."""
    torch.manual_seed(1)
    model, alone = (nn.Sequential(Linear(8, 5, recipe="current")) for _ in range(2))
    alone.load_state_dict(model.state_dict())
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("etp",))
    with pytest.raises(ValueError, match=r"parallelize: reduce_dtype is torch\.int8"):
        parallelize(model, mesh, reduce_dtype=torch.int8)
    parallelize(model, mesh, reduce_dtype=torch.bfloat16)
    torch.manual_seed(2 + rank)
    x, dy = torch.randn(16, 8), torch.randn(16, 5)
    for each in (model, alone):
        each(x).backward(dy)
    own = [alone.get_parameter(name).grad for name in ("0.weight", "0.bias")]
    return *[p.grad for p in model.parameters()], *own  # type: ignore[return-value]


def test_reduce_dtype(worker_pool: Pools) -> None:
    (rows, bias, dw, db), (other_rows, other_bias, other_dw, other_db) = worker_pool(2).run(_reduced)

    def mean(one: Tensor, two: Tensor) -> Tensor:
        return ((one.bfloat16() + two.bfloat16()) / 2).float()

    assert torch.equal(torch.cat([rows, other_rows]), mean(dw, other_dw)) and rows.dtype == torch.float32
    assert torch.equal(bias, other_bias) and torch.equal(bias, mean(db, other_db))


def test_fsdp_shards_the_rest(worker_pool: Pools) -> None:
    for different in worker_pool(4).run(sharded_rest):
        assert not different


def test_wrappers_refuse_rows(worker_pool: Pools) -> None:
    """On all ranks, before anything waits."""
    for ddp, wrapped, frozen, block, root, loss, fsdp, experts in worker_pool(2).run(refuse_wrappers):
        assert "EtpEmbedding(26, 24): DistributedDataParallel" in ddp and "'dp' dim" in ddp
        assert "EtpEmbedding(26, 24): DistributedDataParallel" in wrapped
        assert "Linear(8, 8): DistributedDataParallel" in frozen
        assert "self_attention.qkv.linear.query_weight" in block and "etp_parameters(model)" in block
        assert "embedding.weight" in root
        assert "whole_weight()" in loss
        assert "EtpEmbedding(26, 24): weight is not the parameter" in fsdp and "ignored_params=" in fsdp
        assert "GroupedLinear" in experts and "ignored_params=" in experts


def test_parallelize_refuses_and_changes_nothing(worker_pool: Pools) -> None:
    wanted = {
        "sparse": "embedding has sparse=True",
        "max_norm": "max_norm=1.0",
        "fused": "layers.1.layernorm_mlp.fc1 has fuse_wgrad_accumulation",
        "fused, dp": "layers.1.layernorm_mlp.fc1 has fuse_wgrad_accumulation",
        "tied": "embedding.weight and head.weight are one parameter",
        "dtensor": "head.weight is a DTensor",
        "dims": "'data'",
        "twice": "call parallelize once",
        "made with rows": "layers.0.self_attention.qkv.linear is sharded already, over 2 ranks",
        "twice, dp": "call parallelize once",
    }
    for found in worker_pool(2).run(refuse_models):
        assert found.keys() == wanted.keys()
        for name, (said, unchanged) in found.items():
            assert wanted[name] in said and said.startswith("parallelize: "), (name, said)
            assert unchanged, name
