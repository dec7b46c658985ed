"""Operands of GEMMs: codes and scales of one orientation of a quantized matrix, or of both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minifloat.formats import COLUMNWISE, ROWWISE, Format
from minifloat.ops import grouped, quantize
from minifloat.ops.quantize import reference

_NAMES = {ROWWISE: "rowwise", COLUMNWISE: "columnwise"}


class Operand(NamedTuple):
    """One orientation of a quantized [M, K] matrix, or of groups of its rows, each quantized separately.

    Args:
        codes: uint8 in the [M, K] layout, two a byte along ``dim`` for 4-bit elements; the values themselves, in their
            own dtype, for the identity format; bf16 values in lieu of codes, times the scales of their blocks, where an
            emulated product reads them next.
        scale_inv: what codes are multiplied by: fp32 [1], or the grid of blocks in the [M, K] layout (fp32, or the
            bytes of E8M0 or E4M3). None for the identity format.
        amax: fp32 [1], or one a row: the second level of NVFP4's scales. Else None.
        format: the number format.
        dim: the dim the codes are scaled along: ``ROWWISE`` or ``COLUMNWISE``.
        shape: the logical (M, K).
        dtype: the dtype that it was cast from and dequantizes to.
        offsets: of groups, int32 [G + 1] on the device: the first row of each, and the end of the last one. The three
            tensors have the shapes of ``ops/grouped/layout.py`` then. None of a matrix that is one group, and of
            experts as FSDP2 gathers them, whose tensors are stacked, [G, ...] each, until a product joins them.
    """

    codes: Tensor
    scale_inv: Tensor | None
    amax: Tensor | None
    format: Format
    dim: int
    shape: tuple[int, int]
    dtype: torch.dtype
    offsets: Tensor | None = None

    def serves(self, dim: int) -> bool:
        """Whether a GEMM may contract it along ``dim``."""
        return self.dim == dim or self.format.symmetric

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Computes the [M, K] values in fp32, rounded once to ``dtype`` (default: its own); rows of no group are 0."""
        dtype = dtype or self.dtype
        if self.scale_inv is None:
            return self.codes.to(dtype)
        if self.offsets is not None:
            return grouped.grouped_dequantize(
                self.codes, self.scale_inv, self.amax, self.offsets, self.format.spec, self.dim, *self.shape, dtype
            )
        if self.codes.dtype == torch.bfloat16:
            parts = self.codes, self.scale_inv, self.amax
            return quantize.reference.dequantize(*parts, self.format, self.dim, *self.shape).to(dtype)
        return quantize.dequantize(
            self.codes, self.scale_inv, self.amax, self.format.spec, self.dim, *self.shape, dtype
        )

    def scale_values(self) -> Tensor | None:
        """Returns the factors from codes to values, fp32, shaped like ``scale_inv``, decoded from bytes; None without.

        NVFP4's include the second level.
        """
        if self.scale_inv is None:
            return None
        return reference.scale_values(self.scale_inv, self.amax, self.format, self.dim)

    @property
    def layout(self) -> tuple[Format, int, tuple[int, int], torch.dtype]:
        """All but the tensors: format, dim, shape and dtype."""
        return self[3:7]

    @property
    def tensors(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Codes, scales and amax as GEMMs read them; None for an amax that the cast only measured."""
        return self.codes, self.scale_inv, self.amax if self.format.scale_rule == "two_level" else None


class Quantized(NamedTuple):
    """Pair of operands of one matrix, which may differ in format. One may be None; a symmetric one serves as both."""

    rowwise: Operand | None
    columnwise: Operand | None

    def along(self, dim: int) -> Operand:
        """Returns the operand that a GEMM may contract along ``dim``.

        Raises:
            ValueError: there is none; a square matrix would hide the wrong one.
        """
        for operand in self if dim == ROWWISE else self[::-1]:
            if operand is not None and (operand.dim == dim or operand.format.symmetric):
                return operand
        held = [f"{_NAMES[o.dim]} {o.format.spec}" for o in self if o is not None] or ["nothing"]
        raise ValueError(
            f"a GEMM that contracts dim {dim} needs a {_NAMES[dim]} operand, but this value holds {', '.join(held)}; "
            f"quantize it with {_NAMES[dim]}=True"
        )

    @property
    def any(self) -> Operand:
        """Either orientation, rowwise first."""
        operand = self.rowwise if self.rowwise is not None else self.columnwise
        assert operand is not None, "a Quantized value holds at least one operand"
        return operand

    def map(self, function: Callable[[Operand], Any]) -> Quantized:
        """Applies ``function`` to every operand; one that fills both places still does."""
        rowwise, columnwise = self
        row = None if rowwise is None else function(rowwise)
        if columnwise is None or columnwise is rowwise:
            return Quantized(row, None if columnwise is None else row)
        return Quantized(row, function(columnwise))

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Computes the values, from the rowwise operand where there is one."""
        return self.any.dequantize(dtype)
