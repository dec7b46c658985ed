"""What layers do whose weights are sharded for extended tensor parallelism: each holds its ``EtpWeight``, or None."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import Any

from torch import Tensor, nn

from minifloat.arguments import checked
from minifloat.comm.group import Group
from minifloat.comm.pytorch import check_same_rows, check_when_wrapping
from minifloat.functional.etp.rows import EtpRows, Reduction
from minifloat.functional.etp.weight import EtpWeight
from minifloat.nn.options import replace


class SharedRows(nn.Module):
    """A layer of whose parameters ranks may have some rows each; ``_etp``: the weight that gathers them, or None.

    A parameter that is copied or replaced has lost its notes: which ranks share it is noted again.
    """

    _rows_kind = EtpRows
    _etp: EtpWeight | None = None

    @property
    def _weight_names(self) -> tuple[str, ...]:
        """The names of the parameters that make up the weight."""
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


def shard_rows(
    layer: SharedRows,
    group: Group,
    reduction: Reduction,
    replicas: tuple[Group, ...] = (),
    shared: MutableMapping[Tensor, nn.Parameter] | None = None,
) -> EtpRows:
    """Replaces the parameters of the weight, of which all ranks have the same, by this rank's rows of them.

    Args:
        group, reduction, replicas: as of :class:`~minifloat.functional.etp.rows.Sharding`.
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
    """The weights of layers below ``model`` that ``etp_group`` shares."""
    found = (module.__dict__.get("_etp") for module in model.modules())
    return (weight for weight in found if weight is not None)


@checked
def etp_parameters(model: nn.Module) -> set[nn.Parameter]:
    """The parameters below ``model`` that are a rank's rows of a weight that ``etp_group`` shares.

    They gather and reduce themselves: give them to ``fully_shard`` as ``ignored_params``.
    """
    return {parameter for weight in etp_weights(model) for parameter in weight.rows.parameters()}


def check_not_replicated(model: nn.Module) -> None:
    for weight in etp_weights(model):
        check_same_rows(weight.rows.layer, weight.rows.parameters())
