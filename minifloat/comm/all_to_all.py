"""The all-to-all of quantized rows, such as tokens on their way to experts: codes and scales."""

from __future__ import annotations

from collections.abc import Sequence

from minifloat.comm.checks import Check, check_exchanged
from minifloat.comm.collectives import Pending, start_exchange
from minifloat.comm.gather import with_fields
from minifloat.comm.group import Group
from minifloat.formats import ROWWISE
from minifloat.operand import Operand


def start_all_to_all(
    operand: Operand, send: Sequence[int], receive: Sequence[int], group: Group, *, check: Check = False
) -> Pending[Operand]:
    """Starts to send rows of a quantized matrix, such as tokens to their experts, with the scales of those rows.

    Args:
        operand: rowwise, its scales one a row and block; or one for the whole that all ranks agree on. Rows are in the
            order of the ranks that they go to.
        send, receive: how many rows go to and come from each rank.

    Returns:
        The rows received, in the order of the ranks that they come from.

    Raises:
        ValueError: a scale spans several rows but not all, or counts do not fit ``operand``; with ``check`` those of
            another rank.
    """
    fmt = operand.format
    if operand.dim != ROWWISE or fmt.tile or fmt.transform != "none":
        raise ValueError(
            f"all_to_all sends single rows, but a scale of {fmt.spec} along dim {operand.dim} spans several; "
            "send a rowwise operand scaled in strips"
        )
    check_exchanged("all_to_all", operand.codes, send, receive, group, check)
    if group.size == 1:
        return Pending([], lambda: operand)
    fields = ["codes"] + ["scale_inv"] * fmt.grid + ["amax"] * (operand.amax is not None and fmt.amax_per_row)
    transfers = {field: start_exchange(getattr(operand, field), send, receive, group) for field in fields}

    def finish() -> Operand:
        return with_fields(operand, {field: transfer.wait() for field, transfer in transfers.items()}, sum(receive))

    return Pending([], finish)


def all_to_all(
    operand: Operand, send: Sequence[int], receive: Sequence[int], group: Group, *, check: Check = False
) -> Operand:
    """The rows that other ranks have for this one; see :func:`start_all_to_all`."""
    return start_all_to_all(operand, send, receive, group, check=check).wait()
