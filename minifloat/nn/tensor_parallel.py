"""Parameters that ranks share: the pieces of tensor parallelism, and the rows of extended tensor parallelism (ETP)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from minifloat.arguments import checked
from minifloat.comm.dtensor_ddp import check_same_rows, check_when_wrapping
from minifloat.comm.group import Group
from minifloat.functional.etp.rows import EtpRows, Reduction
from minifloat.functional.etp.weight import EtpWeight
from minifloat.functional.exchange import LOCAL, Exchange, make_exchange
from minifloat.functional.quantize import Mode
from minifloat.nn.options import replace


class Partition(NamedTuple):
    """Cut of a parameter along one dim, of which each rank of a group holds a piece.

    Args:
        dim: the dim.
        parts: lengths along it of the fused parts of the whole (q, k, v; gate, up), each of which is cut by itself.
        size, rank: of the group.
    """

    dim: int
    parts: tuple[int, ...]
    size: int
    rank: int

    def whole_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Returns the full shape of a parameter of which this rank's piece has ``shape``."""
        return tuple([extent * self.size if dim == self.dim else extent for dim, extent in enumerate(shape)])

    def cut(self, whole: Tensor) -> Tensor:
        """Cuts out this rank's piece: of each part as many rows, one after the other."""
        parts = whole.split(list(self.parts), self.dim)
        return torch.cat([part.tensor_split(self.size, self.dim)[self.rank] for part in parts], self.dim)


def tensor_parallel(
    label: str, mode: Mode | None, sequence_parallel: bool = False, tp_group: dist.ProcessGroup | None = None,
    tp_size: int = 1, tp_mesh: DeviceMesh | None = None,
) -> Exchange:  # fmt: skip
    """Makes the exchange of a parallel layer from its constructor's arguments; :data:`LOCAL` for a single rank.

    Raises:
        ValueError: they contradict each other.
    """
    if sequence_parallel and mode is None:
        raise ValueError(f"{label}: sequence_parallel=True needs parallel_mode='column' or 'row'")
    if tp_group is not None and tp_mesh is not None:
        raise ValueError(f"{label}: tp_group and tp_mesh both say which ranks; give one of them")
    group = Group.of(tp_mesh if tp_group is None else tp_group)
    if tp_size not in (1, group.size):
        how = "and no tp_group or tp_mesh" if group.size == 1 else f"and a group of {group.size} ranks"
        raise ValueError(f"{label}: tp_size={tp_size} {how}; the group says what the size is")
    return LOCAL if mode is None or group.size == 1 else make_exchange(mode, sequence_parallel, group)


def partitions(label: str, exchange: Exchange, in_features: int, parts: Mapping[str, int]) -> dict[str, Partition]:
    """Finds how ``weight`` and ``bias`` of a linear are cut; leaves out what every rank has in full.

    Args:
        in_features: of the whole.
        parts: what its ``out_features`` are made of, by the names that errors give them.

    Raises:
        ValueError: a length does not divide by the number of ranks.
    """
    size, rank = exchange.group.size, exchange.group.rank
    lengths = {"in_features": in_features} if exchange.mode == "row" else dict(parts)
    for name, length in lengths.items() if exchange.mode else ():
        if length % size:
            raise ValueError(f"{label}: {name}={length} does not divide by tp_size={size}")
    if exchange.mode == "column":
        rows = Partition(0, tuple(lengths.values()), size, rank)
        return {"weight": rows, "bias": rows}
    return {"weight": Partition(1, (in_features,), size, rank)} if exchange.mode == "row" else {}


def mark(parameter: Any, partition: Partition | None) -> None:
    """Notes on a parameter how it is sharded, under the names that Megatron gave these attributes.

    ``tensor_model_parallel``, ``partition_dim`` (-1: every rank has all of it), ``partition_stride`` (how many fused
    parts there are) and, of our own, ``partition_parts`` (their lengths in the whole).
    """
    parameter.tensor_model_parallel = partition is not None
    parameter.partition_dim = -1 if partition is None else partition.dim
    parameter.partition_parts = () if partition is None else partition.parts
    parameter.partition_stride = max(len(parameter.partition_parts), 1)


class EtpModule(nn.Module):
    """Layer whose parameters' rows ranks may share; ``_etp``: the weight that gathers them, or None.

    A parameter that is copied or replaced has lost its notes: which ranks share it is noted again.
    """

    _rows_kind = EtpRows
    _etp: EtpWeight | None = None

    @property
    def _weight_names(self) -> tuple[str, ...]:
        """Names of the parameters that make up the weight."""
        return ("weight",)

    def _mark_parameters(self) -> None:
        """Notes on the parameters which ranks share them, if any do; ``DistributedDataParallel`` refuses the layer."""
        if self._etp is not None:
            check_when_wrapping(check_not_replicated)
            self._etp.rows.mark()

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        replaced = self._parameters.get(name)
        super().register_parameter(name, param)
        if replaced is not None and param is not None:
            self._mark_parameters()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._mark_parameters()

    def invalidate(self) -> None:
        """Forgets what was cast: call it after writing to the parameter in a way that PyTorch does not see."""
        if self._etp is not None:
            self._etp.forget()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self.invalidate()  # module.to() and the like write through .data
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._mark_parameters()
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        self.invalidate()
        if self._etp is not None:
            self._etp.rows.cut_full(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        self._mark_parameters()  # which may be others now


def shard_rows(
    layer: EtpModule, group: Group, reduction: Reduction, replicas: tuple[Group, ...] = (),
    shared: MutableMapping[Tensor, nn.Parameter] | None = None,
) -> EtpRows:  # fmt: skip
    """Replaces the parameters of the weight, of which all ranks have the same, by this rank's rows of them.

    Args:
        group, reduction, replicas: as in :class:`~minifloat.functional.etp.rows.Sharding`.
        shared: by the whole of each, the rows that other layers have: a parameter that layers share stays one.
    """
    rows = layer._rows_kind(layer, layer._weight_names, group, reduction, replicas)
    shared = {} if shared is None else shared
    for place, (name, weight) in enumerate(zip(rows.names, rows.parameters(), strict=True)):
        if weight not in shared:
            shared[weight] = rows.parameter(place, weight)
        replace(layer, name, shared[weight])
    layer._etp = EtpWeight(rows)
    layer._mark_parameters()
    return rows


def etp_weights(model: nn.Module) -> Iterator[EtpWeight]:
    """Iterates over the weights of layers below ``model`` that ``etp_group`` shares."""
    found = (module.__dict__.get("_etp") for module in model.modules())
    return (weight for weight in found if weight is not None)


@checked
def etp_parameters(model: nn.Module) -> set[nn.Parameter]:
    """Finds the parameters in ``model`` that are a rank's rows of a weight sharded over ``etp_group``.

    Layers gather and reduce them: pass them to ``fully_shard`` as ``ignored_params``.
    """
    return {parameter for weight in etp_weights(model) for parameter in weight.rows.parameters()}


def check_not_replicated(model: nn.Module) -> None:
    for weight in etp_weights(model):
        check_same_rows(weight.rows.layer, weight.rows.parameters())
