"""torchtitan's own models with our override."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import minifloat
from minifloat.functional import count_gemms

pytest.importorskip("torchtitan")

OVERRIDE = "minifloat.adapters.torchtitan.linears"


def small_model(recipe: str | None) -> tuple[Any, list[str]]:
    from torchtitan.config.override import OverrideConfig, apply_overrides
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3 import llama3_configs

    config = copy.deepcopy(llama3_configs["debugmodel"](attn_backend="flex"))
    del config.layers[2:]
    for layer in config.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()  # which needs no compiler on a CPU
    done = apply_overrides(OverrideConfig(imports=[(OVERRIDE, {"recipe": recipe})]), config) if recipe else []
    torch.manual_seed(0)
    model = config.build()
    model.init_states(buffer_device=torch.device("cpu"))
    return model, done


def test_a_model_trains_in_the_recipe() -> None:
    (plain, _), (model, done) = small_model(None), small_model("mxfp8")
    assert len(done) == 2 * 5 and isinstance(model.layers["0"].feed_forward.w1, minifloat.Linear)
    assert not isinstance(model.lm_head, minifloat.Linear)
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), model.parameters(), strict=True))
    tokens = torch.randint(0, 2048, (2, 32))
    with count_gemms() as gemms:
        logits = model(tokens)
        logits.float().logsumexp(-1).mean().backward()
    assert gemms.total() == 3 * 10 and all("e4m3/1x32/e8m0" in gemm for gemm in gemms)
    torch.testing.assert_close(logits, plain(tokens), rtol=0.1, atol=0.1 * logits.abs().max().item())
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_tensor_parallelism_is_refused() -> None:
    layer = small_model("current")[0].layers["0"].feed_forward.w1
    with pytest.raises(ValueError, match="torchtitan's tensor parallelism is not supported"):
        layer.parallelize(SimpleNamespace(tp_enabled=True))
