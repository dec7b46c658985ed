"""One step of a training: losses, gradients, clipping and the optimizer."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minifloat import MoE, TopKRouter, autocast, cast_weights, router_losses
from minifloat.comm.dtensor_ddp import local_rows
from minifloat.nn.linear_state import LinearState
from minifloat.tools.train.ranks import ALONE, Ranks
from minifloat.tools.train.run import TrainConfig

Batch = tuple[Tensor, Tensor]
BETAS = (0.9, 0.95)  # of AdamW


def make_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """AdamW; only matrices decay."""
    return torch.optim.AdamW(parameter_groups(model, config), lr=config.learning_rate, betas=BETAS, fused=True)


def parameter_groups(model: nn.Module, config: TrainConfig) -> list[dict[str, Any]]:
    """Matrices, which decay, and vectors."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    return [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]


def keep_wgrads_unrounded(model: nn.Module) -> None:
    """Lets linears compute the gradients of their weights in fp32 from now on, which the optimizer reads."""
    for layer in model.modules():
        if isinstance(layer, LinearState):
            layer.wgrad_in_weight_dtype = True


def compute_unquantized(model: nn.Module) -> None:
    """Lets linears that have a recipe of their own compute without one from now on."""
    for module in model.modules():
        if getattr(module, "recipe", None) is not None:
            module.recipe = "none"  # type: ignore[assignment]


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    rate: float,
    config: TrainConfig,
    device: torch.device,
    ranks: Ranks = ALONE,
) -> tuple[float, float]:
    """One update at learning rate `rate`; returns the loss and the gradient norm before clipping.

    Gradients are those of the mean over the micro-batches, one of which is in memory at a time.
    Parameters, biases of experts and optimizer do not change when one of the two is not finite. Reading them waits for
    the device, which is also what makes the step's time true: the optimizer's part shows in the next step's.
    """
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):  # some compile their step and read a tensor
            group["lr"].fill_(rate)
        else:
            group["lr"] = fp32(rate)
    value, norm = clipped_gradients(model, batch, config, device, ranks).tolist()
    if math.isfinite(value) and math.isfinite(norm):
        optimizer.step()
        update_expert_biases(model, ranks)
    optimizer.zero_grad(set_to_none=True)
    return value, norm


def clipped_gradients(
    model: nn.Module, batch: Batch, config: TrainConfig, device: torch.device, ranks: Ranks = ALONE
) -> Tensor:
    """Adds to the gradients those of the mean over a step's batch, clipped.

    Returns:
        The loss and the gradient norm before clipping, fp32 [2] on the device.
    """
    losses = []
    with cast_weights(model):
        for part in micro_batches(batch, config):
            loss = batch_loss(model, part, config, device, ranks)
            # Autograd's own thread for a GPU would cost the host up to half of its time (docs/layers.md), and a process
            # has one GPU. Hooks, recomputations and callbacks run in this thread too; kernels stay on their streams.
            with torch.autograd.set_multithreading_enabled(False):
                ((loss + router_losses(model)) * (config.loss_scale / config.accumulate)).backward()
            losses.append(loss.detach())
    gradients = [local_rows(parameter.grad) for parameter in model.parameters() if parameter.grad is not None]
    torch._foreach_mul_(gradients, 1 / config.loss_scale)
    norm = ranks.clip(model, config.clip)
    return torch.stack((ranks.mean(torch.stack(losses).mean()), norm))


def update_expert_biases(model: nn.Module, ranks: Ranks = ALONE, bad: Tensor | None = None) -> None:
    """Ends a step of the routers whose bias balances experts, by the choices of the ranks that share the batch.

    ``bad``, a bool on the device, forgets them: those of a step that is not finite.
    """
    for router in model.modules():
        if isinstance(router, TopKRouter) and router.expert_counts is not None:
            if bad is not None:
                router.expert_counts.masked_fill_(bad, 0)
            router.update_expert_bias(ranks.data)


def fp32(rate: float) -> float:
    """A learning rate as a tensor on a device has it, which a captured step reads."""
    return float(torch.tensor(rate, dtype=torch.float32))


@torch.no_grad()
def imbalance_of(model: nn.Module) -> Tensor | None:
    """The most choices of an expert over the mean, in the latest forward; the largest of all layers of this rank.

    A scalar on the device; None of a model without experts.
    """
    layers = [each.expert_counts for each in model.modules() if isinstance(each, MoE)]
    shares = [each.max() * each.numel() / each.sum().clamp(min=1) for each in layers if each is not None]
    return torch.stack(shares).max() if shares else None


def micro_batches(batch: Batch, config: TrainConfig) -> list[Batch]:
    """The parts of a step's batch whose gradients are summed."""
    inputs, targets = (part.chunk(config.accumulate) for part in batch)
    return list(zip(inputs, targets, strict=True))


def batch_loss(
    model: nn.Module, batch: Batch, config: TrainConfig, device: torch.device, ranks: Ranks = ALONE
) -> Tensor:
    """The mean cross entropy in nats a token, fp32 scalar, over the tokens that this rank has.

    It is weighted so that :meth:`Ranks.mean` is that over the batch.
    """
    inputs_BT, targets_BT = (ranks.share(part).to(device, non_blocking=True) for part in batch)
    # Layers have recipes of their own; inside of this, delayed scaling updates all histories together, not each alone.
    with autocast(enabled=False), torch.autocast(device.type, config.dtype, enabled=config.dtype != torch.float32):
        logits = model(inputs_BT)
    loss = F.cross_entropy(logits.flatten(0, -2).float(), ranks.own(targets_BT).flatten())
    return loss * ranks.weight(batch[0])
