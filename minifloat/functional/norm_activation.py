"""Norms and activations: under autograd, and as outputs that are cast, by their kernel or afterwards.

A value comes first (``norm_value``, ``act_value``), so that ranks may reduce amaxes before its cast; under current
scaling the kernel that computes it finds them. Under delayed scaling and in blocks that kernel casts too, and the value
is never in memory; NVFP4 needs an amax of all of it. Codes are always those of a cast of the value: the fp32 result
under delayed scaling, else rounded to the dtype of the input (``docs/numerics.md`` 3.3 and 3.4).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minifloat import backends
from minifloat.comm.group import cached
from minifloat.formats import COLUMNWISE, ROWWISE, Format
from minifloat.functional.autograd import apply, as_output, first_order, guarded
from minifloat.operand import Quantized
from minifloat.ops import activation, norm
from minifloat.ops.quantize import casts_blocks
from minifloat.quantizer import Amaxes, Quantizer, as_matrix


class _Facts(NamedTuple):
    """Number of a quantizer's casts, what the functions below say of them, and the format if all have one."""

    casts: int
    fp32: bool
    one_amax: bool
    alike: Format | None


@cached
def _facts(quantizer: Quantizer) -> _Facts:
    formats = [fmt for fmt, _ in quantizer.casts]
    single = len(formats) > 0 and not quantizer.chained
    return _Facts(
        len(formats),
        single and all(fmt.scale_rule == "given" for fmt in formats),
        len(formats) > 0 and all(fmt.needs_amax and not fmt.grid for fmt in formats),
        formats[0] if single and formats[0] == formats[-1] else None,
    )


def reads_fp32(quantizer: Quantizer) -> bool:
    """Whether the fused cast reads the fp32 result: delayed scaling in each orientation that is wanted."""
    return _facts(quantizer).fp32


def measures_amax(quantizer: Quantizer) -> bool:
    """Whether its casts need one amax of the value alone, which the kernel that computes it can find."""
    return _facts(quantizer).one_amax


def one_format(quantizer: Quantizer) -> Format | None:
    """Returns the format of all casts, if they have one and none reads another's values."""
    return _facts(quantizer).alike


class OutputCast:
    """Cast of the output of a norm or an activation: by the kernel that computes it (``in_kernel``), or afterwards.

    Args:
        x: [..., K], the input, or the tensor whose gradient is the output.
        quantizer: of the operand to come; it decides whether the value is rounded.
        scale: that of delayed scaling, fp32 [1]: with it the kernel casts too, and gives no value.
        fused: so it does for blocks that need no amax but their own. Not where ranks that share a block reduce it.
        return_value: the value is read too, so it is rounded to the dtype of ``x`` whatever the quantizer.
        half: the columns of each half of an output that is rounded before its cast; blocks must not straddle them.
    """

    def __init__(
        self, x: Tensor, quantizer: Quantizer, *, scale: Tensor | None = None, fused: bool = False,
        return_value: bool = False, half: int | None = None,
    ) -> None:  # fmt: skip
        facts = self.facts = _facts(quantizer)
        fp32 = facts.fp32 and not return_value
        self.x, self.matrix, self.quantizer = x, as_matrix(x), quantizer
        self.scale = scale if fp32 and facts.casts == 1 else None
        fmt = facts.alike if fused and not return_value else None
        blocks = fmt is not None and casts_blocks(fmt) and (half or 0) % fmt.block == 0
        self.in_kernel = self.scale is not None or blocks
        self.dtype = torch.float32 if fp32 and half is None else x.dtype
        self.layouts = quantizer.layouts(x.device.type) if self.in_kernel else ()

    @property
    def arguments(self) -> tuple[Any, ...]:
        """Arguments of the operation: scale, format, whether codes are wanted along rows and columns, and k-major.

        Of the operation that gives the value: dtype, and whether to measure the amax.
        """
        if not self.in_kernel:
            return self.dtype, self.facts.one_amax
        dims = [dim for _, dim in self.layouts]
        fmt = self.layouts[0][0]
        k_major = self.scale is not None or (self.x.device.type == "cuda" and backends.k_major(fmt))
        return self.scale, fmt.spec, ROWWISE in dims, COLUMNWISE in dims, k_major

    def output(self, outputs: Sequence[Tensor], shape: Sequence[int], **others: Any) -> FusedOutput:
        """Makes the output of ``shape`` from those of the operation: ``ops.quantize.FusedCodes``, or value and amax."""
        if not self.in_kernel:
            value, amax = outputs
            amaxes = (amax,) * self.facts.casts if self.facts.one_amax else None
            return FusedOutput(as_output(value, shape), self.x.dtype, amaxes=amaxes, **others)
        row_codes, column_codes, row_scales, column_scales, amax = outputs
        each: list[tuple[Tensor, Tensor, Tensor | None, Tensor | None]] = []
        for _, dim in self.layouts:
            codes, scales = (row_codes, row_scales) if dim == ROWWISE else (column_codes, column_scales)
            each.append((codes, scales, None, None) if self.scale is None else (codes, row_scales, amax, self.scale))
        operand_layout, matrix = self.quantizer.operand_layout(self.layouts), (self.matrix.shape[0], shape[-1])
        quantized = operand_layout.operands(iter(each), matrix, self.x.dtype)
        return FusedOutput(None, self.x.dtype, quantized=quantized, **others)


class FusedOutput(NamedTuple):
    """Output of a norm or an activation: values, or codes where its kernel also casts.

    Args:
        value: [..., K], what the cast reads: fp32, or the dtype of the input. None if the cast was fused.
        dtype: that of the input, in which its operands stand for values.
        saved: what the backward needs besides the inputs: mean and rsigma of a norm, fp32 [M] each.
        amaxes: those that the cast needs, where the kernel that computed the value found them.
        quantized: its operands, if the cast was fused.
        column_sum: the sum of the value over its rows, [K], if it was asked for: the gradient of a bias.
        stream: what a norm was of, [..., K]: its input, to which a residual may have been added.
    """

    value: Tensor | None
    dtype: torch.dtype
    saved: tuple[Tensor, ...] = ()
    amaxes: Amaxes | None = None
    quantized: Quantized | None = None
    column_sum: Tensor | None = None
    stream: Tensor | None = None

    def cast(self, quantizer: Quantizer, amaxes: Amaxes | None = None, rng: Tensor | None = None) -> Quantized:
        """Quantizes the value for a GEMM; the arguments are those of :meth:`Quantizer.cast`."""
        if self.quantized is not None:
            return self.quantized
        assert self.value is not None
        amaxes = self.amaxes if amaxes is None else amaxes
        return self.label(quantizer.cast(self.value, amaxes, rng, gemm_ready=True))

    def label(self, quantized: Quantized) -> Quantized:
        """Makes operands of the value, wherever they were cast, stand for values in the dtype of the input."""
        if quantized.rowwise is not None and quantized.rowwise.dtype == self.dtype:
            return quantized
        return quantized.map(lambda operand: operand._replace(dtype=self.dtype))


# ---- norms ----


DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Norm:
    """Kind of norm, as a value of a call.

    Args:
        normalization: ``"LayerNorm"`` or ``"RMSNorm"``.
        eps: added to the variance.
        zero_centered_gamma: scale by ``1 + gamma``.
    """

    normalization: str = "LayerNorm"
    eps: float = 1e-5
    zero_centered_gamma: bool = False

    text: str = field(init=False, repr=False, compare=False)
    has_mean: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        norm.check_name(self.normalization)
        object.__setattr__(self, "has_mean", self.normalization == "LayerNorm")
        # Spelled here: in traced code a number of a module may be a symbol.
        object.__setattr__(self, "text", f"{self.normalization}:{self.eps!r}:{int(self.zero_centered_gamma)}")

    @classmethod
    def of_text(cls, text: str) -> Norm:
        """Reads ``text``."""
        name, eps, centered = text.split(":")
        return cls(name, float(eps), centered == "1")

    def gradients(
        self, dy: Tensor, x: Tensor, gamma: Tensor, saved: tuple[Tensor, ...], dresidual: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Computes dx like ``x``, dgamma and dbeta (None for RMSNorm) like gamma, in fp32.

        Args:
            dy: [..., K], any float dtype.
            saved: :attr:`FusedOutput.saved`.
            dresidual: another gradient of ``x``, added to dx before its one rounding.
        """
        mean, rsigma = saved
        mean = rsigma[:0] if mean is None else mean
        other = None if dresidual is None else as_matrix(dresidual)
        dx, dgamma, dbeta = norm.norm_backward(
            as_matrix(dy), as_matrix(x), gamma, mean, rsigma, self.normalization, self.zero_centered_gamma, other
        )
        return as_output(dx, x.shape), dgamma, dbeta if self.normalization == "LayerNorm" else None


def normalize(x: Tensor, gamma: Tensor, beta: Tensor | None, of: Norm) -> Tensor:
    """Computes ``norm(x)`` over the last dim, in fp32 and rounded once to the dtype of ``x``.

    Args:
        x: [..., K], bf16, fp16 or fp32.
        gamma, beta: [K], any float dtype; RMSNorm has no beta.

    Raises:
        ValueError: another dtype, or parameters that do not fit ``x``.
    """
    if x.dtype not in DTYPES:
        raise ValueError(f"{of.normalization} of {x.dtype}; bf16, fp16 and fp32 are supported: use x.float()")
    return apply(NormFunction, x, gamma, beta, of)


class NormFunction(torch.autograd.Function):
    """Computes a norm. Keeps ``x`` as it came, gamma, and mean and rsigma, fp32 [M] each."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gamma: Tensor, beta: Tensor | None, of: Norm) -> Tensor:
        y, *saved, _, _ = norm.norm_forward(
            x.reshape(-1, x.shape[-1]), gamma, beta, of.normalization, of.eps, of.zero_centered_gamma, x.dtype, False
        )
        ctx.save_for_backward(guarded(x), gamma, *saved)
        ctx.of = of
        return as_output(y, x.shape)

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, gamma, *saved = ctx.saved_tensors
        dx, dgamma, dbeta = ctx.of.gradients(dy, x, gamma, tuple(saved))
        return dx, dgamma, dbeta if ctx.needs_input_grad[2] else None, None


def norm_value(
    x: Tensor, gamma: Tensor, beta: Tensor | None, of: Norm, quantizer: Quantizer, *, residual: Tensor | None = None,
    **cast_options: Any,
) -> FusedOutput:  # fmt: skip
    """Computes LayerNorm or RMSNorm of ``x``, or of ``x + residual``, to be cast with ``quantizer``.

    Args:
        x: [..., K], bf16, fp16 or fp32.
        gamma, beta: [K], any float dtype; RMSNorm has no beta.
        residual: [..., K] in the dtype of ``x``; the sum, rounded to it, is :attr:`FusedOutput.stream`.
        cast_options: those of :class:`OutputCast`.

    Raises:
        TypeError, ValueError: ``x`` cannot be quantized (see ``cast_all``), or the parameters do not fit it.
    """
    cast = OutputCast(x, quantizer, **cast_options)
    options = gamma, beta, of.normalization, of.eps, of.zero_centered_gamma, *cast.arguments
    added = None if residual is None else as_matrix(residual)
    if cast.in_kernel:
        *outputs, mean, rsigma, total = norm.norm_cast(cast.matrix, *options, added)
    else:
        y, mean, rsigma, amax, total = norm.norm_forward(cast.matrix, *options, added)
        outputs = [y, amax]
    stream = x if residual is None else as_output(total, x.shape)
    return cast.output(outputs, x.shape, saved=(mean, rsigma), stream=stream)


# ---- activations ----


@dataclass(frozen=True)
class Activation:
    """Kind of activation, as a value of a call: one of ``ops.activation.NAMES``, and its parameters if it has any."""

    name: str
    parameters: tuple[float, ...] = ()
    text: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if len(self.parameters) != len(defaults := activation.parameters_of(self.name)):
            raise ValueError(
                f"{self.name} has {len(defaults)} parameters, got {len(self.parameters)}; use Activation.of"
            )
        object.__setattr__(self, "text", ":".join([self.name, *map(repr, self.parameters)]))  # as of a norm

    @classmethod
    def of(cls, name: str, params: Mapping[str, float] | None = None) -> Activation:
        """Takes ``params`` by name, the rest by default: ``limit``, ``alpha``, ``glu_linear_offset`` of clamped_swiglu.

        Raises:
            ValueError: there is no such activation, or it has no such parameter.
        """
        return cls(name, activation.parameters_of(name, params))

    @classmethod
    def of_text(cls, text: str) -> Activation:
        """Reads ``text``."""
        name, *parameters = text.split(":")
        return cls(name, tuple(map(float, parameters)))

    @property
    def gated(self) -> bool:
        """Whether its output is half as wide as its input."""
        return activation.gated(self.name)


def activate(x: Tensor, of: Activation, probabilities: Tensor | None = None, offsets: Tensor | None = None) -> Tensor:
    """Computes the activation of ``x`` [..., K], [..., K / 2] if gated, in fp32, rounded once to the dtype of ``x``.

    Args:
        probabilities: fp32 [M], factors of the rows of groups.
        offsets: of the groups, see :class:`~minifloat.Operand`; rows that are no group's are 0.

    Raises:
        TypeError, ValueError: ``x`` is not bf16, fp16 or fp32, or of odd width and the activation is gated.
    """
    return apply(ActivationFunction, x, of, probabilities, offsets)


VALUES: tuple[Any, ...] = (), (), ()
"""No formats, dims and memory orders: an operation on groups gives values, not casts."""


class ActivationFunction(torch.autograd.Function):
    """Y = p act(X), dX = act'(X) p dY and dp = the sum of act(X) dY over a row; p is 1 but of groups. Keeps X and p."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, of: Activation, probabilities: Tensor | None, offsets: Tensor | None) -> Tensor:
        how, matrix = (of.name, of.parameters), as_matrix(x)
        if offsets is None:
            y, _ = activation.activation_forward(matrix, *how, x.dtype, False)
        else:
            y, _ = activation.grouped_activation(matrix, probabilities, offsets, None, *how, False, *VALUES)
        ctx.save_for_backward(guarded(x), None if probabilities is None else guarded(probabilities), offsets)
        ctx.of = of
        return as_output(y, (*x.shape[:-1], y.shape[-1]))

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, probabilities, offsets = ctx.saved_tensors
        matrix, how, dy = as_matrix(x), (ctx.of.name, ctx.of.parameters), as_matrix(dy)
        if offsets is None:
            dx, _, dp = activation.activation_backward(dy, matrix, *how, matrix.dtype, False, False)
        else:
            how = probabilities, offsets, None, *how, False, *VALUES
            dx, _, dp = activation.grouped_activation_backward(dy, matrix, *how)
        return as_output(dx, x.shape), None, None if probabilities is None else dp, None


def act_value(x: Tensor, of: Activation, quantizer: Quantizer, **cast_options: Any) -> FusedOutput:
    """Computes an activation of ``x`` [..., K], to be cast with ``quantizer``: [..., K], or [..., K / 2] if gated.

    Other arguments and errors as in :func:`norm_value`.
    """
    cast = OutputCast(x, quantizer, **cast_options)
    forward = activation.activation_cast if cast.in_kernel else activation.activation_forward
    outputs = forward(cast.matrix, of.name, of.parameters, *cast.arguments)
    return cast.output(outputs, (*x.shape[:-1], activation.out_columns(of.name, x.shape[-1])))


def dact_value(
    dy: Tensor, x: Tensor, of: Activation, quantizer: Quantizer, *, with_column_sum: bool = False, **cast_options: Any
) -> FusedOutput:
    """Computes the gradient of an activation's input ``x`` [..., K], to be cast with ``quantizer``.

    Delayed scaling reads the fp32 result of plain activations only; that of a gated one is rounded first. The cast of
    blocks that straddle its two halves is not fused. ``with_column_sum``: give :attr:`FusedOutput.column_sum` too.
    Other arguments and errors as in :func:`norm_value`.
    """
    cast = OutputCast(x, quantizer, half=x.shape[-1] // 2 if of.gated else None, **cast_options)
    backward = activation.activation_backward_cast if cast.in_kernel else activation.activation_backward
    *outputs, total = backward(as_matrix(dy), cast.matrix, of.name, of.parameters, *cast.arguments, with_column_sum)
    return cast.output(outputs, x.shape, column_sum=total.to(cast.dtype) if with_column_sum else None)
