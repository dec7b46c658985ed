"""Norms and clipping of gradients of experts that ranks share out: those of one process, on all ranks the same bits."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from minifloat import MoE
from minifloat.comm.dtensor_ddp import local_part, local_rows, sharded_like
from minifloat.distributed import fully_shard, parallelize
from minifloat.optim import clip_grad_norm_, gradient_norm
from tests.helpers.compare import same_on_all_ranks
from tests.helpers.distributed_pool import Pools
from tests.helpers.expert_cases import E, F, H, own_part

LIMIT = 0.5


def clip(rank: int, size: int, dims: dict[str, int], single: bool, absent: bool) -> tuple[Tensor, Tensor, float]:
    """The norm, that after clipping, and one process's; gradients are that one's, clipped.

    ``absent``: the experts of the first rank have no gradients; ``dims``: those of FSDP2 are named "fsdp".
    """
    mesh = init_device_mesh("cpu", tuple(dims.values()), mesh_dim_names=tuple(dims))
    torch.manual_seed(1)
    whole = MoE(H, F, E, shared_ffn_hidden_size=F, bias=True, single_grouped_weight=single)
    model: Any = copy.deepcopy(whole)
    parallelize(model, mesh["ep"] if "fsdp" in dims else mesh)
    if "fsdp" in dims:
        fully_shard(model.experts, mesh=mesh["fsdp"])
    for name, parameter in whole.named_parameters():
        if not absent or (".0." not in name and ".1." not in name):
            parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name)))
    for name, parameter in model.named_parameters():
        full = whole.get_parameter(name).grad
        if full is not None:
            own = local_part(own_part(model, name, full), parameter)
            parameter.grad = sharded_like(parameter, own.clone())
    expected = float(torch.nn.utils.clip_grad_norm_(whole.parameters(), LIMIT))
    norm, after = clip_grad_norm_(model.parameters(), LIMIT), gradient_norm(model.parameters())
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            own = local_part(own_part(model, name, whole.get_parameter(name).grad), parameter)  # type: ignore[arg-type]
            torch.testing.assert_close(local_rows(parameter.grad), own, rtol=1e-5, atol=1e-8)
    return norm, after, expected


CASES: dict[str, tuple[dict[str, int], bool, bool]] = {
    "ep": ({"ep": 2}, False, False),
    "one parameter": ({"ep": 4}, True, False),
    "some without gradients": ({"ep": 2}, False, True),
    "dp, ep": ({"dp": 2, "ep": 2}, False, False),
    "ep, eetp": ({"ep": 2, "eetp": 2}, False, False),
    "etp, ep, one parameter": ({"etp": 2, "ep": 2}, True, False),
    "fsdp, ep": ({"fsdp": 2, "ep": 2}, False, False),
}


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_clipped_as_in_one_process(worker_pool: Pools, case: str) -> None:
    norms, after, expected = zip(*worker_pool(math.prod(CASES[case][0].values())).run(clip, *CASES[case]), strict=True)
    torch.testing.assert_close(float(same_on_all_ranks(norms)), expected[0], rtol=1e-6, atol=0)
    torch.testing.assert_close(float(same_on_all_ranks(after)), LIMIT, rtol=1e-5, atol=0)
