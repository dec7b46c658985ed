"""How parameters are made: their dtype, their initial values, their place in a module."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

InitMethod = Callable[[Tensor], object]
"""Fills a tensor in place, as the functions of ``torch.nn.init`` do; called without gradients."""


def one_dtype(label: str, dtype: torch.dtype | None, params_dtype: torch.dtype | None) -> torch.dtype | None:
    """``dtype`` of a module's parameters, which ``params_dtype`` is another name of.

    Raises:
        ValueError: both are given and differ.
    """
    if dtype is not None and params_dtype not in (None, dtype):
        raise ValueError(f"{label}: dtype is {dtype} and params_dtype {params_dtype}; give one of them")
    return dtype if params_dtype is None else params_dtype


def initialize(weight: Tensor, init_method: InitMethod | None) -> None:
    """Fills a weight [N, K]; by default as ``nn.Linear`` does, uniform in +-1/sqrt(K)."""
    if init_method is not None:
        with torch.no_grad():
            init_method(weight)
    else:
        nn.init.kaiming_uniform_(weight, a=math.sqrt(5))


def replace(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Puts ``parameter`` in the place of the one that has the dotted ``name`` below ``module``."""
    path, _, own = name.rpartition(".")
    module.get_submodule(path).register_parameter(own, parameter)
