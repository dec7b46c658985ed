"""Groups of rows of one matrix, quantized as matrices of their own.

The rows of X [M, K] that belong to expert g are ``offsets[g]`` to ``offsets[g + 1]``; how many those are only the
device knows. A weight is [G, N, K]. No scale, block or byte is shared between groups, so that each is quantized and
multiplied as by a linear of its own, in one launch for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from minifloat.arguments import checked, label_of
from minifloat.autocast import DelayedCall, check_can_wait
from minifloat.functional.norm_activation import measures_amax, one_format
from minifloat.functional.quantize import RoleCasts
from minifloat.functional.router import Routing
from minifloat.operand import Quantized
from minifloat.ops import grouped
from minifloat.ops.permute import permute_rows
from minifloat.ops.quantize import casts_blocks
from minifloat.quantizer import Quantizer


class GroupLayout(NamedTuple):
    """Which rows are of which group; one value serves every layer that a routing leads through.

    Args:
        offsets: int32 [G + 1] on the device: the first row of each group, and the end of the last one.
        rows: of the matrix, M: a bound that the host knows.
    """

    offsets: Tensor
    rows: int

    @classmethod
    def of(
        cls, counts: Tensor | Sequence[int], rows: int, device: torch.device, layer: object, wait: bool
    ) -> GroupLayout:
        """The layout of ``counts`` [G], in order of the groups; rows beyond their sum are no group's.

        Counts that the device has are not waited for, unless ``wait``: negative ones are taken for 0 there, and groups
        end with the last row.

        Raises:
            TypeError: counts that are no integers.
            ValueError: negative ones, or more than there are rows, where the host knows them; of compiled code that has
                them, when it runs, and with the class of the layer alone, since it serves layers of other names.
            RuntimeError: ``wait`` in compiled code or the capture of a CUDA graph.
        """
        if not isinstance(counts, Tensor):
            counts = torch.tensor(list(counts), device="cpu")
        if counts.numel() and (counts.is_floating_point() or counts.is_complex() or counts.dtype == torch.bool):
            raise TypeError(
                f"{label_of(layer)}: m_splits is {counts.dtype}; integers are needed, the rows of each group"
            )
        if counts.dim() != 1:
            raise ValueError(
                f"{label_of(layer)}: m_splits has shape {tuple(counts.shape)}; one number for each group is needed"
            )
        on_host, compiling = counts.device.type == "cpu" and type(counts) is Tensor, torch.compiler.is_compiling()
        if wait and (compiling or not on_host):
            check_can_wait(label_of(layer))
        if on_host and compiling:
            counts = grouped.checked_counts(counts, rows, type(layer).__name__)
        elif wait or on_host:
            grouped.check_counts(counts, rows, layer)
        if counts.dtype not in (torch.int32, torch.int64):
            counts = counts.long()  # an int8 cannot be compared with all numbers of rows
        # Each count is bounded, too: the sum of wrong ones could overflow and be negative.
        ends = counts.to(device, non_blocking=True).clamp(min=0, max=rows).cumsum(0).clamp(max=rows)
        return cls(torch.nn.functional.pad(ends, (1, 0)).int(), rows)

    @classmethod
    def uniform(cls, groups: int, rows: int, device: torch.device) -> GroupLayout:
        """``groups`` of ``rows`` rows each, as of weights."""
        end = groups * rows
        return (
            cls(torch.arange(0, end + 1, rows, dtype=torch.int32, device=device), end)
            if rows
            else cls(torch.zeros(groups + 1, dtype=torch.int32, device=device), 0)
        )


def casts_in_kernel(cast: RoleCasts) -> bool:
    """Whether a kernel that computes the values of groups can cast them."""
    fmt = one_format(cast.quantizers[0])
    # With given scales no kernel writes columnwise codes in another order.
    given = fmt is not None and fmt.scale_rule == "given" and cast.prepared.columns_k_major
    return given or (fmt is not None and casts_blocks(fmt))


def cast_tokens(
    cast: RoleCasts, x: Tensor, routing: Routing, rows: Tensor, delayed_call: DelayedCall | None
) -> Quantized:
    """Makes the operands of ``permute(x, routing)`` for tokens ``x`` [T, K]; where kernels can, that is never written.

    ``rows``: int32 [T k], the token of each row.
    """
    quantizer, offsets = cast.quantizers[0], routing.offsets
    one_amax = measures_amax(quantizer)
    from_tokens = one_amax and one_format(quantizer) is not None and cast.prepared.columns_k_major
    if not from_tokens and not casts_in_kernel(cast):
        return cast.of_groups(permute_rows(x, None, routing.inverse, offsets), offsets, delayed_call)
    amax = grouped.gathered_amax(x, rows, offsets) if one_amax else None
    return cast.of_groups(x, offsets, delayed_call, amax=amax, rows=rows)


@checked
def quantize_groups(x: Tensor, offsets: Tensor, quantizer: Quantizer, *, gemm_ready: bool = False) -> Quantized:
    """Each group of rows of ``x`` [M, K] as ``quantizer`` casts it alone, in one launch for all.

    ``fprop``, ``dgrad`` and ``wgrad`` multiply such operands group by group. Those of a weight [G, N, K] are quantized
    as [G N, K], with offsets 0, N, ..., G N; X and dY have the offsets of their rows.

    Args:
        offsets: int32 [G + 1] on the device of ``x``: the first row of each group, and the end of the last one, at most
            M; not descending. Rows beyond it are no group's.
        gemm_ready: lay codes out in memory as this device's GEMMs read them.
    """
    return quantizer.cast(x, gemm_ready=gemm_ready, offsets=offsets)
