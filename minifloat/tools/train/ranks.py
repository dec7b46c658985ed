"""A training on several ranks: who has which parameters and which tokens, and what the ranks tell each other.

Ranks are a grid, data x tensor-parallel. Those of one data position share each linear (``--tp``), those of one
tensor-parallel position shard their parameters and share the batch (``--fsdp``).

Every rank draws all batches and takes its sequences. Under sequence parallelism what works on tokens one by one
(embedding, norms, head, loss) sees the rank's own tokens of these only, so that the gradients of its parameters, which
all tensor-parallel ranks have, are partial sums; the linears gather tokens and scatter sums by themselves. Without it
every tensor-parallel rank has all tokens there.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from minifloat.comm.dtensor import own_rows, sharded_like
from minifloat.comm.group import Group
from minifloat.optim.gradients import clip_grad_norm_
from minifloat.tools.train.parts import Parts, Place

THIS_PROCESS = Group()
SAVE_TIMEOUT = timedelta(hours=1)  # longer than a rank ever takes to write its part of a checkpoint


@dataclass(frozen=True)
class Ranks:
    """A rank's place among all; by default this process alone, for which nothing here does anything.

    Args:
        tp: the ranks that share each linear.
        data_mesh: those that shard parameters and share the batch, one dim; None: this rank alone.
        timeout: how long a step may wait for another rank, once the first one is done; None: as the groups were made.
        savers: all ranks, in a group for the threads that save, whose messages must not mix with a training's.
    """

    tp: Group = THIS_PROCESS
    sequence_parallel: bool = True
    data_mesh: DeviceMesh | None = None
    timeout: timedelta | None = None
    savers: Group = THIS_PROCESS

    @staticmethod
    def of_world(
        device: torch.device, tp: int, sequence_parallel: bool = True, timeout: timedelta | None = None
    ) -> Ranks:
        """All ranks there are, neighbours in a tensor-parallel group of ``tp``; a collective."""
        size = dist.get_world_size()
        savers = Group.of(dist.new_group(backend="gloo", timeout=SAVE_TIMEOUT))
        if size == tp:
            return Ranks(Group.of(dist.group.WORLD), sequence_parallel, timeout=timeout, savers=savers)
        mesh = init_device_mesh(device.type, (size // tp, tp), mesh_dim_names=("data", "tp"))
        return Ranks(Group.of(mesh["tp"]), sequence_parallel, mesh["data"], timeout, savers)

    @property
    def data(self) -> Group:
        """The ranks that shard parameters and share the batch."""
        return Group.of(self.data_mesh)

    @property
    def size(self) -> int:
        return self.tp.size * self.data.size

    @property
    def alone(self) -> bool:
        return self.size == 1

    @property
    def first(self) -> bool:
        """This rank is the one that writes files and talks to the user."""
        return self.tp.rank == 0 and self.data.rank == 0

    @property
    def splits_tokens(self) -> bool:
        return self.sequence_parallel and self.tp.size > 1

    def linear(self, mode: Literal["column", "row"]) -> dict[str, Any]:
        """Further arguments of a linear."""
        if self.tp.size == 1:
            return {}
        group = self.tp.process_group
        return {"parallel_mode": mode, "sequence_parallel": self.sequence_parallel, "tp_group": group}

    # ---- who has what of a batch ----

    def check_batch(self, size: int, context: int, held_out: int) -> None:
        """Raises ValueError where some data rank would have no sequence in a step, or tokens that cannot be split.

        Args:
            size: sequences in a micro-batch.
            context: tokens in a sequence.
            held_out: how many sequences are evaluated; their last batch may be smaller.
        """
        if size < self.data.size:
            raise ValueError(
                f"{size} sequences in a step are too few for {self.data.size} ranks that share them; choose a "
                f"--batch-size of at least {self.data.size}, or start fewer ranks"
            )
        for sequences in (size, held_out % size or size):
            for own in {sequences // self.data.size or 1, -(-sequences // self.data.size)}:
                self._check_tokens(own * context)

    def share(self, batch_BT: Tensor) -> Tensor:
        """This rank's sequences of a batch, one at least, for all ranks run each forward; see :meth:`weight`."""
        own = batch_BT.tensor_split(self.data.size)[self.data.rank]
        return own if own.shape[0] else batch_BT[:1]

    def weight(self, sequences: int) -> float:
        """What the mean over its :meth:`share` of so many counts, for their mean to be that of all ranks' values.

        One where ranks have equal numbers, zero where the sequence that a rank has is another's.
        """
        own = sequences // self.data.size + (self.data.rank < sequences % self.data.size)
        return own * self.data.size / sequences

    def own(self, tokens_N: Tensor) -> Tensor:
        """This rank's part of what there is one of for each token of its sequences.

        Raises:
            ValueError: the tokens of a batch cannot be split evenly.
        """
        if not self.splits_tokens:
            return tokens_N
        self._check_tokens(tokens_N.shape[0])
        return tokens_N.chunk(self.tp.size)[self.tp.rank]

    def _check_tokens(self, tokens: int) -> None:
        if self.splits_tokens and tokens % self.tp.size:
            raise ValueError(
                f"{tokens} tokens of a rank's batch, or of the last one that is held out, do not divide by the "
                f"{self.tp.size} ranks of --tp; choose a --context that does, or --no-sequence-parallel"
            )

    def seed(self, seed: int, step: int) -> int | None:
        """Of the random numbers of a step, which no two data ranks may round with; None: those of one process go on."""
        if self.data.rank == 0:
            return None
        return int.from_bytes(hashlib.sha256(f"{seed}/{step}/{self.data.rank}".encode()).digest()[:7])

    # ---- agreement ----

    def mean(self, own: Tensor) -> Tensor:
        """The mean over all ranks of a value that each has of its own tokens."""
        total = own
        for group in ([self.tp] if self.splits_tokens else []) + [self.data]:
            if group.size > 1:
                total = total.clone()
                dist.all_reduce(total, group=group.process_group)
                total /= group.size
        return total

    def any(self, flag: bool, device: torch.device) -> bool:
        """Some rank says so."""
        return self.any_of((flag,), device)[0]

    def any_of(self, flags: Sequence[bool], device: torch.device) -> list[bool]:
        """Of each flag, whether some rank says so."""
        if self.alone:
            return list(flags)
        told = torch.tensor([float(flag) for flag in flags], device=device)
        dist.all_reduce(told, op=dist.ReduceOp.MAX)
        return [bool(flag) for flag in told.tolist()]

    def exchange(self, value: Any) -> list[Any]:
        """All ranks' values, in their order; for the threads that save."""
        if self.alone:
            return [value]
        values = [None] * self.size
        dist.all_gather_object(values, value, group=self.savers.process_group)
        return values

    def set_timeout(self, timeout: timedelta | None) -> None:
        """From now on no exchange waits longer than that for another rank: with gloo it raises, with NCCL it aborts."""
        if self.alone or timeout is None:
            return
        names = {group.name for group in (Group.of(dist.group.WORLD), self.tp, self.data) if group.size > 1}
        for name in names:
            dist.distributed_c10d._set_pg_timeout(timeout, Group(name).process_group)

    def finish_gradients(self, model: nn.Module) -> None:
        """Makes gradients of the sum of tensor-parallel ranks' losses those of their mean, in one all-reduce.

        The means over data ranks are FSDP2's.
        """
        if not self.splits_tokens:
            return
        # A linear marks all of its parameters, and sums the gradients of those that it does not split by itself.
        complete = "tensor_model_parallel"
        gradients = [(own_rows(p.grad), hasattr(p, complete)) for p in model.parameters() if p.grad is not None]
        torch._foreach_mul_([gradient for gradient, _ in gradients], 1 / self.tp.size)
        partial = [gradient for gradient, summed in gradients if not summed]
        flat = torch.cat([gradient.flatten() for gradient in partial])
        dist.all_reduce(flat, group=self.tp.process_group)
        for gradient, total in zip(partial, flat.split([g.numel() for g in partial]), strict=True):
            gradient.copy_(total.view_as(gradient))

    def clip(self, model: nn.Module, limit: float) -> Tensor:
        """Clips the gradients of the whole model, each parameter counted once; returns their norm before that."""
        return clip_grad_norm_(model.parameters(), limit, tp_group=self.tp)

    # ---- checkpoints, which fit any number of ranks ----

    def parts(self, tensors: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> Parts:
        """What this rank saves of ``tensors``, copied to the CPU; the first one saves what all have. Not a collective.

        Args:
            parameters: what each tensor belongs to, by the same names; missing where it belongs to none.
        """
        own: dict[str, Tensor] = {}
        places: dict[str, Place] = {}
        for name, tensor in tensors.items():
            parameter = parameters.get(name)
            by_rows, by_tp = is_dtensor(tensor), parameter is not None and self._is_part(tensor, parameter)
            if (self.data.rank and not by_rows) or (self.tp.rank and not by_tp):
                continue
            shape, start = list(tensor.shape), [0] * tensor.ndim
            if by_rows:  # as FSDP2 and `torch.chunk` cut
                start[0] = min(self.data.rank * math.ceil(shape[0] / self.data.size), shape[0])
            if by_tp:
                assert parameter is not None
                start[dim(parameter)] += self.tp.rank * shape[dim(parameter)]
                shape[dim(parameter)] *= self.tp.size
            rows = own_rows(tensor).detach()
            own[name] = rows.to("cpu", copy=True, memory_format=torch.contiguous_format)
            if by_rows or by_tp:
                places[name] = Place(shape, start)
        return Parts(own, places)

    def part(self, tensors: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """This rank's part of whole ``tensors``, in the form of its parameters; see :meth:`parts`."""
        result = dict(tensors)
        for name, tensor in tensors.items():
            parameter = parameters.get(name)
            if parameter is None or tensor.ndim != parameter.ndim:
                continue
            if sharded(parameter) and self.tp.size > 1:
                result[name] = tensor.chunk(self.tp.size, dim(parameter))[self.tp.rank].contiguous()
            if is_dtensor(parameter):
                result[name] = self._shard(result[name], parameter)
        return result

    def shape(self, parameter: Tensor) -> list[int]:
        """The shape of the whole of a parameter."""
        shape = list(parameter.shape)
        if sharded(parameter):
            shape[dim(parameter)] *= self.tp.size
        return shape

    def numel(self, parameter: Tensor) -> int:
        """Elements of the whole of a parameter."""
        return math.prod(self.shape(parameter))

    def _is_part(self, tensor: Tensor, parameter: Tensor) -> bool:
        return self.tp.size > 1 and sharded(parameter) and tensor.shape == parameter.shape

    def _shard(self, tensor: Tensor, parameter: Tensor) -> Tensor:
        """The DTensor, like ``parameter``, of a tensor that this rank has the whole of, cut as FSDP2 does."""
        rows = tensor.chunk(self.data.size)  # fewer where there are too few rows
        own = rows[self.data.rank] if self.data.rank < len(rows) else tensor[:0]
        return sharded_like(parameter, own.to(own_rows(parameter).device, copy=True), tensor.shape)


ALONE = Ranks()


def is_dtensor(tensor: Tensor) -> bool:
    """FSDP2 has sharded it, or what it is the gradient of."""
    return hasattr(tensor, "to_local")  # its class is slow to import


def sharded(parameter: Tensor) -> bool:
    """Each tensor-parallel rank has a part of it, along :func:`dim`."""
    return bool(getattr(parameter, "tensor_model_parallel", False))


def dim(parameter: Tensor) -> int:
    return int(getattr(parameter, "partition_dim", 0))


@torch.no_grad()
def fill_normal(parameter: Tensor, std: float, generator: torch.Generator, ranks: Ranks) -> None:
    """Normal numbers; a rank that has a part draws the whole, so that models start alike on any number of ranks."""
    if ranks.tp.size == 1 or not sharded(parameter):
        parameter.normal_(std=std, generator=generator)
        return
    whole = torch.empty(ranks.shape(parameter), dtype=parameter.dtype, device=parameter.device).normal_(
        std=std, generator=generator
    )
    parameter.copy_(whole.chunk(ranks.tp.size, dim(parameter))[ranks.tp.rank])
