"""Master weights around any optimizer; the norm and the clipping of gradients of models that are sharded."""

from typing import NoReturn

from minifloat.optim.gradient_norm import clip_grad_norm_, gradient_norm
from minifloat.optim.master_weights import MasterWeights

__all__ = ["MasterWeights", "clip_grad_norm_", "gradient_norm"]


def __getattr__(name: str) -> NoReturn:
    gone = "; use torch.optim.AdamW, or for moments of 8 bits torchao.optim.AdamW8bit or AdamWFp8"
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}" + gone * (name == "AdamW"))
