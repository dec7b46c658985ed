"""How a tensor is quantized, as an immutable value: which format for which orientation, and which are wanted.

Quantizing has phases, each over many tensors at a time: :func:`find_amaxes`, then whatever agreement between ranks the
caller wants, then :func:`cast_all`. A quantizer knows no process group, holds no tensor and is never changed, so one
and the same object may serve two groups, two devices and a compiled graph.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from minifloat import capability
from minifloat.arguments import checked, shown
from minifloat.formats import COLUMNWISE, IDENTITY, ROWWISE, Format
from minifloat.operand import Operand, Quantized
from minifloat.ops import quantize
from minifloat.ops.library import directly
from minifloat.ops.quantize.job import Request

Amaxes = tuple[Tensor | None, ...]
"""One entry for each cast of :meth:`Quantizer.casts`: an amax, or, for delayed scaling, the scale."""

Layouts = tuple[tuple[Format, int], ...]
"""Casts of one tensor: (format, dim) each."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""What can be quantized."""


@checked
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

    def __hash__(self) -> int:
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
        """Some orientation is quantized."""
        return self.row_format.quantized or self.format(COLUMNWISE).quantized

    @property
    def chained(self) -> bool:
        """The columnwise operand is cast from the rowwise one, in a second step."""
        return self.columnwise and self.columnwise_source == "rowwise_dequantized" and self.row_format.quantized

    @property
    def casts(self) -> Layouts:
        """The casts that give the wanted orientations, (format, dim) each; one serves both if the format is symmetric.

        A symmetric format is always cast rowwise: one layout, whichever orientation asked for it.
        """
        row, column = self.row_format, self.format(COLUMNWISE)
        wanted = [(row, ROWWISE)] * (self.rowwise or self.chained)
        if self.columnwise and not self.chained and not (wanted and row == column and row.symmetric):
            wanted.append((column, ROWWISE if column.symmetric else COLUMNWISE))
        return tuple(wanted)

    def layouts(self, gemm_ready_on: str) -> Layouts:
        """The casts to make for the GEMMs of a type of device; for ``""`` no GEMM in particular, :attr:`casts`.

        Those that read codes with the contracted dim consecutive need both memory orders, symmetric format or not.
        """
        casts = self.casts
        if gemm_ready_on != "cuda" or len(casts) != 1 or self.chained or not capability.k_major(casts[0][0]):
            return casts
        wanted = [ROWWISE] * self.rowwise + [COLUMNWISE] * self.columnwise
        return tuple((casts[0][0], dim) for dim in wanted)

    def amax(self, x: Tensor) -> Amaxes:
        """What ranks that share ``x`` agree on before its cast: one entry for each of :attr:`casts`."""
        return find_amaxes([x], [self])[0]

    def cast(
        self, x: Tensor, amaxes: Amaxes | None = None, rng: Tensor | None = None, *, gemm_ready: bool = False
    ) -> Quantized:
        """Quantizes ``x``; see :func:`cast_all`."""
        return cast_all([x], [self], [amaxes], [rng], gemm_ready=gemm_ready)[0]

    @checked
    def __call__(self, x: Tensor) -> Quantized:
        """Amax and cast at once. A 3-D or higher ``x`` is taken as [M, K] with M the product of its leading dims."""
        return self.cast(x, self.amax(x))


# Made once, since every call of every layer asks for the same few: those of the recipes that a program uses.
_with_usages: dict[tuple[Quantizer, bool, bool], Quantizer] = {}
MOST_USAGES = MOST_BATCHES = 1024  # recipes, and lists of parameters, that change at each step must not fill the memory
_batches: dict[tuple[tuple[Quantizer, ...], str], _Batch] = {}


class _Batch(NamedTuple):
    """Quantizers side by side, as lists for the operations.

    ``amax_...`` list what needs an amax first, ``cast_...`` what is quantized; ``..._of`` says which tensor it is of.
    ``levels``: for each cast which of its tensor's amaxes it takes. ``stochastic``: tensors that need random bits.
    ``given``: which casts of each tensor take a scale from outside. ``amax_request``: the amaxes alone, for kernels.
    ``requests``: the casts, for kernels, by which tensors have amaxes that are known.
    """

    amax_of: list[int]
    amax_formats: list[str]
    amax_dims: list[int]
    needs_amax: list[list[bool]]
    cast_of: list[int]
    levels: list[int]
    formats: list[Format]
    specs: list[str]
    dims: list[int]
    k_major: list[bool]
    stochastic: list[int]
    layouts: list[Layouts]
    given: list[list[bool]]
    amax_request: Request
    requests: dict[tuple[bool, ...], Request]


def _new_batch(quantizers: Sequence[Quantizer], gemm_ready_on: str) -> _Batch:
    layouts = [quantizer.layouts(gemm_ready_on) for quantizer in quantizers]
    amaxes = Request([], [], [], [], [], [], [], [], {})
    batch = _Batch(
        amaxes.amax_of, amaxes.amax_formats, amaxes.amax_dims, [], [], [], [], [], [], [], [], layouts, [], amaxes, {}
    )
    for i, quantizer in enumerate(quantizers):
        batch.needs_amax.append([fmt.needs_amax for fmt, _ in quantizer.casts])
        batch.given.append([fmt.scale_rule == "given" for fmt, _ in quantizer.casts])
        for fmt, dim in quantizer.casts:
            if fmt.needs_amax:
                batch.amax_of.append(i)
                batch.amax_formats.append(fmt.spec)
                batch.amax_dims.append(dim)
        if any(fmt.rounding == "stochastic" for fmt, _ in quantizer.casts):
            batch.stochastic.append(i)
        for place, (fmt, dim) in enumerate(batch.layouts[i]):
            if fmt.quantized:
                batch.cast_of.append(i)
                batch.levels.append(min(place, len(quantizer.casts) - 1))  # a transposed copy takes that of its twin
                batch.formats.append(fmt)
                batch.specs.append(fmt.spec)
                batch.dims.append(dim)
                batch.k_major.append(gemm_ready_on == "cuda" and capability.k_major(fmt))
    return batch


def _batch(quantizers: Sequence[Quantizer], gemm_ready_on: str) -> _Batch:
    if torch.compiler.is_compiling():
        return _new_batch(quantizers, gemm_ready_on)
    key = tuple(quantizers), gemm_ready_on
    batch = _batches.get(key)
    if batch is None:
        if len(_batches) >= MOST_BATCHES:
            _batches.clear()
        batch = _batches[key] = _new_batch(quantizers, gemm_ready_on)
    return batch


def _with_scales(batch: _Batch, amaxes: Sequence[Amaxes], scales: Sequence[Tensor | None]) -> list[Amaxes]:
    """``amaxes``, with the scale of each tensor where its cast takes one."""
    return [
        tuple([scale if wanted and scale is not None else level for wanted, level in zip(given, levels, strict=True)])
        for given, levels, scale in zip(batch.given, amaxes, scales, strict=True)
    ]


def find_amaxes(xs: Sequence[Tensor], quantizers: Sequence[Quantizer]) -> list[Amaxes]:
    """The amaxes of many tensors in one launch.

    Args:
        xs: [..., K] each, bf16, fp16 or fp32.
        quantizers: one a tensor.

    Returns:
        For each tensor one entry a cast: fp32 (see ``kernels.quantize.reference.amax``), or None where the cast finds
        its own because no scale spans more than a block, or takes a given scale.
    """
    if len(xs) != len(quantizers):
        raise ValueError(f"quantizers are {len(quantizers)} for {len(xs)} tensors; one for each is needed")
    batch = _batch(quantizers, "")
    if not batch.amax_of:
        return [(None,) * len(wanted) for wanted in batch.needs_amax]
    if _directly(xs):
        from minifloat.ops.quantize import pipeline  # which needs Triton

        found = iter(pipeline.run(batch.amax_request, [as_matrix(x) for x in xs], (), ())[1])
    else:
        found = iter(quantize.amax([as_matrix(xs[i]) for i in batch.amax_of], batch.amax_formats, batch.amax_dims))
    return [tuple([next(found) if needed else None for needed in wanted]) for wanted in batch.needs_amax]


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
        amaxes: as :func:`find_amaxes` gives them, reduced over a group or not; for delayed scaling the scale, fp32
            [1]. None: each tensor's own, found first, in one launch.
        rngs: for each tensor the int64 [2] seed and offset of stochastic rounding. None: drawn.
        gemm_ready: lay codes out in memory as this device's GEMMs read them, in the same pass: where those want the
            contracted dim consecutive, columnwise codes are transposed in memory, and a symmetric format gives two
            operands. For what is neither gathered nor kept as a parameter.
        noop_flag: fp32 [1] on the device; where it is not 0 kernels do nothing, and the result is undefined.
        scales: for each tensor the scale that its casts take under delayed scaling, in lieu of one among ``amaxes``.

    Raises:
        TypeError: a tensor is not floating point.
        ValueError: its dtype is not bf16, fp16 or fp32, or delayed scaling was given no scale.
    """
    if len(xs) != len(quantizers):
        raise ValueError(f"quantizers are {len(quantizers)} for {len(xs)} tensors; one for each is needed")
    if not xs:
        return []
    matrices = [as_matrix(x) for x in xs]
    batch = _batch(quantizers, xs[0].device.type if gemm_ready else "")
    if noop_flag is None and rngs is None and _directly(matrices):
        return _cast_directly(batch, matrices, quantizers, amaxes, scales)
    levels = complete(matrices, quantizers, amaxes)
    if scales is not None:
        levels = _with_scales(batch, levels, scales)
    seeds: list[Tensor | None] = list(rngs) if rngs is not None else [None] * len(xs)
    for i in batch.stochastic:  # one for both orientations, which draw different bits from it
        seeds[i] = quantize.draw_seed(matrices[i]) if seeds[i] is None else seeds[i]
    given = [levels[i][place] for i, place in zip(batch.cast_of, batch.levels, strict=True)]
    _check_scales(batch, given)
    outputs: list[Tensor] = []
    if batch.cast_of:
        drawn = [
            seeds[i] if fmt.rounding == "stochastic" else None
            for i, fmt in zip(batch.cast_of, batch.formats, strict=True)
        ]
        sources = [matrices[i] for i in batch.cast_of]
        outputs = quantize.cast(sources, given, drawn, batch.specs, batch.dims, batch.k_major, noop_flag)
    each = iter(zip(outputs[0::3], outputs[1::3], outputs[2::3], given, strict=True))
    return [
        assemble(quantizer, layouts, each, (x.shape[0], x.shape[1]), x.dtype, x)
        for x, quantizer, layouts in zip(matrices, quantizers, batch.layouts, strict=True)
    ]


def _check_scales(batch: _Batch, given: Sequence[Tensor | None]) -> None:
    for fmt, level in zip(batch.formats, given, strict=True):
        if fmt.scale_rule != "given":
            continue
        if level is None:
            raise ValueError(
                "delayed scaling casts with a scale from its history; give Quantizer.cast amaxes=(scale,), or cast_all "
                "scales=[scale]"
            )
        check_scale(level)


def check_scale(scale: Tensor) -> None:
    """Raises a ValueError where a delayed scale that a user gives is none; it is read where that waits for nothing."""
    if torch.compiler.is_compiling():
        return
    known = scale.device.type == "cpu" and type(scale) is Tensor and not torch._C._len_torch_dispatch_stack()
    bad = not scale.is_floating_point() or scale.numel() != 1
    if bad or (known and not 0 < scale.float().item() < math.inf):  # are_scales of one, which each cast asks
        value = f"{scale.item()}" if known and scale.numel() == 1 else shown(scale)
        raise ValueError(f"scale is {value}; delayed scaling casts with one number above 0, finite, floating-point [1]")


def are_scales(values: Tensor) -> bool:
    """All are floating point, above 0 and finite in fp32; waits for the device."""
    return values.is_floating_point() and bool(((single := values.float()) > 0).logical_and(single.isfinite()).all())


def _directly(xs: Sequence[Tensor]) -> bool:
    return all(directly(x) and x.device == xs[0].device for x in xs)


def _cast_directly(
    batch: _Batch,
    xs: Sequence[Tensor],
    quantizers: Sequence[Quantizer],
    amaxes: Sequence[Amaxes | None] | None,
    scales: Sequence[Tensor | None] | None,
) -> list[Quantized]:
    """Amax and cast by kernels that were launched before with other tensors of these shapes."""
    known = tuple([levels is not None for levels in amaxes]) if amaxes is not None else (False,) * len(xs)
    request = batch.requests.get(known)
    if request is None:
        request = batch.requests[known] = _request(batch, known)
    given: list[Tensor | None] = []
    for i, place, fmt in zip(batch.cast_of, batch.levels, batch.formats, strict=True):
        levels = None if amaxes is None else amaxes[i]
        if fmt.scale_rule == "given" and scales is not None and scales[i] is not None:
            given.append(scales[i])
        else:
            given.append(None if levels is None else levels[place])
    _check_scales(batch, given)
    drawn: list[Tensor | None] = [None] * len(batch.cast_of)
    if batch.stochastic:
        seeds = {i: quantize.draw_seed(xs[i]) for i in batch.stochastic}
        drawn = [
            seeds[i] if fmt.rounding == "stochastic" else None
            for i, fmt in zip(batch.cast_of, batch.formats, strict=True)
        ]
    from minifloat.ops.quantize import pipeline  # which needs Triton

    outputs = iter(pipeline.run(request, xs, given, drawn)[0] if batch.cast_of else ())
    return [
        assemble(quantizer, layouts, outputs, (x.shape[0], x.shape[1]), x.dtype, x)
        for x, quantizer, layouts in zip(xs, quantizers, batch.layouts, strict=True)
    ]


def _request(batch: _Batch, known: Sequence[bool]) -> Request:
    found = [n for n, i in enumerate(batch.amax_of) if not known[i]]
    wanted = [
        (i, place) for i, needs in enumerate(batch.needs_amax) for place, needed in enumerate(needs)
        if needed and not known[i]
    ]  # fmt: skip
    number = {tensor_and_cast: n for n, tensor_and_cast in enumerate(wanted)}
    own_level = [number.get((i, place), -1) for i, place in zip(batch.cast_of, batch.levels, strict=True)]
    return Request(
        [batch.amax_of[n] for n in found],
        [batch.amax_formats[n] for n in found],
        [batch.amax_dims[n] for n in found],
        batch.cast_of,
        batch.specs,
        batch.dims,
        batch.k_major,
        own_level,
        {},
    )


def complete(
    xs: Sequence[Tensor], quantizers: Sequence[Quantizer], amaxes: Sequence[Amaxes | None] | None
) -> Sequence[Amaxes]:
    """``amaxes`` that are known, and each tensor's own, in one launch, where there are none."""
    if amaxes is None:
        return find_amaxes(xs, quantizers)
    missing = [i for i, level in enumerate(amaxes) if level is None]
    found = iter(find_amaxes([xs[i] for i in missing], [quantizers[i] for i in missing]) if missing else ())
    return [next(found) if level is None else level for level in amaxes]


def assemble(
    quantizer: Quantizer,
    layouts: Layouts,
    outputs: Iterator[tuple[Tensor, Tensor, Tensor | None, Tensor | None]],
    shape: tuple[int, int],
    dtype: torch.dtype,
    values: Tensor | None = None,
) -> Quantized:
    """The operands of one [M, K] matrix.

    Args:
        layouts: the casts that were made, as :meth:`Quantizer.layouts` gives them.
        outputs: of each cast codes, scales, the measured amax and the given one; as many as are quantized are taken.
        shape, dtype: of the matrix.
        values: the matrix itself, for orientations that are left in high precision.
    """
    operands = []
    for fmt, dim in layouts:
        if fmt.quantized:
            codes, scale_inv, measured, level = next(outputs)
            amax = measured if fmt.scale_rule == "given" else level if fmt.scale_rule == "two_level" else None
            operands.append(Operand(codes, scale_inv, amax, fmt, dim, shape, dtype))
        else:
            assert values is not None
            operands.append(Operand(values, None, None, fmt, dim, shape, dtype))
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
