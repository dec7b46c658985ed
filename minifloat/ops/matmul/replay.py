"""Products whose operands kernels prepare, replayed at calls of equal layouts.

Preparing is a pass over codes and scales (a transpose, padding, bf16 values), finishing one over the product (factors,
a bias); in between a library multiplies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minifloat.ops import launch
from minifloat.ops.matmul.native import cut
from minifloat.ops.replay import Recorder


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


class RecordedProduct:
    """[m, n] = a b^T in three steps; see :class:`Steps`. Called as a backend of ``matmul.Product``."""

    def __init__(self, steps: Steps) -> None:
        self.steps = steps
        self.recorder = Recorder()

    def __call__(
        self, a: Any, b: Any, out_dtype: torch.dtype, bias: Tensor | None, fast_accum: bool,
        out: Tensor | None = None, accumulate: bool = False,
    ) -> Tensor:  # fmt: skip
        direct = self.steps.direct(bias, out_dtype)
        if not direct and self.steps.whole is not None:
            whole = self.steps.whole(a, b, bias, out_dtype)
            if whole is not None:
                return whole
        into = out if accumulate and direct and self.steps.adds else None
        results = self.recorder(
            (out_dtype, a.outer, b.outer), (*a[:3], *b[:3], bias, into),
            lambda: (self._step_by_step(a, b, out_dtype, bias, direct, into),),
        )  # fmt: skip
        assert results[0] is not None
        return results[0]

    def _step_by_step(
        self, a: Any, b: Any, out_dtype: torch.dtype, bias: Tensor | None, direct: bool, into: Tensor | None
    ) -> Tensor:
        operands, left = self.steps.prepare(a, b, direct)
        dtype = out_dtype if direct else torch.float32
        product = launch.library(self.steps.multiply, [*operands, *([] if into is None else [into])], dtype)
        if self.steps.repair is not None:
            self.steps.repair(product, left)
        if product.shape != (a.outer, b.outer) or not product.is_contiguous():
            product = launch.library(_cut, [product], a.outer, b.outer)
        return product if direct else self.steps.finish(product, left, bias, out_dtype)


def _cut(tensors: Sequence[Tensor], m: int, n: int) -> Tensor:
    return cut(tensors[0], m, n)
