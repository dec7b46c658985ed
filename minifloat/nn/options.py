"""Keyword arguments that layers share and hand on to the linears in them, whose docstring explains them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict

from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from minifloat.arguments import Device, FloatDtype, Size
from minifloat.functional.etp.rows import Reduction
from minifloat.nn.parameters import one_dtype
from minifloat.recipe import RecipeLike


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
