"""Recipes that differ in a number at each step: nothing that is kept for them grows without end."""

from __future__ import annotations

import functools
import gc
import importlib
from collections import Counter

import pytest
import torch

import minifloat
from minifloat import formats, quantizer
from minifloat.functional.quantize import LinearConfig
from minifloat.quantizer import Quantizer

# What these are of there is a handful of in a process: devices, kernels, booleans, groups of ranks, nothing.
OF_FEW = {
    "_device_facts", "cublaslt", "kernels", "tile", "gemm_tile", "multiprocessors", "_runs_on", "_gather_options",
    "_max_options", "check_when_wrapping", "_compiled", "operations", "_warn",
}  # fmt: skip


def test_caches_have_a_bound() -> None:
    """All of the package but those of devices and the like."""
    caches = [each for each in gc.get_objects() if type(each) is functools._lru_cache_wrapper]
    ours = [each for each in caches if getattr(each, "__module__", "").startswith("minifloat.")]
    unbounded = {each.__name__ for each in ours if each.cache_parameters()["maxsize"] is None}
    assert unbounded - OF_FEW == set()
    assert {"parse", "choose"} <= {each.__name__ for each in ours}


def test_a_recipe_for_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward under 50 recipes in turn, some with a state, keep what one keeps."""
    contexts = importlib.import_module("minifloat.autocast")  # the package's attribute is the class
    for module, limit, kept in [
        (quantizer, "MOST_USAGES", "_with_usages"),
        (quantizer, "MOST_CASTS", "_casts"),
        (contexts, "_MAX_RECIPES", "_recipes"),
    ]:
        monkeypatch.setattr(module, limit, 8)
        monkeypatch.setattr(module, kept, {})  # what other tests left in it would be dropped in between
    layer, x = minifloat.Linear(32, 32), torch.randn(4, 32)

    def step(i: int) -> None:
        recipes: list[minifloat.Recipe] = [
            minifloat.Float8CurrentScaling(amax_epsilon=i * 1e-6),
            minifloat.Float8BlockScaling(amax_epsilon=i * 1e-6),
            minifloat.DelayedScaling(margin=i % 50, amax_history_len=2 + i),
            minifloat.CustomRecipe(lambda role: Quantizer(minifloat.Format(amax_epsilon=i * 1e-6))),
        ]
        for recipe in recipes:
            with minifloat.autocast(recipe=recipe):
                layer(x).sum().backward()

    def alive() -> Counter[type]:
        gc.collect()
        return Counter(
            type(each) for each in gc.get_objects() if issubclass(type(each), (LinearConfig, minifloat.Recipe))
        )

    for i in range(10):
        step(i)
    before = alive()
    for i in range(10, 50):
        step(i)
        assert max(map(len, (quantizer._with_usages, quantizer._casts, contexts._recipes))) <= 8
    assert alive() == before
    assert formats.parse.cache_info().currsize <= formats.MOST_PARSED
