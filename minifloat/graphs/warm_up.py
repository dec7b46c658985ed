"""What a warm-up, and a capture, must leave as it was."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from minifloat.delayed import AmaxHistory
from minifloat.nn.linear_state import LinearState
from minifloat.nn.moe import MoE

_MAIN_GRAD_FLAGS = ("main_grad_is_old", "grad_added_to_main_grad")


def fused_weights(module: nn.Module) -> list[Any]:
    """The weights whose gradients backward adds to ``main_grad``."""
    layers = [each for each in module.modules() if isinstance(each, LinearState) and each.fuse_wgrad_accumulation]
    weights = [layer._weight(name) for layer in layers for name in layer._weight_names]
    return list({id(weight): weight for weight in weights if weight.requires_grad}.values())


@contextmanager
def unchanged(modules: Sequence[nn.Module], device: torch.device) -> Iterator[None]:
    """Afterwards buffers, amax histories, cached weights, random numbers and flags of main_grad are as before.

    Gradients are not looked at: use ``torch.autograd.grad``, and :func:`scratch_main_grads`.
    """
    everyone = list({id(part): part for module in modules for part in module.modules()}.values())
    buffers = [(part, {n: None if b is None else b.clone() for n, b in part._buffers.items()}) for part in everyone]
    cached = [(part, part._weight_cache) for part in everyone if isinstance(part, LinearState)]
    routed = [(part, part.router_loss, part.expert_counts) for part in everyone if isinstance(part, MoE)]
    weights = [weight for module in modules for weight in fused_weights(module)]
    flags = [{name: getattr(w, name) for name in _MAIN_GRAD_FLAGS if hasattr(w, name)} for w in weights]
    random = [device] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(random):
            yield
    finally:
        for part, saved in buffers:
            _restore_buffers(part, saved)
        for layer, operands in cached:
            layer._weight_cache = operands
        for moe, loss, counts in routed:
            moe.router_loss, moe.expert_counts = loss, counts
        for weight, before in zip(weights, flags, strict=True):
            for name in _MAIN_GRAD_FLAGS:
                if name in before:
                    setattr(weight, name, before[name])
                elif hasattr(weight, name):
                    delattr(weight, name)


@torch.no_grad()
def _restore_buffers(module: nn.Module, saved: dict[str, Tensor | None]) -> None:
    """Buffers stay the same tensors; a history that a recipe has cut or made longer stays so."""
    for name, before in saved.items():
        buffer = module._buffers[name]
        if buffer is None or before is None:
            continue
        if isinstance(module, AmaxHistory) and buffer.shape != before.shape:
            steps = min(buffer.shape[0], before.shape[0])
            buffer.zero_()[:steps].copy_(before[:steps])
        else:
            buffer.copy_(before)


@contextmanager
def scratch_main_grads(weights: Sequence[Any]) -> Iterator[None]:
    """Backward adds to other memory than ``main_grad``, one for all weights."""
    before = [weight.main_grad for weight in weights]
    sizes: dict[tuple[torch.dtype, torch.device], int] = {}
    for grad in before:
        key = grad.dtype, grad.device
        sizes[key] = max(sizes.get(key, 0), grad.numel())
    scratch = {key: torch.zeros(size, dtype=key[0], device=key[1]) for key, size in sizes.items()}
    try:
        for weight, grad in zip(weights, before, strict=True):
            weight.main_grad = scratch[grad.dtype, grad.device][: grad.numel()].view(grad.shape)
        yield
    finally:
        for weight, grad in zip(weights, before, strict=True):
            weight.main_grad = grad
