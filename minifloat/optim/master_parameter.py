"""Master weights of one low-precision parameter: fp32, or the parameter's own bf16 bits and 16 bits more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from minifloat.comm.collectives import all_reduce_max
from minifloat.comm.dtensor_ddp import local_rows, sharded_like
from minifloat.comm.group import Group
from minifloat.tensor import QuantizedTensor, quantize_all_

KEYS = ("master", "remainder")
"""Names of the two forms in a state dict."""


def is_low_precision(p: Tensor) -> bool:
    """Whether ``p`` is quantized, bf16 or fp16: too coarse for an optimizer to step it."""
    return isinstance(local_rows(p), QuantizedTensor) or p.dtype in (torch.bfloat16, torch.float16)


def split(values: Tensor) -> tuple[Tensor, Tensor]:
    """Splits fp32 ``values`` into the nearest bf16 and an int16 remainder; :func:`join` makes the same 32 bits.

    The remainder is the distance between the two as bit patterns, ``values - (high << 16)``. Half-way cases are rounded
    away from zero, by adding half a step to the bits: each bf16 then stands for 2^16 values, as many as an int16 has.
    With ties to even an even bf16 would stand for 2^16 + 1, of which no 16 bits can tell all apart. A NaN becomes the
    one quiet NaN.
    """
    bits = torch.where(values.isnan(), torch.nan, values).view(torch.int32)
    high = (bits + 0x8000) >> 16
    return high.to(torch.int16).view(torch.bfloat16), (bits - (high << 16)).to(torch.int16)


def join(high: Tensor, remainder: Tensor) -> Tensor:
    """Joins what :func:`split` took apart to the fp32 values.

    A pair that it never gives makes values of another ``high``: (+-0, a negative remainder) is a NaN.
    """
    return ((high.view(torch.int16).to(torch.int32) << 16) + remainder).view(torch.float32)


class Master:
    """Master weights of one parameter, in its shape and on its device.

    Attributes:
        param: the low-precision parameter.
        values: fp32, what the inner optimizer steps; empty between steps where there is a remainder.
        remainder: int16, which together with the parameter's own bf16 bits is the fp32 value; else None.
    """

    def __init__(self, param: Tensor, with_remainder: bool) -> None:
        self.param = param
        self.values = nn.Parameter(_initial_values(param))
        self.remainder: Tensor | None = None
        if with_remainder and param.dtype == torch.bfloat16 and not isinstance(self.rows, QuantizedTensor):
            if self.rows is not param:
                raise ValueError(
                    f"master='bf16+remainder' is not for sharded parameters, as one of shape {tuple(param.shape)} is: "
                    "use master='fp32', whose masters are sharded too"
                )
            high, self.remainder = split(self.values.detach())
            with torch.no_grad():
                param.copy_(high)
        self.mark_written()

    @property
    def rows(self) -> Tensor:
        """Parameter, or what this rank has of it."""
        return local_rows(self.param)

    def mark_written(self) -> None:
        """Notes that the parameter as it is now follows from these values."""
        self._version: int | None = _version(self.param)

    def mark_unknown(self) -> None:
        """Notes that the parameter may hold anything: :meth:`follow` has to look."""
        self._version = None

    def load(self) -> None:
        """Makes :attr:`values` whole."""
        if self.remainder is not None and self.values.shape != self.param.shape:
            self.values.data = join(self.param.detach(), self.remainder)

    def rounded(self) -> Tensor:
        """Rounds the master to the parameter's dtype, and keeps a remainder here."""
        if self.remainder is None:
            return self.values.detach()
        high, remainder = split(self.values.detach())
        self.remainder.copy_(remainder)
        return high

    def release(self) -> None:
        """Frees :attr:`values` where a remainder replaces them."""
        if self.remainder is not None:
            self.values.data = self.values.new_empty(0)

    @torch.no_grad()
    def follow(self) -> None:
        """Takes over what others wrote to the parameter; where it still holds the rounded master, that stays.

        With a remainder the parameter's bits are the upper half of the value, whoever wrote them: the remainder stays,
        so that the value is one that rounds to what was written. Where no such value has this remainder, which is so
        for most zeros, it becomes 0, and the value what was written.
        """
        if _version(self.param) == self._version:
            return
        if self.remainder is not None:
            high = self.param.detach()
            rounded, _ = split(join(high, self.remainder))
            self.remainder.masked_fill_(rounded.view(torch.int16) != high.view(torch.int16), 0)
        else:
            now, values = _exact(local_rows(self.param.detach())), local_rows(self.values)
            values.copy_(torch.where(self._rounds_to(now), values, now))
        self.mark_written()

    def _rounds_to(self, now: Tensor) -> Tensor:
        """Marks where the values round to ``now``, those of the parameter."""
        held, values = local_rows(self.param.detach()), local_rows(self.values.detach())
        scale = _scale_of_codes(held)
        if scale is None:
            return _exact(held.clone().copy_(values)) == now
        # Known through its reciprocal, to an ulp or two: what either neighbour rounds to is taken for the same code.
        same = torch.zeros_like(now, dtype=torch.bool)
        for factor in (1 - 2**-22, 1.0, 1 + 2**-22):
            rounded: Any = held.clone()
            rounded.scale = scale * factor
            same |= (_exact(rounded.quantize_(values)) - now).abs() <= now.abs() * 2**-18
        return same

    def is_written(self) -> bool:
        """Whether the parameter holds the rounded master under a delayed scale other than that of its next cast.

        A collective of the ranks that shard it: all of them write, or none does, for their codes have one scale.
        """
        rows: Any = self.rows
        if _scale_of_codes(rows) is None:
            return False
        differs = (~self._rounds_to(_exact(rows.detach()))).any().float().view(1)
        return not bool(all_reduce_max([differs], Group.of(rows.amax_group))[0])

    def state(self) -> dict[str, Tensor]:
        """Returns the entries of a state dict."""
        if self.remainder is not None:
            return {"remainder": self.remainder}
        return {"master": self.values.detach()}

    def check(self, saved: Mapping[str, Any], index: int) -> None:
        """Checks that :meth:`restore` can take ``saved``, the state of parameter number ``index``."""
        wanted, other = KEYS if self.remainder is None else KEYS[::-1]
        if wanted not in saved:
            raise ValueError(
                f"the state of parameter {index} has a {other!r} where this optimizer keeps a {wanted!r}: make it with "
                "the master= that the state was saved with"
            )
        if saved[wanted].shape != self.param.shape:
            raise ValueError(
                f"the {wanted} of parameter {index} is of shape {tuple(saved[wanted].shape)}, the parameter of "
                f"{tuple(self.param.shape)}: the state dict belongs to another model"
            )

    @torch.no_grad()
    def restore(self, saved: Mapping[str, Any]) -> None:
        """Takes what :meth:`state` gave."""
        if self.remainder is not None:
            self.remainder.copy_(saved["remainder"])
            self.release()  # values made for this, of a parameter that was frozen until now
            self.mark_unknown()  # the parameter may not have been loaded
        else:
            self.values.copy_(saved["master"])


@torch.no_grad()
def write(masters: Sequence[Master], skipped: Tensor | None = None) -> None:
    """Rounds masters to their parameters: the quantized ones in one multi-tensor cast, the others in one copy.

    ``skipped``, fp32 on the device: where it is not 0 no master has changed, and codes keep their delayed scale.
    """
    quantized = [master for master in masters if isinstance(master.rows, QuantizedTensor)]
    others = [master for master in masters if not isinstance(master.rows, QuantizedTensor)]
    if quantized:
        rows, values = [m.rows for m in quantized], [local_rows(m.rounded()) for m in quantized]
        quantize_all_(rows, values, noop_flag=None if skipped is None else skipped.float().view(1))  # type: ignore[arg-type]
    if others:
        torch._foreach_copy_([m.rows for m in others], [local_rows(m.rounded()) for m in others])
    for master in masters:
        master.mark_written()


def _scale_of_codes(t: Tensor) -> Tensor | None:
    """Returns the delayed scale that ``t`` was cast with, not its ``scale`` of now; None in other formats."""
    held = t._operands.any if isinstance(t, QuantizedTensor) else None
    if held is None or held.format.scale_rule != "given" or held.scale_inv is None:
        return None
    return held.scale_inv.reciprocal()


def _exact(t: Tensor) -> Tensor:
    return t.dequantize(torch.float32) if isinstance(t, QuantizedTensor) else t.float()


def _version(p: Tensor) -> int:
    """Counts the writes to ``p``: those to a DTensor as such, and those to what this rank has of it."""
    rows = local_rows(p)
    if rows is p:
        return p._version
    return p._version + (rows._operands.any.codes if isinstance(rows, QuantizedTensor) else rows)._version


@torch.no_grad()
def _initial_values(param: Tensor) -> Tensor:
    """Returns the values before the first cast where the parameter has kept them, which it forgets; else its own."""
    rows = local_rows(param)
    if not isinstance(rows, QuantizedTensor):
        return _exact(param.detach())
    kept = rows.get_high_precision_init_val()
    rows.clear_high_precision_init_val()  # also those that a load has made stale
    values = _exact(rows.detach()) if kept is None else kept.to(rows.device, torch.float32, copy=True)
    return sharded_like(param, values.reshape(rows.shape))
