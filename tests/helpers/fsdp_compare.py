"""Compares a model under FSDP2 with an unsharded replica: what each reads of its weights, and what both keep."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import minifloat
from minifloat.functional import experts, fused_layers, linear
from minifloat.functional.grouped import GroupLayout, joined
from minifloat.nn.linear_state import LinearState
from minifloat.operand import Operand, Quantized
from minifloat.parallel.fsdp import sharded_weights
from minifloat.quantizer import cast_all, casts
from minifloat.recipe import Recipe
from minifloat.tensor import QuantizedTensor

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


class Differences:
    """Comparisons whose results are read together: on a GPU each read by itself would wait for it."""

    def __init__(self) -> None:
        self._made: list[tuple[str, Tensor, tuple[Tensor, Tensor] | None]] = []

    def values(self, what: str, found: Tensor, expected: Tensor, tolerance: float = 0.0) -> None:
        """Equal, or apart by ``tolerance`` of the largest expected value, or of 0.1; NaN equals nothing."""
        if tolerance:  # what nearly cancels has the errors of its summands
            same = (found - expected).abs() <= tolerance * expected.abs().max().clamp_min(0.1)
        else:
            same = found == expected
        self._made.append((what, ~same.all(), (found, expected)))

    def bits(self, what: str, found: Tensor | None, expected: Tensor | None) -> None:
        """Of one shape and dtype, in any memory order, and equal to the bit."""
        if found is None or expected is None:
            self.fact(what, found is None and expected is None)
        elif (found.shape, found.dtype) != (expected.shape, expected.dtype):
            self.fact(f"{what}: {found.dtype} {tuple(found.shape)} for {tuple(expected.shape)}", False)
        else:
            kind = _BITS[found.itemsize]
            self._made.append((what, (found.view(kind) != expected.view(kind)).any(), None))

    def fact(self, what: str, holds: bool) -> None:
        """Something that the host knows."""
        if not holds:
            self._made.append((what, torch.tensor(True), None))

    def first(self) -> str:
        """What differs first, or ""; forgets all."""
        made, self._made = self._made, []
        if not made:
            return ""
        device = max((wrong.device for _, wrong, _ in made), key=lambda each: each.type != "cpu")
        flags = torch.stack([wrong.to(device) for _, wrong, _ in made]).tolist()
        for (what, _, pair), wrong in zip(made, flags, strict=True):
            if wrong:
                return what if pair is None else f"{what} differs by {(pair[0] - pair[1]).abs().max():.3g}"
        return ""


class Reads:
    """Compares what GEMMs of the sharded model read of gathered weights with quantizing the wholes, to the bit.

    That is codes and scales: rowwise as a layer's forward takes them, and in backward what dgrad finds of what the
    forward has saved, columnwise where the format has another operand for that.
    """

    def __init__(self, plain: nn.Module, sharded: nn.Module, differences: Differences) -> None:
        modules = zip(plain.named_modules(), sharded.modules(), strict=True)
        kinds = minifloat.Linear, minifloat.GroupedLinear
        self._twins = {
            theirs: (name, mine)
            for (name, mine), theirs in modules
            if isinstance(mine, kinds) and mine.recipe != "none"
        }
        weights = {f".{name}" for name in sharded_weights(sharded)}
        names = {name for name, _ in self._twins.values()}
        self._gathered = {name for name in names if any(each.startswith(f".{name}.") for each in weights if name)}
        self._gathered |= {"" for each in weights if each.count(".") == 1}  # the model is a linear
        self._differences = differences
        self._wholes: dict[str, Quantized] = {}
        self._saved: dict[int, tuple[str, Quantized]] = {}
        self.forward: set[str] = set()
        self.backward: set[str] = set()

    def begin(self) -> None:
        """Quantizes the replica's weights as they are now, with the scales that a forward would begin with."""
        self._saved, self.forward, self.backward = {}, set(), set()
        layers = {name: mine for name, mine in self._twins.values() if name in self._gathered}
        self._wholes = {name: quantized_whole(layer) for name, layer in layers.items()}

    def end(self, backward: bool = True) -> None:
        """Every gathered weight was read in forward and, unless told otherwise, what forward saved in backward."""
        missing = sorted(self._gathered - self.forward)
        self._differences.fact(f"forward did not read the gathered {missing}", not missing)
        missing = sorted({name for name, _ in self._saved.values()} - self.backward)
        self._differences.fact(f"backward did not read the gathered {missing}", not missing or not backward)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Around forwards and backwards."""
        weight_operands, unpack = LinearState._weight_operands, linear.unpack
        weight_matrix = minifloat.Linear._weight_matrix

        def ready(layer: Any, *call: Any) -> Quantized | None:
            found = weight_operands(layer, *call)
            if layer in self._twins:
                self._forward(layer, found)
            return found

        def matrix(layer: Any) -> Tensor:
            found = weight_matrix(layer)
            if type(found) is Tensor and layer in self._twins:  # parameters that are gathered one by one, cast as one
                self._forward(layer, None)
            return found

        def unpacked(*saved: Any) -> list[Operand | None]:
            operands = unpack(*saved)
            for w in operands[1::2]:
                if w is not None:
                    self._backward(w)
            return operands

        with (
            mock.patch.object(LinearState, "_weight_operands", ready),
            mock.patch.object(minifloat.Linear, "_weight_matrix", matrix),
            mock.patch.object(linear, "unpack", unpacked),
            mock.patch.object(fused_layers, "unpack", unpacked),
            mock.patch.object(experts, "unpack", unpacked),
        ):
            yield

    def _forward(self, layer: Any, found: Quantized | None) -> None:
        name, twin = self._twins[layer]
        if name not in self._gathered:
            return
        if found is None:
            assert layer.parameters_split is not None
            for part in layer._weight_names:
                mine, theirs = getattr(twin, part), getattr(layer, part)
                if isinstance(theirs, QuantizedTensor):
                    self._rowwise(f"{name}.{part}", theirs.operands, mine.operands)
                    self.forward.add(name)
            return
        whole = self._wholes[name]
        self._rowwise(name, found, whole)
        self.forward.add(name)
        self._saved.update({_memory(operand): (name, whole) for operand in found if operand is not None})

    def _rowwise(self, name: str, found: Quantized, expected: Quantized) -> None:
        assert found.rowwise is not None and expected.rowwise is not None
        self._compare(f"{name} in forward", found.rowwise, expected.rowwise)

    def _backward(self, found: Operand) -> None:
        name, whole = self._saved.get(_memory(found), ("", None))
        if whole is not None:
            self.backward.add(name)
            self._compare(f"{name} in backward", found, whole.along(found.dim))

    def _compare(self, what: str, found: Any, expected: Any) -> None:
        found = joined(found)
        self._differences.bits(f"codes of {what}", found.codes, expected.codes)
        self._differences.bits(f"scales of {what}", found.scale_inv, expected.scale_inv)
        if found.format.scale_rule == "two_level":
            self._differences.bits(f"amax of {what}", found.amax, expected.amax)


def quantized_whole(layer: minifloat.Linear | minifloat.GroupedLinear) -> Quantized:
    """Both orientations of an unsharded layer's weight: its own codes, or a cast of its values."""
    assert isinstance(layer.recipe, Recipe)
    weight, plan = layer._weight_matrix(), layer._config(layer.recipe)
    if isinstance(weight, QuantizedTensor):
        return weight.operands
    weight = weight.detach()
    scale = None if plan.delayed is None else layer.forward_scaling.scale[layer._groups : 2 * layer._groups]
    quantizer = plan.weight.with_usage(rowwise=True, columnwise=True)
    if isinstance(layer, minifloat.GroupedLinear):
        offsets = GroupLayout.uniform(*weight.shape[:2], weight.device).offsets
        return casts([quantizer]).of_groups(weight.flatten(0, 1), offsets, scale)
    return cast_all([weight], [quantizer], scales=[scale])[0]


def _memory(operand: Operand) -> int:
    """What stays of codes while FSDP2 frees and allocates their memory."""
    return operand.codes.untyped_storage()._cdata


def wholes(tensors: Sequence[Any]) -> list[Tensor]:
    """The wholes of DTensors sharded by rows over the same ranks, in one all-gather."""
    if not tensors:
        return []
    mesh, sent = tensors[0].device_mesh, []
    for tensor in tensors:
        assert isinstance(tensor, DTensor)
        own = tensor.to_local().detach()
        padded = own.new_zeros(-(-tensor.shape[0] // mesh.size()), *tensor.shape[1:])
        padded[: own.shape[0]] = own
        sent.append(padded.view(-1).view(torch.uint8))
    flat = torch.cat(sent)
    received = flat.new_empty(mesh.size(), flat.numel())
    dist.all_gather(list(received), flat, group=mesh.get_group())
    parts = received.split([own.numel() for own in sent], dim=1)
    return [
        part.reshape(-1).view(tensor.dtype).view(-1, *tensor.shape[1:])[: tensor.shape[0]]
        for part, tensor in zip(parts, tensors, strict=True)
    ]
