"""Models with rows of ``etp_group`` in DDP and FSDP2, on the meta device, and where ``parallelize`` refuses them."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import minifloat
from minifloat import linear_cross_entropy
from minifloat.distributed import data_parallel, etp_parameters, fully_shard, parallelize
from tests.helpers.distributed_pool import process_group
from tests.helpers.etp_cases import HIDDEN, PLAN, VOCABULARY, Model, combine, data_rank, mesh_of, own_rows, run

FP32 = torch.float32


def made(seed: int = 1, **options: Any) -> Model:
    torch.manual_seed(seed)
    return Model(**options)


def refusal(call: Any, *args: Any, **options: Any) -> str:
    """What the error of a call says."""
    try:
        call(*args, **options)
    except ValueError as error:
        return str(error)
    return ""


# ---- errors ----


def refuse_wrappers(rank: int, size: int) -> list[str]:
    """Errors of functions that wrap a model or read a weight, which no rank has written by then."""
    mesh = mesh_of({"etp": size})
    model = parallelize(made(), mesh)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    found = [refusal(DistributedDataParallel, model), refusal(data_parallel, model)]
    assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))
    frozen = minifloat.Linear(8, 8, etp_group=mesh).requires_grad_(False)
    found.append(refusal(DistributedDataParallel, nn.Sequential(frozen, nn.Linear(8, 8))))
    for rows in (8, 9):
        layer = minifloat.Linear(8, rows, etp_group=mesh)
        before = [parameter.detach().clone() for parameter in layer.parameters()]
        assert f"Linear(8, {rows}): DistributedDataParallel" in refusal(DistributedDataParallel, layer)
        copied = nn.Sequential(copy.deepcopy(layer), nn.Linear(rows, 8))
        assert f"Linear(8, {rows}): DistributedDataParallel" in refusal(DistributedDataParallel, copied)
        assert all(torch.equal(*pair) for pair in zip(before, layer.parameters(), strict=True))
    found += [refusal(fully_shard, model.layers[0], mesh=mesh), refusal(fully_shard, model, mesh=mesh)]
    assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())
    head = minifloat.Linear(HIDDEN, VOCABULARY, etp_group=mesh)
    hidden, target = torch.ones(4, HIDDEN), torch.zeros(4, dtype=torch.int64)
    found.append(refusal(linear_cross_entropy, hidden, head.weight, target))
    tokens = torch.zeros(3, 2, dtype=torch.int64)
    experts = minifloat.GroupedLinear(2, 8, 8, etp_group=mesh)
    for sharded, inputs in ((model, (tokens,)), (experts, (torch.ones(2, 8), [1, 1]))):
        found.append(refusal(torch_fully_shard(sharded, mesh=mesh), *inputs))
    return found


def refuse_models(rank: int, size: int) -> dict[str, tuple[str, bool]]:
    """By case what ``parallelize`` says, and whether the model is as it was."""
    mesh = mesh_of({"dp": 1, "etp": size})
    sparse, normed, fused, split = (made() for _ in range(4))
    sparse.embedding.sparse = True
    normed.embedding.max_norm = 1.0
    fused.layers[1].layernorm_mlp.fc1.fuse_wgrad_accumulation = True
    split.head.weight = nn.Parameter(distribute_tensor(split.head.weight.detach(), mesh["etp"], [Shard(0)]))
    names = DeviceMesh("cpu", torch.arange(size).view(1, size), mesh_dim_names=("data", "etp"))
    cases: dict[str, tuple[nn.Module, Any, dict[str, Any]]] = {
        "sparse": (sparse, mesh, {}),
        "max_norm": (normed, mesh, {}),
        "fused": (fused, mesh, {"plan": {"layers.1.*": "replicated"}}),
        "fused, dp": (fused, mesh_of({"dp": size}), {}),
        "tied": (made(tied=True), mesh, {"plan": {"head": "replicated"}}),
        "dtensor": (split, mesh, {}),
        "dims": (made(), names, {}),
        "twice": (parallelize(made(), mesh), mesh, {}),
        "made with rows": (made(etp_group=mesh["etp"]), mesh, {}),
        "twice, dp": (parallelize(made(), mesh_of({"dp": size})), mesh, {}),
    }
    found = {}
    for name, (model, ranks, options) in cases.items():
        before = [(type(each), dict(each._parameters), len(each._forward_pre_hooks)) for each in model.modules()]
        said = refusal(parallelize, model, ranks, **options)
        after = [(type(each), dict(each._parameters), len(each._forward_pre_hooks)) for each in model.modules()]
        same = [
            a[::2] == b[::2] and [*map(id, a[1].values())] == [*map(id, b[1].values())]
            for a, b in zip(before, after, strict=True)
        ]
        found[name] = said, all(same)
    return found


# ---- what is made later, or elsewhere ----


def reset(model: nn.Module) -> nn.Module:
    """Start values of all modules that have parameters of their own, as a training sets them after ``to_empty``."""
    torch.manual_seed(3)
    for module in model.modules():
        if any(True for _ in module.parameters(recurse=False)):
            module.reset_parameters()  # type: ignore[operator]
    return model


def made_on_meta(rank: int, size: int, dims: dict[str, int]) -> list[str]:
    """Parameters that differ from those of the model that was made at once: none."""
    mesh, plan = mesh_of(dims), PLAN if "tp" in dims else None
    with torch.device("meta"):
        later = Model()
    model = reset(parallelize(later, mesh, plan=plan).to_empty(device="cpu"))
    whole = reset(made())
    if "tp" in dims:
        parallelize(whole, mesh["tp"], plan=plan)
    rows = own_rows(model)
    wanted = {name: p[rows[name]] if name in rows else p for name, p in whole.named_parameters()}
    found = dict(model.named_parameters())
    assert found.keys() == wanted.keys()
    return [name for name, p in found.items() if not torch.equal(p, wanted[name])]


def sharded_rest(rank: int, size: int) -> list[str]:
    """FSDP2 shards norms and biases over all ranks and ignores rows of weights: what differs from the oracle."""
    mesh = mesh_of({"dp": 2, "etp": size // 2})
    model, oracle = made(dtype=FP32), made(dtype=FP32)
    parallelize(model, mesh)
    ignored, data = etp_parameters(model), mesh[("dp", "etp")]._flatten("data")
    assert len(ignored) == len(own_rows(model))
    fully_shard(model.layers[0], mesh=data, ignored_params=ignored, reshard_after_forward=False)
    for part in (model.layers[1], model):
        fully_shard(part, mesh=data, ignored_params=ignored)
    rows, different = own_rows(model), []
    for seed in range(2):
        generator = torch.Generator().manual_seed(seed)
        batches = [torch.randint(VOCABULARY, (6, 2), generator=generator) for _ in range(size)]
        ys, parts = run(oracle, batches, minifloat.Float8CurrentScaling())
        (y,), (found,) = run(model, [batches[data_rank(mesh)]], minifloat.Float8CurrentScaling())
        different += [] if torch.equal(y, ys[data_rank(mesh)]) else ["y"]
        for name in dict(oracle.named_parameters()):
            own = found[name]
            assert isinstance(own, DTensor) == (name not in rows), name
            total, bound = combine([part[name] for part in parts], 2, "mean")  # FSDP2 adds in its own order
            wanted = total[rows[name]] if name in rows else total
            bound = 0 * wanted if name in rows else 1e-6 * total.abs().max() + bound
            own = own.full_tensor() if isinstance(own, DTensor) else own
            if own.shape != wanted.shape or bool(((own - wanted).abs() > bound).any()):
                different.append(f"{name}, {seed}")
    return different


# ---- single layers ----


def embeddings(rank: int, size: int) -> list[str]:
    """``EtpEmbedding`` and ``VocabParallelEmbedding`` beside ``nn.Embedding`` of the same seed: what differs."""
    different = []
    makers: dict[str, Any] = {
        "etp": lambda: minifloat.EtpEmbedding(27, 8, -1, etp_group=process_group()),
        "copied": lambda: copy.deepcopy(minifloat.EtpEmbedding(27, 8, -1, etp_group=process_group())),
        "vocab": lambda: minifloat.VocabParallelEmbedding(27, 8, etp_group=process_group(), etp_reduction="sum"),
    }
    for name, make in makers.items():
        torch.manual_seed(1)
        whole = nn.Embedding(27, 8, None if name == "vocab" else -1)
        torch.manual_seed(1)
        table = make()
        assert f"etp_size={size}" in repr(table) and len(table.weight) < 27
        tokens = torch.randint(27, (size, 5, 2), generator=torch.Generator().manual_seed(2))
        tokens[:, 0] = 26
        ys, parts = run(whole, list(tokens), None)
        for _ in range(2):
            (y,), (found,) = run(table, [tokens[rank]], None)
            total, bound = combine([part["weight"] for part in parts], size, "sum" if name == "vocab" else "mean")
            own = own_rows(table)["weight"]
            close = (found["weight"] - total[own]).abs() <= bound.expand_as(total)[own]
            different += [] if torch.equal(y, ys[rank]) and bool(close.all()) else [name]
    return different


def whole_weight(rank: int, size: int) -> list[str]:
    """A loss that reads the weight of the head itself, ``linear_cross_entropy``: what differs."""
    torch.manual_seed(1)
    whole = minifloat.Linear(8, 27, bias=False)
    torch.manual_seed(1)
    head = minifloat.Linear(8, 27, bias=False, etp_group=process_group())
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(size, 5, 8, generator=generator)
    target = torch.randint(27, (size, 5), generator=generator)
    parts: list[Tensor] = []
    for x, wanted in zip(hidden, target, strict=True):
        whole.zero_grad()
        linear_cross_entropy(x, whole.whole_weight(), wanted).backward()
        assert whole.weight.grad is not None
        parts.append(whole.weight.grad)
    linear_cross_entropy(hidden[rank], head.whole_weight(), target[rank]).backward()
    total, bound = combine(parts, size, "mean")
    own = own_rows(head)["weight"]
    assert head.weight.grad is not None
    close = (head.weight.grad - total[own]).abs() <= bound.expand_as(total)[own]
    return [] if bool(close.all()) else ["weight"]
