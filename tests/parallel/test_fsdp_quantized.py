"""Quantized parameters under ``fully_shard``, with fp32 masters of each rank's rows, beside unsharded replicas."""

from __future__ import annotations

import pytest
import torch

import minifloat
from minifloat.optim import MasterWeights
from minifloat.parallel.fsdp import fully_shard
from minifloat.tensor import QuantizedTensor
from tests.helpers.distributed_pool import Pools, on_ranks
from tests.helpers.fsdp_cases import MODELS, Case, mesh_of, quantized_lockstep, shard


@pytest.mark.parametrize(
    "case",
    [
        Case("linears", "current"),
        Case("linears", "delayed", options=("autocast",)),
        Case("aligned", "delayed", reshard=False),
        Case("aligned", "block", "root"),
        Case("aligned", "mxfp8", options=("preserve",)),
        Case("aligned", "nvfp4", "nested"),
        Case("fused", "nvfp4", "root"),
        Case("transformer", "mxfp8"),
    ],
    ids=lambda case: "-".join(case[:3]),
)
def test_lockstep(worker_pool: Pools, case: Case) -> None:
    assert worker_pool(2).run(quantized_lockstep, case, 3) == [""] * 2


@pytest.mark.parametrize(
    "recipe",
    [
        *("delayed", "block", "nvfp4", "mxfp6"),
        *[pytest.param(name, marks=pytest.mark.slow) for name in ("current", "mxfp8", "rowwise", "mxfp4")],
    ],
)
def test_unaligned_and_empty_shards(worker_pool: Pools, recipe: str) -> None:
    assert worker_pool(3).run(quantized_lockstep, Case("linears", recipe), 2) == [""] * 3


def in_bf16(rank: int, size: int, case: Case, steps: int) -> str:
    """The same in a model that is bf16 throughout, all of whose parameters have masters."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        return quantized_lockstep(rank, size, case, steps)
    finally:
        torch.set_default_dtype(torch.float32)


def test_bf16(worker_pool: Pools) -> None:
    assert worker_pool(2).run(in_bf16, Case("fused", "mxfp8"), 2) == [""] * 2


def ragged_blocks(rank: int, size: int) -> list[object]:
    """A last shard of fewer rows than a unit, the written codes, and a weight that no recipe reads."""
    torch.manual_seed(0)
    with minifloat.quantized_model_init(recipe="mxfp8"):
        model, plain = minifloat.Linear(24, 63), minifloat.Linear(24, 63)
    values = torch.randn(63, 24)
    for layer in (model, plain):
        with torch.no_grad():
            layer.weight.copy_(values)
            layer.bias.zero_()
    fully_shard(model, mesh=mesh_of(size))
    optimizers = [MasterWeights(layer.parameters(), torch.optim.SGD, lr=0.5) for layer in (model, plain)]
    found: list[object] = [model.weight._local_tensor.shape[0]]
    for _ in range(2):
        results = []
        for layer in (model, plain):
            x = torch.ones(3, 24, requires_grad=True)
            y = layer(x)  # no recipe in force: the values, in backward too
            y.square().sum().backward()
            results += [y.detach(), x.grad]
        found.append(torch.equal(results[0], results[2]) and torch.equal(results[1], results[3]))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    codes = plain.weight.detach()
    assert isinstance(codes, QuantizedTensor) and isinstance(model.weight._local_tensor, QuantizedTensor)
    mine = model.weight._local_tensor.operands.rowwise
    theirs = codes.operands.rowwise
    assert mine is not None and theirs is not None
    rows = slice(32 * rank, min(32 * rank + 32, 63))
    found.append(torch.equal(mine.codes, theirs.codes[rows]) and torch.equal(mine.scale_inv, theirs.scale_inv[rows]))
    return found


def test_ragged_blocks(worker_pool: Pools) -> None:
    assert worker_pool(2).run(ragged_blocks) == [[32, True, True, True], [31, True, True, True]]


@on_ranks(2)
def test_amaxes_are_agreed_on(rank: int, size: int) -> None:
    """A plain optimizer writes the shards, and ranks agree on the one scale, whoever has the largest value."""
    with minifloat.quantized_model_init(recipe="current"):
        model = minifloat.Linear(8, 12, bias=False)
    fully_shard(model, mesh=mesh_of(size))
    local = model.weight._local_tensor
    with torch.no_grad():
        local.copy_(torch.full((6, 8), 3.0 + rank))
        scales = [local.operands.rowwise.scale_inv.item()]
        torch._foreach_mul_([model.weight], 2.0)
        scales.append(local.operands.rowwise.scale_inv.item())
    assert abs(scales[0] * 448 - 4.0) < 1e-5 and abs(scales[1] * 448 - 8.0) < 1e-5


@pytest.mark.parametrize(("recipe", "quantized"), [("mxfp8", True), ("nvfp4", False), ("delayed", True)])
@on_ranks(2)
def test_materialized_from_meta(rank: int, size: int, recipe: str, quantized: bool) -> list[str]:
    """Made on meta, sharded, given memory and start values; what differs from the model that was never sharded."""

    def model() -> torch.nn.Module:
        with minifloat.quantized_model_init(quantized, recipe=recipe):
            return MODELS["fused"](recipe)

    with torch.device("meta"):
        sharded = model()
    shard(sharded, Case("fused", recipe), mesh_of(size))
    sharded.to_empty(device="cpu")
    torch.manual_seed(5)
    plain = model()
    models: tuple[torch.nn.Module, ...] = (plain, sharded)
    for each in models:
        torch.manual_seed(6)
        for layer in each.modules():
            if isinstance(layer, (minifloat.Linear, torch.nn.LayerNorm)):
                layer.reset_parameters()
            elif isinstance(layer, minifloat.LayerNormLinear | minifloat.LayerNormMLP):
                layer.norm.reset_parameters()
    x = torch.randn(3, 24)
    outputs = [each(x) for each in models]
    return [] if torch.equal(*outputs) else [f"outputs differ by {(outputs[0] - outputs[1]).abs().max():.3g}"]


def with_remainder(rank: int, size: int) -> None:
    model = minifloat.Linear(8, 12, dtype=torch.bfloat16)
    fully_shard(model, mesh=mesh_of(size))
    MasterWeights(model.parameters(), torch.optim.SGD, lr=0.1, master="bf16+remainder")


def test_no_remainder(worker_pool: Pools) -> None:
    with pytest.raises(ValueError, match=r"sharded parameters, as one of shape \(12, 8\) is: use master='fp32'"):
        worker_pool(2).run(with_remainder)


@on_ranks(2)
def test_copies_of_larger_values(rank: int, size: int) -> list[str]:
    """Ranks agree on the delayed scale of what is copied, if that would saturate; what differs from the plain model."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        with minifloat.quantized_model_init(recipe="delayed"):
            models.append(minifloat.Linear(24, 40, bias=False, recipe="delayed"))
    plain, sharded = models
    fully_shard(sharded, mesh=mesh_of(size))
    local, wrong = sharded.weight._local_tensor, []
    for factor in (50.0, 2.0, 90.0):
        new = factor * torch.randn(40, 24, generator=torch.Generator().manual_seed(1))
        new[-1] *= 3  # the largest is the last rank's
        with torch.no_grad():
            plain.weight.copy_(new)
            local.copy_(new[20 * rank : 20 * rank + 20])
        if not torch.equal(plain.forward_scaling.scale, sharded.forward_scaling.scale):
            wrong.append(f"{factor}: scale {sharded.forward_scaling.scale}, not {plain.forward_scaling.scale}")
        y = [model(torch.ones(3, 24)) for model in models]
        sharded.reshard()
        if not torch.equal(*y) or not torch.equal(local.dequantize(), plain.weight.dequantize()[20 * rank :][:20]):  # type: ignore[operator]
            wrong.append(f"{factor}: values")
    return wrong
