"""The output of a norm or an activation before its cast, or after it where one kernel computes and casts.

A value comes first (``norm_value`` and its like in ``norm.py`` and ``activation.py``), so that ranks may reduce amaxes
before its cast; under current scaling the kernel that computes it finds them. Delayed scaling, and blocks, whose
amaxes are their own, let that kernel cast it too, so that it is never materialized; NVFP4 needs an amax of all of it
first. The codes are always those of a cast of the value. That is the fp32 result itself under delayed scaling;
everything else rounds to the dtype of the input first (``docs/numerics.md`` 3.3 and 3.4).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from minifloat import capability
from minifloat.formats import COLUMNWISE, ROWWISE
from minifloat.operand import Operand, Quantized
from minifloat.ops.quantize import casts_blocks
from minifloat.quantizer import Amaxes, Layouts, Quantizer


def reads_fp32(quantizer: Quantizer) -> bool:
    """The fused cast reads the fp32 result: delayed scaling in each orientation that is wanted."""
    casts = quantizer.casts
    return len(casts) > 0 and not quantizer.chained and all(fmt.scale_rule == "given" for fmt, _ in casts)


def measures_amax(quantizer: Quantizer) -> bool:
    """All that its casts need to know of the value is one amax, which the kernel that computes it can find."""
    casts = quantizer.casts
    return len(casts) > 0 and all(fmt.needs_amax and not fmt.grid for fmt, _ in casts)


class FusedCast(NamedTuple):
    """A cast by the kernel that computes the value: with a scale that is given, else in blocks.

    Args:
        layouts: what :meth:`Quantizer.layouts` asks for on the device of ``x``.
        scale: that of delayed scaling, fp32 [1].
        x: the input of what is cast.
    """

    quantizer: Quantizer
    layouts: Layouts
    scale: Tensor | None
    x: Tensor

    @classmethod
    def of(cls, quantizer: Quantizer, scale: Tensor | None, blocks: bool, x: Tensor) -> FusedCast | None:
        """None where the value is needed first, in blocks also unless ``blocks`` are wanted."""
        formats = [fmt for fmt, _ in quantizer.casts]
        if scale is not None and len(formats) == 1 and reads_fp32(quantizer):
            return cls(quantizer, quantizer.layouts(x.device.type), scale, x)
        alike = len(formats) > 0 and not quantizer.chained and formats[0] == formats[-1]
        if blocks and alike and casts_blocks(formats[0]):
            return cls(quantizer, quantizer.layouts(x.device.type), None, x)
        return None

    @property
    def given(self) -> bool:
        """The scale is."""
        return self.scale is not None

    @property
    def arguments(self) -> tuple[Tensor | None, str, bool, bool, bool]:
        """Of the operation: scale, format, whether codes are wanted along the rows and along the columns, k-major."""
        dims = [dim for _, dim in self.layouts]
        fmt = self.layouts[0][0]
        k_major = self.scale is not None or (self.x.device.type == "cuda" and capability.k_major(fmt))
        return self.scale, fmt.spec, ROWWISE in dims, COLUMNWISE in dims, k_major

    def divides(self, columns: int) -> bool:
        """So many columns are whole blocks."""
        return columns % self.layouts[0][0].block == 0

    def operands(self, outputs: Sequence[Tensor], shape: tuple[int, int]) -> Quantized:
        """Of the outputs of the operation, ``ops.quantize.FusedCodes``."""
        row_codes, column_codes, row_scales, column_scales, amax = outputs
        each: list[tuple[Tensor, Tensor, Tensor | None, Tensor | None]] = []
        for _, dim in self.layouts:
            codes, scales = (row_codes, row_scales) if dim == ROWWISE else (column_codes, column_scales)
            each.append((codes, scales, None, None) if self.scale is None else (codes, row_scales, amax, self.scale))
        return self.quantizer.arrangement(self.layouts).operands(iter(each), shape, self.x.dtype)


class FusedOutput(NamedTuple):
    """A norm's or an activation's output before its cast, or after it where one kernel does both.

    Args:
        value: [..., K], what the cast reads: fp32, or the dtype of the input. None if the cast was fused.
        dtype: that of the input, in which its operands stand for values.
        saved: what the backward needs besides the inputs: mean and rsigma of a norm, fp32 [M] each.
        amaxes: those that the cast needs, where the kernel that computed the value found them.
        quantized: its operands, if the cast was fused.
        column_sum: the sum of the value over its rows, [K], if it was asked for: the gradient of a bias.
        stream: what a norm was of, [..., K]: its input, to which a residual may have been added.
    """

    value: Tensor | None
    dtype: torch.dtype
    saved: tuple[Tensor, ...] = ()
    amaxes: Amaxes | None = None
    quantized: Quantized | None = None
    column_sum: Tensor | None = None
    stream: Tensor | None = None

    def cast(self, quantizer: Quantizer, amaxes: Amaxes | None = None, rng: Tensor | None = None) -> Quantized:
        """Quantizes the value for a GEMM; the arguments are those of :meth:`Quantizer.cast`."""
        if self.quantized is not None:
            return self.quantized
        assert self.value is not None
        amaxes = self.amaxes if amaxes is None else amaxes
        return self.label(quantizer.cast(self.value, amaxes, rng, gemm_ready=True))

    def label(self, quantized: Quantized) -> Quantized:
        """Makes operands of the value, wherever they were cast, stand for values in the dtype of the input."""
        row, column = quantized
        labelled = self._relabel(row)
        return Quantized(labelled, labelled if column is row else self._relabel(column))

    def _relabel(self, operand: Operand | None) -> Operand | None:
        if operand is None or operand.dtype == self.dtype:
            return operand
        o = operand  # spelled out: torch.compile of PyTorch 2.11 does not trace dataclasses.replace
        return Operand(o.codes, o.scale_inv, o.amax, o.format, o.dim, o.shape, self.dtype)
