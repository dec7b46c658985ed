"""How parameters are made, and the keyword arguments that layers hand on to the linears in them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypedDict

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from minifloat.arguments import Device, FloatDtype, Size
from minifloat.functional.etp.rows import Reduction
from minifloat.recipe import RecipeLike

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


class Placement(TypedDict, total=False):
    """Where parameters are made; ``params_dtype`` is another name of ``dtype``."""

    device: Device | None
    dtype: FloatDtype | None
    params_dtype: FloatDtype | None


class LinearOptions(Placement, total=False):
    """What all linears of a layer are given."""

    recipe: RecipeLike | None
    fuse_wgrad_accumulation: bool
    etp_group: ProcessGroup | DeviceMesh | None
    etp_reduction: Reduction


class TensorParallelOptions(TypedDict, total=False):
    """The ranks of tensor parallelism, and whether activations between layers are split over them."""

    sequence_parallel: bool
    tp_group: ProcessGroup | None
    tp_size: Size
    tp_mesh: DeviceMesh | None


class DenseOptions(LinearOptions, TensorParallelOptions, total=False):
    """What all linears of a layer without experts are given."""


def place(label: str, options: Placement) -> Placement:
    """The device and dtype of ``options``, which name the dtype once from now on.

    Raises:
        ValueError: ``dtype`` and ``params_dtype`` are both given and differ.
    """
    options["dtype"] = one_dtype(label, options.get("dtype"), options.pop("params_dtype", None))
    return {"device": options.get("device"), "dtype": options["dtype"]}


def chosen(options: Mapping[str, Any], kind: type) -> dict[str, Any]:
    """Those of ``options`` that the ``TypedDict`` ``kind`` has."""
    return {name: value for name, value in options.items() if name in kind.__annotations__}
