"""Groups of rows of one matrix, quantized and multiplied as matrices of their own: operands, casts and GEMMs.

The rows of X [M, K] that belong to expert g are ``offsets[g]`` to ``offsets[g + 1]``; how many those are only the
device knows. A weight is [G, N, K]. No scale, block or byte is shared between groups, so that each is quantized and
multiplied as by a linear of its own, in one launch for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minifloat import finite
from minifloat.arguments import label_of
from minifloat.comm.group import cached
from minifloat.delayed_call import DelayedCall
from minifloat.formats import COLUMNWISE, IDENTITY, ROWWISE, Format
from minifloat.functional.norm_activation import measures_amax
from minifloat.functional.quantize import delayed_scale, record_groups
from minifloat.functional.router import Routing
from minifloat.operand import Quantized
from minifloat.ops import grouped, matmul, new
from minifloat.ops.permute import permute_rows
from minifloat.ops.quantize import casts_blocks
from minifloat.quantizer import Quantizer, as_matrix, casts


class GroupLayout(NamedTuple):
    """Which rows are of which group; one value serves every layer that a routing leads through.

    Args:
        offsets: int32 [G + 1] on the device: the first row of each group, and the end of the last one.
        rows: of the matrix, M: a bound that the host knows.
    """

    offsets: Tensor
    rows: int

    @classmethod
    def of(
        cls, counts: Tensor | Sequence[int], rows: int, device: torch.device, layer: object, wait: bool
    ) -> GroupLayout:
        """The layout of ``counts`` [G], in order of the groups; rows beyond their sum are no group's.

        Counts that the device has are not waited for, unless ``wait``: negative ones are taken for 0 there, and groups
        end with the last row.

        Raises:
            TypeError: counts that are no integers.
            ValueError: negative ones, or more than there are rows, where the host knows them; of compiled code that has
                them, when it runs, and with the class of the layer alone, since it serves layers of other names.
            RuntimeError: ``wait`` in compiled code or the capture of a CUDA graph.
        """
        if not isinstance(counts, Tensor):
            counts = torch.tensor(list(counts), device="cpu")
        if counts.numel() and (counts.is_floating_point() or counts.is_complex() or counts.dtype == torch.bool):
            raise TypeError(
                f"{label_of(layer)}: m_splits is {counts.dtype}; integers are needed, the rows of each group"
            )
        if counts.dim() != 1:
            raise ValueError(
                f"{label_of(layer)}: m_splits has shape {tuple(counts.shape)}; one number for each group is needed"
            )
        on_host, compiling = counts.device.type == "cpu" and type(counts) is Tensor, torch.compiler.is_compiling()
        if wait and (compiling or not on_host):
            finite.check_can_wait(label_of(layer))
        if on_host and compiling:
            counts = grouped.checked_counts(counts, rows, type(layer).__name__)
        elif wait or on_host:
            grouped.check_counts(counts, rows, label_of(layer))
        if counts.dtype not in (torch.int32, torch.int64):
            counts = counts.long()  # an int8 cannot be compared with all numbers of rows
        # Each count is bounded, too: the sum of wrong ones could overflow and be negative.
        ends = counts.to(device, non_blocking=True).clamp(min=0, max=rows).cumsum(0).clamp(max=rows)
        return cls(torch.nn.functional.pad(ends, (1, 0)).int(), rows)

    @classmethod
    def uniform(cls, groups: int, rows: int, device: torch.device) -> GroupLayout:
        """``groups`` of ``rows`` rows each, as of weights."""
        end = groups * rows
        return (
            cls(torch.arange(0, end + 1, rows, dtype=torch.int32, device=device), end)
            if rows
            else cls(torch.zeros(groups + 1, dtype=torch.int32, device=device), 0)
        )


class GroupedOperand(NamedTuple):
    """One orientation of a matrix [M, K] that is quantized group by group; see :class:`~minifloat.operand.Operand`.

    ``codes``, ``scale_inv`` and ``amax`` have the shapes of ``ops/grouped/layout.py``; ``shape`` is (M, K).
    """

    codes: Tensor
    scale_inv: Tensor | None
    amax: Tensor | None
    offsets: Tensor
    format: Format
    dim: int
    shape: tuple[int, int]
    dtype: torch.dtype

    @property
    def tensors(self) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
        """Those that a backward saves."""
        return self.codes, self.scale_inv, self.amax if self.format.scale_rule == "two_level" else None, self.offsets

    @property
    def groups(self) -> int:
        """Their number."""
        return self.offsets.shape[0] - 1

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The [M, K] values it stands for; rows that are no group's are 0."""
        dtype = dtype or self.dtype
        if self.scale_inv is None:
            return self.codes.to(dtype)
        return grouped.grouped_dequantize(
            self.codes, self.scale_inv, self.amax, self.offsets, self.format.spec, self.dim, *self.shape, dtype
        )

    def serves(self, dim: int) -> bool:
        """A GEMM may contract it along ``dim``."""
        return self.dim == dim or self.format.symmetric

    def joined(self) -> GroupedOperand:
        """Itself: all groups lie in one piece of memory."""
        return self


def values(x: Tensor, offsets: Tensor) -> GroupedOperand:
    """``x`` [..., K] in high precision."""
    matrix = as_matrix(x)
    return GroupedOperand(matrix, None, None, offsets, IDENTITY, ROWWISE, (matrix.shape[0], matrix.shape[1]), x.dtype)


class GroupedCasts:
    """Casts what a layer knows as ``kind`` group by group, for GEMMs on a type of device; "" for none in particular.

    Attributes:
        one_amax: all that the casts need to know of a group is one amax, which a kernel that computes it can find.
        in_kernel: a kernel that computes a value can cast it.
        from_tokens: a kernel can cast rows that it reads by index.
        formats, specs: of each cast; specs, dims and memory orders as operations take them.
    """

    def __init__(self, quantizer: Quantizer, kind: str, gemm_ready_on: str) -> None:
        prepared = casts([quantizer], gemm_ready_on)
        self.kind, self.request = kind, prepared.request
        self.operand_layout = prepared.wanted[0].operand_layout
        self.second = None
        if quantizer.chained:
            column = Quantizer(quantizer.format(COLUMNWISE), rowwise=False)
            self.second = GroupedCasts(column, kind, gemm_ready_on)
        self.formats = [fmt for fmt, _ in self.operand_layout.layouts if fmt.quantized]
        self.specs = self.request.formats, self.request.dims, self.request.k_major
        self.one_amax = measures_amax(quantizer)
        each = [fmt for fmt, _ in self.operand_layout.layouts]
        formats, first = set(each), each[0] if each else IDENTITY
        _, dims, orders = self.specs
        columns = [order for dim, order in zip(dims, orders, strict=True) if dim == COLUMNWISE]
        scaled = first.scale_rule == "given" and all(columns)  # in another order no kernel writes them
        alike = self.second is None and len(formats) == 1
        self.in_kernel = alike and (scaled or casts_blocks(first))
        self.from_tokens = self.in_kernel or (alike and self.one_amax and all(columns))

    def __call__(
        self,
        x: Tensor,
        offsets: Tensor,
        delayed_call: DelayedCall | None = None,
        scales: Tensor | None = None,
        amax: Tensor | None = None,
        rows: Tensor | None = None,
    ) -> Quantized:
        """The operands of ``x`` [..., K].

        Args:
            scales: fp32 [G] of delayed scaling, if not those of its history.
            amax: of each group, fp32 [G], if it is known and all that its scale comes from.
            rows: int32 [M], the rows of ``x`` that are cast, where :attr:`from_tokens`.
        """
        x, scales = as_matrix(x), self.scales(delayed_call, scales)
        request = self.request
        amaxes = [amax] * len(request.amax_of) if amax is not None else []
        if request.amax_of and not amaxes:
            amaxes = grouped.grouped_amax(x, offsets, request.amax_formats, request.amax_dims)
        given = [
            scales if fmt.scale_rule == "given" else None if own < 0 else amaxes[own]
            for fmt, own in zip(self.formats, request.own_level, strict=True)
        ]
        made: list[Tensor] = []
        if self.formats:
            stochastic = any(fmt.rounding == "stochastic" for fmt in self.formats)
            rng = grouped.draw_seeds(offsets) if stochastic else None
            made = grouped.grouped_cast(x, offsets, given, rng, *self.specs, rows)
        return self.operands(grouped.gathered(x, rows), offsets, made, given, delayed_call)

    def scales(self, delayed_call: DelayedCall | None, known: Tensor | None = None) -> Tensor | None:
        """The scales of delayed scaling, fp32 [G]; None if no cast takes them. ``known``: those of an earlier time."""
        if known is None and delayed_call is not None:
            known = delayed_scale(delayed_call, self.kind)
        return known if any(fmt.scale_rule == "given" for fmt in self.formats) else None

    def of_tokens(
        self, x: Tensor, routing: Routing, rows: Tensor, delayed_call: DelayedCall | None = None
    ) -> Quantized:
        """The operands of ``permute(x, routing)`` for tokens ``x`` [T, K]; where kernels can, that is never written.

        ``rows``: int32 [T k], the token of each row.
        """
        offsets = routing.offsets
        if not self.from_tokens:
            return self(permute_rows(x, None, routing.inverse, offsets), offsets, delayed_call)
        amax = grouped.gathered_amax(x, rows, offsets) if self.one_amax else None
        return self(x, offsets, delayed_call, amax=amax, rows=rows)

    def operands(
        self,
        x: Tensor,
        offsets: Tensor,
        made: Sequence[Tensor],
        given: Sequence[Tensor | None],
        delayed_call: DelayedCall | None,
    ) -> Quantized:
        """Of codes, scales and measured amaxes of each cast, and the amaxes or scales that it was given.

        ``x``: the matrix [M, K], or one of its shape and dtype where all orientations are quantized.
        """
        outputs = iter(list(zip(made[0::3], made[1::3], made[2::3], given, strict=True)))
        operands: list[Any] = [self._operand(x, offsets, fmt, dim, outputs) for fmt, dim in self.operand_layout.layouts]
        row, column = (operands[i] if i >= 0 else None for i in (self.operand_layout.row, self.operand_layout.column))
        if self.second is not None:
            column = self.second(operands[0].dequantize(), offsets).columnwise
        if delayed_call is not None:
            measured = [o.amax for o in operands if o.format.scale_rule == "given" and o.amax is not None]
            record_groups(delayed_call, self.kind, measured[:1])
        return new(Quantized, (row, column))

    def _operand(self, x: Tensor, offsets: Tensor, fmt: Format, dim: int, outputs: Any) -> GroupedOperand:
        if not fmt.quantized:
            return values(x, offsets)
        codes, scale_inv, measured, level = next(outputs)
        amax = measured if fmt.scale_rule == "given" else level if fmt.scale_rule == "two_level" else None
        return GroupedOperand(codes, scale_inv, amax, offsets, fmt, dim, (x.shape[0], x.shape[1]), x.dtype)


@cached
def grouped_casts(quantizer: Quantizer, kind: str, gemm_ready_on: str) -> GroupedCasts:
    """:class:`GroupedCasts`, which a program makes once."""
    return GroupedCasts(quantizer, kind, gemm_ready_on)


def quantize(x: Tensor, layout: GroupLayout, quantizer: Quantizer, *, gemm_ready: bool = False) -> Quantized:
    """Each group of rows of ``x`` [M, K] as ``quantizer`` casts it alone.

    Args:
        gemm_ready: lay codes out in memory as this device's GEMMs read them.

    Returns:
        A :class:`Quantized` of :class:`GroupedOperand`.
    """
    return grouped_casts(quantizer, "input", x.device.type if gemm_ready else "")(x, layout.offsets)


def multiply(
    gemm: str,
    a: GroupedOperand,
    b: GroupedOperand,
    out_dtype: torch.dtype,
    bias: Tensor | None = None,
    fast_accum: bool = False,
    out: Tensor | None = None,
    accumulate: bool = False,
) -> Tensor:
    """The GEMM of each group, see :data:`~minifloat.ops.grouped.grouped_mm`; other arguments as of ``gemm.multiply``.

    Raises:
        ValueError: sizes that do not fit.
    """
    weight_rows = b.shape[0] // max(b.groups, 1)
    if gemm == "wgrad":
        rows, cols, depths = a.shape[1], b.shape[1], (a.shape[0], b.shape[0])
    elif gemm == "dgrad":
        rows, cols, depths = a.shape[0], b.shape[1], (a.shape[1], weight_rows)
    else:
        rows, cols, depths = a.shape[0], weight_rows, (a.shape[1], b.shape[1])
    if depths[0] != depths[1] or a.groups != b.groups:
        raise ValueError(
            f"grouped {gemm} contracts {depths[0]} elements with {depths[1]}, of {a.groups} and {b.groups} groups"
        )
    arguments = (
        gemm, a.codes, a.scale_inv, a.tensors[2], a.format.spec, a.dim, a.offsets,
        b.codes, b.scale_inv, b.tensors[2], b.format.spec, b.dim, b.offsets,
        rows, cols, out_dtype, bias, fast_accum,
    )  # fmt: skip
    if out is not None and not accumulate and _takes_product(out, out_dtype):
        grouped.grouped_mm_into(out, *arguments)
        return out
    return matmul.written(grouped.grouped_mm(*arguments), out, accumulate)


def _takes_product(out: Tensor, dtype: torch.dtype) -> bool:
    """Kernels can write a product there."""
    if torch.compiler.is_compiling() or type(out) is not Tensor:
        return False
    return out.dtype == dtype and out.is_contiguous() and out.data_ptr() % 256 == 0


def product(gemm: str, a: Quantized, b: Quantized, *, out_dtype: torch.dtype, fast_accum: bool = False) -> Tensor:
    """fprop Y [M, N], dgrad dX [M, K] or wgrad dW [G, N, K] of each group; 0 in rows and of groups that have none."""
    a_dim, b_dim = matmul.CONTRACTED[gemm]
    return multiply(gemm, a.along(a_dim), b.along(b_dim), out_dtype, None, fast_accum)  # type: ignore[arg-type]


def bias_gradient(dy: Tensor, layout: GroupLayout) -> Tensor:
    """db [G, N]: the sum of each group's rows of dY [M, N]."""
    return grouped.grouped_sum(as_matrix(dy), layout.offsets)
