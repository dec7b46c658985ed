"""Arguments of layers: options that they hand on to the linears in them, and checks of tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypedDict

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from minifloat.arguments import Device, FloatDtype, Size, label_of
from minifloat.autocast import surrounding_recipe
from minifloat.functional.etp.rows import Reduction
from minifloat.recipe import RecipeLike

InitMethod = Callable[[Tensor], object]
"""Fills a tensor in place, as the functions of ``torch.nn.init`` do; called without gradients."""


def one_dtype(label: str, dtype: torch.dtype | None, params_dtype: torch.dtype | None) -> torch.dtype | None:
    """Returns the dtype of a module's parameters, which ``params_dtype`` is another name of.

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
    """Device and dtype of parameters; ``params_dtype`` is another name of ``dtype``."""

    device: Device | None
    dtype: FloatDtype | None
    params_dtype: FloatDtype | None


class LinearOptions(Placement, total=False):
    """Options of all linears of a layer."""

    recipe: RecipeLike | None
    fuse_wgrad_accumulation: bool
    etp_group: ProcessGroup | DeviceMesh | None
    etp_reduction: Reduction


class TensorParallelOptions(TypedDict, total=False):
    """Ranks of tensor parallelism, and whether activations between layers are split over them."""

    sequence_parallel: bool
    tp_group: ProcessGroup | None
    tp_size: Size
    tp_mesh: DeviceMesh | None


class DenseOptions(LinearOptions, TensorParallelOptions, total=False):
    """Options of all linears of a layer without experts."""


def place(label: str, options: Placement) -> Placement:
    """Returns the device and dtype of ``options``, which name the dtype once from now on.

    Raises:
        ValueError: ``dtype`` and ``params_dtype`` are both given and differ.
    """
    options["dtype"] = one_dtype(label, options.get("dtype"), options.pop("params_dtype", None))
    return {"device": options.get("device"), "dtype": options["dtype"]}


def chosen(options: Mapping[str, Any], kind: type) -> dict[str, Any]:
    """Selects the ``options`` that the ``TypedDict`` ``kind`` has."""
    return {name: value for name, value in options.items() if name in kind.__annotations__}


# ---- the tensors of a call: errors name the layer, the argument, what came and the way out ----

_STRIDED = torch.strided
_CONVERTED = {"list": "torch.tensor(...)", "tuple": "torch.tensor(...)", "ndarray": "torch.from_numpy(...)"}


def check_tensor(x: Any, module: nn.Module, name: str = "input") -> None:
    """Checks that ``x``, the argument ``name`` of ``module``, is one dense tensor with its values on this rank.

    Raises:
        TypeError: no tensor.
        ValueError: a sparse or nested tensor, or a DTensor for a layer that computes with operations of ours.
    """
    if type(x) is not Tensor or x.layout is not _STRIDED or x.is_nested:
        _check_unusual(x, module, name)


def check_tensors(x: Any, residual: Any, module: nn.Module) -> None:
    """:func:`check_tensor` of an input and a residual, if there is one."""
    check_tensor(x, module)
    if residual is not None:
        check_tensor(residual, module, "residual")


def check_meta(x: Tensor, module: nn.Module, parameter: Tensor | None) -> None:
    """Raises a ValueError if ``parameter`` is on ``meta``, where there are no values, and ``x`` is not."""
    if parameter is not None and parameter.is_meta and not x.is_meta:
        raise ValueError(
            f"{label_of(module)}: the parameters are on the meta device, without values, and the input is on "
            f"{x.device}; use to_empty(device=...) and then reset_parameters() or load_state_dict(...)"
        )


def _check_unusual(x: Any, module: nn.Module, name: str) -> None:
    if not isinstance(x, Tensor):
        kind = type(x).__name__
        way_out = f", as {_CONVERTED[kind]} makes it" if kind in _CONVERTED else ""
        raise TypeError(f"{label_of(module)}: {name} is {'None' if x is None else kind}; a tensor is needed{way_out}")
    if x.is_nested:
        raise ValueError(
            f"{label_of(module)}: {name} is a nested tensor; use a padded one (to_padded_tensor), or all tokens one "
            "after the other, with qkv_format='thd' and cu_seqlens for attention"
        )
    if x.layout != _STRIDED:
        raise ValueError(f"{label_of(module)}: {name} is a tensor of layout {x.layout}; use a dense one: to_dense()")
    own: Any = module.__dict__.get("_recipe", module)
    plain = own == "none" or (own is None and surrounding_recipe() is None)  # PyTorch's own linear
    if hasattr(x, "to_local") and not plain:
        raise ValueError(
            f"{label_of(module)}: {name} is a DTensor, as parallelize_module of PyTorch makes it, and minifloat's "
            "layers split their work over ranks themselves; use parallel_mode='column' or 'row' with tp_group, or "
            "minifloat.distributed.parallelize, or give the layer to_local()"
        )
