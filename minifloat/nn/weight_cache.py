"""Weights that stay quantized between the microbatches of a step, or for all that reads them inside of a context."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from minifloat.operand import Quantized
from minifloat.quantizer import Quantizer
from minifloat.recompute import capturing
from minifloat.tensor.base import versions


class CachedWeight(NamedTuple):
    """A quantized weight, and what it was cast from and with.

    ``in_capture``: by ``cast_weights``, while a CUDA graph was captured or not; None: by the layer itself.
    """

    sources: tuple[Tensor, ...]
    versions: tuple[float, ...]
    quantizer: Quantizer
    operands: Quantized
    in_capture: bool | None = None

    def of(self, sources: tuple[Tensor, ...], quantizer: Quantizer) -> bool:
        """It has what casting the weight made of ``sources`` now would give."""
        return (
            len(self.sources) == len(sources)
            and all(mine is theirs for mine, theirs in zip(self.sources, sources, strict=True))
            and self.versions == versions(sources)
            and self.quantizer in (quantizer, quantizer.with_usage(columnwise=True))
            and self.in_capture in (None, capturing())  # a graph would cast no more when it is replayed
        )
