"""Products in three steps, and the factors that are left for the last one.

Preparing is a pass over codes and scales (a transpose, padding, bf16 values), finishing one over the product (factors,
a bias); in between a library multiplies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minifloat.ops.matmul.reference import Values, finish, tensor_factor


class Steps(NamedTuple):
    """A product in three steps; the first and the last launch kernels, or do nothing to tensors.

    Args:
        prepare: (a, b, direct) -> the tensors that the library reads, and what ``finish`` needs of the operands.
        multiply: (those tensors, dtype) -> the library's product. One that ``adds`` takes memory as one more tensor,
            and returns that if it added the product to it.
        direct: (bias, dtype) -> whether the library's product in that dtype is the result already.
        finish: (fp32 product, what ``prepare`` left, bias, dtype) -> the result, where it is not.
        repair: (library's product, what ``prepare`` left) -> nothing; launches kernels that write parts of the product.
        whole: (a, b, bias, dtype) -> the result where it is not direct and another way than these steps is faster, else
            None; so much work that finding its launches anew costs nothing.
    """

    prepare: Callable[[Any, Any, bool], tuple[Sequence[Tensor], Any]]
    multiply: Callable[[Sequence[Tensor], torch.dtype], Tensor]
    direct: Callable[[Tensor | None, torch.dtype], bool]
    finish: Callable[[Tensor, Any, Tensor | None, torch.dtype], Tensor]
    repair: Callable[[Tensor, Any], None] | None = None
    whole: Callable[[Any, Any, Tensor | None, torch.dtype], Tensor | None] | None = None
    adds: bool = False


class Scales(NamedTuple):
    """Factors of the whole contraction: fp32 [1] or [m] and [n], None for none, and what they are over."""

    left: Tensor | None
    right: Tensor | None
    divisor: float


UNSCALED = Scales(None, None, 1.0)


def scaled(product: Tensor, scales: Scales, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """fp32 ``product`` [m, n] times its scales, if any, plus ``bias`` [n] in the output's dtype, rounded once."""
    left, right, divisor = scales
    if left is not None or right is not None:
        one = product.new_ones(1)
        left, right = one if left is None else left, one if right is None else right
        product = product * tensor_factor(Values(left, None, left, divisor), Values(right, None, right, 1.0))
    return finish(product, bias, out_dtype)
