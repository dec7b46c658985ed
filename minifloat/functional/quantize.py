"""Quantizes the tensors of a linear's call as its recipe says, in one launch a phase, delayed scaling included."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from minifloat import backends
from minifloat.autocast import DelayedCall
from minifloat.comm.group import Group
from minifloat.formats import COLUMNWISE, IDENTITY, ROWWISE, Format, parse
from minifloat.operand import Operand, Quantized
from minifloat.ops import delayed
from minifloat.quantizer import Amaxes, Quantizer, as_matrix, cast_all, casts, find_amaxes
from minifloat.recipe import DelayedScaling, QuantizerRole, Recipe
from minifloat.recipe.base import BackwardOverride
from minifloat.tensor import QuantizedTensor

Mode = Literal["column", "row"]
"""Split of a linear over ranks: columns of Y and rows of W, or columns of X and W, which the products contract."""

FORWARD_SLOTS = ("input", "weight", "output")
BACKWARD_SLOTS = ("grad_output", "grad_input")


@dataclass(frozen=True)
class LinearConfig:
    """Configuration of one linear layer under one recipe.

    Args:
        input, weight, output, grad_output, grad_input: how each tensor is quantized.
        delayed: the recipe of the amax histories, where some tensor has one.
        fast_fprop, fast_dgrad, fast_wgrad: accumulate without moving partial sums to fp32 registers (Hopper).
        backward_override: None, or what the unquantized backward computes on.
        save_original_input: keep the input as it came for backward, and quantize it again there.
    """

    input: Quantizer
    weight: Quantizer
    output: Quantizer
    grad_output: Quantizer
    grad_input: Quantizer
    delayed: DelayedScaling | None
    fast_fprop: bool
    fast_dgrad: bool
    fast_wgrad: bool
    backward_override: BackwardOverride
    save_original_input: bool

    @property
    def text(self) -> str:
        """Spells what decides on the passes of the layer; :meth:`of_text` reads it."""
        parts = []
        for kind in FORWARD_SLOTS + BACKWARD_SLOTS:
            quantizer: Quantizer = getattr(self, kind)
            row, column = quantizer.row_format.spec, quantizer.format(COLUMNWISE).spec
            parts.append(f"{row}&{column}&{quantizer.columnwise_source}")
        flags = (self.fast_fprop, self.fast_dgrad, self.fast_wgrad, self.save_original_input, self.delayed is not None)
        return f"{';'.join(parts)};{''.join(['1' if flag else '0' for flag in flags])};{self.backward_override}"

    @classmethod
    def of_text(cls, text: str) -> LinearConfig:
        """Reads :attr:`text`; delayed scaling's recipe is a default one, since passes read and record alike."""
        *roles, flags, override = text.split(";")
        config: list[Any] = []
        for role in roles:
            row, column, source = role.split("&")
            columns = None if row == column else parse(column)
            config.append(Quantizer(parse(row), columns, columnwise_source=source))  # type: ignore[arg-type]
        *fast, original, delayed = [flag == "1" for flag in flags]
        config += DelayedScaling() if delayed else None, *fast, None if override == "None" else override, original
        return cls(*config)

    def describe(self) -> str:
        """Describes what decides on numbers, in words that are the same on all ranks."""
        parts = []
        for kind in FORWARD_SLOTS + BACKWARD_SLOTS:
            quantizer: Quantizer = getattr(self, kind)
            row, column = quantizer.row_format.spec, quantizer.format(COLUMNWISE).spec
            source = " cast from the rowwise one" * (quantizer.columnwise_source != "original")
            parts.append(f"{kind} {row}" + f" and {column}" * (row != column or bool(source)) + source)
        if self.delayed is not None:
            parts.append(f"{self.delayed.amax_history_len} steps by {self.delayed.rules[0]}")
        return ", ".join([*parts, f"backward_override={self.backward_override}"])


def linear_config(recipe: Recipe, name: str = "", save_original_input: bool = False) -> LinearConfig:
    """Makes the configuration of a layer called ``name``. A custom recipe's factory is called here, once a role.

    Raises:
        ValueError: a custom recipe asks for delayed scaling with different parameters in one layer, or rotates one
            operand of wgrad alone.
    """
    quantizers: dict[str, Quantizer] = {}
    delayed: DelayedScaling | None = None
    for kind in FORWARD_SLOTS + BACKWARD_SLOTS:
        role = QuantizerRole("linear", kind, name)
        quantizer, wanted = recipe.resolve(role)
        quantizers[kind] = quantizer
        # With "is not": PyTorch 2.11 does not trace "!=" of callables that are made in a graph.
        if wanted is not None and delayed is not None and wanted is not delayed and wanted != delayed:
            raise ValueError(
                f"layer {name or 'linear'!r}: its tensors ask for delayed scaling with different parameters, "
                f"{delayed} and {wanted}; they share one history, so they must agree"
            )
        delayed = wanted or delayed
    x, dy = (quantizers[kind].format(COLUMNWISE) for kind in ("input", "grad_output"))
    if x.transform != dy.transform and recipe.backward_override is None:
        raise ValueError(
            f"layer {name or 'linear'!r}: wgrad multiplies {dy.spec} of grad_output with {x.spec} of input, and a "
            "rotation cancels only if both have it; give both operands of wgrad the transform, or neither"
        )
    return LinearConfig(
        **quantizers,
        delayed=delayed,
        fast_fprop=not recipe.fp8_gemm_fprop.use_split_accumulator,
        fast_dgrad=not recipe.fp8_gemm_dgrad.use_split_accumulator,
        fast_wgrad=not recipe.fp8_gemm_wgrad.use_split_accumulator,
        backward_override=recipe.backward_override,
        save_original_input=save_original_input,
    )


class Ranks(NamedTuple):
    """Part of an exchange that a spec depends on.

    Args:
        mode, sequence_parallel: which of the five exchanges.
        group: the ranks.
    """

    mode: Mode
    sequence_parallel: bool
    group: Group


class Options(NamedTuple):
    """Options of a call beside its recipe: the key under which the layer finds its ``Spec``.

    Args:
        device: type of the device.
        dtype, weight_dtype: of the activations, what the output and both gradients are computed to; of the parameter.
        needs_x, needs_w, needs_b: whether input, weight and bias need gradients.
        ranks: that share the linear; None: one does it all.
        input_is_quantized: X comes quantized and is its own original: nothing else is kept of it.
        recompute_x: backward recomputes the operand of X that wgrad reads, from what the norm or activation that
            computed X saves. Only where dX is needed, backward is quantized, and no rank gathers X.
        quantize_output, quantize_grad_input: return those as :class:`QuantizedTensor`.
        batch_invariant: a row of fprop's result depends on no other row.
        gathers_weight: ranks with other data share the rows of the weight (``functional/etp``).
        delays_wgrad: backward leaves the computation of dW for later.
    """

    device: str
    dtype: torch.dtype
    weight_dtype: torch.dtype
    needs_x: bool
    needs_w: bool
    needs_b: bool
    ranks: Ranks | None = None
    input_is_quantized: bool = False
    recompute_x: bool = False
    quantize_output: bool = False
    quantize_grad_input: bool = False
    batch_invariant: bool = False
    gathers_weight: bool = False
    delays_wgrad: bool = False


class RoleCasts:
    """Casts the tensors that a layer knows as ``kinds`` (``"input"``, ``"weight"``, ...), for its GEMMs on a device.

    A delayed scale is read from the layer's history (that of the input may be given), and the amax that the cast
    measured is recorded there. A spec keeps some of these: what their casts launch is recorded in them. ``emit_bf16``:
    see :class:`~minifloat.casts.Casts`, in eager code.
    """

    needs_values = False
    """Whether these must get the values that they cast, and no kernel may compute and cast them at once."""

    def __init__(
        self, quantizers: Sequence[Quantizer], kinds: Sequence[str], gemm_ready_on: str, emit_bf16: tuple[int, ...] = ()
    ) -> None:
        self.quantizers, self.kinds, self.gemm_ready = quantizers, kinds, gemm_ready_on != ""
        self.prepared = casts(quantizers, gemm_ready_on, emit_bf16)
        self.casts = None if torch.compiler.is_compiling() else self.prepared

    def __call__(
        self, xs: Sequence[Tensor], delayed_call: DelayedCall | None, input_scale: Tensor | None = None,
        amaxes: Sequence[Amaxes | None] | None = None, noop_flag: Tensor | None = None,
    ) -> list[Quantized]:  # fmt: skip
        """Makes the operands of ``xs``; ``amaxes``: those of each tensor, None where they are still to be found.

        ``noop_flag``: as of :func:`cast_all`. An amax that delayed scaling records is then 0.
        """
        scales = None if delayed_call is None else [delayed_scale(delayed_call, kind) for kind in self.kinds]
        if scales is not None and input_scale is not None:
            scales[self.kinds.index("input")] = input_scale
        if self.casts is not None:
            results = self.casts(xs, amaxes, scales=scales, noop_flag=noop_flag)
        else:  # each by itself: under a compiler siblings' casts of one input are common subexpressions
            known, given = amaxes or [None] * len(xs), scales or [None] * len(xs)
            results = [
                cast_with(x, quantizer, scale, levels, gemm_ready=self.gemm_ready)
                for x, quantizer, scale, levels in zip(xs, self.quantizers, given, known, strict=True)
            ]
        if delayed_call is not None:
            record_all(delayed_call, self.kinds, results)
        return results

    def like(self, quantizer: Quantizer, gemm_ready_on: str) -> RoleCasts:
        """Makes the cast of one tensor of the same kind."""
        return RoleCasts([quantizer], self.kinds, gemm_ready_on)

    def of_groups(
        self, x: Tensor, offsets: Tensor, delayed_call: DelayedCall | None, scales: Tensor | None = None, **known: Any
    ) -> Quantized:
        """Makes the operands of the one ``x`` [..., K], each group of its rows by itself.

        ``scales``: fp32 [G] of delayed scaling, if not those of its history; others as of :meth:`Casts.of_groups`.
        """
        made = self.prepared.of_groups(x, offsets, self.group_scales(delayed_call, scales), **known)
        if delayed_call is not None:
            record_all(delayed_call, self.kinds, [made])
        return made

    def group_scales(self, delayed_call: DelayedCall | None, known: Tensor | None = None) -> Tensor | None:
        """Returns the scales of delayed scaling, fp32 [G], or those ``known``; None if no cast takes them."""
        if not self.prepared.takes_scales:
            return None
        return delayed_scale(delayed_call, self.kinds[0]) if known is None else known


def quantize(
    x: Tensor, quantizer: Quantizer, kind: str, delayed_call: DelayedCall | None, *, gemm_ready: bool = True,
    noop_flag: Tensor | None = None,
) -> Quantized:  # fmt: skip
    """Makes the operands of one tensor, as :class:`RoleCasts` makes them; of a quantized one, of its values."""
    x = x.dequantize() if isinstance(x, QuantizedTensor) else x
    cast = RoleCasts([quantizer], [kind], x.device.type if gemm_ready else "")
    return cast([x], delayed_call, noop_flag=noop_flag)[0]


def values_of(x: Tensor, offsets: Tensor | None = None) -> Operand:
    """``x`` [..., K] in high precision as an operand."""
    matrix = as_matrix(x.dequantize() if isinstance(x, QuantizedTensor) else x)
    return Operand(matrix, None, None, IDENTITY, ROWWISE, (matrix.shape[0], matrix.shape[1]), matrix.dtype, offsets)


def cast_with(
    x: Tensor, quantizer: Quantizer, scale: Tensor | None, amaxes: Amaxes | None = None, *, gemm_ready: bool = True
) -> Quantized:
    """Quantizes ``x`` for a GEMM where delayed scaling casts with ``scale``, recording nothing."""
    known = None if amaxes is None else [amaxes]
    return cast_all([x], [quantizer], known, scales=[scale], gemm_ready=gemm_ready)[0]


_KINDS = FORWARD_SLOTS, BACKWARD_SLOTS
_SLOTS = {kind: (direction, slot) for direction, kinds in enumerate(_KINDS) for slot, kind in enumerate(kinds)}
"""Direction (0 forward, 1 backward) and index in its histories."""


def delayed_scale(delayed_call: DelayedCall | None, kind: str, keep: bool = False) -> Tensor | None:
    """Returns the layer's scales for ``kind``, fp32, one for each group; ``keep``: the next update leaves them."""
    if delayed_call is None:
        return None
    direction, slot = _SLOTS[kind]
    if direction:
        delayed_call.backward_begins()
    history = delayed_call.histories[direction]
    groups = history.scale.shape[0] // len(_KINDS[direction])
    if groups != 1:
        scales = history.scale[slot * groups : (slot + 1) * groups]
        return scales.clone() if keep else scales
    if keep:
        return delayed.read_scale(history.scale, slot)
    return history.scale[slot : slot + 1]


def record_all(delayed_call: DelayedCall, kinds: Sequence[str], results: Sequence[Quantized]) -> None:
    """Records the amaxes that delayed casts measured of tensors of one direction, if at all, in one launch."""
    slots, amaxes, direction = [], [], 0
    for kind, result in zip(kinds, results, strict=True):
        direction, slot = _SLOTS[kind]
        for operand in result if delayed_call.records[direction] else ():
            if operand is not None and operand.format.scale_rule == "given" and operand.amax is not None:
                slots.append(slot)
                amaxes.append(operand.amax)
                break
    if slots and delayed_call.histories[direction].scale.shape[0] != len(_KINDS[direction]):
        record_groups(delayed_call, kinds[0], amaxes)
    elif slots:
        forward_in_graph = direction == 0 and delayed_call.compiling
        record = delayed.record_forward_amax_ if forward_in_graph else delayed.record_amax_
        record(delayed_call.histories[direction].amax_history, slots, amaxes)


def record_groups(delayed_call: DelayedCall, kind: str, amaxes: Sequence[Tensor]) -> None:
    """Records the amaxes of groups, fp32 [G] each, that a delayed cast measured of ``kind``, but infinity and NaN."""
    direction, slot = _SLOTS[kind]
    newest = delayed_call.histories[direction].amax_history[0]
    groups = newest.shape[0] // len(_KINDS[direction])
    if delayed_call.compiling and direction == 0 and delayed_call.records[0]:  # which looks for a checkpoint
        delayed.record_forward_amax_(delayed_call.histories[0].amax_history, [], [])
    for amax in amaxes if delayed_call.records[direction] else ():
        own = newest[slot * groups : (slot + 1) * groups]
        with torch.no_grad():
            own.copy_(torch.maximum(own, amax.nan_to_num(0.0, 0.0, 0.0)))


def calibrate(xs: Sequence[Tensor], kinds: Sequence[str], delayed_call: DelayedCall) -> None:
    """Records the amaxes of tensors that are computed with in high precision."""
    amaxes = find_amaxes(xs, [Quantizer(Format())] * len(xs))
    for levels, kind in zip(amaxes, kinds, strict=True):
        direction, slot = _SLOTS[kind]
        assert levels[0] is not None
        delayed.record_amax_(delayed_call.histories[direction].amax_history, [slot], [levels[0]])


def as_quantized_tensor(x: Tensor, quantizer: Quantizer, kind: str, delayed_call: DelayedCall | None) -> Tensor:
    """``x`` as a tensor that the next layer takes as it is."""
    if not quantizer.quantized:
        return x
    operands = quantize(x.detach(), quantizer, kind, delayed_call, gemm_ready=False)
    scale = delayed_scale(delayed_call, kind)
    scale = None if scale is None else scale.clone()
    return QuantizedTensor.from_operands(operands, quantizer, x.shape, x.dtype, scale=scale)


def reuse(x: Tensor, quantizer: Quantizer) -> Quantized | None:
    """Returns the operands of a quantized tensor if they are what ``quantizer`` would give, else None."""
    fits = isinstance(x, QuantizedTensor) and x.holds_own_matrix and holds(x.operands, quantizer)
    return x.operands if fits else None  # type: ignore[attr-defined]


def holds(operands: Quantized, quantizer: Quantizer) -> bool:
    """Whether there are operands of the formats of ``quantizer`` for the dims that it wants."""
    for dim, wanted in ((ROWWISE, quantizer.rowwise), (COLUMNWISE, quantizer.columnwise)):
        if wanted and not any(o is not None and o.serves(dim) and o.format == quantizer.format(dim) for o in operands):
            return False
    return True


def pairs_with(w: Quantized, config: LinearConfig, dgrad: bool) -> bool:
    """Whether the GEMMs of a layer take this weight, whatever its recipe would make of it, on every device.

    Codes of equal width, scales that span equally many elements, no rotation; or MXFP4 by FP8 in strips of 128, which
    is the same. Everything else would be computed at the speed of the reference where a fresh cast has a GEMM.
    """
    others = [(ROWWISE, config.input.format(ROWWISE))]
    if dgrad and config.backward_override is None:
        others.append((COLUMNWISE, config.grad_output.format(ROWWISE)))
    for dim, other in others:
        held = [o.format for o in w if o is not None and o.serves(dim)]
        if not any(
            backends.folds(other, mine)
            or (mine.block, mine.grid, mine.packed, mine.transform)
            == (other.block, other.grid, other.packed, other.transform)
            for mine in held
            if mine.quantized and other.quantized
        ):
            return False
    return True
