"""Models on ranks with different data, and what one process computes that has the data of all ranks in turn.

The oracle is D18's in ``docs/architecture.md``: each data rank is a microbatch of the model that is not sharded over
data ranks, and gradients are added in the order of the ranks: within ``etp`` first, then over ``dp``.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import minifloat
from minifloat import autocast, quantized_model_init
from minifloat.nn.tensor_parallel import etp_weights
from minifloat.parallel.parallelize import parallelize
from minifloat.recipe import Recipe
from tests.helpers.tensor_parallel_oracle import in_rank_order, order_bound

HIDDEN, HEADS, FFN, VOCABULARY = 24, 4, 40, 26
PLAN: dict[str, Any] = {"embedding": "vocabulary", "norm": "sequence", "head": "column"}
LLAMA = {"num_gqa_groups": 2, "normalization": "RMSNorm", "activation": "swiglu"}
LR = 0.5


class Model(nn.Module):
    """Tokens [s, b] to logits [s, b, V]."""

    def __init__(self, tied: bool = False, **options: Any) -> None:
        super().__init__()
        dtype = options.pop("dtype", torch.bfloat16)
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN, dtype=dtype)
        sizes = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "dtype": dtype, **options}
        self.layers = nn.ModuleList(minifloat.TransformerLayer(HIDDEN, FFN, HEADS, **sizes) for _ in range(2))
        self.norm = minifloat.RMSNorm(HIDDEN, dtype=dtype)
        self.head = minifloat.Linear(HIDDEN, VOCABULARY, bias=not tied, dtype=dtype)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


@dataclass(frozen=True)
class Case:
    """A mesh and what runs on it.

    Args:
        options, arguments: of :class:`Model`, of ``parallelize``.
        quantized: weights are kept as the recipe casts them.
        tolerance: relative to the largest gradient of a parameter, where sums have no order that is known.
    """

    dims: dict[str, int]
    recipe: Recipe | None = None
    options: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)
    steps: int = 2
    quantized: bool = False
    tolerance: float = 0.0


def mesh_of(dims: dict[str, int]) -> DeviceMesh:
    return init_device_mesh("cpu", tuple(dims.values()), mesh_dim_names=tuple(dims))


def data_rank(mesh: DeviceMesh) -> int:
    """Which data this rank has: ranks of ``tp`` have the same."""
    names = mesh.mesh_dim_names or ()
    own = {name: mesh.get_local_rank(name) for name in names}
    place = 0
    for name in ("dp", "etp", "eetp"):
        place = place * (mesh[name].size() if name in names else 1) + own.get(name, 0)
    return place


def combine(parts: Sequence[Tensor], etp: int, reduction: str) -> tuple[Tensor, Tensor]:
    """The gradient of all data ranks, and how far another order of the sum may be from it."""
    groups = [in_rank_order(parts[i : i + etp]) for i in range(0, len(parts), etp)]
    total, bound = in_rank_order(groups), order_bound(parts) if max(etp, len(groups)) > 2 else torch.zeros(())
    if reduction == "mean":
        total, bound = total / len(parts), bound / len(parts) + (bound > 0) * total.abs() * torch.finfo(total.dtype).eps
    return total, bound


def own_rows(model: nn.Module) -> dict[str, slice]:
    """By name the parameters of which this rank has some rows, counted in the whole."""
    found = {}
    for prefix, layer in model.named_modules():
        for weight in () if (held := layer.__dict__.get("_etp")) is None else (held,):
            for name, (_, rows) in weight.rows.extents().items():
                found[f"{prefix}.{name}".lstrip(".")] = rows
    return found


def run(
    model: nn.Module, batches: Sequence[Tensor], recipe: Recipe | None
) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """Y of each batch, and the gradients of each batch by itself."""
    model.zero_grad()  # also of what FSDP2 shows gathered between forward and backward
    with autocast(enabled=recipe is not None, recipe=recipe):
        ys = [model(batch) for batch in batches]
    gradients = []
    for y in reversed(ys):  # delayed scaling's gradient amaxes are complete once the first batch has had its backward
        model.zero_grad()
        y.backward(torch.cos(3 * y.detach()))
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    return [y.detach() for y in ys], gradients[::-1]


def compare(rank: int, size: int, case: Case) -> list[str]:
    """What differs from the oracle on this rank: nothing."""
    mesh = mesh_of(case.dims)
    torch.manual_seed(1)
    with quantized_model_init(enabled=case.quantized, recipe=case.recipe):
        model = Model(**case.options)
    oracle = copy.deepcopy(model)
    arguments = {"plan": PLAN if "tp" in case.dims else None} | case.arguments
    if "tp" in case.dims:
        parallelize(oracle, mesh["tp"], **{n: v for n, v in arguments.items() if n != "etp_reduction"})
    parallelize(model, mesh, **arguments)
    rows, count = own_rows(model), size // case.dims.get("tp", 1)
    assert bool(rows) == (len({"etp", "eetp"} & case.dims.keys()) > 0)
    shardings = [weight.sharding for weight in etp_weights(model)]
    wanted = case.arguments.get("prefetch", 1), case.arguments.get("prefetch_bytes")
    assert all(sharding.prefetch == wanted for sharding in shardings)
    assert len({sharding.group for sharding in shardings}) == len({"etp", "eetp"} & case.dims.keys())
    different = []
    for step in range(case.steps):
        generator = torch.Generator().manual_seed(step)
        batches = [torch.randint(VOCABULARY, (6, 2), generator=generator) for _ in range(count)]
        ys, parts = run(oracle, batches, case.recipe)
        (y,), (found,) = run(model, [batches[data_rank(mesh)]], case.recipe)
        different += [] if torch.equal(y, ys[data_rank(mesh)]) else [f"y of step {step}"]
        for name, parameter in oracle.named_parameters():
            each = [part[name] for part in parts]
            total, bound = combine(each, case.dims.get("etp", 1), case.arguments.get("etp_reduction", "mean"))
            bound = bound + case.tolerance * total.abs().max()
            own, bound = (total[rows[name]], bound.expand_as(total)[rows[name]]) if name in rows else (total, bound)
            same = found[name].shape == own.shape and found[name].dtype == own.dtype
            if not same or bool(((found[name].double() - own.double()).abs() > bound).any()):
                different.append(f"{name} of step {step}")
            with torch.no_grad():
                parameter.sub_(total, alpha=LR)
                model.get_parameter(name).sub_(own, alpha=LR)
    return different
