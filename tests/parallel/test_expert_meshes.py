"""``parallelize`` over a dim ``ep`` of a mesh, beside one process that has all experts and all data."""

from __future__ import annotations

import copy
import math
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import minifloat
from minifloat import GroupedMLP, quantized_model_init
from minifloat.comm.group import Group
from minifloat.distributed import (
    data_parallel,
    ep_parameters,
    fully_shard,
    parallelize,
    reduce_replicated,
    sharded_weights,
)
from minifloat.parallel.data_parallel import _members
from minifloat.tensor import QuantizedTensor
from tests.helpers import etp_cases
from tests.helpers.distributed_pool import Pools, on_ranks
from tests.helpers.expert_cases import Case, E, F, H, Tokens, batches, data_rank, gradients, joined, own_part
from tests.helpers.tensor_parallel_oracle import in_rank_order

SINGLE = {"single_grouped_weight": True, "bias": True}
SUM = {"etp_reduction": "sum"}
CASES = {
    "ep": Case({"ep": 2}, {"recipe": "current"}),
    "ep, biases": Case({"ep": 2}, {"recipe": "mxfp8", "bias": True}),
    "ep, one parameter": Case({"ep": 4}, SINGLE),
    "ep, sum": Case({"ep": 2}, {"recipe": "block"}, SUM),
    "dp, ep": Case({"dp": 2, "ep": 2}, {"recipe": "current", "bias": True}),
    "dp, ep, sum": Case({"dp": 2, "ep": 2}, SINGLE, SUM),
    "ep, eetp": Case({"ep": 2, "eetp": 2}, {"recipe": "current", "bias": True}),
    "ep, eetp, one parameter": Case({"ep": 2, "eetp": 2}, {"recipe": "mxfp8", **SINGLE}),
    "eetp, ep, sum": Case({"eetp": 2, "ep": 2}, {"recipe": "none"}, SUM),
    "etp, ep": Case({"etp": 2, "ep": 2}, {"recipe": "block"}, {"recast": True}),
    "quantized": Case({"ep": 2, "eetp": 2}, {"recipe": "mxfp8"}, quantized=True),
    "whole experts": Case({"ep": 2}, {"recipe": "none"}, {"plan": {"experts": "replicated"}}),
}


def values(parameter: Tensor) -> Tensor:
    return parameter.dequantize() if isinstance(parameter, QuantizedTensor) else parameter


def compare(rank: int, size: int, case: Case) -> list[str]:
    """Y, dX and all gradients of two steps, and the values that the model starts with: what differs."""
    mesh = init_device_mesh(torch.get_default_device().type, tuple(case.dims.values()), mesh_dim_names=tuple(case.dims))
    torch.manual_seed(1)
    with quantized_model_init(case.quantized, recipe=case.options.get("recipe")):
        whole = Tokens(**case.options)
    model = copy.deepcopy(whole)
    assert parallelize(model, mesh, **case.arguments) is model
    count = 1 if "plan" in case.arguments else case.dims["ep"]
    assert model.experts.fc1.num_gemms == E // count and model.experts.ep_group.size == count
    groups, (group, place) = size // case.dims["ep"], data_rank(mesh)
    wrong = []
    for step in range(2):
        for name, parameter in model.named_parameters():
            if not torch.equal(values(parameter), own_part(model, name, values(whole.get_parameter(name)))):
                wrong.append(f"{name} before step {step}")
        data = batches(step, groups, case.dims["ep"])
        y, dx, found = gradients(model, data[group][place])
        each = [gradients(whole, joined(of_group)) for of_group in data]
        first = sum(len(batch[0]) for batch in data[group][:place])
        rows = slice(first, first + len(y))
        wrong += [] if torch.equal(y, each[group][0][rows]) else [f"Y of step {step}"]
        wrong += [] if torch.equal(dx, each[group][1][rows]) else [f"dX of step {step}"]
        for name, parameter in whole.named_parameters():
            total = in_rank_order([of_group[2][name] for of_group in each])
            total = total if "etp_reduction" in case.arguments else total / size
            if name in found:
                own, mine = own_part(model, name, total), found[name]
                bound = 0.0 if name != "factor" and count > 1 else 0.02 * float(total.abs().max())  # sums of bf16
                if own.shape != mine.shape or bool(((own - mine).abs() > bound).any()):
                    wrong.append(f"gradient of {name} in step {step}")
            with torch.no_grad():
                parameter.sub_(total, alpha=0.1)
                if name in found:
                    model.get_parameter(name).sub_(own_part(model, name, total), alpha=0.1)
    return wrong


@pytest.mark.parametrize("name", CASES)
def test_is_one_process_with_all_data(worker_pool: Pools, name: str) -> None:
    """To the bit, but of gradients that are added up in another order."""
    case = CASES[name]
    for different in worker_pool(math.prod(case.dims.values())).run(compare, case):
        assert not different


# ---- whole models ----

MODELS: dict[str, dict[str, int]] = {"dp, ep": {"dp": 2, "ep": 2}, "etp, ep": {"etp": 2, "ep": 2}}


def train_model(rank: int, size: int, dims: dict[str, int]) -> dict[str, float]:
    """How far Y and gradients in fp32 are, relative to the largest, from those of one process with all data."""
    mesh = etp_cases.mesh_of(dims)
    torch.manual_seed(1)
    options: dict[str, Any] = {"dtype": torch.float32, "moe": {"num_experts": E, "top_k": 2}}
    whole = etp_cases.Model(**options)
    model = parallelize(copy.deepcopy(whole), mesh)
    tokens = torch.randint(etp_cases.VOCABULARY, (size, 6, 2), generator=torch.Generator().manual_seed(2))
    (y,), (found,) = etp_cases.run(model, [tokens[rank]], None)
    (ys,), (wanted,) = etp_cases.run(whole, [torch.cat(tokens.unbind(), 1)], None)
    rows = etp_cases.own_rows(model)
    pairs = {"y": (y, ys[:, 2 * rank : 2 * rank + 2])}
    assert any(".experts." in name for name in found) and found.keys() == dict(model.named_parameters()).keys()
    for name, own in found.items():
        total = wanted[name] / size
        pairs[name] = own, total[rows[name]] if name in rows else total
    compared = {name: pair for name, pair in pairs.items() if pair[1].numel() and "key_bias" not in name}  # which is 0
    return {name: float((a - b).abs().max() / b.abs().max()) for name, (a, b) in compared.items()}


@pytest.mark.parametrize("name", MODELS)
def test_model_trains_as_one_process(worker_pool: Pools, name: str) -> None:
    for distances in worker_pool(4).run(train_model, MODELS[name]):
        assert {name: far for name, far in distances.items() if not far < 1e-5} == {}


# ---- what is made before, later, or elsewhere ----


def reset(model: nn.Module) -> nn.Module:
    torch.manual_seed(3)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    return model


@pytest.mark.parametrize("single", [False, True])
@on_ranks(2)
def test_starts_on_meta_as_the_whole_model(rank: int, size: int, single: bool) -> list[str]:
    """Names of parameters that differ."""
    options = {"bias": True, "single_grouped_weight": single}
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("ep",))
    with torch.device("meta"):
        later = GroupedMLP(E, H, F, **options)
    parallelize(later, mesh)
    assert len(ep_parameters(later)) == (4 if single else 4 * E // size)
    model = nn.ModuleDict({"experts": reset(later.to_empty(device="cpu"))})
    whole = nn.ModuleDict({"experts": reset(GroupedMLP(E, H, F, **options))})
    assert all(hasattr(parameter, "ep_group") for parameter in model.parameters())
    return [n for n, p in model.named_parameters() if not torch.equal(p, own_part(model, n, whole.get_parameter(n)))]


@pytest.mark.parametrize("recipe", ["current", "mxfp8"])
@on_ranks(2)
def test_quantized_experts(rank: int, size: int, recipe: str) -> list[str]:
    """Experts that were quantized whole, beside such that were made by rank; memory is that of a rank's experts."""
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("ep",))
    models = []
    for options in ({}, {"ep_group": mesh["ep"]}):
        torch.manual_seed(1)
        with quantized_model_init(recipe=recipe, preserve_high_precision_init_val=True):
            models.append(GroupedMLP(E, H, F, recipe=recipe, **options))
    cut, made = (parallelize(copy.deepcopy(model), mesh) for model in models)
    assert {*dict(cut.named_parameters())} == {*dict(made.named_parameters())}
    wrong = []
    for name, parameter in made.named_parameters():
        own: Any = cut.get_parameter(name)
        before = [each.get_high_precision_init_val() for each in (own, parameter)]  # type: ignore[attr-defined]
        if not torch.equal(own.dequantize(), parameter.dequantize()) or not torch.equal(*before):
            wrong.append(name)
        codes = own.operands.any.codes
        if codes.untyped_storage().nbytes() > E // size * codes.numel():
            wrong.append(f"memory of {name}")
    return wrong


@pytest.mark.parametrize("single", [False, True])
@on_ranks(2)
def test_frees_the_memory_of_other_experts(rank: int, size: int, single: bool) -> int:
    """How many bytes too many there are."""
    model = GroupedMLP(E, H, F, bias=True, single_grouped_weight=single)
    parallelize(model, init_device_mesh("cpu", (size,), mesh_dim_names=("ep",)))
    held = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
    return sum(held.values()) - sum(p.numel() * 4 for p in model.parameters())


# ---- gradients without ``parallelize``, and what is refused ----


def reduce_by_hand(rank: int, size: int, other: str) -> list[str]:
    """``reduce_replicated`` of layers that were made with ``ep_group``, beside ``parallelize``: what differs."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=(other, "ep"))
    models = []
    rows = {"etp_group": mesh[other]} if other == "etp" else {}
    for options in ({}, {"ep_group": mesh["ep"]} | rows):
        torch.manual_seed(1)
        models.append(Tokens(bias=True, **options))
    parallelize(models[0], mesh)
    reduce_replicated(models[1], [mesh[other], mesh["ep"]] if rows else [mesh["ep"], mesh[other]])
    group, place = data_rank(mesh)
    batch = batches(0, 2, 2)[group][place]
    (*results, found), (*others, wanted) = (gradients(model, batch) for model in models)
    assert all(torch.equal(*pair) for pair in zip(results, others, strict=True))
    return [name for name in wanted if not torch.equal(found[name], wanted[name])]


@pytest.mark.parametrize("other", ["dp", "etp"])
def test_reduce_replicated(worker_pool: Pools, other: str) -> None:
    for different in worker_pool(4).run(reduce_by_hand, other):
        assert not different


def refuse(rank: int, size: int) -> dict[str, tuple[str, bool]]:
    """By case what is said, and whether the model is as it was."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    odd, other_kind = GroupedMLP(5, H, F), GroupedMLP(E, H, F)
    other_kind.fc1 = nn.Linear(H, 2 * F)  # type: ignore[assignment]
    fused = GroupedMLP(E, H, F, fuse_wgrad_accumulation=True)
    made = GroupedMLP(E, H, F, ep_group=mesh["ep"])
    ignoring = copy.deepcopy(made)
    names = [f"0.{name}" for name, _ in ignoring.named_parameters()]
    other = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "dp"))
    layer = minifloat.TransformerLayer(H, F, 4, moe={"num_experts": E, "top_k": 2})
    tp = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "tp"))
    world = torch.distributed.group.WORLD
    calls: dict[str, tuple[nn.Module, Any]] = {
        "odd": (odd, lambda m: parallelize(m, mesh)),
        "not grouped": (other_kind, lambda m: parallelize(m, mesh)),
        "fused": (fused, lambda m: parallelize(m, mesh)),
        "made elsewhere": (made, lambda m: parallelize(m, other)),
        "made, no ep": (made, lambda m: parallelize(m, mesh["dp"])),
        "tp": (layer, lambda m: parallelize(m, tp)),
        "ddp": (nn.Sequential(made, nn.Linear(2, 2)), DistributedDataParallel),
        "ddp of ours": (nn.Sequential(made), data_parallel),
        "mixed": (made, lambda m: reduce_replicated(m, world)),
    }
    found = {}
    for name, (model, call) in calls.items():
        before = [(each, dict(each._parameters), len(each._forward_pre_hooks)) for each in model.modules()]
        said = refusal(call, model)
        after = [(each, dict(each._parameters), len(each._forward_pre_hooks)) for each in model.modules()]
        found[name] = (
            said,
            [(m, [*map(id, p.values())], n) for m, p, n in before]
            == [(m, [*map(id, p.values())], n) for m, p, n in after],
        )
    wrapped = nn.Sequential(ignoring, nn.Linear(2, 2))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(wrapped, names)
    DistributedDataParallel(wrapped)
    return found


def refusal(call: Any, model: nn.Module) -> str:
    try:
        call(model)
    except ValueError as error:
        return str(error)
    return ""


def test_names_of_groups_come_again() -> None:
    """After a restart of torch.distributed ``ep_group`` may have the name of another group before."""
    group, each = Group("1", 2, 0), mock.patch.object(dist, "get_process_group_ranks", side_effect=[[0, 1], [0, 2]])
    with mock.patch.object(Group, "process_group", None), each:
        assert [_members(group) for _ in range(2)] == [{0, 1}, {0, 2}]


def test_refusals_change_nothing(worker_pool: Pools) -> None:
    wanted = {
        "odd": "has 5 experts, which 2 ranks of 'ep' cannot share alike",
        "not grouped": "fc1 is a Linear, whose experts cannot be shared out",
        "fused": "fc1 has fuse_wgrad_accumulation",
        "made elsewhere": "fc1 was made with an ep_group of 2 ranks, which are no dim 'ep'",
        "made, no ep": "fc1 was made with an ep_group of 2 ranks",
        "tp": "2 ranks of 'ep' and 2 of 'tp'",
        "ddp": "GroupedLinear 'fc1': DistributedDataParallel",
        "ddp of ours": "each rank of ep_group has other experts",
        "mixed": "a group has ranks [0, 1, 2, 3], and ranks",
    }
    for found in worker_pool(4).run(refuse):
        assert found.keys() == wanted.keys()
        for name, (said, unchanged) in found.items():
            assert wanted[name] in said, (name, said)
            assert unchanged, name


# ---- FSDP2 of a rank's experts ----


def shard_experts(rank: int, size: int, dims: dict[str, int], recipe: str, single: bool) -> list[str]:
    """Two steps; gradients that are not those of one process with all data, but for the order of sums."""
    mesh = init_device_mesh(torch.get_default_device().type, tuple(dims.values()), mesh_dim_names=tuple(dims))
    data = mesh[tuple(dims)]._flatten("data")  # type: ignore[index]
    options: dict[str, Any] = {"recipe": recipe, "single_grouped_weight": single}
    torch.manual_seed(1)
    whole = nn.Sequential(*[minifloat.MoE(H, F, E, 2, **options) for _ in range(2)])
    torch.manual_seed(1)
    model = nn.Sequential(*[minifloat.MoE(H, F, E, 2, ep_group=mesh["ep"], **options) for _ in range(2)])
    if single:
        model = parallelize(copy.deepcopy(whole), mesh["ep"])  # type: ignore[assignment]
    for moe in model:
        fully_shard(moe.experts, mesh=mesh["dp"])  # type: ignore[arg-type]
        fully_shard(moe, mesh=data)
    fully_shard(model, mesh=data)
    codes = sharded_weights(model)
    wrong = [] if (recipe == "none" or single) == (not codes) else ["gathered weights"]
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, whole)]
    for step in range(2):
        x = torch.randn(size, 11, H, generator=torch.Generator(torch.get_default_device()).manual_seed(step))
        model(x[rank]).square().sum().backward()
        (whole(x.flatten(0, 1)).square().sum() / size).backward()
        for name, parameter in model.named_parameters():
            assert hasattr(parameter, "ep_group") == (".experts." in name)
            own = parameter.grad.full_tensor()  # type: ignore[union-attr]
            wanted = own_part(model, name, whole.get_parameter(name).grad)  # type: ignore[arg-type]
            if own.shape != wanted.shape or float((own - wanted).abs().max()) > 3e-6 * float(wanted.abs().max()):
                wrong.append(f"{name} in step {step}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return wrong


@pytest.mark.parametrize(
    ("dims", "recipe", "single"),
    [({"dp": 2, "ep": 2}, "mxfp8", False), ({"dp": 2, "ep": 2}, "none", True), ({"dp": 1, "ep": 2}, "mxfp8", False)],
)
def test_fully_shard(worker_pool: Pools, dims: dict[str, int], recipe: str, single: bool) -> None:
    for different in worker_pool(math.prod(dims.values())).run(shard_experts, dims, recipe, single):
        assert not different


@on_ranks(2)
def test_fully_shard_refuses_other_experts(rank: int, size: int) -> bool:
    mesh = init_device_mesh("cpu", (1, size), mesh_dim_names=("dp", "ep"))
    model = nn.Sequential(minifloat.MoE(H, F, E, ep_group=mesh["ep"]))
    for options in ({}, {"mesh": mesh["ep"]}):
        with pytest.raises(ValueError, match=r"fully_shard: 0\.experts\.fc1.* is of this rank's experts"):
            fully_shard(model, **options)
    with pytest.raises(ValueError, match=r"fully_shard: 0\.router\.weight is no expert's"):
        fully_shard(model, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["ep"], ignored_params=set(ep_parameters(model)))
    return hasattr(model[0].experts.fc1, "device_mesh")
