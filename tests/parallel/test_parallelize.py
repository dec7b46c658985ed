"""``parallelize``, and what it shares with layers that were made parallel: values, numbers, errors."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import minifloat
from minifloat import LayerNormLinear, LayerNormMLP, Linear, TransformerLayer, autocast, prepare, quantized_model_init
from minifloat.nn.embedding import VocabParallelEmbedding
from minifloat.parallel.parallelize import parallelize
from minifloat.recipe import DelayedScaling, Recipe
from minifloat.tensor import QuantizedTensor
from tests.helpers.distributed_pool import Pools, on_ranks
from tests.helpers.fused_model import assert_same
from tests.helpers.recipes import NAMED
from tests.helpers.selection import diagonals
from tests.helpers.tensor_parallel_layers import BATCH, HIDDEN, Case, step

LLAMA: dict[str, Any] = {"num_gqa_groups": 4, "normalization": "RMSNorm", "activation": "swiglu", "bias": False}
CASES = {
    "layer": Case(),
    "llama": Case(options=LLAMA | {"qk_norm_type": "RMSNorm"}, rotary=True),
    "fused qkv": Case(options={"fuse_qkv_params": True, "num_gqa_groups": 6}),
    "decoder": Case(encoder_rows=(5, 4), options={"layer_type": "decoder", "fuse_qkv_params": True}),
    "attention": Case("attention", options={"num_gqa_groups": 2}),
}
RECIPES: dict[str, Recipe | None] = {"none": None} | {name: NAMED[name] for name in ("delayed", "current", "block")}
SEQUENCE = pytest.mark.parametrize("sequence_parallel", [True, False], ids=["sequence", "replicated"])
VOCABULARY, TOKENS = 26, 5


class Model(nn.Module):
    """Tokens [s, b] to logits [s, b, V]: what a training has around its layers."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        sizes = {"hidden_dropout": 0.0, "attention_dropout": 0.0, **LLAMA}
        self.layers = nn.ModuleList(TransformerLayer(HIDDEN, 72, 12, layer_number=i, **sizes) for i in range(2))
        self.norm = minifloat.RMSNorm(HIDDEN)
        self.head = Linear(HIDDEN, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


PLAN: dict[str, Any] = {"embedding": "vocabulary", "norm": "sequence", "head": "column"}


def parameters_and_cuts(model: nn.Module) -> Any:
    named = dict(model.named_parameters())
    cuts = {n: (p.partition_dim, p.partition_parts) for n, p in named.items() if getattr(p, "partition_dim", -1) >= 0}
    return {name: p.detach() for name, p in named.items()}, cuts


# ---- layers ----


@pytest.mark.parametrize(("name", "recipe", "sequence_parallel"), diagonals(2, CASES, RECIPES, [True, False]))
def test_is_the_layer_made_parallel(worker_pool: Pools, name: str, recipe: str, sequence_parallel: bool) -> None:
    """Values, notes on parameters, results of two steps and delayed scaling's state: bit for bit."""
    case = replace(CASES[name], sequence_parallel=sequence_parallel, recipe=RECIPES[recipe], scales=(1.0, 4.0))
    for found, wanted in worker_pool(2).run(_both, case):
        assert found["cuts"] == wanted["cuts"] and found["repr"] == wanted["repr"]
        for key in ("parameters", "first", "second", "state"):
            assert_same(found[key], wanted[key])


def _both(rank: int, size: int, case: Case) -> list[dict[str, Any]]:
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))["tp"]
    made = parallelize(case.make(), mesh, sequence_parallel=case.sequence_parallel)
    results = []
    for layer in (made, case.sharded()):
        parameters, cuts = parameters_and_cuts(layer)
        parameters = {name: p.clone() for name, p in parameters.items()}
        of: dict[str, Any] = {"parameters": parameters, "cuts": cuts, "repr": repr(layer)}
        for number, key in enumerate(("first", "second")):
            x, dy, encoder = case.batch(number)
            own = None if encoder is None else case.share(encoder, case.encoder_rows)[rank]
            given = (case.share(x)[rank], case.share(dy)[rank], own, case.recipe)
            of[key] = step(layer, *given, **case.arguments(uneven=True))
        results.append(of | {"state": dict(layer.state_dict())})
    return results


@pytest.mark.parametrize("kind", ["column", "row", "norm", "mlp"])
@on_ranks(2)
def test_single_layers(rank: int, size: int, kind: str) -> None:
    def make(**sharding: Any) -> nn.Module:
        torch.manual_seed(7)
        if kind == "mlp":
            sharding = {"set_parallel_mode": True, **sharding} if sharding else {}
            return LayerNormMLP(24, 32, activation="geglu", **sharding)
        mode = {"parallel_mode": "row" if kind == "row" else "column", **sharding} if sharding else {}
        if kind == "norm":
            return LayerNormLinear(24, 32, parameters_split={"a": 20, "b": 12}, **mode)
        return Linear(24, 32, **mode)

    model = nn.Sequential(make())
    parallelize(model, dist.group.WORLD, plan={} if kind == "mlp" else {"0": "row" if kind == "row" else "column"})
    wanted = nn.Sequential(make(sequence_parallel=True, tp_group=dist.group.WORLD))
    assert parameters_and_cuts(model)[1] == parameters_and_cuts(wanted)[1]
    x = torch.randn(6 if kind == "row" else 3, 12 if kind == "row" else 24)
    results = []
    for each in (model, wanted):
        y = each(x)
        each.zero_grad()
        y.square().sum().backward()
        grads = {name: p.grad for name, p in each.named_parameters()}
        results.append({"y": y.detach(), **{name: g for name, g in grads.items() if g is not None}})
    found, wanted = results
    assert_same(found, wanted)


# ---- models ----


@SEQUENCE
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_model(worker_pool: Pools, tied: bool, sequence_parallel: bool) -> None:
    """Logits and gradients are those of one process; a tied table stays one parameter."""
    length = 6
    by_rank = worker_pool(2).run(_train, tied, sequence_parallel, length)
    wanted = _step(_model(tied), length)
    assert torch.allclose(torch.cat([each["y"] for each, _ in by_rank], -1), wanted["y"], atol=1e-5)
    assert by_rank[0][0].keys() == wanted.keys()
    cuts = by_rank[0][1]
    for name in wanted.keys() - {"y"}:
        parts = [each[name] for each, _ in by_rank]
        whole = parts[0]
        if name in cuts:
            dim, lengths = cuts[name]
            pieces = zip(*(part.split([n // 2 for n in lengths], dim) for part in parts), strict=True)
            whole = torch.cat([torch.cat(pair, dim) for pair in pieces], dim)
        else:
            assert torch.equal(*parts), name
        assert torch.allclose(whole, wanted[name], atol=2e-5, rtol=1e-4), name


def _model(tied: bool) -> Model:
    torch.manual_seed(11)
    return Model(tied)


def _train(rank: int, size: int, tied: bool, sequence_parallel: bool, length: int) -> Any:
    model = _model(tied)
    assert parallelize(model, dist.group.WORLD, sequence_parallel=sequence_parallel, plan=PLAN) is model
    assert isinstance(model.embedding, VocabParallelEmbedding)
    assert (model.head.weight is model.embedding.weight) is tied
    return _step(model, length), parameters_and_cuts(model)[1]


def _step(model: Model, length: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(4)
    tokens = torch.randint(VOCABULARY, (length, BATCH), generator=generator)
    dy = torch.randn(length, BATCH, VOCABULARY, generator=generator)
    y = model(tokens)
    if y.shape != dy.shape:  # this rank's part of the vocabulary
        dy = dy.chunk(2, -1)[dist.get_rank()]
    y.backward(dy)
    return {"y": y.detach()} | {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@on_ranks(2)
def test_meta(rank: int, size: int) -> None:
    """A model without memory gets the values of its seed after ``to_empty``."""
    options = {"sequence_parallel": True, "plan": PLAN}
    with torch.device("meta"):
        model = parallelize(Model(), dist.group.WORLD, **options)  # type: ignore[arg-type]
    assert all(p.is_meta for p in model.parameters())
    results = []
    for each in (model.to_empty(device="cpu"), parallelize(Model(), dist.group.WORLD, **options)):  # type: ignore[arg-type]
        torch.manual_seed(3)
        for module in each.modules():
            if isinstance(module, (Linear, nn.Embedding, minifloat.RMSNorm, minifloat.LayerNorm)):
                module.reset_parameters()
        results.append(_step(each, 4) | parameters_and_cuts(each)[0])  # type: ignore[arg-type]
    found, wanted = results
    assert_same(found, wanted)


@on_ranks(2)
def test_delayed_scaling_goes_on(rank: int, size: int) -> None:
    """Buffers and their values are what they were, and frozen parameters stay frozen."""
    layer = Case(options=LLAMA).make()
    recipe = DelayedScaling(amax_history_len=4)
    prepare(layer, recipe)
    with autocast(recipe=recipe):
        layer(torch.randn(4, BATCH, HIDDEN)).sum().backward()
    layer.layernorm_mlp.fc1.weight.requires_grad_(False)
    before = {name: buffer.clone() for name, buffer in layer.named_buffers()}
    parallelize(layer, dist.group.WORLD)
    assert before and not layer.layernorm_mlp.fc1.weight.requires_grad
    assert_same(dict(layer.named_buffers()), before)


def test_one_rank() -> None:
    """A group of this process alone changes nothing."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = _model(False)
        names = [*model.state_dict()]
        assert parallelize(model, dist.group.WORLD, plan=PLAN) is model
        assert [*model.state_dict()] == names and type(model.embedding) is nn.Embedding
    finally:
        dist.destroy_process_group()


# ---- quantized parameters ----


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("recipe", ["current", "mxfp8", "delayed"])
@on_ranks(2)
def test_of_quantized_parameters(rank: int, size: int, recipe: str, trained: bool) -> None:
    """Each piece is cast by itself, from the values before the first cast where these are still right."""

    def made(**options: Any) -> TransformerLayer:
        torch.manual_seed(0)
        sizes: dict[str, Any] = LLAMA | {"fuse_qkv_params": True, "hidden_dropout": 0.0, "attention_dropout": 0.0}
        with quantized_model_init(recipe=recipe, preserve_high_precision_init_val=True):
            return TransformerLayer(HIDDEN, 72, 12, params_dtype=torch.bfloat16, **sizes, **options)

    layer = made()
    born = made(set_parallel_mode=True, sequence_parallel=True, tp_group=dist.group.WORLD)
    if trained:
        torch.manual_seed(1)
        with torch.no_grad():
            for p in layer.parameters():
                p.copy_(torch.randn(p.shape))
        whole = {name: p.dequantize().detach() for name, p in layer.named_parameters() if hasattr(p, "dequantize")}
    parallelize(layer, dist.group.WORLD)  # type: ignore[arg-type]
    found, wanted = dict(layer.named_parameters()), dict(born.named_parameters())
    assert found.keys() == wanted.keys() and sum(isinstance(p, QuantizedTensor) for p in found.values()) == 4
    for name, p in found.items():
        if isinstance(p, QuantizedTensor):
            assert vars(p)["partition_parts"] == vars(wanted[name])["partition_parts"]
            assert (p.get_high_precision_init_val() is None) == trained
            if trained:  # what the codes stood for, cut, and cast by itself
                linear = layer.get_submodule(name.removesuffix(".weight"))
                with torch.no_grad():
                    wanted[name].copy_(linear._partitions["weight"].cut(whole[name]))  # type: ignore[operator, union-attr]
            assert torch.equal(p.dequantize(), wanted[name].dequantize()), name
    if not trained:
        torch.manual_seed(rank)
        x = torch.randn(5, 2, HIDDEN).bfloat16()
        with autocast(recipe=recipe):
            assert torch.equal(layer(x), born(x))


# ---- errors ----

ERRORS: dict[str, tuple[dict[str, Any], str]] = {
    "heads": ({"heads": 9}, "9 query heads .* do not divide by tp_size=2"),
    "width": ({"ffn": 27}, r"parallelize: layers.0.layernorm_mlp.fc1: .*=27 does not divide by tp_size=2"),
    "twice": ({"twice": True}, "layers.0.self_attention.qkv is sharded already, over 2 ranks"),
    "tied": ({"tied": True, "plan": {"head": "column"}}, "embedding.weight and head.weight are one parameter"),
    "nothing": ({"plan": {"tail": "column"}}, "nothing fits {'tail': 'column'}"),
    "inside": ({"plan": {"layers.0.layernorm_mlp.fc1": "column"}}, "nothing fits {'layers.0.layernorm_mlp.fc1'"),
    "style": ({"plan": {"head": "columns"}}, "plan is {'head': 'columns'}"),
    "norm": ({"plan": {"norm": "column"}}, "nothing fits {'norm': 'column'}"),
    "replaced": ({"replaced": True}, "layers.0.self_attention.proj is a Bilinear"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_refused(worker_pool: Pools, name: str) -> None:
    options, message = ERRORS[name]
    with pytest.raises(ValueError, match=message):
        worker_pool(2).run(_refused, options)


def _refused(rank: int, size: int, options: dict[str, Any]) -> None:
    model = _model(options.get("tied", False))
    if "heads" in options or "ffn" in options:
        model.layers[0] = TransformerLayer(HIDDEN * 3 // 4, options.get("ffn", 72), options.get("heads", 12))
    if options.get("replaced"):
        model.layers[0].self_attention.proj = nn.Bilinear(1, 1, 1)  # type: ignore[union-attr]
    if options.get("twice"):
        parallelize(model, dist.group.WORLD)
    before = copy.deepcopy(dict(model.named_parameters()))
    try:
        parallelize(model, dist.group.WORLD, plan=options.get("plan"))
    finally:
        after = dict(model.named_parameters())
        assert after.keys() == before.keys() and all(torch.equal(after[name], before[name]) for name in before)
