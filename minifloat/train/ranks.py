"""A training whose linears are split over ranks: who has which tokens, and what the ranks tell each other.

Every rank sees all batches. Under sequence parallelism what works on tokens one by one (embedding, norms, head, loss)
sees the rank's own tokens only, so that the gradients of its parameters, which all ranks have, are partial sums; the
linears gather tokens and scatter sums by themselves. Without it every rank has all tokens there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from minifloat.distributed.group import Group
from minifloat.optim.gradients import clip_grad_norm_

THIS_PROCESS = Group()


@dataclass(frozen=True)
class Ranks:
    """The ranks of one tensor-parallel group; by default this process alone, for which nothing here does anything."""

    group: Group = THIS_PROCESS
    sequence_parallel: bool = True

    @property
    def alone(self) -> bool:
        return self.group.size == 1

    @property
    def first(self) -> bool:
        """This rank is the one that writes files and talks to the user."""
        return self.group.rank == 0

    @property
    def splits_tokens(self) -> bool:
        return self.sequence_parallel and not self.alone

    def linear(self, mode: Literal["column", "row"]) -> dict[str, Any]:
        """Further arguments of a linear."""
        if self.alone:
            return {}
        group = self.group.process_group
        return {"parallel_mode": mode, "sequence_parallel": self.sequence_parallel, "tp_group": group}

    def own(self, tokens_N: Tensor) -> Tensor:
        """This rank's part of what there is one of for each token.

        Raises:
            ValueError: the tokens of a batch cannot be split evenly.
        """
        if not self.splits_tokens:
            return tokens_N
        if tokens_N.shape[0] % self.group.size:
            raise ValueError(
                f"{tokens_N.shape[0]} tokens of a batch do not divide by {self.group.size} ranks; "
                "change --batch-size or --tp"
            )
        return tokens_N.chunk(self.group.size)[self.group.rank]

    # ---- agreement ----

    def mean(self, own: Tensor) -> Tensor:
        """The mean over all tokens of a value whose mean over its own tokens each rank has."""
        if not self.splits_tokens:
            return own
        total = own.clone()
        dist.all_reduce(total, group=self.group.process_group)
        return total / self.group.size

    def any(self, flag: bool, device: torch.device) -> bool:
        """Some rank says so."""
        if self.alone:
            return flag
        flags = torch.tensor(float(flag), device=device)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self.group.process_group)
        return bool(flags)

    def finish_gradients(self, model: nn.Module) -> None:
        """Makes gradients of the sum of the ranks' losses those of the mean over all tokens, in one all-reduce."""
        if not self.splits_tokens:
            return
        # A linear marks all of its parameters, and sums the gradients of those that it does not split by itself.
        complete = "tensor_model_parallel"
        gradients = [(p.grad, hasattr(p, complete)) for p in model.parameters() if p.grad is not None]
        torch._foreach_mul_([gradient for gradient, _ in gradients], 1 / self.group.size)
        partial = [gradient for gradient, summed in gradients if not summed]
        flat = torch.cat([gradient.flatten() for gradient in partial])
        dist.all_reduce(flat, group=self.group.process_group)
        for gradient, total in zip(partial, flat.split([g.numel() for g in partial]), strict=True):
            gradient.copy_(total.view_as(gradient))

    def clip(self, model: nn.Module, limit: float) -> Tensor:
        """Clips the gradients of the whole model, each parameter counted once; returns their norm before that."""
        return clip_grad_norm_(model.parameters(), limit, tp_group=self.group)

    # ---- checkpoints, which are those of one process ----

    def whole(self, tensors: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """``tensors``, gathered where they are like a parameter of which this rank has a part.

        Args:
            parameters: what each tensor belongs to, by the same names; missing where it belongs to none.
        """
        result = dict(tensors)
        for name, tensor in tensors.items():
            parameter = parameters.get(name)
            if parameter is not None and self._is_part(tensor, parameter):
                parts = [torch.empty_like(tensor) for _ in range(self.group.size)]
                dist.all_gather(parts, tensor.detach().contiguous(), group=self.group.process_group)
                result[name] = torch.cat(parts, dim(parameter)).cpu()  # of all parameters, more than a GPU may hold
        return result

    def part(self, tensors: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The inverse of :meth:`whole`."""
        result = dict(tensors)
        for name, tensor in tensors.items():
            parameter = parameters.get(name)
            if parameter is not None and sharded(parameter) and not self.alone and tensor.ndim == parameter.ndim:
                result[name] = tensor.chunk(self.group.size, dim(parameter))[self.group.rank].contiguous()
        return result

    def numel(self, parameter: Tensor) -> int:
        """Elements of the whole of a parameter."""
        return parameter.numel() * (self.group.size if sharded(parameter) else 1)

    def _is_part(self, tensor: Tensor, parameter: Tensor) -> bool:
        return not self.alone and sharded(parameter) and tensor.shape == parameter.shape


ALONE = Ranks()


def sharded(parameter: Tensor) -> bool:
    """Each rank has a part of it, along :func:`dim`."""
    return bool(getattr(parameter, "tensor_model_parallel", False))


def dim(parameter: Tensor) -> int:
    return int(getattr(parameter, "partition_dim", 0))


@torch.no_grad()
def fill_normal(parameter: Tensor, std: float, generator: torch.Generator, ranks: Ranks) -> None:
    """Normal numbers; a rank that has a part draws the whole, so that models start alike on any number of ranks."""
    if ranks.alone or not sharded(parameter):
        parameter.normal_(std=std, generator=generator)
        return
    shape = list(parameter.shape)
    shape[dim(parameter)] *= ranks.group.size
    whole = torch.empty(shape, dtype=parameter.dtype, device=parameter.device).normal_(std=std, generator=generator)
    parameter.copy_(whole.chunk(ranks.group.size, dim(parameter))[ranks.group.rank])
