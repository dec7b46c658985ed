"""``fully_shard`` of weights that are several parameters: gathered as codes, those of the whole weight."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import minifloat
from minifloat.formats import COLUMNWISE, ROWWISE, Format
from minifloat.parallel.fsdp import fully_shard, hooks, sharded_weights
from minifloat.quantizer import Quantizer, cast_all
from tests.helpers.distributed_pool import Pools, on_ranks
from tests.helpers.fsdp_cases import MODELS, Case, RecordedGathers, lockstep, mesh_of, quantized_lockstep, shard, step
from tests.helpers.memory import live_storages

RECIPES = ("current", "delayed", "block", "mxfp8", "nvfp4")


def split(recipe: str) -> nn.Module:
    """Parameters whose rows are whole blocks, but the last one's, and so few in one that a rank of three has none."""
    return nn.Sequential(
        minifloat.Linear(24, 300, recipe=recipe, parameters_split={"a": 128, "b": 128, "c": 44}),
        minifloat.LayerNormLinear(300, 130, bias=False, recipe=recipe, parameters_split={"a": 128, "b": 2}),
        minifloat.Linear(130, 24, recipe=recipe),
    )


def attention(recipe: str) -> nn.Module:
    """Query, key and value as ``TransformerLayer`` has them; four heads share two keys and values."""
    options: dict[str, Any] = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "recipe": recipe}
    return nn.Sequential(minifloat.TransformerLayer(64, 64, 4, num_gqa_groups=2, kv_channels=64, **options))


MODELS.update(split=split, attention=attention)


def in_lockstep(rank: int, size: int, case: Case, steps: int) -> str:
    return lockstep(rank, size, case, steps)  # in a process that knows these models


@pytest.mark.parametrize(
    ("size", "recipe"),
    [
        (3, "delayed"),
        (3, "nvfp4"),
        *(pytest.param(3, recipe, marks=pytest.mark.slow) for recipe in ("current", "block", "mxfp8")),
        *(pytest.param(2, recipe, marks=pytest.mark.slow) for recipe in RECIPES),
    ],
)
def test_lockstep(worker_pool: Pools, size: int, recipe: str) -> None:
    assert worker_pool(size).run(in_lockstep, Case("split", recipe), 2) == [""] * size


@pytest.mark.parametrize(
    "case",
    [
        Case("attention", "mxfp8", "nested", reshard=True, options=("checkpoint", "evaluate")),
        pytest.param(Case("attention", "block", "root", dtype="bfloat16"), marks=pytest.mark.slow),
        pytest.param(Case("split", "delayed", options=("autocast", "accumulate", "frozen")), marks=pytest.mark.slow),
        pytest.param(Case("split", "mxfp8", reshard=False, options=("save_on_cpu",)), marks=pytest.mark.slow),
    ],
    ids=lambda case: "-".join(case[:3]),
)
def test_ways_to_step(worker_pool: Pools, case: Case) -> None:
    assert worker_pool(2).run(in_lockstep, case, 2) == [""] * 2


def rotated(role: minifloat.QuantizerRole) -> Quantizer:
    """One amax a row, and one of all rotated values."""
    rows = Format("e2m1", 16, scale_rule="two_level", amax_per_row=True)
    return Quantizer(rows, Format("e2m1", 16, scale_rule="two_level", transform="hadamard16"))


def mixed(role: minifloat.QuantizerRole) -> Quantizer:
    """Two formats that are symmetric, each by itself."""
    return Quantizer(Format("e4m3"), Format("e4m3", 128, tile=True, scale_rule="pow2"))


def compared(rank: int, size: int, recipe: Any, rows: dict[str, int]) -> list[str]:
    """What a gathered weight and its parameters hold, beside the whole cast by one process; what is left of it."""
    torch.manual_seed(0)
    own = minifloat.CustomRecipe(recipe) if callable(recipe) else recipe
    layer = minifloat.Linear(24, sum(rows.values()), bias=False, recipe=own, parameters_split=rows)
    with torch.no_grad():
        layer.b_weight[0] = 9.0  # the largest, of one rank
    values = torch.cat([parameter.detach() for parameter in layer.parameters()])
    scale = layer.forward_scaling.scale[1:2].clone() if recipe == "delayed" else None
    expected = cast_all([values], [layer._config(layer.recipe).weight], scales=[scale])[0]
    fully_shard(layer, mesh=mesh_of(size))
    wrong = ["not as codes"] * (list(sharded_weights(layer)) != [f"{name}_weight" for name in rows])
    layer.unshard()
    weight = hooks.parameters_below(layer)[0].weight
    for mine, theirs in zip(weight.gathered.operands, expected, strict=True):
        names = ["codes", "scale_inv", *["amax"] * (theirs.format.scale_rule == "two_level")]
        wrong += [
            f"{theirs.dim} {name}" for name in names if not torch.equal(getattr(mine, name), getattr(theirs, name))
        ]
    wholes = expected.dequantize().split(list(rows.values()))
    for (name, parameter), whole in zip(layer.named_parameters(), wholes, strict=True):
        wrong += [name] * (not torch.equal(parameter.dequantize(), whole) or parameter.shape != whole.shape)
    layer.reshard()
    operands = [each for held in (weight.gathered.operands, *weight.gathered.pieces) for each in held]
    tensors = [t for operand in operands for t in operand[:3] if t is not None and t.numel() > 24]  # not of columns
    return wrong + ["not freed"] * any(t.untyped_storage().size() for t in tensors)


@pytest.mark.parametrize("recipe", [*RECIPES, rotated])
def test_codes_are_those_of_the_whole(worker_pool: Pools, recipe: Any) -> None:
    assert worker_pool(3).run(compared, recipe, {"a": 128, "b": 128, "c": 44}) == [[]] * 3


def test_mixed_formats(worker_pool: Pools) -> None:
    assert worker_pool(2).run(compared, mixed, {"a": 256, "b": 1}) == [[]] * 2


def listed(rank: int, size: int) -> list[dict[str, Any]]:
    """Of several parameters, ones whose blocks lie in two of them; of two modules; of no recipe."""
    rows = {"a": 4, "b": 8}
    halves = nn.Sequential(
        minifloat.Linear(8, 12, parameters_split=rows), minifloat.Linear(12, 12, recipe="mxfp8", parameters_split=rows)
    )
    fully_shard(halves, mesh=mesh_of(size), recipe="current")
    tied = nn.Sequential(minifloat.Linear(8, 8, recipe="current"), minifloat.Linear(8, 8, recipe="current"))
    tied[1].weight = tied[0].weight
    fully_shard(tied, mesh=mesh_of(size))
    none = nn.Sequential(minifloat.Linear(8, 8), minifloat.Linear(8, 8, recipe="none"))
    fully_shard(none, mesh=mesh_of(size))
    for model in (halves, tied, none):
        step(model, rank)
    return [sharded_weights(model) for model in (halves, tied, none)]


def test_which_weights(worker_pool: Pools) -> None:
    spec = "e4m3/tensor/fp32"
    assert worker_pool(2).run(listed) == [[{"0.a_weight": (spec, spec), "0.b_weight": (spec, spec)}, {}, {}]] * 2


# ---- the wire and memory ----


@on_ranks(2)
def test_wire_and_memory(rank: int, size: int) -> list[str]:
    """Bytes of a step's two gathers; whether what is received is copied, and what is left of it."""
    rows = {"a": 256, "b": 128, "c": 44}
    layer = minifloat.Linear(64, 428, bias=False, recipe="mxfp8", parameters_split=rows)
    model = shard(nn.Sequential(layer), Case("", "mxfp8", reshard=True), mesh_of(size))
    recorded = RecordedGathers(model)
    step(model, rank)
    before = live_storages()
    recorded.sent.clear()
    step(model, rank)
    wrong = ["a step leaves memory behind"] * (live_storages() != before)
    weight = hooks.parameters_below(model)[0].weight
    expected = [
        sum(each.gather_bytes(weight.quantizer.format(dim), dim, 64) for each in weight.owned)
        for dim in (ROWWISE, COLUMNWISE)
    ]
    wrong += [f"{recorded.sent} bytes sent, not {expected}"] * (recorded.sent != expected)
    layer.unshard()
    codes = weight.gathered.operands.rowwise.codes
    received_codes = [weight.gathered.buffers([ROWWISE], i)[0].received for i in range(3)]
    for parameter, received in zip(weight.params, received_codes, strict=True):
        own = received.untyped_storage().data_ptr() != codes.untyped_storage().data_ptr()
        wrong += [f"{parameter.name} is copied"] * own
    return wrong


# ---- quantized parameters ----


def quantized_in_lockstep(rank: int, size: int, case: Case, steps: int) -> str:
    return quantized_lockstep(rank, size, case, steps)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["delayed", "mxfp8"])
def test_each_is_quantized_by_itself(worker_pool: Pools, recipe: str) -> None:
    assert worker_pool(3).run(quantized_in_lockstep, Case("split", recipe), 2) == [""] * 3
