"""Groups of rows of one matrix, quantized as matrices of their own.

The rows of X [M, K] that belong to expert g are ``offsets[g]`` to ``offsets[g + 1]``; how many those are only the
device knows. A weight is [G, N, K]. No scale, block or byte is shared between groups, so that each is quantized and
multiplied as by a linear of its own, in one launch for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from minifloat.arguments import checked, label_of
from minifloat.autocast import DelayedCall, check_can_wait
from minifloat.comm.group import cached
from minifloat.formats import COLUMNWISE, IDENTITY
from minifloat.functional.norm_activation import measures_amax
from minifloat.functional.quantize import delayed_scale, record_groups
from minifloat.functional.router import Routing
from minifloat.operand import Quantized
from minifloat.ops import grouped
from minifloat.ops.permute import permute_rows
from minifloat.ops.quantize import casts_blocks
from minifloat.quantizer import Quantizer, as_matrix, casts


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
            grouped.check_counts(counts, rows, label_of(layer))
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


class GroupedCasts:
    """Casts what a layer knows as ``kind`` group by group, for GEMMs on a type of device; "" for none in particular.

    Attributes:
        one_amax: all that the casts need to know of a group is one amax, which a kernel that computes it can find.
        in_kernel: a kernel that computes a value can cast it.
        from_tokens: a kernel can cast rows that it reads by index.
        formats, specs: of each cast; specs, dims and memory orders as operations take them.
    """

    def __init__(self, quantizer: Quantizer, kind: str, gemm_ready_on: str) -> None:
        prepared = casts([quantizer], gemm_ready_on)
        self.kind, self.request = kind, prepared.request
        self.operand_layout = prepared.wanted[0].operand_layout
        self.second = None
        if quantizer.chained:
            column = Quantizer(quantizer.format(COLUMNWISE), rowwise=False)
            self.second = GroupedCasts(column, kind, gemm_ready_on)
        self.formats = [fmt for fmt, _ in self.operand_layout.layouts if fmt.quantized]
        self.takes_scales, self.stochastic = prepared.takes_scales, bool(prepared._stochastic)
        self.specs = self.request.formats, self.request.dims, self.request.k_major
        self.one_amax = measures_amax(quantizer)
        each = [fmt for fmt, _ in self.operand_layout.layouts]
        first = each[0] if each else IDENTITY
        columns = [order for dim, order in zip(*self.specs[1:], strict=True) if dim == COLUMNWISE]
        scaled = first.scale_rule == "given" and all(columns)  # in another order no kernel writes them
        alike = self.second is None and len(set(each)) == 1
        self.in_kernel = alike and (scaled or casts_blocks(first))
        self.from_tokens = self.in_kernel or (alike and self.one_amax and all(columns))

    def __call__(
        self,
        x: Tensor,
        offsets: Tensor,
        delayed_call: DelayedCall | None = None,
        scales: Tensor | None = None,
        amax: Tensor | None = None,
        rows: Tensor | None = None,
    ) -> Quantized:
        """The operands of ``x`` [..., K].

        Args:
            scales: fp32 [G] of delayed scaling, if not those of its history.
            amax: of each group, fp32 [G], if it is known and all that its scale comes from.
            rows: int32 [M], the rows of ``x`` that are cast, where :attr:`from_tokens`.
        """
        x, scales = as_matrix(x), self.scales(delayed_call, scales)
        request = self.request
        amaxes = [amax] * len(request.amax_of) if amax is not None else []
        if request.amax_of and not amaxes:
            amaxes = grouped.grouped_amax(x, offsets, request.amax_formats, request.amax_dims)
        given = [
            scales if fmt.scale_rule == "given" else None if own < 0 else amaxes[own]
            for fmt, own in zip(self.formats, request.own_level, strict=True)
        ]
        made: list[Tensor] = []
        if self.formats:
            rng = grouped.draw_seeds(offsets) if self.stochastic else None
            made = grouped.grouped_cast(x, offsets, given, rng, *self.specs, rows)
        return self.operands(grouped.gathered(x, rows), offsets, made, given, delayed_call)

    def scales(self, delayed_call: DelayedCall | None, known: Tensor | None = None) -> Tensor | None:
        """The scales of delayed scaling, fp32 [G]; None if no cast takes them. ``known``: those of an earlier time."""
        if known is None and delayed_call is not None:
            known = delayed_scale(delayed_call, self.kind)
        return known if self.takes_scales else None

    def of_tokens(
        self, x: Tensor, routing: Routing, rows: Tensor, delayed_call: DelayedCall | None = None
    ) -> Quantized:
        """The operands of ``permute(x, routing)`` for tokens ``x`` [T, K]; where kernels can, that is never written.

        ``rows``: int32 [T k], the token of each row.
        """
        offsets = routing.offsets
        if not self.from_tokens:
            return self(permute_rows(x, None, routing.inverse, offsets), offsets, delayed_call)
        amax = grouped.gathered_amax(x, rows, offsets) if self.one_amax else None
        return self(x, offsets, delayed_call, amax=amax, rows=rows)

    def operands(
        self,
        x: Tensor,
        offsets: Tensor,
        made: Sequence[Tensor],
        given: Sequence[Tensor | None],
        delayed_call: DelayedCall | None,
    ) -> Quantized:
        """Of codes, scales and measured amaxes of each cast, and the amaxes or scales that it was given.

        ``x``: the matrix [M, K], or one of its shape and dtype where all orientations are quantized.
        """
        outputs = iter(list(zip(made[0::3], made[1::3], made[2::3], given, strict=True)))
        layout = self.operand_layout
        if self.second is not None:
            layout = layout._replace(columnwise_from_rowwise=partial(self.second, offsets=offsets))
        operands = layout.operands(outputs, (x.shape[0], x.shape[1]), x.dtype, x, offsets)
        if delayed_call is not None:
            pairs = zip(self.formats, made[2::3], strict=True)
            record_groups(delayed_call, self.kind, [own for fmt, own in pairs if fmt.scale_rule == "given"][:1])
        return operands


@cached
def grouped_casts(quantizer: Quantizer, kind: str, gemm_ready_on: str) -> GroupedCasts:
    """:class:`GroupedCasts`, which a program makes once."""
    return GroupedCasts(quantizer, kind, gemm_ready_on)


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
    return grouped_casts(quantizer, "input", x.device.type if gemm_ready else "")(x, offsets)
