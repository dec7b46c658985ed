"""``parallelize`` on meshes of ``dp``, ``etp`` and ``tp``, against one process that has all data in turn."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import minifloat
from minifloat import Linear, linear_cross_entropy
from minifloat.distributed import data_parallel, etp_parameters, fully_shard, parallelize, reduce_replicated
from tests.helpers.distributed_pool import Pools, process_group
from tests.helpers.etp_cases import (
    HIDDEN,
    LLAMA,
    PLAN,
    VOCABULARY,
    Case,
    Model,
    combine,
    compare,
    data_rank,
    mesh_of,
    own_rows,
    run,
)
from tests.helpers.recipes import NAMED
from tests.helpers.tensor_parallel_oracle import in_rank_order

WIDTH = 24
Make = Callable[..., nn.Module]


def linear(**options: Any) -> nn.Module:
    return minifloat.LayerNormLinear(WIDTH, 37, dtype=torch.bfloat16, **options)


def mlp(**options: Any) -> nn.Module:
    return minifloat.LayerNormMLP(WIDTH, 41, dtype=torch.bfloat16, **options)


def attention(**options: Any) -> nn.Module:
    return minifloat.MultiheadAttention(WIDTH, 4, attention_dropout=0.0, dtype=torch.bfloat16, **options)


def decoder(**options: Any) -> nn.Module:
    sizes = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "layer_type": "decoder", "dtype": torch.bfloat16}
    return minifloat.TransformerLayer(WIDTH, 41, 4, **sizes, **options)


OPTIONS: dict[str, tuple[Make, dict[str, Any], dict[str, Any]]] = {
    "split": (linear, {"parameters_split": {"a": 30, "b": 7}, "recompute_norm": True}, {}),
    "split, empty rows": (linear, {"parameters_split": {"a": 1, "b": 35, "c": 1}, "return_bias": True}, {}),
    "norm's result": (linear, {"return_layernorm_output": True}, {"return_residual": True}),
    "quantized output": (linear, {}, {"fp8_output": True}),
    "main_grad": (mlp, {"fuse_wgrad_accumulation": True, "recompute_activation": True}, {}),
    "delayed dW": (mlp, {"delay_wgrad_compute": True, "activation": "swiglu"}, {}),
    "delayed dW to main_grad": (linear, {"delay_wgrad_compute": True, "fuse_wgrad_accumulation": True}, {}),
    "checkpointed": (mlp, {"checkpoint": True, "recompute_norm": True, "activation": "geglu"}, {}),
    "attention": (attention, {"num_gqa_groups": 2, "input_layernorm": True, "qk_norm_type": "RMSNorm"}, {}),
    "no norm": (attention, {"save_original_input": True}, {"checkpoint_core_attention": True}),
    "decoder": (decoder, {"apply_residual_connection_post_layernorm": True}, {"encoder_output": True}),
}


def step(layer: nn.Module, x: Tensor, options: dict[str, Any], first: bool) -> dict[str, Tensor]:
    """Outputs, dX and the gradients, after one more microbatch."""
    options = options | ({"encoder_output": x.flip(0)} if options.get("encoder_output") else {})
    x = x.clone().requires_grad_()
    outputs = layer(x, is_first_microbatch=first, **options)
    outputs = [y for y in (outputs if isinstance(outputs, tuple) else (outputs,)) if y is not None and y.requires_grad]
    torch.autograd.backward(outputs, [torch.cos(3 * y.detach().float()).to(y.dtype) for y in outputs])
    if getattr(layer, "linear", getattr(layer, "fc1", layer)).__dict__.get("delay_wgrad_compute"):
        layer.backward_dw()
    found = {f"y{i}": y.detach().float() for i, y in enumerate(outputs)} | {"x": x.grad}
    for name, parameter in layer.named_parameters():
        gradient = getattr(parameter, "main_grad", None)
        gradient = parameter.grad if gradient is None else gradient
        if gradient is not None:
            found[name] = gradient.clone()
    return found


def with_main_grad(layer: nn.Module) -> nn.Module:
    for each in layer.modules():
        if getattr(each, "fuse_wgrad_accumulation", False):
            each.weight.main_grad = torch.full_like(each.weight, 7.0, dtype=torch.float32)  # to be replaced
    return layer


def compare_layers(rank: int, size: int, recipe: str) -> list[str]:
    """What differs after two microbatches, for every entry of ``OPTIONS``: nothing."""
    different = []
    for case, (make, options, call) in OPTIONS.items():
        torch.manual_seed(1)
        whole = make(recipe=recipe, **options)
        torch.manual_seed(1)
        layer = copy.deepcopy(make(recipe=recipe, etp_group=process_group(), **options))
        assert "etp_size=2" in repr(layer)
        reduce_replicated(layer, process_group())
        rows = own_rows(layer)
        with_main_grad(layer)
        sums: dict[str, Tensor] = {}
        generator = torch.Generator().manual_seed(2)
        for first in (True, False):
            xs = [torch.randn(6, 2, WIDTH, generator=generator).bfloat16() for _ in range(size)]
            found = step(layer, xs[rank], call, first)
            each = [step(with_main_grad(copy.deepcopy(whole)), x, call, True) for x in xs]
            assert found.keys() == each[rank].keys(), case
            for name, own in found.items():
                wanted = each[rank][name]
                if name in dict(layer.named_parameters()):
                    total = in_rank_order([of_rank[name] for of_rank in each]) / size
                    wanted = total[rows[name]] if name in rows else total
                    wanted = sums[name] = wanted if first else sums[name] + wanted
                if not torch.equal(own, wanted):
                    different.append(f"{case}: {name}, {'first' if first else 'second'}")
    return different


# ---- models with rows of ``etp_group`` in DDP and FSDP2, on the meta device, and where ``parallelize`` refuses them

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


# ---- ``parallelize`` on meshes of ``dp``, ``etp`` and ``tp``, against one process that has all data in turn ----

SUM = {"etp_reduction": "sum"}
EXPERTS: dict[str, Any] = {"moe": {"num_experts": 3, "top_k": 2}}
FULL = {"dtype": torch.float32}
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
    "etp, tied": Case(ETP, NAMED["current"], FULL | {"tied": True}, steps=1, tolerance=1e-6),
    "etp, experts": Case(ETP, NAMED["current"], EXPERTS),
    "etp, eetp": Case({"etp": 2, "eetp": 2}, NAMED["current"], FULL | EXPERTS, steps=1, tolerance=1e-6),
    "eetp, sum": Case({"eetp": 3}, None, FULL | EXPERTS, SUM, steps=1, tolerance=1e-6),
    "uneven": Case({"etp": 3}, None, FULL | LLAMA, steps=1),
    "uneven, current": Case({"etp": 3}, NAMED["current"], FULL, SUM, steps=1),
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
