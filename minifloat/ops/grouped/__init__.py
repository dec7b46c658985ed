"""Amax, cast and product of groups of rows of one matrix, whose sizes only the device knows: one launch a phase.

Each group is quantized as a matrix of its own, and multiplied so: what these operations give is, bit for bit, what
:mod:`minifloat.ops.quantize` gives of each group alone. ``layout.py`` has the shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minifloat.arguments import label_of
from minifloat.formats import COLUMNWISE, ROWWISE, Format, parse
from minifloat.ops import matmul
from minifloat.ops.grouped import layout
from minifloat.ops.library import SymInt, operation
from minifloat.ops.quantize import empty, reference, scale_shape


def _parts(x: Tensor, offsets: Sequence[int]) -> Sequence[Tensor]:
    """The rows of each group."""
    return x[offsets[0] : offsets[-1]].split([end - first for first, end in pairwise(offsets)])


def check_counts(counts: Tensor, rows: int, layer: object) -> None:
    """Raises a ValueError unless ``counts`` [G] may be the rows of groups, of so many in all; waits for the device."""
    found = counts.tolist()
    if min(found, default=0) < 0 or sum(found) > rows:
        raise ValueError(
            f"{label_of(layer)}: m_splits {found} must not be negative and adds up to {sum(found)}, with {rows} rows "
            "of input; give the rows of each expert"
        )


@operation()
def checked_counts(counts: Tensor, rows: SymInt, label: str) -> Tensor:
    """A copy of ``counts`` that :func:`check_counts` has looked at, in code that was compiled without their values."""
    check_counts(counts, rows, label)
    return counts.clone()


@checked_counts.fake
def _(counts: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(counts)


@operation()
def copied_after(tensors: Sequence[Tensor], first: Tensor) -> list[Tensor]:
    """Copies of ``tensors`` that no compiler makes before ``first``, as in forward, where FSDP2 may have freed them."""
    return [each.clone() for each in tensors]


@copied_after.fake
def _(tensors: Sequence[Tensor], first: Tensor) -> list[Tensor]:
    return [torch.empty_like(each) for each in tensors]


@operation("grouped.casts:amax")
def grouped_amax(x: Tensor, offsets: Tensor, formats: Sequence[str], dims: Sequence[int]) -> list[Tensor]:
    """Finds what ``reference.amax`` gives of each group of rows of ``x`` [M, K], for each format along its dim.

    ``offsets``: int32 [G + 1]: the first row of each group, and the end of the last one, at most M; not descending.
    The amaxes of formats that find their own are empty, [0].
    """
    amaxes, known = empty_amaxes(x, offsets, formats, dims), offsets.tolist()
    for amax, fmt, dim in zip(amaxes, map(parse, formats), dims, strict=True):
        amax.zero_()
        for rows, place in zip(_parts(x, known), layout.own_rows("amax", fmt, dim, known), strict=True):
            if fmt.needs_amax:
                amax[place] = reference.amax(rows, fmt, dim).view_as(amax[place])
    return amaxes


@grouped_amax.fake
def empty_amaxes(x: Tensor, offsets: Tensor, formats: Sequence[str], dims: Sequence[int]) -> list[Tensor]:
    shapes = [
        layout.shape("amax", fmt, dim, x.shape[0], x.shape[1], offsets.shape[0] - 1) if fmt.needs_amax else (0,)
        for fmt, dim in zip(map(parse, formats), dims, strict=True)
    ]
    return [x.new_empty(shape, dtype=torch.float32) for shape in shapes]


@operation("grouped.casts:cast")
def grouped_cast(
    x: Tensor, offsets: Tensor, given: Sequence[Tensor | None], rng: Tensor | None, formats: Sequence[str],
    dims: Sequence[int], k_major: Sequence[bool], rows: Tensor | None = None, chained: bool = False,
) -> list[Tensor]:  # fmt: skip
    """Casts ``x`` [M, K] to codes, scales and amaxes of each cast, in the shapes of ``layout.py``.

    Args:
        offsets: as of :data:`grouped_amax`.
        given: of each cast the amaxes as :data:`grouped_amax` gives them; for the rule ``"given"`` the scales, fp32
            [G]; None where blocks find their own.
        rng: int64 [G, 2], seed and offset of each group for stochastic rounding.
        k_major: columnwise codes lie in memory with rows consecutive.
        rows: cast in lieu of ``x`` the matrix that :func:`gathered_amax` measures, which never stands in memory. The
            formats are one format with one amax or scale a group and columnwise codes ``k_major``, or one of
            ``quantize.casts_blocks``.
        chained: there are two casts, to one format of ``quantize.casts_blocks``: rowwise, and columnwise of what the
            first stands for, in the dtype of ``x``.

    Returns:
        The third is the groups' own amaxes, fp32 [G], where scales were given, else empty.
    """
    x = x if rows is None else x[rows.long()]
    known = offsets.tolist()
    parts, outputs = _parts(x, known), list[Tensor]()
    for level, spec, dim, transposed in zip(given, formats, dims, k_major, strict=True):
        fmt = parse(spec)
        if chained and outputs:
            values = grouped_dequantize.reference(*outputs[:2], None, offsets, spec, ROWWISE, *x.shape, x.dtype)
            parts = _parts(values, known)
        codes, scales, amax = empty_cast(x, offsets.numel() - 1, fmt, dim, transposed)
        for tensor in (codes, scales, amax):
            tensor.zero_()
        places = [layout.own_rows(name, fmt, dim, known) for name in layout.NAMES]
        for group, (part, of_codes, of_scales, of_amax) in enumerate(zip(parts, *places, strict=True)):
            own = None if level is None else level[of_amax].reshape(-1)
            made = reference.cast(part, own, None if rng is None else rng[group], fmt, dim)
            codes[of_codes] = made.codes
            scales[of_scales] = made.scale_inv.view_as(scales[of_scales])
            if amax.numel():
                amax[group] = made.amax[0]
        outputs += codes, scales, amax
    return outputs


@grouped_cast.fake
def _(
    x: Tensor, offsets: Tensor, _given: Any, _rng: Any, formats: Any, dims: Any, k_major: Any,
    rows: Tensor | None = None, chained: bool = False,
) -> list[Tensor]:  # fmt: skip
    return empty_casts(gathered(x, rows), offsets, formats, dims, k_major)


def gathered(x: Tensor, rows: Tensor | None) -> Tensor:
    """``x``, or a matrix of the shape that its ``rows`` have."""
    return x if rows is None else x.new_empty(1, 1).expand(rows.shape[0], x.shape[1])


def empty_casts(
    x: Tensor, offsets: Tensor, formats: Sequence[str], dims: Sequence[int], k_major: Sequence[bool]
) -> list[Tensor]:
    """:func:`empty_cast` of each."""
    groups, each = offsets.shape[0] - 1, zip(map(parse, formats), dims, k_major, strict=True)
    return [tensor for how in each for tensor in empty_cast(x, groups, *how)]


def empty_cast(x: Tensor, groups: int, fmt: Format, dim: int, k_major: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Memory of a cast: codes, scales, and the amaxes that a cast with given scales measures."""
    shape = layout.shape("codes", fmt, dim, x.shape[0], x.shape[1], groups)
    codes = empty(x, shape, torch.uint8, k_major and dim == COLUMNWISE)
    scales = x.new_empty(layout.shape("scale_inv", fmt, dim, x.shape[0], x.shape[1], groups), dtype=fmt.scale_dtype)
    return codes, scales, x.new_empty(groups if fmt.scale_rule == "given" else 0, dtype=torch.float32)


@operation("grouped.casts:gathered_amax")
def gathered_amax(x: Tensor, rows: Tensor, offsets: Tensor) -> Tensor:
    """The amax of each group, fp32 [G], of the matrix [M, K] whose row r is row ``rows[r]`` of ``x`` [T, K].

    It never stands in memory. ``rows``: int32 [M]; ``offsets``: as of :data:`grouped_amax`.
    """
    return grouped_amax.reference(x[rows.long()], offsets, [Format().spec], [ROWWISE])[0]


@gathered_amax.fake
def _(x: Tensor, _rows: Tensor, offsets: Tensor) -> Tensor:
    return x.new_empty(offsets.shape[0] - 1, dtype=torch.float32)


@operation("grouped.products:multiply")
def grouped_mm(
    gemm: str,
    a: Tensor, a_scale: Tensor | None, a_amax: Tensor | None, a_format: str, a_dim: int, a_offsets: Tensor,
    b: Tensor, b_scale: Tensor | None, b_amax: Tensor | None, b_format: str, b_dim: int, b_offsets: Tensor,
    rows: SymInt, cols: SymInt, out_dtype: torch.dtype, bias: Tensor | None, fast_accum: bool,
) -> Tensor:  # fmt: skip
    """The GEMM of each group: fprop, dgrad or wgrad as of ``functional/gemm.py``.

    ======  =================  ==============  ===================  =========================
    gemm    a                  b               result               rows, cols
    ======  =================  ==============  ===================  =========================
    fprop   X [M, K]           W [G N, K]      Y [M, N]             M, N
    dgrad   dY [M, N]          W [G N, K]      dX [M, K]            M, K
    wgrad   dY [M, N]          X [M, K]        dW [G, N, K]         N, K
    ======  =================  ==============  ===================  =========================

    Operands are casts as :data:`grouped_cast` gives them, with the offsets of their rows; those of the format identity
    are values [M, K]. ``bias`` [G, N] is added in fp32. Rows of Y and dX that are no group's are zero.
    """
    known, wgrad = a_offsets.tolist(), gemm == "wgrad"
    along, product = matmul.CONTRACTED[gemm], None
    if a_scale is not None and b_scale is not None:
        product = matmul.product(gemm, a_format, a_dim, along[0], b_format, b_dim, along[1], a.device)
    matmul.record(gemm, a_format, b_format, "torch" if product is None else product.backend)
    left = _sides(a, a_scale, a_amax, parse(a_format), a_dim, known)
    right = _sides(b, b_scale, b_amax, parse(b_format), b_dim, b_offsets.tolist())
    out = a.new_zeros((len(left), rows, cols) if wgrad else (rows, cols), dtype=out_dtype)
    results = out.unbind() if wgrad else _parts(out, known)
    for group, (result, own, other) in enumerate(zip(results, left, right, strict=True)):
        addend = None if bias is None else bias[group]
        if product is None:
            found = _of_values(own.values(out_dtype), other.values(out_dtype), along, addend)
        else:
            sides: Any = *own[:3], result.shape[0], *other[:3], cols, out_dtype, addend, fast_accum, None, False, False
            found = product.run(*sides)
        result.copy_(found)
    return out


class _Side(NamedTuple):
    """An operand of a group's product, and its number of rows."""

    codes: Tensor
    scale_inv: Tensor | None
    amax: Tensor | None
    format: Format
    dim: int
    rows: int

    def values(self, dtype: torch.dtype) -> Tensor:
        """Dequantizes the operand."""
        codes, scale_inv, amax, fmt, dim, rows = self
        if scale_inv is None:
            return codes.to(dtype)
        cols = codes.shape[1] * (2 if fmt.packed and dim == ROWWISE else 1)
        grid = scale_inv.reshape(scale_shape(fmt, dim, rows, cols))
        return reference.dequantize(codes, grid, amax, fmt, dim, rows, cols).to(dtype)


def _sides(
    codes: Tensor, scale_inv: Tensor | None, amax: Tensor | None, fmt: Format, dim: int, offsets: Sequence[int]
) -> list[_Side]:
    """The operands of groups."""
    if scale_inv is None:
        return [_Side(own, None, None, fmt, dim, own.shape[0]) for own in _parts(codes, offsets)]
    sides, places = [], [layout.own_rows(name, fmt, dim, offsets) for name in layout.NAMES]
    for (first, end), of_codes, of_scales, of_amax in zip(pairwise(offsets), *places, strict=True):
        scales = scale_inv[of_scales] if fmt.block else scale_inv[of_scales].reshape(-1)
        level = None if amax is None else amax[of_amax].reshape(-1)
        sides.append(_Side(codes[of_codes], scales, level, fmt, dim, end - first))
    return sides


def _of_values(left: Tensor, right: Tensor, along: tuple[int, int], bias: Tensor | None) -> Tensor:
    """The GEMM of one group of values."""
    left, right = left if along[0] == ROWWISE else left.t(), right.t() if along[1] == ROWWISE else right
    depth = min(left.shape[1], right.shape[0])  # a packed operand may end with a zero code
    left, right = left[:, :depth], right[:depth]
    return left @ right if bias is None else torch.addmm(bias.to(left.dtype), left, right)


@grouped_mm.fake
def _(gemm: str, a: Tensor, *rest: Any) -> Tensor:
    offsets, rows, cols, out_dtype = rest[4], rest[11], rest[12], rest[13]
    return a.new_empty((offsets.shape[0] - 1, rows, cols) if gemm == "wgrad" else (rows, cols), dtype=out_dtype)


@operation("grouped.products:multiply_values")
def rowwise_mm(
    x: Tensor, x_offsets: Tensor, w: Tensor, w_offsets: Tensor, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """:data:`grouped_mm`'s fprop of values [M, K] and [G N, K], a row of which depends on no other row of ``x``.

    Products are added in fp32 in the order of K: a library's product blocks K by the number of rows.
    """
    rows, cols = x.shape[0], w.shape[0] // max(w_offsets.numel() - 1, 1)
    out = x.new_zeros(rows, cols, dtype=out_dtype)
    parts = (_parts(each, offsets.tolist()) for each, offsets in ((out, x_offsets), (x, x_offsets), (w, w_offsets)))
    for group, (result, left, weight) in enumerate(zip(*parts, strict=True)):
        left, right = left.float(), weight.float().t().contiguous()
        total = right.new_zeros(result.shape)
        for k in range(right.shape[0]):
            total += left[:, k, None] * right[k]
        result.copy_(total if bias is None else total + bias[group].to(out_dtype).float())
    return out


@rowwise_mm.fake
def _(x: Tensor, x_offsets: Tensor, w: Tensor, w_offsets: Tensor, bias: Any, out_dtype: torch.dtype) -> Tensor:
    return x.new_empty((x.shape[0], w.shape[0] // (w_offsets.shape[0] - 1)), dtype=out_dtype)


@operation("grouped.products:multiply_into", mutates=["out"])
def grouped_mm_into(
    out: Tensor,
    gemm: str,
    a: Tensor, a_scale: Tensor | None, a_amax: Tensor | None, a_format: str, a_dim: int, a_offsets: Tensor,
    b: Tensor, b_scale: Tensor | None, b_amax: Tensor | None, b_format: str, b_dim: int, b_offsets: Tensor,
    rows: SymInt, cols: SymInt, out_dtype: torch.dtype, bias: Tensor | None, fast_accum: bool,
) -> None:  # fmt: skip
    """:data:`grouped_mm` written to ``out``: contiguous, of its shape and dtype, at a multiple of 16 bytes."""
    out.copy_(
        grouped_mm.reference(
            gemm, a, a_scale, a_amax, a_format, a_dim, a_offsets, b, b_scale, b_amax, b_format, b_dim, b_offsets,
            rows, cols, out_dtype, bias, fast_accum,
        )
    )  # fmt: skip


@grouped_mm_into.fake
def _(out: Tensor, *_arguments: Any) -> None:
    return None


@operation("grouped.products:add_rows")
def grouped_sum(x: Tensor, offsets: Tensor) -> Tensor:
    """The sum of each group's rows of ``x`` [M, N]: [G, N], in the dtype of ``x``."""
    sums = [own.sum(0) for own in _parts(x, offsets.tolist())]
    return torch.stack(sums) if sums else x.new_zeros(0, x.shape[1])


@grouped_sum.fake
def _(x: Tensor, offsets: Tensor) -> Tensor:
    return x.new_empty(offsets.shape[0] - 1, x.shape[1])


@operation("grouped.spread:dequantize")
def grouped_dequantize(
    codes: Tensor, scale_inv: Tensor, amax: Tensor | None, offsets: Tensor, format: str, dim: int, rows: SymInt,
    cols: SymInt, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """The values [M, K] that a cast of groups stands for; 0 in rows that are no group's."""
    values, known = codes.new_zeros(rows, cols, dtype=dtype), offsets.tolist()
    sides = _sides(codes, scale_inv, amax, parse(format), dim, known)
    for result, side in zip(_parts(values, known), sides, strict=True):
        result.copy_(side.values(dtype)[:, :cols])
    return values


@grouped_dequantize.fake
def _(codes: Tensor, *rest: Any) -> Tensor:
    *_, rows, cols, dtype = rest
    return codes.new_empty((rows, cols), dtype=dtype)


@operation(random=True)
def draw_seeds(offsets: Tensor) -> Tensor:
    """Seed and offset of stochastic rounding for each group, int64 [G, 2], from PyTorch's generator."""
    return torch.randint(2**62, (offsets.shape[0] - 1, 2), dtype=torch.int64, device=offsets.device)
