"""How a tensor is quantized, as an immutable value: which format for which orientation, and which are wanted.

Quantizing has phases, each over many tensors at a time: :func:`find_amaxes`, then whatever agreement between ranks the
caller wants, then :func:`cast_all`. A quantizer knows no process group, holds no tensor and is never changed, so one
and the same object may serve two groups, two devices and a compiled graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from minifloat import capability
from minifloat.formats import COLUMNWISE, IDENTITY, ROWWISE, Format
from minifloat.kernels import quantize
from minifloat.operand import Operand, Quantized

Amaxes = tuple[Tensor | None, ...]
"""One entry for each cast of :meth:`Quantizer.casts`: an amax, or, for delayed scaling, the scale."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""What can be quantized."""


@dataclass(frozen=True)
class Quantizer:
    """Formats by orientation. The two differ in hybrid recipes and where NVFP4 rotates its columnwise copy.

    Args:
        row_format: format of the rowwise operand.
        column_format: format of the columnwise operand; default ``row_format``.
        rowwise, columnwise: which orientations :meth:`cast` produces.
        columnwise_source: ``"rowwise_dequantized"`` casts the columnwise operand from what the rowwise one stands for.
    """

    row_format: Format
    column_format: Format | None = None
    rowwise: bool = True
    columnwise: bool = True
    columnwise_source: Literal["original", "rowwise_dequantized"] = "original"

    @classmethod
    def identity(cls) -> Quantizer:
        """Leaves the tensor in high precision."""
        return cls(IDENTITY)

    @classmethod
    def hybrid(
        cls,
        *,
        rowwise_quantizer: Quantizer,
        columnwise_quantizer: Quantizer,
        columnwise_source: Literal["original", "rowwise_dequantized"] = "original",
    ) -> Quantizer:
        """Rowwise operands of one quantizer, columnwise ones of another."""
        column_format = columnwise_quantizer.format(COLUMNWISE)
        return cls(rowwise_quantizer.row_format, column_format, columnwise_source=columnwise_source)

    def format(self, dim: int) -> Format:
        """The format that a GEMM contracting ``dim`` meets."""
        return self.row_format if dim == ROWWISE or self.column_format is None else self.column_format

    def with_usage(self, *, rowwise: bool | None = None, columnwise: bool | None = None) -> Quantizer:
        """The same formats for other orientations; None keeps what is."""
        # Spelled out: torch.compile of PyTorch 2.11 does not trace dataclasses.replace.
        return Quantizer(
            self.row_format,
            self.column_format,
            self.rowwise if rowwise is None else rowwise,
            self.columnwise if columnwise is None else columnwise,
            self.columnwise_source,
        )

    @property
    def quantized(self) -> bool:
        """Some orientation is quantized."""
        return self.row_format.quantized or self.format(COLUMNWISE).quantized

    @property
    def chained(self) -> bool:
        """The columnwise operand is cast from the rowwise one, in a second step."""
        return self.columnwise and self.columnwise_source == "rowwise_dequantized" and self.row_format.quantized

    @property
    def casts(self) -> tuple[tuple[Format, int], ...]:
        """The casts that give the wanted orientations, (format, dim) each; one serves both if the format is symmetric.

        A symmetric format is always cast rowwise: one layout, whichever orientation asked for it.
        """
        row, column = self.row_format, self.format(COLUMNWISE)
        wanted = [(row, ROWWISE)] * (self.rowwise or self.chained)
        if self.columnwise and not self.chained and not (wanted and row == column and row.symmetric):
            wanted.append((column, ROWWISE if column.symmetric else COLUMNWISE))
        return tuple(wanted)

    def amax(self, x: Tensor) -> Amaxes:
        """What ranks that share ``x`` agree on before its cast: one entry for each of :attr:`casts`."""
        return find_amaxes([x], [self])[0]

    def cast(
        self, x: Tensor, amaxes: Amaxes | None = None, rng: Tensor | None = None, *, gemm_ready: bool = False
    ) -> Quantized:
        """Quantizes ``x``; see :func:`cast_all`."""
        return cast_all([x], [self], [amaxes], [rng], gemm_ready=gemm_ready)[0]

    def layouts(self, device: torch.device, gemm_ready: bool) -> tuple[tuple[Format, int], ...]:
        """The casts to make: :attr:`casts`, or what GEMMs on ``device`` read where they want codes in two orders."""
        casts = self.casts
        if not gemm_ready or len(casts) != 1 or self.chained or not capability.k_major(casts[0][0], device):
            return casts
        wanted = [ROWWISE] * self.rowwise + [COLUMNWISE] * self.columnwise
        return tuple((casts[0][0], dim) for dim in wanted)

    def __call__(self, x: Tensor) -> Quantized:
        """Amax and cast at once. A 3-D or higher ``x`` is taken as [M, K] with M the product of its leading dims."""
        return self.cast(x, self.amax(x))


def find_amaxes(xs: Sequence[Tensor], quantizers: Sequence[Quantizer]) -> list[Amaxes]:
    """The amaxes of many tensors in one launch.

    Args:
        xs: [..., K] each, bf16, fp16 or fp32.
        quantizers: one a tensor.

    Returns:
        For each tensor one entry a cast: fp32 (see ``kernels.quantize.reference.amax``), or None where the cast finds
        its own because no scale spans more than a block, or takes a given scale.
    """
    sources, formats, dims = [], [], []
    for x, quantizer in zip(xs, quantizers, strict=True):
        for fmt, dim in quantizer.casts:
            if fmt.needs_amax:
                sources.append(as_matrix(x))
                formats.append(fmt.spec)
                dims.append(dim)
    found = iter(quantize.amax(sources, formats, dims) if sources else ())
    return [tuple(next(found) if fmt.needs_amax else None for fmt, _ in q.casts) for q in quantizers]


def cast_all(
    xs: Sequence[Tensor],
    quantizers: Sequence[Quantizer],
    amaxes: Sequence[Amaxes | None] | None = None,
    rngs: Sequence[Tensor | None] | None = None,
    *,
    gemm_ready: bool = False,
) -> list[Quantized]:
    """Quantizes many tensors in one launch.

    Args:
        xs: [..., K] each, bf16, fp16 or fp32.
        quantizers: one a tensor.
        amaxes: as :func:`find_amaxes` gives them, reduced over a group or not; for delayed scaling the scale, fp32
            [1]. None: each tensor's own.
        rngs: for each tensor the int64 [2] seed and offset of stochastic rounding. None: drawn.
        gemm_ready: lay codes out in memory as this device's GEMMs read them, in the same pass: where those want the
            contracted dim consecutive, columnwise codes are transposed in memory, and a symmetric format gives two
            operands. For what is neither gathered nor kept as a parameter.

    Raises:
        TypeError: a tensor is not floating point.
        ValueError: its dtype is not bf16, fp16 or fp32, or delayed scaling was given no scale.
    """
    matrices = [as_matrix(x) for x in xs]
    amaxes = amaxes or [None] * len(xs)
    rngs = rngs or [None] * len(xs)
    own = find_amaxes(matrices, quantizers) if any(amax is None for amax in amaxes) else amaxes
    sources: list[Tensor] = []
    given: list[Tensor | None] = []
    seeds: list[Tensor | None] = []
    formats: list[str] = []
    dims: list[int] = []
    k_major: list[bool] = []
    for x, quantizer, amax, fallback, rng in zip(matrices, quantizers, amaxes, own, rngs, strict=True):
        if rng is None and any(fmt.rounding == "stochastic" for fmt, _ in quantizer.casts):
            rng = quantize.draw_seed(x)  # one for both orientations, which draw different bits from it
        layouts, found = quantizer.layouts(x.device, gemm_ready), amax or fallback or ()
        for (fmt, dim), level in zip(layouts, found if len(found) == len(layouts) else found * 2, strict=True):
            if not fmt.quantized:
                continue
            if fmt.scale_rule == "given" and level is None:
                raise ValueError("delayed scaling casts with a scale from its history; pass it as amaxes=(scale,)")
            sources.append(x)
            given.append(level)
            seeds.append(rng if fmt.rounding == "stochastic" else None)
            formats.append(fmt.spec)
            dims.append(dim)
            k_major.append(gemm_ready and capability.k_major(fmt, x.device))
    outputs = iter(quantize.cast(sources, given, seeds, formats, dims, k_major) if sources else ())
    levels = iter(given)
    return [
        _assemble(x, quantizer, quantizer.layouts(x.device, gemm_ready), outputs, levels)
        for x, quantizer in zip(matrices, quantizers, strict=True)
    ]


def _assemble(
    x: Tensor,
    quantizer: Quantizer,
    layouts: Sequence[tuple[Format, int]],
    outputs: Iterator[Tensor],
    levels: Iterator[Tensor | None],
) -> Quantized:
    """Takes this tensor's part from the outputs of the cast operation, three a cast."""
    shape = (x.shape[0], x.shape[1])
    operands = []
    for fmt, dim in layouts:
        if fmt.quantized:
            codes, scale_inv, measured = next(outputs), next(outputs), next(outputs)
            level = next(levels)
            amax = measured if fmt.scale_rule == "given" else level if fmt.scale_rule == "two_level" else None
            operands.append(Operand(codes, scale_inv, amax, fmt, dim, shape, x.dtype))
        else:
            operands.append(Operand(x, None, None, fmt, dim, shape, x.dtype))
    if quantizer.chained:
        second = Quantizer(quantizer.format(COLUMNWISE), rowwise=False).cast(operands[0].dequantize())
        return Quantized(operands[0] if quantizer.rowwise else None, second.columnwise)
    if len(operands) != 1:
        return Quantized(*operands) if operands else Quantized(None, None)
    both = operands[0].format.symmetric
    return Quantized(
        operands[0] if quantizer.rowwise else None,
        operands[0] if quantizer.columnwise and (both or not quantizer.rowwise) else None,
    )


def as_matrix(x: Tensor) -> Tensor:
    """``x`` as [M, K]: leading dims flattened.

    Raises:
        TypeError: ``x`` is not floating point.
        ValueError: it has a dtype that no format is defined for, or no dims at all.
    """
    if not x.is_floating_point():
        raise TypeError(
            f"only floating-point tensors can be quantized, got {x.dtype}; cast it first, as in x.bfloat16()"
        )
    if x.dtype not in DTYPES:
        raise ValueError(
            f"cannot quantize {x.dtype}; bf16, fp16 and fp32 are supported: cast it first, as in x.float()"
        )
    if x.dim() == 0:
        raise ValueError("cannot quantize a tensor of no dims; reshape it to [1, 1]")
    return x.flatten(0, -2) if x.dim() > 2 else x if x.dim() == 2 else x[None]
