"""Shares out the rows of a weight among ranks, and casts those of many weights together."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from minifloat.arguments import label_of
from minifloat.autocast import used
from minifloat.comm.dtensor_ddp import check_same_rows, running
from minifloat.comm.group import Group, ShardMap
from minifloat.comm.sharded_cast import Repeat, quantize_shards
from minifloat.formats import COLUMNWISE, ROWWISE
from minifloat.functional.grouped import SeparateOperands, join, of_all
from minifloat.functional.quantize import FORWARD_SLOTS, holds
from minifloat.operand import Quantized
from minifloat.quantizer import Quantizer
from minifloat.tensor import QuantizedTensor
from minifloat.tensor.base import versions
from minifloat.tensor.rows import QuantizedRows, row_unit, rows_of

Reduction = Literal["mean", "sum"]
"""Reduction of the gradients of ranks that have different data."""


class Sharding(NamedTuple):
    """Share of each rank in the rows of a weight.

    Args:
        group: the ranks.
        shards: the rows of each, of a matrix [N, K]; those of all experts alike.
        reduction: what becomes of the gradients of all ranks.
        matrices: how many there are.
        replicas: groups of ranks with other data that have the same rows; gradients are summed over one after the
            other, and averaged over all.
        recasts: codes are freed after a forward, and rows cast again for backward.
        reduce_dtype: of gradients until they are reduced; None: that of what they are added to.
        prefetch: how many gathers are started ahead while this weight is multiplied, and of how many bytes at most;
            one is always started, unless there are to be none. None: no limit.
        summed: over how many ranks with other data gradients are sums already, as those of experts over ``ep_group``.
    """

    group: Group
    shards: ShardMap
    reduction: Reduction
    matrices: int = 1
    replicas: tuple[Group, ...] = ()
    recasts: bool = False
    reduce_dtype: torch.dtype | None = None
    prefetch: tuple[int, int | None] = (1, None)
    summed: int = 1


class ShardedRows:
    """A rank's rows of a weight, as they are cast: FSDP2's, or those of ``etp_group``.

    Attributes:
        layer: whose they are.
        sharding: how they are shared out.
        dims: the orientations to cast now, where the other one may follow by repetition.
    """

    layer: Any
    sharding: Sharding
    dims: Collection[int] = (ROWWISE, COLUMNWISE)

    def parameters(self) -> list[Any]:
        """Lists the parameters that have these rows, or what is computed in their place."""
        raise NotImplementedError

    def matrices(self) -> list[Tensor]:
        """Returns the values [n, K] of each matrix."""
        values = self._values()
        return values if len(values) == 1 else [torch.cat(values)]

    def _values(self) -> list[Tensor]:
        return [
            each.dequantize().detach() if isinstance(each, QuantizedTensor) else each.detach()
            for each in self.parameters()
        ]

    def ready(self, quantizer: Quantizer) -> list[Quantized] | None:
        """Returns the part of each matrix where parameters are kept as ``quantizer`` gives them; else None."""
        own = self.parameters()
        kept = all(isinstance(each, QuantizedRows) and holds(each._operands, quantizer) for each in own)
        return [each.part for each in own] if kept and len(own) == self.sharding.matrices else None

    def scales(self) -> list[Tensor | None]:
        """Returns what delayed scaling casts each matrix with now, fp32 [1]; None under other recipes."""
        history: Any = self.layer._modules.get("forward_scaling")
        count = self.sharding.matrices
        first = FORWARD_SLOTS.index("weight") * count
        return [None] * count if history is None else list(history.scale[first : first + count].split(1))


class EtpRows(ShardedRows):
    """This rank's rows of the weight of a layer: one matrix [N, K], of one parameter or of several below each other.

    Ranks share out the rows of the matrix: of a parameter among several one may have all, and another none.

    Attributes:
        names: what the layer calls the parameters.
        lengths: rows of each parameter of the full weight.
    """

    def __init__(
        self, layer: nn.Module, names: tuple[str, ...], group: Group, reduction: Reduction, replicas: tuple[Group, ...]
    ) -> None:
        self.layer, self.names = layer, names
        self.lengths = tuple([each.shape[-2] for each in self.parameters()])
        rows, count = self._sizes()
        self.sharding = Sharding(group, ShardMap.chunks(rows, group.size), reduction, count, replicas)

    def _sizes(self) -> tuple[int, int]:
        """Counts the rows of a matrix, and the matrices."""
        return sum(self.lengths), 1

    # ---- as they are cast, and as products read them ----

    def parameters(self) -> list[Any]:
        return [_parameter(self.layer, name) for name in self.names]

    def join(self, matrices: Sequence[Quantized]) -> Quantized:
        """Joins the operands of the matrices to those of the weight, as products read them."""
        return matrices[0]

    def part(self, matrices: Sequence[Quantized]) -> Quantized:
        """Joins those of this rank's rows, which are saved, in the memory of the matrices."""
        return matrices[0]

    def gradients(self, gradients: Tensor) -> Iterable[tuple[Any, Tensor]]:
        """Pairs parameters with their gradients, from those of :meth:`matrices`, [matrices, n, K]."""
        parameters = self.parameters()
        return zip(parameters, gradients[0].split([each.shape[0] for each in parameters]), strict=True)

    # ---- as a layer keeps them ----

    def range(self, place: int, rank: int | None = None) -> slice:
        """Finds a rank's rows, by default this one's, of the full parameter number ``place``."""
        shards, rank = self.sharding.shards, self.sharding.group.rank if rank is None else rank
        before, length = self._before(place), self.lengths[place]
        begin, end = (min(max(row - before, 0), length) for row in (shards.first(rank), shards.end(rank)))
        return slice(begin, end)

    def _before(self, place: int) -> int:
        """Rows of the matrix before those of a parameter."""
        return sum(self.lengths[:place])

    def extents(self) -> dict[str, tuple[int, slice]]:
        """Lists by name how many rows the full parameter has, in dim -2, and which of them this rank."""
        named = enumerate(zip(self.names, self.lengths, strict=True))
        return {name: (length, self.range(place)) for place, (name, length) in named}

    def cut(self, place: int, full: Tensor) -> Tensor:
        """Copies these rows of the parameter number ``place``; quantized as the full one is."""
        own, group = self.range(place), self.sharding.group
        if not isinstance(full, QuantizedTensor):
            return full[..., own, :].clone()
        ranges = [self.range(place, rank) for rank in range(group.size)]
        rows = rows_of(full, ShardMap(tuple([each.stop - each.start for each in ranges])), group)
        rows.scale, rows.amax_group = full.scale, group.process_group
        return rows

    def parameter(self, place: int, full: nn.Parameter) -> nn.Parameter:
        """Makes the parameter of these rows, with the attributes of the full one but the gradient of all rows."""
        parameter = nn.Parameter(self.cut(place, full.detach()), requires_grad=full.requires_grad)
        if isinstance(full, QuantizedTensor) and isinstance(parameter, QuantizedTensor):
            initial = full.get_high_precision_init_val()
            if initial is not None:
                parameter.set_high_precision_init_val(initial[self.range(place)])
        else:
            parameter.__dict__.update({name: noted for name, noted in vars(full).items() if name != "main_grad"})
        return parameter

    def cut_full(self, state_dict: dict[str, Any], prefix: str) -> None:
        """Puts these rows in the place of weights that a state dict has in full."""
        for place, (name, weight) in enumerate(zip(self.names, self.parameters(), strict=True)):
            saved, full = state_dict.get(prefix + name), (*weight.shape[:-2], self.lengths[place], weight.shape[-1])
            if isinstance(saved, Tensor) and saved.shape == full != weight.shape:
                state_dict[prefix + name] = self.cut(place, saved)

    def mark(self) -> None:
        """Notes on the parameters which ranks share them, ``etp_group``, and how many rows and which, ``etp_rows``."""
        for parameter, extent in zip(self.parameters(), self.extents().values(), strict=True):
            parameter.etp_group, parameter.etp_rows = self.sharding.group, extent
            if isinstance(parameter, QuantizedRows):
                parameter.join(self.sharding.group)

    def check(self) -> None:
        """Raises where gradients would not come to these rows; to be asked in each forward.

        Raises:
            ValueError: a parameter is computed, and would get no gradient, which goes past autograd.
                ``DistributedDataParallel``, or PyTorch's ``fully_shard``, which has put a parameter of its own in the
                place of one, takes the rows of all ranks for the same ones.
        """
        own = self.parameters()
        if running() is not None:  # wrapped before the rows were shared out
            check_same_rows(self.layer, own)
        for name, parameter in zip(self.names, own, strict=True):
            if not parameter.is_leaf:
                raise ValueError(
                    f"{label_of(self.layer)}: {name} is computed from other tensors, as by a parametrization or "
                    "functional_call, and a weight that etp_group shares gives its gradient to a parameter; do "
                    "without one of them"
                )
            if isinstance(parameter, nn.Parameter) and not hasattr(parameter, "etp_group"):
                raise ValueError(
                    f"{label_of(self.layer)}: {name} is not the parameter that has this rank's rows for etp_group, as "
                    "after PyTorch's fully_shard, which shards them once more; make the model anew and pass "
                    "ignored_params=minifloat.distributed.etp_parameters(model)"
                )


class ExpertRows(EtpRows):
    """This rank's rows of the weights of experts, [N, K] each, of one parameter each or [G, N, K]: of all alike."""

    def _sizes(self) -> tuple[int, int]:
        first = self.parameters()[0]
        return self.lengths[0], first.shape[0] if first.dim() == 3 else len(self.names)

    def _before(self, place: int) -> int:
        return 0  # all matrices are shared out alike

    def matrices(self) -> list[Tensor]:
        values = self._values()
        return values if values[0].dim() == 2 else list(values[0].unbind())

    def join(self, matrices: Sequence[Quantized]) -> Quantized:
        return of_all(matrices, join)

    def part(self, matrices: Sequence[Quantized]) -> Quantized:
        return of_all(matrices, SeparateOperands.of)

    def gradients(self, gradients: Tensor) -> Iterable[tuple[Any, Tensor]]:
        own = self.parameters()
        return zip(own, gradients, strict=True) if own[0].dim() == 2 else [(own[0], gradients.contiguous())]


def _parameter(module: nn.Module, name: str) -> Any:
    """Finds what has the dotted ``name``: a parameter, past the slow ``nn.Module.__getattr__``, or what replaced it."""
    *path, own = name.split(".")
    for each in path:
        module = module._modules[each]  # type: ignore[assignment]
    found = module._parameters.get(own)
    return getattr(module, own) if found is None else found


class Parts(NamedTuple):
    """Pieces that a rank sends of all matrices, and the rows of each rank in them."""

    matrices: Sequence[Quantized]
    shards: ShardMap

    def serve(self, dim: int) -> bool:
        """Whether there are operands for products that contract ``dim``."""
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
    def repeat(self, rows: ShardedRows, *dims: int) -> Parts:
        """Casts the parts anew, with operands for ``dims``; no collective."""
        values = rows.matrices()
        values = values if self.quantizer.quantized else [each.to(self.dtype) for each in values]
        parts = [each.recast(own, dims) for each, own in zip(self.repeats, values, strict=True)]
        return Parts(parts, rows.sharding.shards)


@torch.inference_mode(False)  # a training step may use what an evaluation has cast
@torch.no_grad()
def cast_together(
    wanted: Sequence[tuple[ShardedRows, Quantizer, torch.dtype]], replayed: Sequence[Tensor | None] | None = None
) -> list[Cast]:
    """Casts the rows of weights that one group shares; a collective. ``replayed``: scales of the one weight."""
    xs: list[Tensor] = []
    quantizers: list[Quantizer] = []
    maps: list[ShardMap] = []
    scales: list[Tensor | None] = []
    dims: list[Collection[int]] = []
    ready = [rows.ready(quantizer) for rows, quantizer, _ in wanted]
    for (rows, quantizer, dtype), own in zip(wanted, ready, strict=True):
        if own is None:
            values = rows.matrices()
            xs += values if quantizer.quantized else [each.to(dtype) for each in values]
            quantizers += [quantizer] * len(values)
            maps += [rows.sharding.shards] * len(values)
            scales += rows.scales() if replayed is None else replayed
            dims += [rows.dims] * len(values)
    all_made = quantize_shards(xs, quantizers, maps, wanted[0][0].sharding.group, scales, dims)
    if used.inspection is not None:
        owners = [
            rows
            for (rows, *_), own in zip(wanted, ready, strict=True)
            if own is None
            for _ in range(rows.sharding.matrices)
        ]
        for rows, x, (part, repeat) in zip(owners, xs, all_made, strict=True):
            if repeat is not None:  # no row of a block is another rank's
                used.inspection.see_rows(rows.layer, x, part)
    made = iter(all_made)
    casts = []
    for (rows, quantizer, dtype), own in zip(wanted, ready, strict=True):
        sharding = rows.sharding
        shards = sharding.shards if own is None else sharding.shards.whole_units(row_unit(quantizer))
        found = [next(made) for _ in range(sharding.matrices)] if own is None else [(each, None) for each in own]
        parts = Parts([part for part, _ in found], shards)
        parameters = rows.parameters()
        scale_versions = None if replayed is not None else versions([s for s in rows.scales() if s is not None])
        repeats = [each for _, each in found if each is not None] if sharding.recasts else []
        if len(repeats) < len(found) or (not quantizer.quantized and parameters[0].dtype == dtype):
            repeats = []  # or no copies
        casts.append(Cast(quantizer, dtype, parts, repeats, parameters, versions(parameters), scale_versions))
    return casts
