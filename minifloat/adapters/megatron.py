"""Megatron-core: its tensor-parallel linears with quantized products, and with quantized gathers of activations."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any, ClassVar

from megatron.core.models.backends import LocalSpecProvider
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
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
        sequence_parallel: bool = False, tp_group: Any = None, gradient_accumulation_fusion: bool = False,
        gtp_remat_size: int = 1, **_: Any,
    ) -> Tensor:  # fmt: skip
        if gtp_remat_size > 1:  # the weight is one rank's rows, and Megatron's own function gathers them
            raise ValueError(f"{type(self).__name__}: set gtp_weight_remat_size to 1, not {gtp_remat_size}")
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


def linears(recipe: RecipeLike) -> dict[type, type]:
    """Makes the classes that stand for Megatron's ``ColumnParallelLinear`` and ``RowParallelLinear`` under ``recipe``.

    Raises:
        ValueError: delayed scaling, whose histories Megatron's checkpoints would not have.
    """
    if recipe == "delayed" or isinstance(recipe, DelayedScaling):
        raise ValueError("Megatron's checkpoints do not have the histories of delayed scaling; use current scaling")
    return {
        base: type(f"Quantized{base.__name__}", (_Quantized, base), {"recipe": recipe})
        for base in (ColumnParallelLinear, RowParallelLinear)
    }


def quantized(spec: Any, recipe: RecipeLike) -> Any:
    """Returns a copy of a layer's ``ModuleSpec`` in which all tensor-parallel linears compute under ``recipe``."""
    return _replaced(spec, linears(recipe))


def _replaced(spec: Any, others: dict[type, type]) -> Any:
    if isinstance(spec, list | tuple):
        return type(spec)(_replaced(each, others) for each in spec)
    if isinstance(spec, partial):  # of experts since megatron-core 0.17, of an MLP since 0.18
        return partial(spec.func, *spec.args, **{name: _replaced(each, others) for name, each in spec.keywords.items()})
    if is_dataclass(spec) and not isinstance(spec, type):
        return replace(spec, **{each.name: _replaced(getattr(spec, each.name), others) for each in fields(spec)})
    return others.get(spec, spec) if isinstance(spec, type) else spec


class MinifloatSpecProvider(LocalSpecProvider):
    """Megatron's local backend with linears under ``recipe``; experts are a sequence of MLPs."""

    def __init__(self, recipe: RecipeLike) -> None:
        self._linears = linears(recipe)

    def column_parallel_linear(self) -> type:
        return self._linears[ColumnParallelLinear]

    def row_parallel_linear(self) -> type:
        return self._linears[RowParallelLinear]

    def grouped_mlp_modules(self, *grouped: bool, **options: bool) -> Any:
        made = super().grouped_mlp_modules(*[False for _ in grouped], **dict.fromkeys(options, False))
        return _replaced(made, self._linears)
