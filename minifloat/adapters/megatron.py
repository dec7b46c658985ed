"""Megatron-core: its tensor-parallel linears with quantized products, and with quantized gathers of activations."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any, ClassVar

from megatron.core.models.backends import LocalSpecProvider
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor

from minifloat.nn.linear import Linear
from minifloat.recipe import DelayedScaling, RecipeLike


class _Quantized:
    """A linear of Megatron's whose products and collectives in between a :class:`minifloat.Linear` computes.

    Parameters, their attributes, ``main_grad`` and checkpoints stay Megatron's.
    """

    recipe: ClassVar[RecipeLike]

    def _forward_impl(
        self, input: Tensor, weight: Tensor, bias: Tensor | None = None, allreduce_dgrad: bool = False,
        sequence_parallel: bool = False, tp_group: Any = None, gradient_accumulation_fusion: bool = False, **_: Any,
    ) -> Tensor:  # fmt: skip
        layer = self.__dict__.get("_quantized")  # no submodule: its weight is this one's
        if layer is None or layer.weight is not weight:
            ranks: dict[str, Any] = {}
            rows, columns = weight.shape
            if allreduce_dgrad or sequence_parallel:
                rows *= tp_group.size()
                ranks = {"parallel_mode": "column", "tp_group": tp_group, "sequence_parallel": sequence_parallel}
            layer = Linear(
                columns, rows, False, "meta", weight.dtype, recipe=self.recipe, name=type(self).__name__,
                fuse_wgrad_accumulation=gradient_accumulation_fusion, **ranks,
            )  # fmt: skip
            layer.weight = weight
            self.__dict__["_quantized"] = layer
        y: Tensor = layer(input)
        return y if bias is None else y + bias


def linears(recipe: RecipeLike) -> tuple[type, type]:
    """Makes the classes that stand for Megatron's ``ColumnParallelLinear`` and ``RowParallelLinear`` under ``recipe``.

    Raises:
        ValueError: delayed scaling, whose histories Megatron's checkpoints would not have.
    """
    if recipe == "delayed" or isinstance(recipe, DelayedScaling):
        raise ValueError("Megatron's checkpoints do not have the histories of delayed scaling; use current scaling")
    column, row = (
        type(f"Quantized{base.__name__}", (_Quantized, base), {"recipe": recipe})
        for base in (ColumnParallelLinear, RowParallelLinear)
    )
    return column, row


def quantized(spec: Any, recipe: RecipeLike) -> Any:
    """Returns a copy of a layer's ``ModuleSpec`` in which all tensor-parallel linears compute under ``recipe``.

    spec = quantized(get_gpt_layer_local_spec(), "mxfp8")
    """
    return _replaced(spec, dict(zip((ColumnParallelLinear, RowParallelLinear), linears(recipe), strict=True)))


def _replaced(spec: Any, others: dict[Any, type]) -> Any:
    if isinstance(spec, type):
        return others.get(spec, spec)
    if isinstance(spec, list):
        return [_replaced(each, others) for each in spec]
    if not is_dataclass(spec):
        return spec
    return replace(spec, **{each.name: _replaced(getattr(spec, each.name), others) for each in fields(spec)})  # type: ignore[type-var]


class MinifloatSpecProvider(LocalSpecProvider):
    """Megatron's local backend with linears under ``recipe``; experts are a sequence of MLPs."""

    def __init__(self, recipe: RecipeLike) -> None:
        self._column, self._row = linears(recipe)

    def column_parallel_linear(self) -> type:
        return self._column

    def row_parallel_linear(self) -> type:
        return self._row

    def grouped_mlp_modules(self, *grouped: bool, **options: bool) -> tuple[type, Any]:
        return SequentialMLP, MLPSubmodules(linear_fc1=self._column, linear_fc2=self._row)
