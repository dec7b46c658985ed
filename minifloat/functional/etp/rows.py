"""This rank's rows of a weight: how they are shared out, and how they are cast."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from minifloat.comm.group import Group
from minifloat.comm.shard_map import ShardMap
from minifloat.comm.sharded_cast import Repeat, quantize_shards
from minifloat.operand import Quantized
from minifloat.quantizer import Quantizer
from minifloat.tensor.base import versions
from minifloat.tensor.rows import row_unit

Reduction = Literal["mean", "sum"]
"""Of the gradients of ranks that have different data."""


class Sharding(NamedTuple):
    """How the rows of a weight are shared out.

    Args:
        group: the ranks.
        shards: the rows of each, of a matrix [N, K]; those of all experts alike.
        reduction: what becomes of the gradients of all ranks.
        matrices: how many there are.
        replicas: groups of ranks with other data that have the same rows; gradients are summed over one after the
            other, and averaged over all.
        recasts: codes are freed after a forward, and rows cast again for backward.
        prefetch: how many gathers are started ahead while this weight is multiplied, and of how many bytes at most;
            one is always started, unless there are to be none. None: no limit.
    """

    group: Group
    shards: ShardMap
    reduction: Reduction
    matrices: int = 1
    replicas: tuple[Group, ...] = ()
    recasts: bool = False
    prefetch: tuple[int, int | None] = (1, None)


class Owner(Protocol):
    """The layer of a weight: what it keeps of it on this rank."""

    @property
    def _label(self) -> str:
        """What errors call it."""

    def _etp_rows(self) -> list[Tensor]:
        """This rank's rows [n, K] of each matrix."""

    def _etp_parameters(self) -> list[Any]:
        """The parameters that have these rows."""

    def _etp_ready(self, quantizer: Quantizer) -> list[Quantized] | None:
        """This rank's part of each matrix where parameters are kept as ``quantizer`` gives them; else None."""

    def _etp_scales(self) -> list[Tensor | None]:
        """What delayed scaling casts each matrix with now, fp32 [1]; None under other recipes."""

    def _etp_join(self, matrices: Sequence[Quantized]) -> Quantized:
        """The operands of the weight from those of its matrices, as products read them."""

    def _etp_part(self, matrices: Sequence[Quantized]) -> Quantized:
        """The same of this rank's rows, which are saved: in the memory of the matrices."""

    def _etp_gradients(self, gradients: Tensor) -> Iterable[tuple[Any, Tensor]]:
        """The parameters with their gradients, from those of :meth:`_etp_rows`, [matrices, n, K]."""


class Parts(NamedTuple):
    """What a rank sends of all matrices, and the rows of each rank in it."""

    matrices: Sequence[Quantized]
    shards: ShardMap

    def serve(self, dim: int) -> bool:
        """There are operands for products that contract ``dim``."""
        return all(any(each is not None and each.serves(dim) for each in part) for part in self.matrices)


class Cast(NamedTuple):
    """This rank's rows of all matrices, as they were cast.

    Args:
        quantizer, dtype: by which, and of values that it leaves as they are.
        parts: of parameters that are kept quantized whole blocks in both orientations; None where they were freed.
        repeats: of each matrix what casts it again, while the parameters are the same; empty where that is not wanted,
            or not possible, and once the parameters have changed in a way that PyTorch does not see.
        parameters, versions: of then, with counts of their writes.
        scale_versions: likewise of delayed scaling's scales; None of those that a recomputation has read.
    """

    quantizer: Quantizer
    dtype: torch.dtype
    parts: Parts | None
    repeats: list[Repeat]
    parameters: list[Any]
    versions: tuple[float, ...]
    scale_versions: tuple[float, ...] | None

    @torch.inference_mode(False)
    def repeat(self, owner: Owner, shards: ShardMap, *dims: int) -> Parts:
        """The parts with operands for ``dims``, cast anew; no collective."""
        rows = owner._etp_rows()
        rows = rows if self.quantizer.quantized else [each.to(self.dtype) for each in rows]
        return Parts([each.recast(own, dims) for each, own in zip(self.repeats, rows, strict=True)], shards)


Wanted = tuple[Owner, Sharding, Quantizer, torch.dtype]
"""Rows to cast."""


@torch.inference_mode(False)  # a training step may use what an evaluation has cast
@torch.no_grad()
def cast_together(wanted: Sequence[Wanted], replayed: Sequence[Tensor | None] | None = None) -> list[Cast]:
    """Casts the rows of weights that one group shares; a collective. ``replayed``: scales of the one weight."""
    xs: list[Tensor] = []
    quantizers: list[Quantizer] = []
    maps: list[ShardMap] = []
    scales: list[Tensor | None] = []
    ready = [owner._etp_ready(quantizer) for owner, _, quantizer, _ in wanted]
    for (owner, sharding, quantizer, dtype), own in zip(wanted, ready, strict=True):
        if own is None:
            rows = owner._etp_rows()
            xs += rows if quantizer.quantized else [each.to(dtype) for each in rows]
            quantizers += [quantizer] * len(rows)
            maps += [sharding.shards] * len(rows)
            scales += owner._etp_scales() if replayed is None else replayed
    made = iter(quantize_shards(xs, quantizers, maps, wanted[0][1].group, scales))
    casts = []
    for (owner, sharding, quantizer, dtype), own in zip(wanted, ready, strict=True):
        shards = sharding.shards if own is None else sharding.shards.whole_units(row_unit(quantizer))
        found = [next(made) for _ in range(sharding.matrices)] if own is None else [(each, None) for each in own]
        parts = Parts([part for part, _ in found], shards)
        parameters = owner._etp_parameters()
        scale_versions = None if replayed is not None else versions([s for s in owner._etp_scales() if s is not None])
        repeats = [_at_this_time(each) for _, each in found if each is not None] if sharding.recasts else []
        if len(repeats) < len(found) or (not quantizer.quantized and parameters[0].dtype == dtype):
            repeats = []  # or no copies
        casts.append(Cast(quantizer, dtype, parts, repeats, parameters, versions(parameters), scale_versions))
    return casts


def _at_this_time(repeat: Repeat) -> Repeat:
    """With a copy of delayed scaling's scale, which the next update writes."""
    return repeat if repeat.scale is None else repeat._replace(scale=repeat.scale.clone())
