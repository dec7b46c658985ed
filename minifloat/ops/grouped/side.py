"""An operand of a grouped product, as kernels read it."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from minifloat.formats import ROWWISE


class Side(NamedTuple):
    """An operand as a kernel reads it.

    Args:
        matrix: of FP8, bf16, fp16 or fp32, one dim consecutive in memory.
        offsets, along, unit: of :class:`Cast`.
        scale: factors, or the grid of blocks.
        strides: of the grid: from one row to the next, outer block to the next and segment to the next.
        step: a factor for each row that is not contracted (1), or one for a group (0).
        divisor: of the factors.
        tile: blocks are squares.
    """

    matrix: Tensor
    offsets: Tensor
    along: int
    unit: int
    scale: Tensor
    strides: tuple[int, int, int] = (0, 0, 0)
    step: int = 0
    divisor: float = 1.0
    tile: bool = False

    @property
    def consecutive(self) -> bool:
        """The contracted dim is consecutive in memory."""
        return (self.matrix.stride(1) == 1) == (self.along == ROWWISE)

    @property
    def stride(self) -> int:
        """Elements between neighbours in the other dim."""
        return self.matrix.stride(0 if self.matrix.stride(1) == 1 else 1)
