"""What layers do whose weights are sharded for extended tensor parallelism: each holds its ``EtpWeight``, or None."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import TYPE_CHECKING

from torch import Tensor, nn

from minifloat.arguments import checked
from minifloat.comm.ddp import check_same_rows, check_when_wrapping
from minifloat.comm.group import Group
from minifloat.functional.etp.rows import EtpRows, Reduction
from minifloat.functional.etp.weight import EtpWeight
from minifloat.nn.parameters import replace

if TYPE_CHECKING:
    from minifloat.nn.embedding import EtpEmbedding
    from minifloat.nn.linear_state import LinearState


def shard_rows(
    layer: LinearState | EtpEmbedding,
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


def mark_rows(layer: LinearState | EtpEmbedding) -> None:
    """Notes on the parameters which ranks share them, if any do; ``DistributedDataParallel`` refuses the layer."""
    if layer._etp is not None:
        check_when_wrapping(check_not_replicated)
        layer._etp.rows.mark()


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
