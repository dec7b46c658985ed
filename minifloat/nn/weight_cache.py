"""Weights that stay quantized between the microbatches of a step."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from minifloat.operand import Quantized
from minifloat.quantizer import Quantizer
from minifloat.tensor.base import versions


class CachedWeight(NamedTuple):
    """A quantized weight, and what it was cast from and with."""

    sources: tuple[Tensor, ...]
    versions: tuple[float, ...]
    quantizer: Quantizer
    operands: Quantized

    def of(self, sources: tuple[Tensor, ...], quantizer: Quantizer) -> bool:
        """It is what casting the weight made of ``sources`` now would give."""
        return (
            len(self.sources) == len(sources)
            and all(mine is theirs for mine, theirs in zip(self.sources, sources, strict=True))
            and self.versions == versions(sources)
            and self.quantizer == quantizer
        )
