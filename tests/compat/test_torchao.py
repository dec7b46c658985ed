"""torchao's names of FP8 training: the calls of its README run as they stand, and give what ``convert`` gives."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh

import minifloat
from minifloat.compat import torchao
from minifloat.compat.torchao import Float8GemmConfig, Float8LinearConfig, convert_to_float8_training
from minifloat.distributed import fully_shard
from minifloat.recipe import Float8CurrentScaling, Float8RowwiseScaling, MMParams
from tests.helpers.distributed_pool import on_ranks


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 48, bias=False), nn.Linear(48, 20, bias=False)).bfloat16()


def test_readme(device: torch.device) -> None:
    """An optimizer made before, a config by name, a filter of names and sizes, compiled steps, a state dict."""
    m = model().to(device)
    x = torch.randn(64, 32, device=device, dtype=torch.bfloat16)
    optimizer = torch.optim.SGD(m.parameters(), lr=0.1)

    def module_filter_fn(mod: nn.Module, fqn: str) -> bool:
        return fqn != "1" and not (isinstance(mod, nn.Linear) and (mod.in_features % 16 or mod.out_features % 16))

    config = Float8LinearConfig.from_recipe_name("tensorwise")
    assert convert_to_float8_training(m, config=config, module_filter_fn=module_filter_fn) is m
    assert [type(each) for each in m] == [minifloat.Linear, nn.Linear]
    expected = copy.deepcopy(m)
    compiled = torch.compile(m, backend="aot_eager")
    for _ in range(3):
        optimizer.zero_grad()
        loss = compiled(x).square().sum() / 1000
        loss.backward()
        optimizer.step()
    torchao.precompute_float8_dynamic_scale_for_fsdp(m)
    assert not torch.equal(m[0].weight, expected[0].weight)
    expected.load_state_dict(m.state_dict())
    assert torch.equal(expected(x), m(x))


def test_without_arguments_every_linear_is_converted() -> None:
    m = convert_to_float8_training(model())
    assert all(type(each) is minifloat.Linear and each.recipe == Float8CurrentScaling() for each in m)  # type: ignore[attr-defined]
    single = nn.Linear(8, 8)
    assert convert_to_float8_training(single) is single and isinstance(single, minifloat.Linear)


@pytest.mark.parametrize(
    ("config", "recipe"),
    [
        (Float8LinearConfig.from_recipe_name("rowwise"), Float8RowwiseScaling(use_power_2_scales=True)),
        (
            Float8LinearConfig(round_scales_to_power_of_2=True, enable_fsdp_float8_all_gather=True, emulate=True),
            Float8CurrentScaling(use_power_2_scales=True),
        ),
        (
            Float8LinearConfig(gemm_config_output=Float8GemmConfig(), gemm_config_grad_weight=Float8GemmConfig(True)),
            Float8CurrentScaling(fp8_gemm_fprop=MMParams(), fp8_gemm_wgrad=MMParams(use_split_accumulator=False)),
        ),
    ],
)
def test_recipes(config: Float8LinearConfig, recipe: minifloat.Recipe) -> None:
    layer = convert_to_float8_training(nn.Linear(8, 8), config=config)
    assert layer.recipe == config.recipe == recipe


def test_what_is_missing_names_the_way_out() -> None:
    with pytest.raises(ValueError, match="recipe_name is 'rowwise_with_gw_hp'; 'tensorwise' or 'rowwise'"):
        Float8LinearConfig.from_recipe_name("rowwise_with_gw_hp")
    with pytest.raises(TypeError, match=r"convert got .*'module_filter_fn'; it is filter_fn here"):
        minifloat.convert(model(), "current", module_filter_fn=None)  # type: ignore[call-arg]
    modules: tuple[Any, ...] = minifloat, torchao
    for module in modules:
        assert module.convert_to_float8_training is convert_to_float8_training
        for name in torchao.WAYS_OUT:
            with pytest.raises(AttributeError, match=rf"no attribute '{name}'; (use|leave)"):
                getattr(module, name)


@on_ranks(2)
def test_gathers_of_pytorch_warn_once(rank: int, size: int) -> None:
    shard: Any
    config, mesh = Float8LinearConfig(enable_fsdp_float8_all_gather=True), init_device_mesh("cpu", (size,))
    for shard, warns in ((fsdp.fully_shard, True), (fully_shard, False), (None, False)):
        m = convert_to_float8_training(model(), config=config)
        if shard is not None:
            for each in (*m, m):
                shard(each, mesh=mesh)
        for _ in range(2):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                m(torch.randn(16, 32).bfloat16()).square().sum().backward()
            found = [str(each.message) for each in caught if "all_gather" in str(each.message)]
            assert len(found) == warns and all(
                "from minifloat.distributed import fully_shard" in each for each in found
            )
            warns = False
