"""The parameters of a linear layer: one or several, whole or this rank's share, and their start values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from minifloat.comm.dtensor import is_dtensor
from minifloat.functional.autograd import apply
from minifloat.nn import parameters
from minifloat.nn.etp import EtpRows
from minifloat.nn.parameters import InitMethod
from minifloat.nn.tensor_parallel import mark, partitions
from minifloat.tensor import QuantizedTensor


class LinearParameters(EtpRows, nn.Linear):
    """The weight and bias of a :class:`~minifloat.Linear`: how they are kept, split and shared out over ranks."""

    @property
    def _label(self) -> str:
        """What errors call the layer."""
        if self.name or torch.compiler.is_compiling():  # sizes of modules that FSDP2 manages are symbols to a compiler
            return f"Linear {self.name!r}"
        return f"Linear({self.in_features}, {self.out_features})"

    def _weight_matrix(self) -> Tensor:
        """W [out_features, in_features], this rank's: the parameter, or all of ``parameters_split`` as one."""
        if self._etp is not None:
            return self._etp_stand_in((self.out_features, self.in_features))
        if self.parameters_split is None:
            return self.weight
        parts, whole = [getattr(self, name) for name in self._weight_names], self._gathered_weight()
        return torch.cat(parts) if whole is None else apply(_Joined, whole, *parts)

    def whole_weight(self) -> Tensor:
        """W of all ranks of ``etp_group``, in the dtype of the parameter: a collective; without a group W itself.

        For functions that read the weight, as :func:`~minifloat.functional.linear_cross_entropy`: its gradient is
        reduced, and added to that of this rank's rows. Tensor-parallel parts stay as they are.
        """
        return self._weight_matrix() if self._etp is None else self._etp_whole()

    def _weight_and_bias(self) -> tuple[Tensor, Tensor | None]:
        """W, and b where forward adds it. Straight from the parameters: nn.Module's ``__getattr__`` takes longer."""
        own = self._parameters
        weight = own.get("weight")
        unusual = self.parameters_split is not None or self._etp is not None
        if weight is None or "bias" not in own or unusual:  # some are no parameters any more
            return self._weight_matrix(), None if self.return_bias else self._bias_vector()
        return weight, None if self.return_bias else own["bias"]

    def _gathered_weight(self) -> QuantizedTensor | None:
        """W where FSDP2 has gathered ``parameters_split`` as codes of the whole; its gradients are nobody's."""
        first = getattr(self, self._weight_names[0])
        whole: QuantizedTensor | None = getattr(getattr(first, "gatherer", None), "whole", None)
        return whole

    def _bias_vector(self) -> Tensor | None:
        """b [out_features], likewise."""
        if self.parameters_split is None:
            return self.bias
        return torch.cat([getattr(self, name) for name in self._bias_names]) if self._has_bias else None

    @property
    def _weight_names(self) -> tuple[str, ...]:
        """The names of the parameters that make up the weight."""
        return ("weight",) if self.parameters_split is None else tuple(f"{n}_weight" for n in self.parameters_split)

    @property
    def _matrices(self) -> tuple[tuple[str, ...], ...]:
        """All parameters make up one matrix, unless a subclass transposes it."""
        return (self._weight_names,) if type(self)._weight_matrix is LinearParameters._weight_matrix else ()

    @property
    def _bias_names(self) -> tuple[str, ...]:
        """The names of the parameters that make up the bias; empty if there is none."""
        if self.parameters_split is None:
            return () if self._parameters.get("bias") is None else ("bias",)
        names = (f"{name}_bias" for name in self.parameters_split)
        return tuple(name for name in names if self._parameters.get(name) is not None)

    @property
    def _has_bias(self) -> bool:
        return bool(self._bias_names)

    # ---- the start ----

    def reset_parameters(self) -> None:
        """Initial values."""
        fan_in = self.in_features * (self._parallel.group.size if self._parallel.mode == "row" else 1)
        bound = 0.0 if self.init_method is not None or not fan_in else fan_in**-0.5
        self._fill("weight", self._weight_names, lambda weight: parameters.initialize(weight, self.init_method))
        self._fill("bias", self._bias_names, lambda bias: nn.init.uniform_(bias, -bound, bound))

    def _fill(self, kind: str, names: Sequence[str], init: InitMethod) -> None:
        """Fills parameters that are ranges of the rows of one tensor: ``init`` is given that, as before the split.

        Of a sharded layer it is given the tensor of all ranks, each of which keeps its own, be it tensor-parallel or
        FSDP2's: the layer starts as the unsharded one does from the same seed.
        """
        parts, partition = [getattr(self, name) for name in names], self._partitions.get(kind)
        plain = all(not isinstance(part, QuantizedTensor) and not is_dtensor(part) for part in parts)
        sharded = kind == "weight" and self._etp is not None
        if len(parts) == 1 and plain and partition is None and not sharded:
            init(parts[0])
        elif parts:
            rows = self._etp_lengths if sharded else [part.shape[0] for part in parts]
            shape = (sum(rows), *parts[0].shape[1:])
            shape = shape if partition is None else partition.whole_shape(shape)
            whole = torch.empty(shape, dtype=parts[0].dtype, device=parts[0].device)
            init(whole)
            own = whole if partition is None else partition.cut(whole)
            for name, part, values in zip(names, parts, own.split(list(rows)), strict=True):
                self._write(name, part, values)

    def _named_split(self, split: Mapping[str, int] | Sequence[str] | None) -> Mapping[str, int] | None:
        """``parameters_split`` with the rows of each; names alone share all rows out equally.

        Raises:
            ValueError: no names, one that is given twice or cannot be an attribute's, or rows that do not divide.
        """
        if split is None:
            return None
        names = list(split)
        if not names or len(set(names)) < len(names) or not all(name.isidentifier() for name in names):
            raise ValueError(f"{self._label}: parameters_split {split!r} must have different names, such as 'query'")
        if isinstance(split, Mapping):
            return split
        if self.out_features % len(names):
            raise ValueError(
                f"{self._label}: out_features={self.out_features} does not divide by the {len(names)} names of "
                f"parameters_split; give the rows of each, as in {{{names[0]!r}: ...}}"
            )
        return dict.fromkeys(names, self.out_features // len(names))

    def _share_out(self, split: Mapping[str, int] | None, fused: Sequence[int] | None) -> None:
        """From the sizes of the whole to those of this rank."""
        parts: Mapping[str, int] = {"out_features": self.out_features}
        if fused is not None:
            parts = {f"fused_parts[{i}]": rows for i, rows in enumerate(fused)}
        if split is not None:
            parts = split
        if sum(parts.values()) != self.out_features or any(rows < 0 for rows in parts.values()):
            option = "parameters_split" if split is not None else "fused_parts"
            raise ValueError(f"{self._label}: {option} {dict(parts)} must add up to out_features={self.out_features}")
        self._partitions = partitions(self._label, self._parallel, self.in_features, parts)
        if self._parallel.mode == "column":
            self.out_features //= self._parallel.group.size
        elif self._parallel.mode == "row":
            self.in_features //= self._parallel.group.size

    def _mark_parameters(self) -> None:
        """Notes on the parameters of a sharded layer how they are."""
        super()._mark_parameters()
        for kind, names in (("weight", self._weight_names), ("bias", self._bias_names)) if self._parallel.mode else ():
            whole, split = self._partitions.get(kind), self.parameters_split or {}
            one_of_parts = whole is not None and whole.dim == 0 and len(names) > 1
            for name in names:
                own = whole.of_single(split[name.removesuffix(f"_{kind}")]) if whole and one_of_parts else whole
                mark(getattr(self, name), own)

    def _split(self, sizes: Mapping[str, int]) -> None:
        """Replaces weight and bias by parameters for ranges of their rows, with the same values."""
        if self.fuse_wgrad_accumulation or self.delay_wgrad_compute:
            raise ValueError(
                f"{self._label}: parameters_split with fuse_wgrad_accumulation or delay_wgrad_compute is not "
                "supported: they need the weight as one parameter"
            )
        shares = self._parallel.group.size if self._parallel.mode == "column" else 1
        sizes = self.parameters_split = {name: rows // shares for name, rows in sizes.items()}
        for kind in ("weight", "bias"):
            whole = self._parameters.pop(kind)
            parts = [None] * len(sizes) if whole is None else whole.detach().split(list(sizes.values()))
            for name, part in zip(sizes, parts, strict=True):
                parameter = None if part is None else nn.Parameter(part.clone())
                self.register_parameter(f"{name}_{kind}", parameter)


class _Joined(torch.autograd.Function):
    """A matrix that is there already, as what its ranges of rows make up."""

    @staticmethod
    def forward(ctx: Any, whole: QuantizedTensor, *parts: Tensor) -> Tensor:
        ctx.rows = [part.shape[0] for part in parts]
        if torch.compiler.is_compiling():
            return whole.detach()
        joined = QuantizedTensor.from_operands(whole.operands, whole.quantizer, whole.shape, whole.dtype)
        joined.gatherer = whole.gatherer  # what detach() does, which takes several times as long
        return joined

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[1:]
        return None, *[own if wanted else None for own, wanted in zip(grad.split(ctx.rows), needed, strict=True)]
