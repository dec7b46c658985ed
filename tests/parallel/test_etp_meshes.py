"""``parallelize`` on meshes of ``dp``, ``etp`` and ``tp``, against one process that has all data in turn."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.distributed_pool import Pools
from tests.helpers.etp_cases import LLAMA, Case, compare
from tests.helpers.recipes import NAMED

SUM = {"etp_reduction": "sum"}
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
    "etp, tied": Case(ETP, NAMED["current"], FP32 | {"tied": True}, steps=1, tolerance=1e-6),
    "etp, experts": Case(ETP, NAMED["current"], {"moe": {"num_experts": 3, "top_k": 2}}),
    "uneven": Case({"etp": 3}, None, FP32 | LLAMA, steps=1),
    "uneven, current": Case({"etp": 3}, NAMED["current"], FP32, SUM, steps=1),
    "dp": Case({"dp": 2}, NAMED["current"]),
    "dp, etp": Case(DP_ETP, NAMED["current"], arguments=SUM),
    "dp, etp, delayed": Case(DP_ETP, NAMED["delayed"], LLAMA),
    "etp, tp": Case(ETP_TP, NAMED["block"], LLAMA),
    "etp, tp, delayed": Case(ETP_TP, NAMED["delayed"], arguments=SUM),
    "etp, tp, replicated": Case(ETP_TP, NAMED["current"], LLAMA, {"sequence_parallel": False}),
}


@pytest.mark.parametrize("name", CASES)
def test_is_one_process_with_all_data(worker_pool: Pools, name: str) -> None:
    """Outputs and all gradients of two steps: bit for bit where sums have one order, else within that of the orders."""
    case = CASES[name]
    size = 1
    for ranks in case.dims.values():
        size *= ranks
    for different in worker_pool(size).run(compare, case):
        assert not different
