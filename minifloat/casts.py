"""Amax and cast of a list of tensors: what does not change from call to call is found once and kept."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minifloat import backends
from minifloat.arguments import shown
from minifloat.formats import COLUMNWISE, ROWWISE, Format
from minifloat.operand import Operand, Quantized
from minifloat.ops import grouped, new, quantize
from minifloat.ops.library import apart
from minifloat.ops.quantize.reference import CastRequest, Output, RequestedCasts, as_matrix
from minifloat.ops.tape import taping

Amaxes = tuple[Tensor | None, ...]
"""One entry for each cast of :attr:`Quantizer.casts`: an amax, or, for delayed scaling, the scale."""

Layouts = tuple[tuple[Format, int], ...]
"""Casts of one tensor: (format, dim) each."""

_PLAIN = (Tensor, torch.nn.Parameter)


def can_skip_dispatcher(xs: Sequence[Tensor]) -> bool:
    """Whether all are plain tensors of one device: then the dispatcher, 10 to 20 us a call, need not be asked.

    Not where autograd or a dispatch mode (of a test, a profiler, a fake tensor) is to see an operation.
    """
    if torch._C._len_torch_dispatch_stack() > taping.modes:
        return False
    device, graph = xs[0].device, torch.is_grad_enabled()
    for x in xs:
        if type(x) not in _PLAIN or x.device != device or (graph and x.requires_grad):
            return False
    return xs[0].is_cpu or (xs[0].is_cuda and backends.kernels(device.index)[0])


class OperandLayout(NamedTuple):
    """Layout of the outputs of one matrix's casts as its operands.

    Args:
        layouts: format and dim of each cast, as :meth:`Quantizer.layouts` gives them.
        row, column: which of them serves which orientation, or -1.
        columnwise_from_rowwise: casts the columnwise operand of the first one's values, where it is made of them.
        column_format: its format then.
    """

    layouts: Layouts
    row: int
    column: int
    columnwise_from_rowwise: Callable[..., Quantized] | None = None
    column_format: Format | None = None

    @property
    def of_groups(self) -> OperandLayout:
        """Gives the cast of groups, whose kernels cast strips along the rows and from those along the columns."""
        fmt = self.layouts[0][0] if self.column_format is not None else None
        if fmt is None or fmt != self.column_format or fmt.symmetric or not quantize.casts_blocks(fmt):
            return self
        return OperandLayout(((fmt, ROWWISE), (fmt, COLUMNWISE)), self.row, 1)

    def operands(
        self, outputs: Iterator[Output], shape: tuple[int, int], dtype: torch.dtype, values: Tensor | None = None,
        offsets: Tensor | None = None,
    ) -> Quantized:  # fmt: skip
        """Makes the operands of a matrix of ``shape`` and ``dtype``.

        Args:
            outputs: of each cast codes, scales, the measured amax and the given one; as many as are quantized are
                taken.
            values: the matrix itself, for orientations that are left in high precision.
            offsets: those of its groups, see :class:`Operand`.
        """
        made = []
        for fmt, dim in self.layouts:
            if fmt.scale_rule == "none":
                assert values is not None
                made.append(Operand(as_matrix(values), None, None, fmt, dim, shape, dtype, offsets))
                continue
            codes, scale_inv, measured, level = next(outputs)
            rule = fmt.scale_rule
            amax = measured if rule == "given" else level if rule == "two_level" else None
            made.append(new(Operand, (codes, scale_inv, amax, fmt, dim, shape, dtype, offsets)))
        row = made[self.row] if self.row >= 0 else None
        if self.columnwise_from_rowwise is not None:
            return Quantized(row, self.columnwise_from_rowwise(made[0].dequantize()).columnwise)
        return new(Quantized, (row, made[self.column] if self.column >= 0 else None))


class TensorCasts(NamedTuple):
    """Casts of one tensor, and the operands that they become.

    Args:
        casts: those that have an amax or a scale of their own; see :attr:`Quantizer.casts`.
        operand_layout: the casts to make, and which operand each becomes.
    """

    casts: Layouts
    operand_layout: OperandLayout


class Casts:
    """Amax and cast of a list of tensors.

    What follows from the quantizers is found when this is made; on a GPU, what a call allocates and launches is
    recorded at the first call of each shape. Whoever casts again and again keeps one of these.

    Args:
        wanted: of each tensor.
        k_major: codes are laid out as GEMMs on CUDA read them.
        emit_bf16: dims along which operands are for one emulated product: kernels may write them as bf16 values.

    Attributes:
        how: formats, dims and memory orders of the casts of groups.
        chained: the second of these is of the values of the first.
    """

    def __init__(self, wanted: Sequence[TensorCasts], k_major: bool = False, emit_bf16: Sequence[int] = ()) -> None:
        self.wanted, self._k_major = wanted, k_major
        self.request = request = CastRequest([], [], [], [], [], [], [], [])
        self._as_values: list[bool] = []  # for each cast
        self._needs_amax: list[list[bool]] = []  # for each cast of each tensor
        self._sources: list[tuple[int, int, bool]] = []  # of each cast: tensor, place among its amaxes, takes a scale
        self._stochastic: list[int] = []  # casts that need random bits
        self._works: dict[tuple[bool, Any], RequestedCasts] = {}  # by what is asked for, on a GPU or not
        for i, (own, each) in enumerate(wanted):
            self._needs_amax.append([fmt.needs_amax for fmt, _ in own])
            numbers = []
            for fmt, dim in own:
                numbers.append(len(request.amax_of) if fmt.needs_amax else -1)
                if fmt.needs_amax:
                    request.amax_of.append(i)
                    request.amax_formats.append(fmt.spec)
                    request.amax_dims.append(dim)
            for place, (fmt, dim) in enumerate(each.layouts):
                if fmt.quantized:
                    twin = min(place, len(own) - 1)  # a transposed copy takes the amax of its twin
                    if fmt.rounding == "stochastic":
                        self._stochastic.append(len(self._sources))
                    self._sources.append((i, twin, fmt.scale_rule == "given"))
                    request.cast_of.append(i)
                    request.formats.append(fmt.spec)
                    request.dims.append(dim)
                    request.k_major.append(k_major and backends.k_major(fmt))
                    self._as_values.append(dim in emit_bf16)
                    request.own_level.append(numbers[twin])
        self.how = request.formats, request.dims, request.k_major
        self._of_groups = wanted[0].operand_layout.of_groups if len(wanted) == 1 else None
        self.chained = self._of_groups is not None and self._of_groups is not wanted[0].operand_layout
        if self.chained:
            self.how = request.formats * 2, [ROWWISE, COLUMNWISE], request.k_major * 2
        self.columns_k_major = all(order for dim, order in zip(*self.how[1:], strict=True) if dim == COLUMNWISE)
        self._nothing: list[Tensor | None] = [None] * len(self._sources)
        self.takes_scales = any(takes for _, _, takes in self._sources)

    def __call__(
        self, xs: Sequence[Tensor], amaxes: Sequence[Amaxes | None] | None = None,
        rngs: Sequence[Tensor | None] | None = None, *, scales: Sequence[Tensor | None] | None = None,
        noop_flag: Tensor | None = None,
    ) -> list[Quantized]:  # fmt: skip
        """Quantizes ``xs`` where no compiler traces it; arguments as of :func:`cast_all`.

        ``scales`` are not checked here: ``cast_all`` does that for the user's, and those of a history are right.
        """
        given = self._nothing
        if not can_skip_dispatcher(xs):
            return self.by_operations(xs, amaxes, rngs, scales, noop_flag)
        if amaxes is not None or self.takes_scales:
            given = self._given(amaxes, scales)
        drawn = self._drawn(xs, rngs) if self._stochastic else self._nothing
        outputs: Iterator[Output] = iter(())
        if self._sources:
            known = None if amaxes is None else tuple(map(bool, amaxes))
            key = xs[0].is_cuda, known
            outputs = iter((self._works.get(key) or self._work(key))(xs, given, drawn, noop_flag)[0])
        results = []
        for x, (_, each) in zip(xs, self.wanted, strict=True):
            shape = x.shape
            results.append(each.operands(outputs, (math.prod(shape[:-1]), shape[-1]), x.dtype, x))
        return results

    def of_groups(
        self, x: Tensor, offsets: Tensor, scales: Tensor | None = None, amax: Tensor | None = None,
        rows: Tensor | None = None, made: Sequence[Tensor] = (),
    ) -> Quantized:  # fmt: skip
        """Quantizes each group of rows of the one tensor ``x`` [..., K] by itself.

        Args:
            scales: fp32 [G], what delayed scaling casts with.
            amax: of each group, fp32 [G], if it is known and all that its scale comes from.
            rows: int32 [M], the rows of ``x`` that are cast in lieu of all.
            made: the casts of ``x``, if the kernel that computed it has made them; its values are not read then.
        """
        x, request, layout = as_matrix(x), self.request, self._of_groups
        assert layout is not None
        amaxes = [amax] * len(request.amax_of) if amax is not None else []
        if request.amax_of and not amaxes:
            amaxes = grouped.grouped_amax(x, offsets, request.amax_formats, request.amax_dims)
        given = [
            scales if takes_scale else None if own < 0 else amaxes[own]
            for (_, _, takes_scale), own in zip(self._sources, request.own_level, strict=True)
        ] * (1 + self.chained)
        if given and not made:
            rng = grouped.draw_seeds(apart(offsets, *offsets.shape)) if self._stochastic else None
            made = grouped.grouped_cast(x, offsets, given, rng, *self.how, rows, self.chained)
        outputs: Iterator[Any] = iter(list(zip(made[0::3], made[1::3], made[2::3], given, strict=True)))
        if layout.columnwise_from_rowwise is not None:
            chained = partial(layout.columnwise_from_rowwise, gemm_ready=self._k_major, offsets=offsets)
            layout = layout._replace(columnwise_from_rowwise=chained)
        count = x.shape[0] if rows is None else rows.shape[0]
        return layout.operands(outputs, (count, x.shape[1]), x.dtype, x, offsets)

    def amaxes(self, xs: Sequence[Tensor]) -> list[Amaxes]:
        """Finds the amaxes of ``xs``; see :func:`find_amaxes`."""
        if not self.request.amax_of:
            return [(None,) * len(wanted) for wanted in self._needs_amax]
        if torch.compiler.is_dynamo_compiling() or not can_skip_dispatcher(xs):
            sources = [as_matrix(xs[i]) for i in self.request.amax_of]
            found = iter(quantize.amax(sources, self.request.amax_formats, self.request.amax_dims))
        else:
            key = xs[0].is_cuda, "amaxes"
            found = iter((self._works.get(key) or self._work(key))(xs, (), (), None)[1])
        return [tuple([next(found) if needed else None for needed in wanted]) for wanted in self._needs_amax]

    def _work(self, key: tuple[bool, Any]) -> RequestedCasts:
        """Prepares kernels or the reference: for the amaxes alone, or for casts with those that are not known."""
        on_gpu, known = key
        request = self.request
        if known == "amaxes":
            request = CastRequest(request.amax_of, request.amax_formats, request.amax_dims, [], [], [], [], [])
        elif known is not None:
            wanted = [n for n, i in enumerate(request.amax_of) if not known[i]]
            number = {n: place for place, n in enumerate(wanted)}
            request = request._replace(
                amax_of=[request.amax_of[n] for n in wanted],
                amax_formats=[request.amax_formats[n] for n in wanted],
                amax_dims=[request.amax_dims[n] for n in wanted],
                own_level=[number.get(n, -1) for n in request.own_level],
            )
        if on_gpu:
            from minifloat.ops.quantize.gpu import RecordedCasts  # which needs Triton

            work: RequestedCasts = RecordedCasts(request, as_values=self._as_values)
        else:
            work = RequestedCasts(request)
        self._works[key] = work
        return work

    def _given(
        self, amaxes: Sequence[Amaxes | None] | None, scales: Sequence[Tensor | None] | None
    ) -> list[Tensor | None]:
        """Lists the amax or scale of each cast, None if it is still to be found."""
        given: list[Tensor | None] = []
        for i, place, takes_scale in self._sources:
            levels = None if amaxes is None else amaxes[i]
            level = None if levels is None else levels[place]
            if takes_scale:
                scale = None if scales is None else scales[i]
                if scale is not None:
                    level = scale
                elif level is None:
                    raise ValueError(
                        "delayed scaling casts with a scale from its history; give Quantizer.cast amaxes=(scale,), or "
                        "cast_all scales=[scale]"
                    )
                else:
                    check_scale(level)
            given.append(level)
        return given

    def _drawn(self, xs: Sequence[Tensor], rngs: Sequence[Tensor | None] | None) -> list[Tensor | None]:
        """Draws the seed of each cast; one for both orientations of a tensor, which draw different bits from it."""
        seeds: list[Tensor | None] = [None] * len(xs) if rngs is None else list(rngs)
        drawn: list[Tensor | None] = [None] * len(self._sources)
        for cast in self._stochastic:
            i = self._sources[cast][0]
            if seeds[i] is None:
                seeds[i] = quantize.draw_seed(xs[i])
            drawn[cast] = seeds[i]
        return drawn

    def by_operations(
        self, xs: Sequence[Tensor], amaxes: Sequence[Amaxes | None] | None, rngs: Sequence[Tensor | None] | None,
        scales: Sequence[Tensor | None] | None, noop_flag: Tensor | None,
    ) -> list[Quantized]:  # fmt: skip
        """Quantizes ``xs`` where a compiler, autograd or a dispatch mode sees each operation."""
        matrices = [as_matrix(x) for x in xs]
        drawn = self._drawn([apart(x, 0) for x in matrices] if self._stochastic else matrices, rngs)
        if amaxes is None:
            levels: Sequence[Amaxes | None] = self.amaxes(matrices)
        else:
            missing = [i for i, level in enumerate(amaxes) if level is None]
            found = iter(Casts([self.wanted[i] for i in missing]).amaxes([matrices[i] for i in missing]))
            levels = [next(found) if level is None else level for level in amaxes]
        given = self._given(levels, scales)
        made = []
        if self._sources:
            request, sources = self.request, [matrices[i] for i, _, _ in self._sources]
            made = quantize.cast(sources, given, drawn, request.formats, request.dims, request.k_major, noop_flag)
        return self._operands(matrices, made[0::3], made[1::3], made[2::3], given)

    def _operands(self, matrices: Sequence[Tensor], *made: Sequence[Tensor | None]) -> list[Quantized]:
        """Makes operands; ``made``: of each cast codes, scales, the measured amax and the given one."""
        outputs: Iterator[Any] = iter(list(zip(*made, strict=True)))
        return [
            each.operands(outputs, (x.shape[0], x.shape[1]), x.dtype, x)
            for x, (_, each) in zip(matrices, self.wanted, strict=True)
        ]


def check_scale(scale: Tensor) -> None:
    """Checks a delayed scale that a user gives; it is read where that waits for nothing."""
    if torch.compiler.is_compiling():
        return
    known = (
        scale.device.type == "cpu" and type(scale) is Tensor and torch._C._len_torch_dispatch_stack() <= taping.modes
    )
    bad = not scale.is_floating_point() or scale.numel() != 1
    if bad or (known and not 0 < scale.float().item() < math.inf):  # are_scales of one, which each cast asks
        value = f"{scale.item()}" if known and scale.numel() == 1 else shown(scale)
        raise ValueError(f"scale is {value}; delayed scaling casts with one number above 0, finite, floating-point [1]")
