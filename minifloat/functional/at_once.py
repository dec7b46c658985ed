"""Casts by the very kernel that makes a value, which then nobody writes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from minifloat import capability
from minifloat.formats import COLUMNWISE, ROWWISE
from minifloat.operand import Quantized
from minifloat.ops.quantize import casts_blocks
from minifloat.quantizer import Layouts, Quantizer


def reads_fp32(quantizer: Quantizer) -> bool:
    """The cast of a producer reads its fp32 result: delayed scaling in each orientation that is wanted."""
    casts = quantizer.casts
    return len(casts) > 0 and not quantizer.chained and all(fmt.scale_rule == "given" for fmt, _ in casts)


class CastAtOnce(NamedTuple):
    """A cast done by the kernel that makes the value: with a scale that is given, else in blocks.

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
    def of(cls, quantizer: Quantizer, scale: Tensor | None, blocks: bool, x: Tensor) -> CastAtOnce | None:
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
