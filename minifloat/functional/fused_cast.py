"""The output of a norm or an activation before its cast, or after it where one kernel computes and casts.

A value comes first (``norm_value`` and its like in ``norm.py`` and ``activation.py``), so that ranks may reduce amaxes
before its cast; under current scaling the kernel that computes it finds them. Delayed scaling, and blocks, whose
amaxes are their own, let that kernel cast it too, so that it is never materialized; NVFP4 needs an amax of all of it
first. The codes are always those of a cast of the value. That is the fp32 result itself under delayed scaling;
everything else rounds to the dtype of the input first (``docs/numerics.md`` 3.3 and 3.4).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minifloat import capability
from minifloat.comm.shard_map import cached
from minifloat.formats import COLUMNWISE, ROWWISE, Format
from minifloat.functional.autograd import as_output
from minifloat.operand import Operand, Quantized
from minifloat.ops.quantize import casts_blocks
from minifloat.quantizer import Amaxes, Quantizer, as_matrix


class _Facts(NamedTuple):
    """How many casts a quantizer makes, what the functions below say of them, and the format if all have one."""

    casts: int
    fp32: bool
    one_amax: bool
    alike: Format | None


@cached
def _facts(quantizer: Quantizer) -> _Facts:
    formats = [fmt for fmt, _ in quantizer.casts]
    single = len(formats) > 0 and not quantizer.chained
    return _Facts(
        len(formats),
        single and all(fmt.scale_rule == "given" for fmt in formats),
        len(formats) > 0 and all(fmt.needs_amax and not fmt.grid for fmt in formats),
        formats[0] if single and formats[0] == formats[-1] else None,
    )


def reads_fp32(quantizer: Quantizer) -> bool:
    """The fused cast reads the fp32 result: delayed scaling in each orientation that is wanted."""
    return _facts(quantizer).fp32


def measures_amax(quantizer: Quantizer) -> bool:
    """All that its casts need to know of the value is one amax, which the kernel that computes it can find."""
    return _facts(quantizer).one_amax


class OutputCast:
    """How the output of a norm or an activation is cast: by the kernel that computes it (``in_kernel``), or afterwards.

    Args:
        x: [..., K], the input, or the tensor whose gradient is the output.
        quantizer: of the operand to come; it decides whether the value is rounded.
        scale: that of delayed scaling, fp32 [1]: with it the kernel casts too, and gives no value.
        fused: so it does for blocks that need no amax but their own. Not where ranks that share a block reduce it.
        return_value: the value is read too, so it is rounded to the dtype of ``x`` whatever the quantizer.
        half: the columns of each half of an output that is rounded before its cast; blocks must not straddle them.
    """

    def __init__(
        self,
        x: Tensor,
        quantizer: Quantizer,
        *,
        scale: Tensor | None = None,
        fused: bool = False,
        return_value: bool = False,
        half: int | None = None,
    ) -> None:
        facts = self.facts = _facts(quantizer)
        fp32 = facts.fp32 and not return_value
        self.x, self.matrix, self.quantizer = x, as_matrix(x), quantizer
        self.scale = scale if fp32 and facts.casts == 1 else None
        fmt = facts.alike if fused and not return_value else None
        blocks = fmt is not None and casts_blocks(fmt) and (half or 0) % fmt.block == 0
        self.in_kernel = self.scale is not None or blocks
        self.dtype = torch.float32 if fp32 and half is None else x.dtype
        self.layouts = quantizer.layouts(x.device.type) if self.in_kernel else ()

    @property
    def arguments(self) -> tuple[Any, ...]:
        """Of the operation: scale, format, whether codes are wanted along rows and along columns, and k-major.

        Of the one that gives the value: dtype, and whether to measure the amax.
        """
        if not self.in_kernel:
            return self.dtype, self.facts.one_amax
        dims = [dim for _, dim in self.layouts]
        fmt = self.layouts[0][0]
        k_major = self.scale is not None or (self.x.device.type == "cuda" and capability.k_major(fmt))
        return self.scale, fmt.spec, ROWWISE in dims, COLUMNWISE in dims, k_major

    def output(self, outputs: Sequence[Tensor], shape: Sequence[int], **others: Any) -> FusedOutput:
        """The output of ``shape`` from those of the operation: ``ops.quantize.FusedCodes``, or value and amax."""
        if not self.in_kernel:
            value, amax = outputs
            amaxes = (amax,) * self.facts.casts if self.facts.one_amax else None
            return FusedOutput(as_output(value, shape), self.x.dtype, amaxes=amaxes, **others)
        row_codes, column_codes, row_scales, column_scales, amax = outputs
        each: list[tuple[Tensor, Tensor, Tensor | None, Tensor | None]] = []
        for _, dim in self.layouts:
            codes, scales = (row_codes, row_scales) if dim == ROWWISE else (column_codes, column_scales)
            each.append((codes, scales, None, None) if self.scale is None else (codes, row_scales, amax, self.scale))
        arrangement, matrix = self.quantizer.arrangement(self.layouts), (self.matrix.shape[0], shape[-1])
        quantized = arrangement.operands(iter(each), matrix, self.x.dtype)
        return FusedOutput(None, self.x.dtype, quantized=quantized, **others)


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
        if row is not None and row.dtype == self.dtype:
            return quantized
        labelled = self._relabel(row)
        return Quantized(labelled, labelled if column is row else self._relabel(column))

    def _relabel(self, operand: Operand | None) -> Operand | None:
        return operand if operand is None or operand.dtype == self.dtype else operand._replace(dtype=self.dtype)
