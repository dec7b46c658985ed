"""Optimizers for low-precision parameters: master weights around any optimizer, AdamW with low-precision moments.

And the norm and the clipping of gradients of models that are sharded.
"""

from minifloat.delayed import forget_overflow
from minifloat.optim.adamw import AdamW
from minifloat.optim.gradients import clip_grad_norm_, gradient_norm
from minifloat.optim.master_weights import MasterWeights

__all__ = ["AdamW", "MasterWeights", "clip_grad_norm_", "forget_overflow", "gradient_norm"]
