"""Groups of rows of one matrix, quantized as matrices of their own, and the weights of experts as one.

The rows of X [M, K] that belong to expert g are ``offsets[g]`` to ``offsets[g + 1]``; how many those are only the
device knows. A weight is [G, N, K]: one parameter, or separate ones, which are neighbours in memory, or one operand
where they are quantized. No scale, block or byte is shared between groups, so that each is quantized and multiplied as
by a linear of its own, in one launch for all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from minifloat import backends
from minifloat.arguments import checked, label_of
from minifloat.autocast import check_can_wait, checks_finite, used
from minifloat.comm.dtensor_ddp import is_dtensor
from minifloat.comm.group import cached
from minifloat.formats import COLUMNWISE, Format
from minifloat.functional.autograd import apply
from minifloat.operand import Operand, Quantized
from minifloat.ops import grouped, new
from minifloat.ops.grouped import layout
from minifloat.quantizer import Quantizer
from minifloat.tensor import Gatherer, QuantizedTensor, operand_ops


class GroupLayout(NamedTuple):
    """Rows of each group; one value serves every layer that a routing leads through.

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
        compiling = torch.compiler.is_compiling()  # a fake tensor, maybe
        on_host = counts.device.type == "cpu" and (compiling or type(counts) is Tensor)
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
        if not rows:
            return cls(torch.zeros(groups + 1, dtype=torch.int32, device=device), 0)
        return cls(torch.arange(0, groups * rows + 1, rows, dtype=torch.int32, device=device), groups * rows)


def layout_of(x: Tensor, m_splits: Any, groups: int, width: int, layer: object) -> GroupLayout:
    """Returns the layout of the rows of ``x`` [..., width] in groups; ``m_splits``: as in ``GroupedLinear.forward``."""
    rows = x.numel() // width if width else x.shape[:-1].numel()
    layout = m_splits
    if not isinstance(layout, GroupLayout):
        layout = GroupLayout.of(m_splits, rows, x.device, layer, wait=used.check_finite and checks_finite())
    check_groups(layout, groups, layer)
    if layout.rows != rows:
        raise ValueError(f"{label_of(layer)}: the layout is for {layout.rows} rows, and the input has {rows}")
    return layout


def check_groups(layout: GroupLayout, groups: int, layer: object) -> None:
    """Raises if the layout is of another number of groups."""
    if layout.offsets.shape[0] != groups + 1:
        raise ValueError(
            f"{label_of(layer)}: m_splits has {layout.offsets.shape[0] - 1} numbers; give the rows of each of the "
            f"{groups} experts"
        )


@checked
def quantize_groups(x: Tensor, offsets: Tensor, quantizer: Quantizer, *, gemm_ready: bool = False) -> Quantized:
    """Casts each group of rows of ``x`` [M, K] separately, in one launch.

    ``fprop``, ``dgrad`` and ``wgrad`` multiply the operands group by group. Quantize a weight [G, N, K] as [G N, K],
    with offsets 0, N, ..., G N; X and dY take the offsets of their rows.

    Args:
        offsets: int32 [G + 1] on the device of ``x``: the first row of each group, and the end of the last one, at most
            M; not descending. Rows beyond it are no group's.
        gemm_ready: lay codes out in memory as this device's GEMMs read them.
    """
    return quantizer.cast(x, gemm_ready=gemm_ready, offsets=offsets)


# ---- several operands as one ----


@cached
def _gaps(name: layout.Name, fmt: Format, dim: int, rows: int, cols: int, groups: int) -> list[int]:
    """Rows of the tensor ``name`` of groups between the end of each and the next, or the end of all."""
    places = layout.own_rows(name, fmt, dim, [rows * group for group in range(groups + 1)])
    starts = [*[place.start for place in places[1:]], layout.shape(name, fmt, dim, groups * rows, cols, groups)[0]]
    return [start - place.stop for start, place in zip(starts, places, strict=True)]


def _join(name: layout.Name, operands: Sequence[Operand]) -> Tensor | None:
    """The tensor ``name`` of all, each at its place, with zeros between them; one launch."""
    first = operands[0]
    like: Tensor | None = getattr(first, name)
    if like is None:
        return None
    gaps = _gaps(name, first.format, first.dim, *first.shape, len(operands))
    zeros = like.new_zeros(max(gaps), *layout.row_shape(name, first.format, first.dim, first.shape[1]))
    pieces: list[Tensor] = []
    for operand, gap in zip(operands, gaps, strict=True):
        own = getattr(operand, name)
        pieces.append(own[None] if own.dim() < zeros.dim() else own.flatten(zeros.dim() - 1))
        if gap:
            pieces.append(zeros[:gap])
    return torch.cat(pieces)


def join(operands: Sequence[Operand]) -> Operand:
    """Operands of matrices [N, K], alike in all but their tensors, as that of [G, N, K]: a copy."""
    first, groups = operands[0], len(operands)
    codes, scale_inv, amax = (_join(name, operands) for name in layout.NAMES)
    assert codes is not None
    offsets = GroupLayout.uniform(groups, first.shape[0], codes.device).offsets
    shape = groups * first.shape[0], first.shape[1]
    return Operand(codes, scale_inv, amax, first.format, first.dim, shape, first.dtype, offsets)


def with_rows_consecutive(weight: Operand) -> Operand:
    """The operand of [G, N, K] as a cast for a GPU's dgrad would give it: columnwise, rows consecutive in memory."""
    assert weight.offsets is not None
    codes, groups, cols = weight.codes, weight.offsets.shape[0] - 1, weight.shape[1]
    rows, unit = weight.shape[0] // groups, layout.unit(weight.format)
    if weight.dim == COLUMNWISE:
        codes = codes.t().contiguous()
    elif rows % unit == 0:
        room = codes.new_zeros(cols, groups, rows + unit)
        room[..., :rows] = codes.view(groups, rows, cols).permute(2, 0, 1)
        codes = room.view(cols, groups * (rows + unit))
    else:
        gaps = _gaps("codes", weight.format, COLUMNWISE, rows, cols, groups)
        pieces = zip(codes.split(rows), gaps, strict=True)
        codes = torch.cat([torch.nn.functional.pad(own.t(), (0, gap)) for own, gap in pieces], 1)
    return weight._replace(codes=codes.t(), dim=COLUMNWISE)


def parts(whole: Operand | None, likes: Sequence[Any]) -> list[Operand | None]:
    """The operand of each group in the memory of ``whole``, with versions of its own; in the shapes of ``likes``."""
    if whole is None:
        return [None] * len(likes)
    offsets, tensors = [likes[0].shape[0] * group for group in range(len(likes) + 1)], []
    for name in layout.NAMES:
        held: Any = getattr(whole, name)
        places = layout.own_rows(name, whole.format, whole.dim, offsets)
        each = zip(places, likes, strict=True)
        tensors.append([held if held is None else held[at].view_as(getattr(like, name)).data for at, like in each])
    return [Operand(*own, *like[3:]) for like, *own in zip(likes, *tensors, strict=True)]


class SeparateOperands(tuple[Any, ...]):
    """The operands of experts' weights as that of [G, N, K], joined when a product reads it.

    So what a forward saves are the very codes of each weight, which FSDP2 may free until backward. A tuple, as other
    operands are: three tensors of each expert, then format, dim, (G N, K), dtype and no offsets.
    """

    @classmethod
    def of(cls, operands: Sequence[Operand]) -> SeparateOperands:
        """``operands``: of the experts, alike in all but their tensors."""
        first = operands[0]
        shape = len(operands) * first.shape[0], first.shape[1]
        tensors = chain.from_iterable(each[:3] for each in operands)
        return cls((*tensors, *first[3:5], shape, first.dtype, None))

    tensors: tuple[Tensor | None, ...] = property(itemgetter(slice(-5)))  # type: ignore[assignment]
    codes: Tensor = property(itemgetter(0))  # type: ignore[assignment]  # of the first expert, for the device
    format: Format = property(itemgetter(-5))  # type: ignore[assignment]
    dim: int = property(itemgetter(-4))  # type: ignore[assignment]
    shape: tuple[int, int] = property(itemgetter(-3))  # type: ignore[assignment]
    dtype: torch.dtype = property(itemgetter(-2))  # type: ignore[assignment]
    serves = Operand.serves

    def split(self) -> list[Operand]:
        """Lists the operand of each expert."""
        groups = (len(self) - 5) // 3
        shape = self.shape[0] // groups, self.shape[1]
        own = (self.format, self.dim, shape, self.dtype, None)
        return [new(Operand, (*self[3 * i : 3 * i + 3], *own)) for i in range(groups)]

    def joined(self) -> Operand:
        """Copies the operands into one piece of memory."""
        return join(self.split())

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The [G N, K] values it stands for."""
        return self.joined().dequantize(dtype)


def _unstacked(operand: Operand) -> Operand:
    """One whose tensors are those of the experts stacked, [G, ...]: a view where no group lies apart from the next."""
    fmt, dim, (rows, cols), dtype = operand.layout
    groups, names = operand.codes.shape[0], [name for name in layout.NAMES if getattr(operand, name) is not None]
    rows //= groups
    if any(any(_gaps(name, fmt, dim, rows, cols, groups)) for name in names):
        each: Any = zip(*[[None] * groups if t is None else t.unbind() for t in operand[:3]], strict=True)
        rest: Any = fmt, dim, (rows, cols), dtype
        return join([Operand(*own, *rest) for own in each])
    flat = {name: getattr(operand, name).reshape(-1, *layout.row_shape(name, fmt, dim, cols)) for name in names}
    return operand._replace(**flat, offsets=GroupLayout.uniform(groups, rows, operand.codes.device).offsets)


def joined(operand: Operand | SeparateOperands) -> Operand:
    """Itself, in one piece of memory."""
    if isinstance(operand, SeparateOperands):
        return operand.joined()
    return _unstacked(operand) if operand.codes.dim() == 3 else operand


def joined_for_dgrad(operand: Operand | SeparateOperands, dy: Operand) -> Operand:
    """Returns it in one piece of memory, and in the memory order that dgrad wants; ``dy``: what it multiplies."""
    if operand.codes.dim() == 3 and torch.compiler.is_compiling():
        copies: list[Any] = grouped.copied_after([each for each in operand[:3] if each is not None], dy.codes)
        operand = Operand(*copies, *[None] * (3 - len(copies)), *operand[3:])
    weight = joined(operand)
    codes = weight.codes
    in_order = not codes.is_cuda or codes.stride(1) != 1 or not backends.k_major(weight.format)
    return weight if in_order else with_rows_consecutive(weight)


# ---- several parameters as one weight ----


def of_all(experts: Sequence[Quantized], make: Callable[[list[Any]], Any]) -> Quantized:
    """Applies ``make`` to the operands in each place; one that fills both places still does."""
    first = experts[0]
    return first.map(lambda own: make([each[0 if own is first.rowwise else 1] for each in experts]))


def join_all(weights: Sequence[QuantizedTensor]) -> Quantized:
    """The operands of weights [N, K] that are alike as those of [G, N, K]: a copy."""
    return of_all([weight._operands for weight in weights], join)


def are_alike(weights: Sequence[Tensor]) -> bool:
    """Quantized weights [N, K] of one device, shape and dtype, with equal quantizers."""
    first = weights[0]
    return all(
        isinstance(each, QuantizedTensor)
        and each.holds_own_matrix
        and (each.quantizer, each.device, each.shape, each.dtype)
        == (first.quantizer, first.device, first.shape, first.dtype)  # type: ignore[attr-defined]
        for each in weights
    )


class JoinedWeights(NamedTuple):
    """Weights [N, K] that lie in the memory of one operand.

    Args:
        held: the operands of each, which are views.
        whole: that of all, [G, N, K].
    """

    held: tuple[Quantized, ...]
    whole: Quantized

    def holds(self, weights: Sequence[Tensor]) -> bool:
        """Whether the codes of ``weights`` are still there."""
        return all(getattr(each, "_operands", None) is own for each, own in zip(weights, self.held, strict=True))


class _QuantizedExperts(QuantizedTensor):
    """W [G, N, K] of separate quantized weights, for one call: whatever PyTorch makes of it is in high precision."""

    def _part(self, view: Tensor) -> None:
        return None


class _Gatherers(NamedTuple):
    """Gatherers of several weights."""

    each: Sequence[Gatherer]

    def fetch(self, *dims: int) -> None:
        for one in self.each:
            one.fetch(*dims)

    def fetch_for(self, quantizer: Quantizer, label: str) -> None:
        for one in self.each:
            one.fetch_for(quantizer, label)


class _Stacked(torch.autograd.Function):
    """Weights [N, K] as one [G, N, K], which ``make`` gives, with gradients to each."""

    @staticmethod
    def forward(ctx: Any, make: Callable[[], Tensor], *weights: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)  # where dW goes to main_grad there is none
        return make()

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        wanted = ctx.needs_input_grad[1:]
        if grad is None:
            return (None,) * (len(wanted) + 1)
        if all(wanted):
            return None, *grad.unbind()
        return None, *[own if need else None for own, need in zip(grad.unbind(), wanted, strict=True)]


def stack_weights(weights: Sequence[Any], joined: JoinedWeights | None) -> Tensor:
    """Weights [N, K] as one [G, N, K], with gradients to each.

    Nothing is copied where they are neighbours in memory, nor of quantized ones, which in a graph are their values.
    """
    if torch.compiler.is_compiling():
        return torch.stack(list(weights))
    if joined is not None and joined.holds(weights):
        make = partial(_quantized_as_one, weights, joined.whole)
    elif are_alike(weights):
        operands = of_all([weight._operands for weight in weights], SeparateOperands.of)
        make = partial(_quantized_as_one, weights, operands)
    elif _are_neighbours(weights):
        first = weights[0]
        make = partial(first.detach().as_strided, (len(weights), *first.shape), (first.numel(), *first.stride()))
    else:
        return torch.stack(list(weights))
    return apply(_Stacked, make, *weights)


def _quantized_as_one(weights: Sequence[QuantizedTensor], operands: Quantized) -> Tensor:
    first = weights[0]
    whole = _QuantizedExperts(operands, first.quantizer, (len(weights), *first.shape), first.dtype)
    gatherers = [each.gatherer for each in weights if each.gatherer is not None]
    whole.gatherer = _Gatherers(gatherers) if gatherers else None
    return whole


def _are_neighbours(weights: Sequence[Tensor]) -> bool:
    """Parameters in high precision that lie one after the other in one piece of memory."""
    first = weights[0]
    if type(first) is not nn.Parameter or len({*map(type, weights)}) > 1:
        return False
    begin, step = first.data_ptr(), first.numel() * first.element_size()
    pointers = [weight.data_ptr() for weight in weights]  # one thing of all at a time: a layer may have hundreds
    if pointers != [begin + i * step for i in range(len(weights))]:
        return False
    if not all([weight.is_contiguous() for weight in weights]) or len({weight.dtype for weight in weights}) > 1:
        return False
    return first.untyped_storage().data_ptr() == weights[-1].untyped_storage().data_ptr()


def join_weights(weights: Sequence[Any], joined: JoinedWeights | None) -> JoinedWeights | None:
    """Makes weights neighbours in memory, after something has made or moved each by itself.

    ``joined``: what this gave before; it is kept where they are quantized and have not moved. Weights without memory
    stay as they are, and those whose memory is shared or pinned, which other memory would not be.
    """
    if joined is not None and joined.holds(weights):
        return joined
    if any(weight.is_meta or is_dtensor(weight) for weight in weights) or _are_neighbours(weights):
        return None
    if weights[0].is_cpu and any(weight.is_shared() or weight.is_pinned() for weight in weights):
        return None  # a tensor of a GPU calls itself shared, whoever has its memory
    if are_alike(weights):
        return _join_quantized(weights)
    if not any(isinstance(weight, QuantizedTensor) for weight in weights):
        with torch.no_grad():
            whole = torch.stack([weight.detach() for weight in weights])
            for weight, own in zip(weights, whole.unbind(), strict=True):
                weight.data = own
    return None


def _join_quantized(weights: Sequence[QuantizedTensor]) -> JoinedWeights | None:
    if any(each.gatherer is not None for each in weights):
        return None
    with torch.inference_mode(False), torch.no_grad():
        whole = join_all(weights)
        held = [weight.operands for weight in weights]
        row, column = (parts(of, [own[i] for own in held]) for i, of in enumerate(whole))
        for weight, *slots in zip(weights, row, row if whole.columnwise is whole.rowwise else column, strict=True):
            initial = weight.get_high_precision_init_val()
            weight._operands = Quantized(*slots)
            weight._wholes = tuple(operand_ops.buffers(whole).values())  # a write to one is a write to all
            if initial is not None:
                weight.set_high_precision_init_val(initial)
    return JoinedWeights(tuple([weight._operands for weight in weights]), whole)
