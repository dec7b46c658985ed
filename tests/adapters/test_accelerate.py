"""FSDP2 as Accelerate shards a converted model, with its weights gathered as codes."""

from __future__ import annotations

import os
from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh

import minifloat
from minifloat.distributed import fully_shard, sharded_weights
from tests.helpers.distributed_pool import on_ranks, torchrun_environment


def make_model(recipe: str) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 80, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, **sizes))
    minifloat.convert(model, recipe, filter_fn=lambda module, name: name.endswith("_proj"))
    return model


def prepared(model: Any, optimizer: torch.optim.Optimizer, codes: bool) -> tuple[Any, ...]:
    """What `Accelerator.prepare` gives under FSDP2, which Accelerate has on accelerators only: its type is set here."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState
    from accelerate.utils import DistributedType

    from minifloat.adapters.accelerate import gather_codes

    AcceleratorState._reset_state(True)
    accelerator = Accelerator(cpu=True)
    policy = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["LlamaDecoderLayer"]}
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, cpu_ram_efficient_loading=False, **policy
    )
    with gather_codes() if codes else nullcontext():
        return accelerator, *accelerator.prepare(model, optimizer)


def losses(model: Any, optimizer: Any, backward: Any, rank: int) -> list[float]:
    x = torch.randint(64, (2, 9), generator=torch.Generator().manual_seed(rank))
    found = []
    for _ in range(3):
        loss = model(input_ids=x, labels=x).loss
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@on_ranks(2)
def test_accelerate_gathers_codes(rank: int, world_size: int) -> Any:
    """Every converted weight of a block travels as codes, and losses are those of sharding by hand, bit for bit."""
    from accelerate.state import AcceleratorState

    before, wrong = fsdp.fully_shard, {}
    one_machine = {"LOCAL_WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    with torchrun_environment(rank, world_size), mock.patch.dict(os.environ, one_machine):
        for recipe in ("current", "delayed"):
            found = {}
            for codes in (True, False):
                model = make_model(recipe)
                optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
                accelerator, model, optimizer = prepared(model, optimizer, codes)
                names = {name for name, _ in model.named_parameters() if name.endswith("_proj.weight")}
                assert set(sharded_weights(model)) == (names if codes else set()), sharded_weights(model)
                assert len(names) == 14 and fsdp.fully_shard is before
                found[codes] = losses(model, optimizer, accelerator.backward, rank)
            by_hand, mesh = make_model(recipe), init_device_mesh("cpu", (world_size,))
            for layer in by_hand.model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(by_hand, mesh=mesh)
            hand = losses(by_hand, torch.optim.AdamW(by_hand.parameters(), lr=1e-2), torch.Tensor.backward, rank)
            if not found[True] == found[False] == hand or not hand[-1] < hand[0] - 0.1:
                wrong[recipe] = found, hand
    AcceleratorState._reset_state(True)
    return wrong
