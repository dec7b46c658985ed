"""Converted experts of transformers together with what else changes a model: calibration, PEFT, FSDP2."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.distributed.device_mesh import init_device_mesh

import minifloat
import minifloat.distributed
from minifloat.convert import convert
from minifloat.functional import count_gemms
from minifloat.recipe import DelayedScaling, Float8CurrentScaling
from tests.helpers.distributed_pool import Pools
from tests.helpers.experts import IDS, NAMES, E, experts_only, gpt_oss, mixtral, train

pytestmark = pytest.mark.usefixtures("one_thread", "quiet_transformers")


def test_prepared_and_calibrated() -> None:
    """Histories exist before the first step, and record each expert's amaxes without any GEMM being quantized."""
    model, recipe = mixtral(), DelayedScaling()
    experts_only(model, None)
    minifloat.prepare(model, recipe)
    experts = model.model.layers[0].mlp.experts
    with minifloat.autocast(enabled=False, calibrating=True, recipe=recipe), torch.no_grad():
        model(IDS)
    amaxes = experts.gate_up_linear.forward_scaling.amax_history.amax(0)
    assert torch.equal(amaxes[E : 2 * E], experts.gate_up_proj.detach().abs().amax((1, 2)))


@pytest.mark.parametrize("first", ["convert", "peft"])
def test_adapters_of_the_weights(first: str) -> None:
    """PEFT adds its products to the weights in each forward; the sum is quantized, whatever came first."""
    config = LoraConfig(r=4, target_modules=[], target_parameters=["experts.gate_up_proj", "experts.down_proj"])
    model = mixtral()
    if first == "convert":
        experts_only(model, "current")
    adapted = get_peft_model(model, config)
    if first == "peft":
        convert(adapted, "current", lambda module, name: name.endswith(("gate_up_proj", "down_proj")))
    adapters = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(adapters, lr=1e-2)
    losses = []
    for _ in range(6):
        optimizer.zero_grad()
        with count_gemms() as gemms:
            loss = adapted(input_ids=IDS, labels=IDS).loss
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.05
    counted = {(gemm.gemm, gemm.a, gemm.b): n for gemm, n in gemms.items()}
    times = {"fprop": 4, "dgrad": 3, "wgrad": 4}  # what the first experts get needs no gradient
    assert counted == {(gemm, *f): times[gemm] for gemm, f in Float8CurrentScaling().expected_gemms().items()}


def sharded_losses(
    rank: int, world_size: int, model: Any, recipe: str, quantized: bool
) -> tuple[list[float], list[float], set[str]]:
    """Of three steps, by FSDP2 and in one process, on the same tokens in every rank; what is gathered as codes."""
    experts_only(model, recipe, quantize_weights=quantized)
    sharded = copy.deepcopy(model)
    mesh = init_device_mesh("cpu", (world_size,))
    for layer in sharded.model.layers:
        minifloat.distributed.fully_shard(layer, mesh=mesh)
    minifloat.distributed.fully_shard(sharded, mesh=mesh)
    return train(sharded, 3), train(model, 3), set(minifloat.distributed.sharded_weights(sharded))


@pytest.mark.parametrize(("make", "recipe"), [(mixtral, "delayed"), (gpt_oss, "current"), (gpt_oss, "mxfp8")])
@pytest.mark.parametrize("quantized", [False, True])
def test_sharded_by_fsdp(worker_pool: Pools, make: Callable[[], Any], recipe: str, quantized: bool) -> None:
    """The losses of one process, bit for bit: the mean of two equal gradients is each of them."""
    for sharded, whole, gathered in worker_pool(2).run(sharded_losses, make(), recipe, quantized):
        assert sharded == whole and sharded[2] < sharded[0]
        names = {f"{name.replace('_proj', '_linear')}.{i}.weight" for name in NAMES for i in range(E)}
        assert gathered == (names if quantized else {*NAMES})
