"""Amax and cast of the matrices of one call past the dispatcher, as one piece of work."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from minifloat.formats import parse

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""What can be quantized."""

Output = tuple[Tensor, Tensor, Tensor | None, Tensor | None]
"""Of one cast: codes, scales, the measured amax under delayed scaling, and the amax or scale that it was given."""


class Request(NamedTuple):
    """What a call asks for, the same in every call of a layer.

    Args:
        amax_of, amax_formats, amax_dims: which tensor each amax is of, and for which format along which dim.
        cast_of, formats, dims, k_major: which tensor each cast is of, and the arguments of the operation.
        own_level: the amax that each cast takes, or -1 if it is given one or needs none.
    """

    amax_of: list[int]
    amax_formats: list[str]
    amax_dims: list[int]
    cast_of: list[int]
    formats: list[str]
    dims: list[int]
    k_major: list[bool]
    own_level: list[int]


def read_amaxes(formats: Sequence[str], own_level: Sequence[int]) -> list[int]:
    """Which amaxes operands keep, as two-level scales do; a cast alone reads the others."""
    two_level = [parse(spec).scale_rule == "two_level" for spec in formats]
    return sorted({own for own, read in zip(own_level, two_level, strict=True) if read and own >= 0})


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
