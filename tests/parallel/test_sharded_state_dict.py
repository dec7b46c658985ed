"""``sharded_state_dict`` through DCP: saved on some ranks and loaded on others, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

import minifloat
from minifloat import LayerNormLinear, Linear, TransformerLayer, prepare, quantized_model_init
from minifloat.parallel.parallelize import parallelize
from minifloat.parallel.state_dict import (
    SavedShard,
    load_sharded_state_dict,
    sharded_optimizer_state_dict,
    sharded_state_dict,
)
from minifloat.recipe import DelayedScaling
from minifloat.tensor import QuantizedTensor
from tests.helpers.distributed_pool import Pools
from tests.helpers.fused_model import assert_same

HIDDEN, HEADS, VOCABULARY = 24, 12, 26
RECIPE = DelayedScaling(amax_history_len=2)
SMALL = {"hidden_dropout": 0.0, "attention_dropout": 0.0}


def make(seed: int) -> nn.ModuleDict:
    """Every way in which parameters are cut: 12 heads and 24 rows divide by 2, 3 and 4, the vocabulary does not."""
    torch.manual_seed(seed)
    layers = {
        "embedding": nn.Embedding(VOCABULARY, HIDDEN),
        "fused": TransformerLayer(HIDDEN, 24, HEADS, activation="swiglu", fuse_qkv_params=True, **SMALL),
        "split": TransformerLayer(HIDDEN, 36, HEADS, qk_norm_type="RMSNorm", **SMALL),
        "decoder": TransformerLayer(HIDDEN, 24, HEADS, layer_type="decoder", fuse_qkv_params=True, **SMALL),
        "norm": minifloat.LayerNorm(HIDDEN),
        "head": LayerNormLinear(HIDDEN, 48, bias=False),
    }
    model = nn.ModuleDict(layers)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm." in name:
                p.copy_(torch.randn(p.shape))
    prepare(model, RECIPE)
    for buffer in model.buffers():
        buffer.copy_(torch.rand(buffer.shape))
    return model


def sharded(seed: int) -> nn.Module:
    if not dist.is_initialized():
        return make(seed)
    plan: Any = {"embedding": "vocabulary", "norm": "sequence", "head": "column"}
    return parallelize(make(seed), dist.group.WORLD, plan=plan)  # type: ignore[arg-type]


def test_same_keys_everywhere(worker_pool: Pools) -> None:
    here = sharded_state_dict(make(1))
    for keys in worker_pool(2).run(_keys):
        assert keys == [*here]
    assert "fused.self_attention.qkv.linear.weight.query" in here and "fused.layernorm_mlp.fc1.bias.up" in here
    assert "decoder.inter_attention.key_value.weight.key" in here and "split.self_attention.proj.weight" in here


def gathered(value: Tensor) -> Tensor:
    """The whole, of what all ranks have."""
    if not isinstance(value, SavedShard):
        return value
    pieces: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(pieces, (value.offsets, value.local))
    whole = torch.full(value.shape, torch.nan, dtype=value.dtype)
    for offsets, piece in pieces:
        whole[tuple([slice(first, first + n) for first, n in zip(offsets, piece.shape, strict=True)])] = piece
    return whole


def _keys(rank: int, size: int) -> list[str]:
    state = sharded_state_dict(sharded(1))
    whole = sharded_state_dict(make(1))
    for key, value in state.items():
        assert torch.equal(gathered(value), whole[key]), key
    model = sharded(1)
    assert sharded_state_dict(model)["norm.weight"].data_ptr() == model.norm.weight.data_ptr()  # type: ignore[union-attr, operator]
    return [*state]


def test_histories_come_and_go() -> None:
    """A checkpoint may lack delayed scaling's buffers, or have more than the model has yet."""
    layer, other = Linear(8, 8), Linear(8, 8)
    prepare(other, RECIPE)
    load_sharded_state_dict(layer, sharded_state_dict(other))
    assert_same(dict(layer.state_dict()), dict(other.state_dict()))
    load_sharded_state_dict(other, sharded_state_dict(Linear(8, 8)))


def quantized(recipe: str, seed: int) -> nn.Module:
    """A model whose weights are kept quantized: columns of several, rows, fused parts."""
    torch.manual_seed(seed)
    options: Any = {"activation": "swiglu", "fuse_qkv_params": True, **SMALL}
    with quantized_model_init(recipe=recipe):
        model = TransformerLayer(HIDDEN, 24, HEADS, params_dtype=torch.bfloat16, **options)
    return parallelize(model, dist.group.WORLD) if dist.is_initialized() else model  # type: ignore[arg-type]


def save_quantized(rank: int, size: int, recipe: str, folder: str) -> dict[str, Any]:
    state = sharded_state_dict(quantized(recipe, 1))
    dcp.save(state, checkpoint_id=folder)
    return {key: gathered(value) for key, value in state.items()}


def load_quantized(rank: int, size: int, recipe: str, folder: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The operands of all weights after a load, and those of the saved values, cut and cast here."""
    model, other = quantized(recipe, 2), quantized(recipe, 3)
    state = sharded_state_dict(model)
    dcp.load(state, checkpoint_id=folder)
    load_sharded_state_dict(model, state)
    assert sum(isinstance(p, QuantizedTensor) for p in model.parameters()) == 4
    found = {key: p.dequantize().detach() for key, p in model.named_parameters() if isinstance(p, QuantizedTensor)}
    whole = {key: gathered(value) for key, value in state.items()}
    load_sharded_state_dict(other, whole)
    wanted = {key: p.dequantize().detach() for key, p in other.named_parameters() if isinstance(p, QuantizedTensor)}
    assert_same(found, wanted)
    return whole, {key: value for key, value in found.items() if "fc2" in key}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # in one process
@pytest.mark.parametrize(("recipe", "saved", "loaded"), [("current", 2, 1), ("block", 1, 2), ("mxfp8", 2, 2)])
def test_quantized_parameters(worker_pool: Pools, tmp_path: Path, recipe: str, saved: int, loaded: int) -> None:
    """What codes stand for is saved, and is the same bits on any number of ranks; each casts its own part of it."""
    args = recipe, str(tmp_path / "checkpoint")
    states = [save_quantized(0, 1, *args)] if saved == 1 else worker_pool(saved).run(save_quantized, *args)
    results = [load_quantized(0, 1, *args)] if loaded == 1 else worker_pool(loaded).run(load_quantized, *args)
    for whole, _ in results:
        assert_same(whole, states[0])
    pieces = torch.cat([piece["layernorm_mlp.fc2.weight"] for _, piece in results], 1)
    torch.testing.assert_close(pieces, states[0]["layernorm_mlp.fc2.weight"], rtol=0.07, atol=1e-3)
    if recipe == "mxfp8":
        assert torch.equal(pieces, states[0]["layernorm_mlp.fc2.weight"])  # scales that are powers of two lose nothing


def test_refused(worker_pool: Pools) -> None:
    with quantized_model_init(recipe="current"):
        layer = Linear(16, 16)
    with pytest.raises(ValueError, match="the optimizer has quantized parameters"):
        sharded_optimizer_state_dict(layer, torch.optim.AdamW(layer.parameters()))
    model = Linear(8, 8)
    with pytest.raises(RuntimeError, match="Missing key"):
        load_sharded_state_dict(model, {"weight": torch.zeros(8, 8)})
    assert load_sharded_state_dict(model, {"weight": torch.zeros(8, 8)}, strict=False).missing_keys == ["bias"]
    worker_pool(2).run(_refused)


def _refused(rank: int, size: int) -> None:
    group = [dist.new_group([r]) for r in range(size)]  # of one rank each: no other group
    two = dist.new_group([0, 1])
    options = {"parallel_mode": "column"}
    model = nn.Sequential(*[Linear(8, 8, tp_group=each, **options) for each in (dist.group.WORLD, two, group[rank])])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="0 and 1 are sharded over different groups"):
        sharded_state_dict(model)
    state = sharded_state_dict(model[:1])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"SavedShard\(\(8, 8\), local=\(4, 8\).* this rank has \(8, 8\)"):
        load_sharded_state_dict(nn.Sequential(Linear(8, 8)), state)
