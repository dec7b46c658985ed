"""Quantizers, immutable values: which format for which orientation, and which of these are wanted.

Quantizing has phases, each over many tensors at a time: :func:`find_amaxes`, then whatever agreement between ranks the
caller wants, then :func:`cast_all`. A quantizer knows no process group, holds no tensor and is never changed, so one
and the same object may serve two groups, two devices and a compiled graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from minifloat import backends
from minifloat.arguments import checked
from minifloat.casts import Amaxes as Amaxes
from minifloat.casts import Casts, OperandLayout, TensorCasts, check_scale
from minifloat.casts import Layouts as Layouts
from minifloat.formats import COLUMNWISE, IDENTITY, ROWWISE, Format
from minifloat.operand import Quantized
from minifloat.ops.quantize.reference import DTYPES as DTYPES
from minifloat.ops.quantize.reference import as_matrix as as_matrix

ColumnwiseSource = Literal["original", "rowwise_dequantized"]
"""Source of columnwise operands."""


@checked
@dataclass(frozen=True)
class Quantizer:
    """Format of each orientation. The two differ in hybrid recipes and if NVFP4 rotates its columnwise operand.

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
    columnwise_source: ColumnwiseSource = "original"

    def __hash__(self) -> int:
        if not self.__dict__:  # Dynamo of PyTorch 2.11 hashes one that it traces before it has its fields
            return 0
        columns = "" if self.column_format is None else self.column_format.spec
        return hash((self.row_format.spec, columns, self.rowwise, self.columnwise))

    @classmethod
    def identity(cls) -> Quantizer:
        """Leaves the tensor in high precision."""
        return cls(IDENTITY)

    @classmethod
    @checked
    def hybrid(
        cls,
        *,
        rowwise_quantizer: Quantizer,
        columnwise_quantizer: Quantizer,
        columnwise_source: ColumnwiseSource = "original",
    ) -> Quantizer:
        """Takes rowwise operands of one quantizer, columnwise ones of another."""
        column_format = columnwise_quantizer.format(COLUMNWISE)
        return cls(rowwise_quantizer.row_format, column_format, columnwise_source=columnwise_source)

    def format(self, dim: int) -> Format:
        """Returns the format for a GEMM that contracts ``dim``."""
        return self.row_format if dim == ROWWISE or self.column_format is None else self.column_format

    def same_formats(self, other: Quantizer) -> bool:
        """Whether two quantizers differ at most in the wanted orientations."""
        return self.with_usage(rowwise=True, columnwise=True) == other.with_usage(rowwise=True, columnwise=True)

    def with_usage(self, *, rowwise: bool | None = None, columnwise: bool | None = None) -> Quantizer:
        """Returns the same formats for other orientations; None keeps the current choice."""
        rowwise = self.rowwise if rowwise is None else rowwise
        columnwise = self.columnwise if columnwise is None else columnwise
        if rowwise == self.rowwise and columnwise == self.columnwise:
            return self
        if torch.compiler.is_compiling():
            return self._with_usage(rowwise, columnwise)
        key = self, rowwise, columnwise
        known = _with_usages.get(key)
        if known is None:
            if len(_with_usages) >= MOST_USAGES:
                _with_usages.clear()
            known = _with_usages[key] = self._with_usage(rowwise, columnwise)
        return known

    def _with_usage(self, rowwise: bool, columnwise: bool) -> Quantizer:
        # Spelled out: torch.compile of PyTorch 2.11 does not trace dataclasses.replace.
        return Quantizer(self.row_format, self.column_format, rowwise, columnwise, self.columnwise_source)

    @property
    def quantized(self) -> bool:
        """Whether some orientation is quantized."""
        return self.row_format.quantized or self.format(COLUMNWISE).quantized

    @property
    def given(self) -> Format | None:
        """The format that is cast with a delayed scale, if one is."""
        return next((fmt for fmt in (self.row_format, self.format(COLUMNWISE)) if fmt.scale_rule == "given"), None)

    @property
    def chained(self) -> bool:
        """Whether the columnwise operand is cast from the rowwise one, in a second step."""
        return self.columnwise and self.columnwise_source == "rowwise_dequantized" and self.row_format.quantized

    @property
    def casts(self) -> Layouts:
        """Casts that give the wanted orientations, (format, dim) each; one serves both if the format is symmetric.

        A symmetric format is always cast rowwise: one layout, whichever orientation asked for it.
        """
        row, column = self.row_format, self.format(COLUMNWISE)
        wanted = [(row, ROWWISE)] * (self.rowwise or self.chained)
        if self.columnwise and not self.chained and not (wanted and row == column and row.symmetric):
            wanted.append((column, ROWWISE if column.symmetric else COLUMNWISE))
        return tuple(wanted)

    def layouts(self, gemm_ready_on: str) -> Layouts:
        """Lists the casts for the GEMMs of a type of device; for ``""``, :attr:`casts`.

        Those that read codes with the contracted dim consecutive need both memory orders, symmetric format or not.
        """
        casts = self.casts
        if gemm_ready_on != "cuda" or len(casts) != 1 or self.chained or not backends.k_major(casts[0][0]):
            return casts
        wanted = [ROWWISE] * self.rowwise + [COLUMNWISE] * self.columnwise
        return tuple((casts[0][0], dim) for dim in wanted)

    def operand_layout(self, layouts: Layouts) -> OperandLayout:
        """Returns how casts in ``layouts``, from :attr:`casts` or :meth:`layouts`, form the wanted operands."""
        if len(layouts) == 2:
            return OperandLayout(layouts, 0, 1)
        row = 0 if self.rowwise and layouts else -1
        if self.chained:
            column = self.format(COLUMNWISE)
            return OperandLayout(layouts, row, -1, Quantizer(column, rowwise=False).cast, column)
        serves_columns = self.columnwise and len(layouts) == 1 and (row < 0 or layouts[0][0].symmetric)
        return OperandLayout(layouts, row, 0 if serves_columns else -1)

    def amax(self, x: Tensor) -> Amaxes:
        """Finds the amaxes that ranks of a sharded ``x`` reduce before its cast: one for each of :attr:`casts`."""
        return find_amaxes([x], [self])[0]

    def cast(
        self,
        x: Tensor,
        amaxes: Amaxes | None = None,
        rng: Tensor | None = None,
        *,
        gemm_ready: bool = False,
        offsets: Tensor | None = None,
    ) -> Quantized:
        """Quantizes ``x``; see :func:`cast_all`. ``offsets``: each group of rows by itself, see :class:`Operand`."""
        if offsets is not None:
            return casts([self], x.device.type if gemm_ready else "").of_groups(x, offsets)
        return cast_all([x], [self], [amaxes], [rng], gemm_ready=gemm_ready)[0]

    @checked
    def __call__(self, x: Tensor) -> Quantized:
        """Finds amaxes and casts. A 3-D or higher ``x`` is taken as [M, K] with M the product of its leading dims."""
        return self.cast(x, self.amax(x))


# Made once, since every call of every layer asks for the same few: those of the recipes that a program uses.
_with_usages: dict[tuple[Quantizer, bool, bool], Quantizer] = {}
MOST_USAGES = MOST_CASTS = 1024  # recipes, and lists of parameters, that change at each step must not fill the memory
_casts: dict[tuple[tuple[Quantizer, ...], str, tuple[int, ...]], Casts] = {}


def casts(quantizers: Sequence[Quantizer], gemm_ready_on: str = "", emit_bf16: tuple[int, ...] = ()) -> Casts:
    """Prepares casts of tensors with ``quantizers``; ``gemm_ready_on`` as in :meth:`Quantizer.layouts`.

    What casts the same tensors again and again keeps the result. ``emit_bf16``: as in :class:`Casts`.
    """
    key = tuple(quantizers), gemm_ready_on, emit_bf16
    known = None if torch.compiler.is_compiling() else _casts.get(key)
    if known is None:
        wanted = [TensorCasts(each.casts, each.operand_layout(each.layouts(gemm_ready_on))) for each in quantizers]
        known = Casts(wanted, gemm_ready_on == "cuda", emit_bf16)
        if not torch.compiler.is_compiling():
            if len(_casts) >= MOST_CASTS:
                _casts.clear()
            _casts[key] = known
    return known


def _check_lengths(xs: Sequence[Tensor], quantizers: Sequence[Quantizer]) -> None:
    if len(xs) != len(quantizers):
        raise ValueError(f"quantizers are {len(quantizers)} for {len(xs)} tensors; one for each is needed")


def find_amaxes(xs: Sequence[Tensor], quantizers: Sequence[Quantizer]) -> list[Amaxes]:
    """Finds the amaxes of many tensors in one launch.

    Args:
        xs: [..., K] each, bf16, fp16 or fp32.
        quantizers: one a tensor.

    Returns:
        For each tensor one entry a cast: fp32 (see ``ops.quantize.reference.amax``), or None where the cast finds
        its own because no scale spans more than a block, or takes a given scale.
    """
    _check_lengths(xs, quantizers)
    return casts(quantizers).amaxes(xs) if xs else []


def cast_all(
    xs: Sequence[Tensor],
    quantizers: Sequence[Quantizer],
    amaxes: Sequence[Amaxes | None] | None = None,
    rngs: Sequence[Tensor | None] | None = None,
    *,
    gemm_ready: bool = False,
    noop_flag: Tensor | None = None,
    scales: Sequence[Tensor | None] | None = None,
) -> list[Quantized]:
    """Quantizes many tensors in one launch.

    Args:
        xs: [..., K] each, bf16, fp16 or fp32, on one device.
        quantizers: one a tensor.
        amaxes: as :func:`find_amaxes` gives them, reduced over a group or not; for delayed scaling the scale, fp32 [1].
            None: each tensor's own, found first, in one launch.
        rngs: for each tensor the int64 [2] seed and offset of stochastic rounding. None: drawn.
        gemm_ready: lay codes out in memory as this device's GEMMs read them, for what is neither gathered nor kept as a
            parameter: a symmetric format may give two operands.
        noop_flag: fp32 [1] on the device; where it is not 0 kernels do nothing, and the result is undefined.
        scales: for each tensor the scale that its casts take under delayed scaling, in lieu of one among ``amaxes``.

    Raises:
        TypeError: a tensor is not floating point.
        ValueError: its dtype is not bf16, fp16 or fp32, or delayed scaling was given no scale.
    """
    _check_lengths(xs, quantizers)
    if not xs:
        return []
    prepared = casts(quantizers, xs[0].device.type if gemm_ready else "")
    for scale in scales if scales is not None and prepared.takes_scales else ():
        if scale is not None:
            check_scale(scale)
    if torch.compiler.is_dynamo_compiling():
        return prepared.by_operations(xs, amaxes, rngs, scales, noop_flag)
    return prepared(xs, amaxes, rngs, scales=scales, noop_flag=noop_flag)


def are_scales(values: Tensor) -> bool:
    """Whether all are floating point, above 0 and finite in fp32; waits for the device."""
    return values.is_floating_point() and bool(((single := values.float()) > 0).logical_and(single.isfinite()).all())
