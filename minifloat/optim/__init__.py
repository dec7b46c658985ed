"""Optimizers for low-precision parameters: master weights around any optimizer, AdamW with low-precision moments."""

from minifloat.optim.adamw import AdamW
from minifloat.optim.master import MasterWeights
from minifloat.optim.overflow import forget_overflow

__all__ = ["AdamW", "MasterWeights", "forget_overflow"]
