"""Activations, forward and backward: the definition in plain PyTorch, and ``torch.library`` operations in fp32."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minifloat.formats import ROWWISE, Format, parse
from minifloat.ops import grouped
from minifloat.ops.library import operation
from minifloat.ops.quantize import empty_fused_cast, fused_cast
from minifloat.ops.quantize import reference as quantize


class Pointwise(NamedTuple):
    """A function of one number and its derivative."""

    function: Callable[[Tensor], Tensor]
    derivative: Callable[[Tensor], Tensor]


def _gelu(x: Tensor) -> Tensor:
    """The tanh form of Hendrycks and Gimpel (2016): sqrt(2 / pi) (x + 0.044715 x^3) inside."""
    return x * (0.5 + 0.5 * torch.tanh(x * (0.79788456 + 0.03567741 * x * x)))


def _gelu_derivative(x: Tensor) -> Tensor:
    # Beyond 10 the derivative is 0 or 1 to the last bit, but x * x may overflow, and 0 * inf is not 0.
    x = x.clamp(-10, 10)
    t = torch.tanh(x * (0.79788456 + 0.03567741 * x * x))
    return 0.5 * x * (1 - t * t) * (0.79788456 + 3 * 0.03567741 * x * x) + 0.5 * (1 + t)


def swish(slope: float) -> Pointwise:
    """``x * sigmoid(slope * x)``: silu with 1, qgelu with 1.702."""

    def derivative(x: Tensor) -> Tensor:
        s = (slope * x).sigmoid_()
        return (x * s).mul_(1 - s).mul_(slope).add_(s)

    return Pointwise(lambda x: (slope * x).sigmoid_() * x, derivative)


def _sigmoid_derivative(x: Tensor) -> Tensor:
    s = torch.sigmoid(x)
    return s * (1 - s)


POINTWISE: dict[str, Pointwise] = {
    "gelu": Pointwise(_gelu, _gelu_derivative),
    "qgelu": swish(1.702),
    "relu": Pointwise(torch.relu, lambda x: (x > 0).to(x.dtype)),
    "srelu": Pointwise(lambda x: torch.relu(x).square(), lambda x: 2 * torch.relu(x)),
    "silu": swish(1.0),
    "sigmoid": Pointwise(torch.sigmoid, _sigmoid_derivative),
}
GATES = {"geglu": "gelu", "qgeglu": "qgelu", "reglu": "relu", "sreglu": "srelu", "swiglu": "silu", "glu": "sigmoid"}
"""Gated activations, ``function(first half) * second half`` of the last dim, by the function of their gate."""

CLAMPED = "clamped_swiglu"
"""The gate of gpt-oss: both halves are clamped, and the second is shifted."""

DEFAULTS: dict[str, dict[str, float]] = {CLAMPED: {"limit": 7.0, "alpha": 1.702, "glu_linear_offset": 1.0}}
"""Parameters of the activations that have any, in the order in which operations take them."""

NAMES = (*POINTWISE, *GATES, CLAMPED)


def gated(name: str) -> bool:
    """Whether it multiplies two halves of its input, so that its output is half as wide."""
    return name not in POINTWISE


def forward(x: Tensor, name: str, parameters: Sequence[float]) -> Tensor:
    """The activation of ``x`` [M, K]: [M, K], or [M, K / 2] if gated."""
    if name in POINTWISE:
        return POINTWISE[name].function(x)
    gate, a, b = _halves(x, name, parameters)
    return gate.function(a) * b


def backward(dy: Tensor, x: Tensor, name: str, parameters: Sequence[float]) -> Tensor:
    """The gradient with respect to ``x`` [M, K]; 0 where :data:`CLAMPED` clamps."""
    if name in POINTWISE:
        return dy * POINTWISE[name].derivative(x)
    gate, a, b = _halves(x, name, parameters)
    da, db = (dy * b).mul_(gate.derivative(a)), gate.function(a).mul_(dy)
    if name == CLAMPED:
        first, second = x.chunk(2, dim=-1)
        da = torch.where(first > parameters[0], 0.0, da)
        db = torch.where(second.abs() > parameters[0], 0.0, db)
    return torch.cat([da, db], dim=-1)


def _halves(x: Tensor, name: str, parameters: Sequence[float]) -> tuple[Pointwise, Tensor, Tensor]:
    """The gate's function, what it is applied to, and what its value multiplies."""
    a, b = x.chunk(2, dim=-1)
    if name != CLAMPED:
        return POINTWISE[GATES[name]], a, b
    limit, alpha, offset = parameters
    return swish(alpha), a.clamp(max=limit), b.clamp(-limit, limit) + offset


def check_name(name: str) -> None:
    """Raises ValueError if there is no such activation."""
    if name not in NAMES:
        raise ValueError(f"no activation is called {name!r}; there are {', '.join(NAMES)}")


def parameters_of(name: str, given: Mapping[str, float] | None = None) -> tuple[float, ...]:
    """The parameters of an activation as its operations take them: ``given`` ones, the rest by default.

    Raises:
        ValueError: no such activation, or it has no such parameter.
    """
    check_name(name)
    known = DEFAULTS.get(name, {})
    if unknown := sorted(set(given or {}) - set(known)):
        raise ValueError(f"{name} has no parameter {', '.join(unknown)}; it has {', '.join(known) or 'none'}")
    return tuple((known | dict(given or {})).values())


def out_columns(name: str, columns: int) -> int:
    """Columns that come out of ``columns``.

    Raises:
        ValueError: no such activation, or the two halves that it multiplies differ.
    """
    check_name(name)
    if not gated(name):
        return columns
    if columns % 2:
        raise ValueError(f"{name} multiplies two halves of the last dim, which is {columns}; it must be even")
    return columns // 2


@operation("activation.kernels:forward")
def activation_forward(
    x: Tensor, name: str, parameters: Sequence[float], dtype: torch.dtype, with_amax: bool
) -> tuple[Tensor, Tensor]:
    """The activation of ``x`` [M, K] in ``dtype``: [M, K], or [M, K / 2] if gated. Parameters: :func:`parameters_of`.

    The amax is that of the result after rounding, fp32 [1]; [0] if it was not asked for. NaNs are dropped.
    """
    out_columns(name, x.shape[-1])
    y = forward(x.float(), name, parameters).to(dtype).contiguous()
    return y, _amax(y, with_amax)


@operation("activation.kernels:cast")
def activation_cast(
    x: Tensor, name: str, parameters: Sequence[float], scale: Tensor | None, format: str, rowwise: bool,
    columnwise: bool, k_major: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The :class:`~minifloat.ops.quantize.FusedCodes` of the activation of ``x`` [M, K].

    With a ``scale``, fp32 [1], and a format of rule "given" the fp32 result is cast. Without one it is rounded to the
    dtype of ``x`` and cast in blocks, whose amaxes are their own: ``format`` is one of ``quantize.casts_blocks``.
    ``k_major`` is as in ``quantize.cast``.
    """
    out_columns(name, x.shape[-1])
    y = forward(x.float(), name, parameters)
    y = y.to(x.dtype) if scale is None else y
    return fused_cast(y, scale, parse(format), rowwise, columnwise, k_major)


@activation_cast.fake
def _(x: Tensor, name: str, _parameters: Any, _scale: Any, format: str, *wanted: bool) -> tuple[Tensor, ...]:
    return empty_fused_cast(x, out_columns(name, x.shape[-1]), parse(format), *wanted)


@operation("activation.kernels:backward")
def activation_backward(
    dy: Tensor, x: Tensor, name: str, parameters: Sequence[float], dtype: torch.dtype, with_amax: bool, with_bias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient with respect to ``x`` [M, K], in ``dtype``; its amax; and dbias.

    dbias is the sum of the rows of the gradient after rounding, in fp32: [K], or [0] if it was not asked for: the
    bias gradient of a linear that gave ``x``.
    """
    dx = _gradient(dy, x, name, parameters).to(dtype).contiguous()
    return dx, _amax(dx, with_amax), _column_sum(dx, with_bias)


@operation("activation.kernels:backward_cast")
def activation_backward_cast(
    dy: Tensor, x: Tensor, name: str, parameters: Sequence[float], scale: Tensor | None, format: str, rowwise: bool,
    columnwise: bool, k_major: bool, with_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradient with respect to ``x`` [M, K], cast as :func:`activation_cast` does, and dbias.

    With a given scale the cast reads the fp32 gradient of plain activations; that of a gated one is rounded to the
    dtype of ``x`` first (``docs/numerics.md`` 3.4). In blocks, each half of the K of a gated one must be whole blocks.
    The amax and dbias are those of what the cast reads.
    """
    dx = _gradient(dy, x, name, parameters)
    dx = dx.to(x.dtype) if scale is None or gated(name) else dx
    return *fused_cast(dx, scale, parse(format), rowwise, columnwise, k_major), _column_sum(dx, with_bias)


@activation_backward_cast.fake
def _(dy: Tensor, x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    *_, format, rowwise, columnwise, k_major, with_bias = rest
    out = empty_fused_cast(x, x.shape[1], parse(format), rowwise, columnwise, k_major)
    return *out, x.new_empty(x.shape[1] if with_bias else 0, dtype=torch.float32)


def _gradient(dy: Tensor, x: Tensor, name: str, parameters: Sequence[float]) -> Tensor:
    assert dy.shape == (x.shape[0], out_columns(name, x.shape[-1])), (dy.shape, name, x.shape)
    return backward(dy.float(), x.float(), name, parameters)


_TENSOR = Format()


def _amax(x: Tensor, wanted: bool) -> Tensor:
    return quantize.amax(x, _TENSOR, ROWWISE) if wanted else x.new_empty(0, dtype=torch.float32)


def _column_sum(dx: Tensor, wanted: bool) -> Tensor:
    return dx.float().sum(0) if wanted else dx.new_empty(0, dtype=torch.float32)


# ---- of groups of rows, times a probability for each row: what stands between the linears of experts ----


@operation("activation.kernels:forward_groups")
def grouped_activation(
    x: Tensor, probabilities: Tensor | None, offsets: Tensor, scales: Tensor | None, name: str,
    parameters: Sequence[float], with_amax: bool, formats: Sequence[str], dims: Sequence[int], k_major: Sequence[bool],
    chained: bool = False,
) -> list[Tensor]:  # fmt: skip
    """y [M, N] of ``x`` [M, N], or [M, 2 N] if the activation is gated, and its amaxes; or what ``grouped_cast`` gives.

    y = p act(x) is computed in fp32 and rounded once to the dtype of x. Where ``formats`` are given, each group's rows
    are cast by themselves; else the values are returned. Rows that are no group's are 0 (in casts undefined on a GPU).

    Args:
        probabilities: fp32 [M].
        offsets: as of ``grouped_amax``, the first one 0.
        scales: fp32 [G], those that casts are given.
        with_amax: measure the amax of each group of values, fp32 [G]; else it is [0].
        formats: one format: of the rule "given", with columnwise codes ``k_major``, or of ``quantize.casts_blocks``.
        chained: as of ``grouped_cast``.
    """
    out_columns(name, x.shape[1])
    y = forward(x.float(), name, parameters)
    if probabilities is not None:
        y = y * probabilities.float()[:, None]
    y = torch.where(_some_groups(x, offsets), y, 0.0).to(x.dtype).contiguous()
    return _results(y, offsets, scales, with_amax, formats, dims, k_major, chained)


@grouped_activation.fake
def _(x: Tensor, _p: Any, offsets: Tensor, _s: Any, name: str, _parameters: Any, *how: Any) -> list[Tensor]:
    return _empty_results(x, out_columns(name, x.shape[1]), offsets, *how)


@operation("activation.kernels:backward_groups")
def grouped_activation_backward(
    dy: Tensor, x: Tensor, probabilities: Tensor | None, offsets: Tensor, scales: Tensor | None, name: str,
    parameters: Sequence[float], with_amax: bool, formats: Sequence[str], dims: Sequence[int], k_major: Sequence[bool],
    chained: bool = False,
) -> list[Tensor]:  # fmt: skip
    """dx and its amaxes, or its casts; and then the gradients of the probabilities, fp32 [M], or [0] without them.

    In blocks, each half of what a gated activation has for input must be whole ones.
    """
    assert dy.shape == (x.shape[0], out_columns(name, x.shape[1])), (dy.shape, name, x.shape)
    present, incoming = _some_groups(x, offsets), dy.float()
    sums = _empty_sums(x, probabilities)
    if probabilities is not None:
        sums = torch.where(present, incoming * forward(x.float(), name, parameters), 0.0).sum(1)
        incoming = incoming * probabilities.float()[:, None]
    dx = torch.where(present, backward(incoming, x.float(), name, parameters), 0.0).to(x.dtype).contiguous()
    return [*_results(dx, offsets, scales, with_amax, formats, dims, k_major, chained), sums]


@grouped_activation_backward.fake
def _(
    dy: Tensor, x: Tensor, probabilities: Tensor | None, offsets: Tensor, _s: Any, _n: Any, _p: Any, *how: Any
) -> list[Tensor]:
    return [*_empty_results(x, x.shape[1], offsets, *how), _empty_sums(x, probabilities)]


def _results(y: Tensor, offsets: Tensor, scales: Tensor | None, with_amax: bool, *how: Any) -> list[Tensor]:
    *how_cast, chained = how
    if how[0]:
        given = [scales] * len(how[0])
        return grouped.grouped_cast.reference(y, offsets, given, None, *how_cast, None, chained)
    none = y.new_empty(0, dtype=torch.float32)
    return [y, grouped.grouped_amax.reference(y, offsets, [Format().spec], [ROWWISE])[0] if with_amax else none]


def _empty_results(x: Tensor, columns: int, offsets: Tensor, with_amax: bool, *how: Any) -> list[Tensor]:
    if how[0]:
        return grouped.empty_casts(x[:, :columns], offsets, *how[:3])
    amax = x.new_empty(offsets.shape[0] - 1 if with_amax else 0, dtype=torch.float32)
    return [x.new_empty(x.shape[0], columns), amax]


def _empty_sums(x: Tensor, probabilities: Tensor | None) -> Tensor:
    return x.new_empty(0 if probabilities is None else x.shape[0], dtype=torch.float32)


def _some_groups(x: Tensor, offsets: Tensor) -> Tensor:
    """Mask of the rows that are some group's, [M, 1]."""
    return torch.arange(x.shape[0], device=x.device)[:, None] < offsets[-1]
