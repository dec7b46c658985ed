"""Operands of grouped products: casts of groups, made-up codes of small integers, and what both stand for."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from minifloat.formats import COLUMNWISE, ROWWISE, parse
from minifloat.ops import grouped
from minifloat.ops.grouped import layout
from minifloat.ops.quantize import reference, scale_shape


class Operand(NamedTuple):
    """The arguments of ``grouped_mm`` for one side."""

    codes: Tensor
    scale_inv: Tensor | None
    amax: Tensor | None
    spec: str
    dim: int
    offsets: Tensor

    def to(self, device: torch.device) -> Operand:
        tensors = [each.to(device) if isinstance(each, Tensor) else each for each in self]
        return Operand(*tensors)  # type: ignore[arg-type]


def offsets_of(counts: tuple[int, ...]) -> Tensor:
    """int32 [G + 1]."""
    return torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def k_major(spec: str) -> bool:
    """Columnwise codes have rows consecutive in memory, as ``backends.k_major`` wants them."""
    fmt = parse(spec)
    return fmt.encoding.dtype is not None and fmt.block in (0, 128)


def quantized(x: Tensor, offsets: Tensor, spec: str, dim: int, by_reference: bool = True) -> Operand:
    """A cast of the groups of ``x``, by the reference or as the library does it; stochastic formats with one seed."""
    fmt = parse(spec)
    if not fmt.quantized:
        return Operand(x.contiguous(), None, None, spec, dim, offsets)
    amax, cast = grouped.grouped_amax, grouped.grouped_cast
    level = (amax.reference if by_reference else amax)(x, offsets, [spec], [dim])[0] if fmt.needs_amax else None
    if fmt.scale_rule == "given":
        level = torch.arange(1.0, offsets.numel()).to(x.device)
    order = [k_major(spec)]
    made = (cast.reference if by_reference else cast)(x, offsets, [level], None, [spec], [dim], order)
    return Operand(*made[:2], level if fmt.scale_rule == "two_level" else None, spec, dim, offsets)


def integers(rows: int, cols: int, offsets: Tensor, spec: str, dim: int) -> Operand:
    """Integers up to 3 under scales of random powers of two, everywhere: in rows that are no group's, too."""
    fmt, groups = parse(spec), offsets.numel() - 1
    if not fmt.quantized:
        return Operand(torch.randint(-3, 4, (rows, cols)).bfloat16(), None, None, spec, dim, offsets)
    shape = layout.shape("codes", fmt, dim, rows, cols, groups)
    values = torch.randint(-3, 4, shape).float()
    codes = fmt.encoding.encode(values)
    if fmt.packed:
        codes = codes | fmt.encoding.encode(torch.randint(-3, 4, shape).float()) << 4
        if dim == ROWWISE and cols % 2:
            codes[:, -1] &= 0xF
        known = offsets.tolist() if dim == COLUMNWISE else [0]
        for (first, end), place in zip(pairwise(known), layout.own_rows("codes", fmt, dim, known), strict=True):
            if (end - first) % 2 and fmt.transform == "none":
                codes[place.stop - 1] &= 0xF
    if dim == COLUMNWISE and k_major(spec):
        codes = codes.t().contiguous().t()
    exponents = torch.randint(-2, 3, layout.shape("scale_inv", fmt, dim, rows, cols, groups))
    scales = torch.exp2(exponents.float())
    if fmt.scale_rule == "e8m0":
        scales = (exponents + 127).to(torch.uint8)
    elif fmt.scale_rule == "two_level":
        scales = scales.to(torch.float8_e4m3fn).view(torch.uint8)
        return Operand(
            codes, scales, torch.rand(layout.shape("amax", fmt, dim, rows, cols, groups)) + 1, spec, dim, offsets
        )
    return Operand(codes, scales, None, spec, dim, offsets)


def values(operand: Operand, group: int, cols: int) -> Tensor:
    """What a group's codes stand for, float64 [rows, cols]; rotated, and of whole groups of 16, where they are."""
    codes, scale_inv, amax, spec, dim, offsets = operand
    fmt, (first, end) = parse(spec), offsets[group : group + 2].tolist()
    rows = end - first
    if scale_inv is None:
        return codes[first:end].double()
    places = [layout.own_rows(name, fmt, dim, offsets.tolist())[group] for name in layout.NAMES]
    level = None if amax is None else amax[places[2]].reshape(-1)
    scales, found = scale_inv[places[1]], codes[places[0]]
    if fmt.transform == "hadamard16":
        rows, fmt = reference.rotated_rows(rows), parse(spec.replace("/hadamard16", ""))
    scales = scales.reshape(scale_shape(fmt, dim, rows, cols))
    return reference.dequantize(found, scales, level, fmt, dim, rows, cols).double()


def poisoned(operand: Operand) -> Operand:
    """The same with NaN, or codes and scales of all ones, in memory that is no group's, or that of one without rows."""
    codes, scale_inv, amax, spec, dim, offsets = operand
    fmt, known = parse(spec), offsets.tolist()

    def poison(x: Tensor, places: list[slice]) -> Tensor:
        free = torch.ones(x.shape[0], dtype=torch.bool)
        for place, (first, end) in zip(places, pairwise(known), strict=True):
            free[place] = end == first
        x = x.clone()  # keeps strides
        x[free] = torch.nan if x.is_floating_point() else 0xFF
        return x

    if scale_inv is None:
        return operand._replace(codes=poison(codes, list(map(slice, known, known[1:]))))
    return operand._replace(
        codes=poison(codes, layout.own_rows("codes", fmt, dim, known)),
        scale_inv=poison(scale_inv, layout.own_rows("scale_inv", fmt, dim, known)),
        amax=None if amax is None else poison(amax, layout.own_rows("amax", fmt, dim, known)),
    )


def alone(x: Operand, group: int, cols: int) -> Operand:
    """A group's part as the only group of an operand."""
    codes, scale_inv, amax, spec, dim, offsets = x
    fmt, (first, end) = parse(spec), offsets[group : group + 2].tolist()
    rows, own = end - first, offsets_of((end - first,))
    if scale_inv is None:
        return Operand(codes[first:end].contiguous(), None, None, spec, dim, own)

    def place(tensor: Tensor, shape: tuple[int, ...], source: slice) -> Tensor:
        target = tensor.new_zeros(shape)
        if target.dim() == 2 and tensor.stride(1) != 1:
            target = target.t().contiguous().t()
        taken = tensor[source]
        target[: taken.shape[0]] = taken
        return target

    places = [layout.own_rows(name, fmt, dim, offsets.tolist())[group] for name in layout.NAMES]
    whole = fmt, dim, rows, cols, 1
    return Operand(
        place(codes, layout.shape("codes", *whole), places[0]),
        place(scale_inv, layout.shape("scale_inv", *whole), places[1]),
        None if amax is None else place(amax, layout.shape("amax", *whole), places[2]),
        spec, dim, own,
    )  # fmt: skip
