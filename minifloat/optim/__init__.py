"""Master weights around any optimizer; the norm and the clipping of gradients of models that are sharded."""

from minifloat.delayed import forget_overflow
from minifloat.optim.gradients import clip_grad_norm_, gradient_norm
from minifloat.optim.master_weights import MasterWeights

__all__ = ["MasterWeights", "clip_grad_norm_", "forget_overflow", "gradient_norm"]


def __getattr__(name: str) -> None:
    if name == "AdamW":
        raise AttributeError(
            "minifloat.optim.AdamW is gone: use torch.optim.AdamW, for moments of 8 bits torchao.optim.AdamW8bit or "
            "AdamWFp8, alone or as the class of MasterWeights"
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
