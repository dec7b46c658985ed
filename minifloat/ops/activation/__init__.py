"""Activations, forward and backward, as ``torch.library`` operations that compute in fp32."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from minifloat.formats import parse
from minifloat.ops.activation import reference
from minifloat.ops.activation.reference import DEFAULTS, NAMES, gated
from minifloat.ops.library import register
from minifloat.ops.quantize import block_cast, empty_block_cast

__all__ = [
    "DEFAULTS", "NAMES", "activation_backward", "activation_backward_cast", "activation_backward_cast_blocks",
    "activation_cast", "activation_cast_blocks", "activation_forward", "check_name", "gated", "out_columns",
    "parameters_of",
]  # fmt: skip

Parameters = Sequence[float]


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


def _forward(x: Tensor, name: str, parameters: Parameters, dtype: torch.dtype, with_amax: bool) -> tuple[Tensor, ...]:
    out_columns(name, x.shape[-1])
    y = reference.forward(x.float(), name, parameters).to(dtype).contiguous()
    return y, reference.amax(y) if with_amax else _amax_like(x, False)


def _fake_forward(
    x: Tensor, name: str, parameters: Parameters, dtype: torch.dtype, with_amax: bool
) -> tuple[Tensor, ...]:
    return x.new_empty((x.shape[0], out_columns(name, x.shape[-1])), dtype=dtype), _amax_like(x, with_amax)


def _cast(
    x: Tensor, name: str, parameters: Parameters, scale: Tensor, format: str, rowwise: bool, columnwise: bool
) -> tuple[Tensor, ...]:
    out_columns(name, x.shape[-1])
    return reference.cast(reference.forward(x.float(), name, parameters), scale, parse(format), rowwise, columnwise)


def _fake_cast(
    x: Tensor, name: str, parameters: Parameters, scale: Tensor, format: str, rowwise: bool, columnwise: bool
) -> tuple[Tensor, ...]:
    codes = reference.empty_codes(x, x.shape[0], out_columns(name, x.shape[-1]), rowwise, columnwise)
    return *codes, torch.empty_like(scale), _amax_like(x, True)


def _backward(
    dy: Tensor, x: Tensor, name: str, parameters: Parameters, dtype: torch.dtype, with_amax: bool, with_bias: bool
) -> tuple[Tensor, ...]:
    assert dy.shape == (x.shape[0], out_columns(name, x.shape[-1])), (dy.shape, name, x.shape)
    dx = reference.backward(dy.float(), x.float(), name, parameters).to(dtype).contiguous()
    amax = reference.amax(dx) if with_amax else _amax_like(x, False)
    return dx, amax, reference.column_sum(dx) if with_bias else _bias_like(x, False)


def _fake_backward(
    dy: Tensor, x: Tensor, name: str, parameters: Parameters, dtype: torch.dtype, with_amax: bool, with_bias: bool
) -> tuple[Tensor, ...]:
    return x.new_empty(x.shape, dtype=dtype), _amax_like(x, with_amax), _bias_like(x, with_bias)


def _backward_cast(
    dy: Tensor, x: Tensor, name: str, parameters: Parameters, scale: Tensor, format: str, rowwise: bool,
    columnwise: bool, with_bias: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    assert dy.shape == (x.shape[0], out_columns(name, x.shape[-1])), (dy.shape, name, x.shape)
    dx = reference.backward(dy.float(), x.float(), name, parameters)
    dx = dx.to(x.dtype).float() if gated(name) else dx
    dbias = reference.column_sum(dx) if with_bias else _bias_like(x, False)
    return *reference.cast(dx, scale, parse(format), rowwise, columnwise), dbias


def _fake_backward_cast(
    dy: Tensor, x: Tensor, name: str, parameters: Parameters, scale: Tensor, format: str, rowwise: bool,
    columnwise: bool, with_bias: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    codes = reference.empty_codes(x, x.shape[0], x.shape[1], rowwise, columnwise)
    return *codes, torch.empty_like(scale), _amax_like(x, True), _bias_like(x, with_bias)


def _cast_blocks(
    x: Tensor, name: str, parameters: Parameters, format: str, rowwise: bool, columnwise: bool, k_major: bool
) -> tuple[Tensor, ...]:
    y, _ = _forward(x, name, parameters, x.dtype, False)
    return block_cast(y, parse(format), rowwise, columnwise, k_major)


def _fake_cast_blocks(
    x: Tensor, name: str, parameters: Parameters, format: str, rowwise: bool, columnwise: bool, k_major: bool
) -> tuple[Tensor, ...]:
    return empty_block_cast(x, out_columns(name, x.shape[-1]), parse(format), rowwise, columnwise, k_major)


def _backward_cast_blocks(
    dy: Tensor, x: Tensor, name: str, parameters: Parameters, format: str, rowwise: bool, columnwise: bool,
    k_major: bool, with_bias: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    dx, _, dbias = _backward(dy, x, name, parameters, x.dtype, False, with_bias)
    return *block_cast(dx, parse(format), rowwise, columnwise, k_major), dbias


def _fake_backward_cast_blocks(
    dy: Tensor, x: Tensor, name: str, parameters: Parameters, format: str, rowwise: bool, columnwise: bool,
    k_major: bool, with_bias: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    casts = empty_block_cast(x, x.shape[1], parse(format), rowwise, columnwise, k_major)
    return *casts, _bias_like(x, with_bias)


def _amax_like(x: Tensor, wanted: bool) -> Tensor:
    return x.new_empty(1 if wanted else 0, dtype=torch.float32)


def _bias_like(x: Tensor, wanted: bool) -> Tensor:
    return x.new_empty(x.shape[1] if wanted else 0, dtype=torch.float32)


def _kernels(module: str, function: str) -> Callable[..., tuple[Tensor, ...]]:
    """A function of a module of this package that has kernels, and needs Triton: imported when first called."""

    def run(*args: Any) -> tuple[Tensor, ...]:
        result: tuple[Tensor, ...] = getattr(import_module(f"{__name__}.{module}"), function)(*args)
        return result

    return run


activation_forward = register(
    "activation_forward(Tensor x, str name, float[] parameters, ScalarType dtype, bool with_amax) -> (Tensor, Tensor)",
    _forward,
    _fake_forward,
    cuda=_kernels("fused", "forward"),
)
"""The activation of ``x`` [M, K] in ``dtype``: [M, K], or [M, K / 2] if gated. Parameters: :func:`parameters_of`.

The amax is that of the result after rounding, fp32 [1]; [0] if it was not asked for. NaNs are dropped.
"""

activation_cast = register(
    "activation_cast(Tensor x, str name, float[] parameters, Tensor scale, str format, bool rowwise, bool columnwise) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    _cast,
    _fake_cast,
    cuda=_kernels("fused", "cast"),
)
"""The activation of ``x`` [M, K], cast from fp32 with ``scale``, fp32 [1] (delayed scaling: scale rule ``"given"``).

Returns rowwise codes, uint8 [M, N]; columnwise ones, [M, N] too but transposed in memory; each [0] if not asked for;
the inverse of the scale; the amax of the fp32 result, [1].
"""

activation_backward = register(
    "activation_backward(Tensor dy, Tensor x, str name, float[] parameters, ScalarType dtype, bool with_amax, "
    "bool with_bias) -> (Tensor, Tensor, Tensor)",
    _backward,
    _fake_backward,
    cuda=_kernels("fused", "backward"),
)
"""The gradient with respect to ``x`` [M, K], in ``dtype``; its amax; and dbias.

dbias is the sum of the rows of the gradient after rounding, in fp32: [K], or [0] if it was not asked for: the
bias gradient of a linear that gave ``x``.
"""

activation_backward_cast = register(
    "activation_backward_cast(Tensor dy, Tensor x, str name, float[] parameters, Tensor scale, str format, "
    "bool rowwise, bool columnwise, bool with_bias) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _backward_cast,
    _fake_backward_cast,
    cuda=_kernels("fused", "backward_cast"),
)
"""The gradient with respect to ``x`` [M, K], cast with ``scale``: as :data:`activation_cast`, and dbias.

The cast reads the fp32 gradient of plain activations; that of a gated one is rounded to the dtype of ``x`` first
(``docs/numerics.md`` 3.4). The amax and dbias are those of what the cast reads.
"""

activation_cast_blocks = register(
    "activation_cast_blocks(Tensor x, str name, float[] parameters, str format, bool rowwise, bool columnwise, "
    "bool k_major) -> (Tensor, Tensor, Tensor, Tensor)",
    _cast_blocks,
    _fake_cast_blocks,
    cuda=_kernels("blocks", "cast"),
)
"""The activation of ``x`` [M, K], rounded to the dtype of ``x`` and cast in blocks, whose amaxes are their own.

``format`` is one of ``quantize.casts_blocks``. Returns codes and scales along the rows, then along the columns, those
that are not wanted [0]; ``k_major`` and all else as in ``quantize.cast``.
"""

activation_backward_cast_blocks = register(
    "activation_backward_cast_blocks(Tensor dy, Tensor x, str name, float[] parameters, str format, bool rowwise, "
    "bool columnwise, bool k_major, bool with_bias) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _backward_cast_blocks,
    _fake_backward_cast_blocks,
    cuda=_kernels("blocks", "backward_cast"),
)
"""The gradient with respect to ``x`` [M, K], rounded and cast as :data:`activation_cast_blocks` does, and dbias.

Of a gated activation each half of K must be whole blocks. dbias as in :data:`activation_backward`.
"""
