"""A training on several ranks: who has which parameters and which tokens, and what the ranks tell each other.

Ranks are a grid, data x tensor-parallel. Those of one data position share each linear (``--tp``), those of one
tensor-parallel position share the batch. They shard all parameters (``--fsdp``), or neighbours among them the rows of
the linears' weights (``--etp``), or experts (``--ep``), and replicate all else.

Every rank draws all batches and takes its sequences. Under sequence parallelism what works on tokens one by one
(embedding, norms, head, loss) sees the rank's own positions of these only; without it every tensor-parallel rank has
all tokens there.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from minifloat.comm.dtensor_ddp import local_rows, sharded_like
from minifloat.comm.group import Group
from minifloat.nn.tensor_parallel import Partition
from minifloat.optim.gradient_norm import clip_grad_norm_
from minifloat.tools.train.local_tensors import Chunk, LocalTensors

THIS_PROCESS = Group()
SAVE_TIMEOUT = timedelta(hours=1)  # longer than a rank ever takes to write its part of a checkpoint


@dataclass(frozen=True)
class Ranks:
    """A rank's place among all; by default this process alone, for which nothing here does anything.

    Args:
        tp: the ranks that share each linear.
        data_mesh: those that share the batch, one dim; None: this rank alone.
        timeout: how long a step may wait for another rank, once the first one is done; None: as the groups were made.
        savers: all ranks, in a group for the threads that save, whose messages must not mix with a training's.
        mesh: of extended tensor parallelism and of experts the ranks by ``"dp"``, ``"ep"``, ``"etp"`` and ``"tp"``;
            None: ranks that share the batch shard all parameters.
    """

    tp: Group = THIS_PROCESS
    sequence_parallel: bool = True
    data_mesh: DeviceMesh | None = None
    timeout: timedelta | None = None
    savers: Group = THIS_PROCESS
    mesh: DeviceMesh | None = None

    @staticmethod
    def of_world(
        device: torch.device,
        tp: int,
        sequence_parallel: bool = True,
        timeout: timedelta | None = None,
        etp: int | None = None,
        ep: int | None = None,
    ) -> Ranks:
        """All ranks there are, neighbours in a tensor-parallel group of ``tp``; a collective.

        ``etp``: neighbours of these groups, so many, share the rows of weights; ``ep``: neighbours of those experts.
        Both None: as with ``--fsdp``.
        """
        size = dist.get_world_size()
        savers = Group.of(dist.new_group(backend="gloo", timeout=SAVE_TIMEOUT))
        if size == tp:
            return Ranks(Group.of(dist.group.WORLD), sequence_parallel, timeout=timeout, savers=savers)
        mesh = init_device_mesh(device.type, (size // tp, tp), mesh_dim_names=("data", "tp"))
        ranks = Ranks(Group.of(mesh["tp"]), sequence_parallel, mesh["data"], timeout, savers)
        if etp is None and ep is None:
            return ranks
        shared = ep or 1, etp or 1, tp
        shape = size // math.prod(shared), *shared
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=("dp", "ep", "etp", "tp"))
        return replace(ranks, tp=Group.of(mesh["tp"]), mesh=mesh)

    @property
    def data(self) -> Group:
        """The ranks that share the batch."""
        return Group.of(self.data_mesh)

    @property
    def etp(self) -> Group:
        """Ranks that share the rows of weights with this one."""
        return THIS_PROCESS if self.mesh is None else Group.of(self.mesh["etp"])

    @property
    def ep(self) -> Group:
        """Ranks that share out experts with this one."""
        return THIS_PROCESS if self.mesh is None else Group.of(self.mesh["ep"])

    @property
    def replicas(self) -> Group:
        """Ranks that have the same rows of weights, and the same experts."""
        return THIS_PROCESS if self.mesh is None else Group.of(self.mesh["dp"])

    @property
    def shards(self) -> int:
        """Ranks that together have the model once, its experts at least."""
        return self.tp.size * (self.data.size if self.mesh is None else self.etp.size * self.ep.size)

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

    # ---- who has what of a batch ----

    def check_batch(self, size: int, context: int) -> None:
        """Raises ValueError where some rank would have no sequence in a step, or no position of one.

        Args:
            size: sequences in a micro-batch.
            context: tokens in a sequence.
        """
        if size < self.data.size:
            raise ValueError(
                f"{size} sequences in a step are too few for {self.data.size} ranks that share them; choose a "
                f"--batch-size of at least {self.data.size}, or start fewer ranks"
            )
        if self.splits_tokens and context < self.tp.size:
            raise ValueError(
                f"{context} tokens in a sequence are too few for the {self.tp.size} ranks of --tp, which split them; "
                "choose a longer --context, or --no-sequence-parallel"
            )

    def share(self, batch_BT: Tensor) -> Tensor:
        """This rank's sequences of a batch, one at least, for all ranks run each forward; see :meth:`weight`."""
        own = batch_BT.tensor_split(self.data.size)[self.data.rank]
        return own if own.shape[0] else batch_BT[:1]

    def weight(self, batch_BT: Tensor) -> float:
        """Weight of the mean over this rank's tokens, for :meth:`mean` to be that over the whole batch.

        One on a single rank, zero where the sequence that a rank has is another's.
        """
        sequences, length = batch_BT.shape
        own = sequences // self.data.size + (self.data.rank < sequences % self.data.size)
        rows = self.positions(length)
        return own * self.data.size / sequences * (1.0 if rows is None else rows[self.tp.rank] / length)

    def positions(self, length: int) -> list[int] | None:
        """Numbers of positions of a sequence that tensor-parallel ranks have; None: all have all."""
        if not self.splits_tokens:
            return None
        return [length // self.tp.size + (rank < length % self.tp.size) for rank in range(self.tp.size)]

    def own(self, tokens_BT: Tensor) -> Tensor:
        """This rank's positions of its sequences."""
        return tokens_BT.tensor_split(self.tp.size, 1)[self.tp.rank] if self.splits_tokens else tokens_BT

    def seed(self, seed: int, step: int) -> int | None:
        """Seed of a step's random numbers, which no two data ranks may share; None: those of one process go on."""
        if self.data.rank == 0:
            return None
        return int.from_bytes(hashlib.sha256(f"{seed}/{step}/{self.data.rank}".encode()).digest()[:7])

    # ---- agreement ----

    def mean(self, own: Tensor) -> Tensor:
        """The mean over a batch of what each rank has of its own tokens, times their :meth:`weight`."""
        total = own.clone()
        for group in ([self.tp] if self.splits_tokens else []) + ([self.data] if self.data.size > 1 else []):
            dist.all_reduce(total, group=group.process_group)
        return total / self.data.size

    def any(self, flag: bool, device: torch.device) -> bool:
        """Some rank says so."""
        return self.any_of((flag,), device)[0]

    def any_of(self, flags: Sequence[bool], device: torch.device) -> list[bool]:
        """Whether some rank says so, for each flag."""
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
        """Limits how long an exchange waits for another rank from now on: with gloo it raises, with NCCL it aborts."""
        if self.alone or timeout is None:
            return
        groups = Group.of(dist.group.WORLD), self.tp, self.data, self.ep, self.etp, self.replicas
        for name in {group.name for group in groups if group.size > 1}:
            dist.distributed_c10d._set_pg_timeout(timeout, Group(name).process_group)

    def clip(self, model: nn.Module, limit: float) -> Tensor:
        """Clips the gradients of the whole model, each parameter counted once; returns their norm before that."""
        return clip_grad_norm_(model.parameters(), limit, tp_group=self.tp)

    # ---- checkpoints, which fit any number of ranks ----

    def local_tensors(self, tensors: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> LocalTensors:
        """Copies what this rank saves of ``tensors`` to the CPU; the first one that has it saves. Not a collective.

        Args:
            parameters: what each tensor belongs to, by the same names; missing where it belongs to none.
        """
        own: dict[str, Tensor] = {}
        chunks: dict[str, list[Chunk]] = {}
        for name, tensor in tensors.items():
            parameter = owner = parameters.get(name, tensor)
            if tensor.shape != parameter.shape:
                parameter = tensor  # a value of its own, as a count of steps
            cut, by_rows = self.partition(parameter), self._by_rows(parameter)
            if self._repeats(by_rows, of_experts(owner)) or (self.tp.rank and cut is None):
                continue
            local = local_rows(tensor).detach()
            own[name] = local.to("cpu", copy=True, memory_format=torch.contiguous_format)
            if by_rows or cut is not None:
                chunks[name] = self._chunks(parameter)
        return LocalTensors(own, chunks)

    def _repeats(self, by_rows: bool, experts: bool) -> bool:
        """Another data rank before this one has the same."""
        if self.mesh is None:
            return self.data.rank > 0 and not by_rows
        same = [self.replicas, *([] if experts else [self.ep]), *([] if by_rows else [self.etp])]
        return any(group.rank for group in same)

    def _chunks(self, parameter: Tensor) -> list[Chunk]:
        """Finds where this rank's part of a parameter lies in the whole."""
        whole, cut = self.shape(parameter), self.partition(parameter)
        indices = [torch.arange(extent) for extent in whole]
        if cut is not None:
            indices[cut.dim] = cut._replace(dim=0).cut(indices[cut.dim])
        indices[0] = self._own_rows(indices[0], parameter)
        runs = indices[0].tensor_split((indices[0].diff() != 1).nonzero().flatten() + 1)
        return [
            Chunk(list(whole), [int(each[0]) for each in (run, *indices[1:])], len(run)) for run in runs if len(run)
        ]

    def shard(self, tensors: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """This rank's part of whole ``tensors``, in the form of its parameters; see :meth:`local_tensors`."""
        result = dict(tensors)
        for name, tensor in tensors.items():
            parameter = parameters.get(name)
            if parameter is None or list(tensor.shape) != self.shape(parameter):
                continue
            if (cut := self.partition(parameter)) is not None:
                result[name] = cut.cut(tensor)
            if self._by_rows(parameter):
                own = self._own_rows(result[name], parameter).to(local_rows(parameter).device, copy=True)
                result[name] = sharded_like(parameter, own)
        return result

    def partition(self, parameter: Tensor) -> Partition | None:
        """Partition over tensor-parallel ranks; None where each has all of the parameter."""
        if self.tp.size == 1 or not getattr(parameter, "tensor_model_parallel", False):
            return None
        dim, parts = parameter.partition_dim, parameter.partition_parts  # type: ignore[attr-defined]
        return Partition(dim, parts, self.tp.size, self.tp.rank)

    def shape(self, parameter: Tensor) -> list[int]:
        """The shape of the whole of a parameter."""
        cut, rows = self.partition(parameter), etp_rows(parameter)
        shape = parameter.shape if rows is None else (rows[0], *parameter.shape[1:])
        return list(shape if cut is None else cut.whole_shape(shape))

    def numel(self, parameter: Tensor) -> int:
        """Elements of the whole of a parameter, of an expert's with those of other ranks' in its place."""
        return math.prod(self.shape(parameter)) * (self.ep.size if of_experts(parameter) else 1)

    def _by_rows(self, parameter: Tensor) -> bool:
        """Data ranks have shared out the rows of a parameter."""
        return is_dtensor(parameter) or etp_rows(parameter) is not None

    def _own_rows(self, tensor: Tensor, parameter: Tensor) -> Tensor:
        """This data rank's rows of ``tensor``, which has those of all, shared out as the parameter's."""
        if (rows := etp_rows(parameter)) is not None:
            return tensor[rows[1]]
        if not is_dtensor(parameter):
            return tensor
        chunks = tensor.chunk(self.data.size)  # as FSDP2 cuts them: fewer where there are too few rows
        return chunks[self.data.rank] if self.data.rank < len(chunks) else tensor[:0]


ALONE = Ranks()


def etp_rows(parameter: Tensor) -> tuple[int, slice] | None:
    """Under extended tensor parallelism how many rows there are, and which this rank has; None: all of them."""
    return getattr(parameter, "etp_rows", None)


def of_experts(parameter: Tensor) -> bool:
    """Whether the parameter is an expert's that other ranks lack."""
    return hasattr(parameter, "ep_group")


def is_dtensor(tensor: Tensor) -> bool:
    """FSDP2 has sharded it, or what it is the gradient of."""
    return hasattr(tensor, "to_local")  # its class is slow to import
