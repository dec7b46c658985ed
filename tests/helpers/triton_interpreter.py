"""Triton kernels on a CPU: import this module, and every launch of a kernel runs in Triton's interpreter.

Where PyTorch sees a CUDA device nothing happens: there tests run the compiled kernels. Elsewhere launches (and nothing
else: a kernel stays a ``JITFunction``, so that :func:`compile_for` takes the same kernel, and the order of imports does
not matter) go to Triton's interpreter, NumPy underneath, whose known defects are corrected here to what sm_90 does:
conversions, minimum and maximum with NaN, fused multiply-add, dot products, arguments. Reading or writing outside the
tensors of the launch raises ``IndexError``.

Kernels must keep to this:

* Load, then convert to fp32. Arithmetic on bf16 or float8, which would run on raw bits, raises ``TypeError``.
* ``x.to(tl.float8e4nv)`` and ``x.to(tl.float8e5)`` saturate; NaN becomes 0x7F whatever its sign.
* ``tl.maximum``, ``tl.max`` and their like drop NaN; ``tl.clamp(x, -c, c)`` makes it c with the sign of the NaN for a
  constant c, and -c for another. With ``propagate_nan=tl.PropagateNan.ALL`` all but the reductions keep it.
* ``tl.floor`` and ``tl.ceil`` take denormals for zero.
* ``/``, ``tl.sqrt``, ``tl.exp``, ``tl.log``, ``tl.sum`` and ``tl.dot`` are approximate or have an order of their own on
  a GPU: what must be exact uses ``tl.div_rn``, ``tl.sqrt_rn``, ``tl.fma``, and fp32 ``+ - *`` (launched with
  ``enable_fp_fusion=False`` where ``a * b + c`` must round twice).
* A compile-time value computed in a kernel is annotated, ``HALF: tl.constexpr = BLOCK // 2``, before ``tl.arange``.
* No inline assembly, libdevice, ``tl.dot_scaled``, or chained assignment ``a = b = x``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton.language as tl
from numpy.typing import NDArray
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, ReduceOps, TensorHandle
from triton.runtime.jit import JITFunction

from tests.helpers.triton_compile import compile_for as compile_for

Array = NDArray[Any]

TORCH_DTYPES = {
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
    tl.bfloat16: torch.bfloat16,
    tl.float16: torch.float16,
    tl.float32: torch.float32,
    tl.float64: torch.float64,
}
# NumPy has no such types: the interpreter keeps their bits in unsigned integers, and calculates with those.
BITS_ONLY = (tl.bfloat16, tl.float8e4nv, tl.float8e5)


# ---- launches ----


def _run(self: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
    """What a launch calls, in place of compiling; options such as num_warps are no arguments and are dropped."""
    if not warmup:
        rewritten = _rewritten(self.fn)
        _memory[:] = _spans((*args, *kwargs.values()))
        by_table = any(isinstance(arg, tuple) and getattr(arg[-1], "dtype", None) == torch.int64 for arg in args)
        if by_table and not _confined:
            _memory.append((0, 2**64 - 1))  # a table says where matrices are
        with np.errstate(all="ignore"):
            interpreter.GridExecutor(rewritten, self.arg_names, grid, self.pre_run_hooks)(*args, **kwargs)


_memory: list[tuple[int, int]] = []  # what a launch may touch: first byte and end of its tensors
_confined: list[bool] = []


@contextmanager
def confined() -> Iterator[None]:
    """Inside, launches by way of a table touch nothing but the tensors they name: each has all matrices in it."""
    _confined.append(True)
    try:
        yield
    finally:
        _confined.pop()


@contextmanager
def last_first() -> Iterator[None]:
    """Inside, the programs of a launch run in reverse order: one that writes what is another's shows in one of both."""
    builder = interpreter.interpreter_builder
    builder.set_grid_idx = lambda x, y, z: InterpreterBuilder.set_grid_idx(builder, builder.grid_dim[0] - 1 - x, y, z)
    try:
        yield
    finally:
        del builder.set_grid_idx


def _spans(args: Iterable[Any]) -> Iterator[tuple[int, int]]:
    for arg in args:
        if isinstance(arg, tuple):
            yield from _spans(arg)
        elif isinstance(arg, torch.Tensor) and arg.numel():
            last = sum((size - 1) * stride for size, stride in zip(arg.shape, arg.stride(), strict=True))
            yield arg.data_ptr(), arg.data_ptr() + (last + 1) * arg.itemsize


def _check_addresses(pointers: TensorHandle, mask: TensorHandle) -> None:
    addresses = pointers.data[mask.data]
    ends = addresses + pointers.get_element_ty().primitive_bitwidth // 8
    inside = np.zeros(addresses.shape, bool)
    for first, end in _memory:
        inside |= (addresses >= first) & (ends <= end)
    if not inside.all():
        raise IndexError(f"{(~inside).sum()} of {inside.size} addresses are outside the tensors of the launch")


def _checked(access: Any, pointers_at: int, mask_at: int) -> Any:
    def checked(self: InterpreterBuilder, *args: Any, **kwargs: Any) -> Any:
        _check_addresses(args[pointers_at], args[mask_at])
        return access(self, *args, **kwargs)

    return checked


def _call(self: JITFunction[Any], *args: Any, **kwargs: Any) -> Any:
    """A kernel calls another function."""
    return _rewritten(self.fn)(*args, **kwargs)


@cache
def _rewritten(fn: Any) -> Any:
    return interpreter.InterpretedFunction(fn).rewrite()


def _bind(self: JITFunction[Any], instance: Any, owner: type) -> Any:
    """``x.max(axis=0)``: the functions of Triton's own library are attributes of a tensor."""
    return (lambda *args, **kwargs: self(instance, *args, **kwargs)) if isinstance(instance, tl.tensor) else self


_patch_lang = interpreter._patch_lang
_patch_lang_tensor = interpreter._patch_lang_tensor
_implicit_cvt = interpreter._implicit_cvt


def _patch_language(fn: Any) -> Any:
    """Replaces the language by its interpreted version for one launch: all of it, whichever modules the kernel uses."""
    if not _patches:
        _find_patches()
    scope = interpreter._LangPatchScope()
    for patch in _patches:
        scope.set_attr(*patch)
    return scope


def _find_patches() -> None:
    """Once, since it takes longer than most launches."""
    scope = _patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    scope.set_attr(JITFunction, "__call__", _call)
    scope.set_attr(JITFunction, "__get__", _bind)
    scope.set_attr(tl.block_type, "__init__", _init_block)
    scope.set_attr(tl.tensor, "__init__", _init_tensor)
    _patches.extend({(id(of), name): (of, name, vars(of)[name]) for of, name, _ in scope._changes}.values())
    scope.restore()


_patches: list[tuple[Any, str, Any]] = []


def _patch_tensor(tensor: type, scope: Any) -> None:
    _patch_lang_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())  # int() of [1] fails since NumPy 2.4


def _argument(arg: Any) -> Any:
    """A launch's argument as a scalar of the type that the compiler gives it."""
    if isinstance(arg, bool):
        return tl.tensor(TensorHandle(np.array([arg]), tl.int1), tl.int1)
    if isinstance(arg, float):
        return tl.tensor(TensorHandle(np.array([arg], np.float32), tl.float32), tl.float32)
    return _implicit_cvt(arg)


# ---- types: each operation makes some, whose attributes are found once for each shape and dtype ----


def _init_block(self: tl.block_type, element_ty: tl.dtype, shape: Any) -> None:
    key = element_ty.name, tuple([size.value if isinstance(size, tl.constexpr) else size for size in shape])
    if key not in _of_blocks:
        _make_block(self, element_ty, shape)
        _of_blocks[key] = vars(self).copy()
    vars(self).update(_of_blocks[key])


def _init_tensor(self: tl.tensor, handle: TensorHandle, type: tl.dtype) -> None:
    if type.name not in _of_tensors:
        _make_tensor(self, handle, type)
        _of_tensors[type.name] = vars(self).copy()
    vars(self).update(_of_tensors[type.name], handle=handle, type=type)


def _numpy_type(type: tl.dtype) -> np.dtype[Any]:
    name = type.scalar.name
    if name not in _numpy_types:
        _numpy_types[name] = _find_numpy_type(type)
    return _numpy_types[name]


_make_block, _make_tensor, _find_numpy_type = tl.block_type.__init__, tl.tensor.__init__, interpreter._get_np_dtype
_of_blocks: dict[tuple[str, tuple[int, ...]], dict[str, Any]] = {}
_of_tensors: dict[str, dict[str, Any]] = {}
_numpy_types: dict[str, np.dtype[Any]] = {}


# ---- conversions ----


def _convert_float(source: Array, source_type: tl.dtype, target_type: tl.dtype, rounding: Any) -> Array:
    """To nearest, ties to even, by PyTorch; to float8 as cvt.rn.satfinite does. Returns bits as unsigned integers."""
    if rounding not in (None, interpreter._ir.ROUNDING_MODE.RTNE):
        raise NotImplementedError(f"rounding mode {rounding}")
    target = TORCH_DTYPES[target_type]
    if target.itemsize == source.itemsize == 1:
        raise TypeError("float8 to float8 does not compile: convert to tl.float32 between")
    values = torch.from_numpy(np.array(source)).view(TORCH_DTYPES[source_type])
    if target.itemsize > 1:
        return values.to(target).view(getattr(torch, f"uint{8 * target.itemsize}")).numpy()
    largest = torch.finfo(target).max
    codes = values.float().clamp(-largest, largest).to(target).view(torch.uint8)
    return codes.masked_fill(values.isnan(), 0x7F).numpy()


def _cast(self: InterpreterBuilder, source: TensorHandle, target_type: tl.dtype) -> TensorHandle:
    source_type, target_type = source.dtype.scalar, target_type.scalar
    numpy_type = _numpy_type(target_type)
    if source_type in (tl.float16, tl.float32) and numpy_type.kind in "iu" and target_type.is_int():
        return TensorHandle(_saturate(source.data, numpy_type).astype(numpy_type), target_type)
    if tl.bfloat16 not in (source_type, target_type):
        return TensorHandle(source.data.astype(numpy_type), target_type)
    if not source_type.is_floating():
        source, source_type = TensorHandle(source.data.astype(np.float32), tl.float32), tl.float32
    return TensorHandle(_convert_float(source.data, source_type, target_type, None).view(numpy_type), target_type)


def _saturate(values: Array, target: np.dtype[Any]) -> Array:
    """cvt.rzi: towards zero, saturating, NaN to 0; to 8 bits by way of 16, whose upper half is dropped."""
    wide = np.dtype(f"{target.kind}{max(target.itemsize, 2)}")
    if wide.itemsize == 8:
        return values
    limits = np.iinfo(wide)
    return np.nan_to_num(np.clip(values.astype(np.float64), limits.min, limits.max), nan=0.0).astype(wide)


def _bf16_constant(self: InterpreterBuilder, value: float) -> TensorHandle:
    return TensorHandle(_convert_float(np.array([value], np.float32), tl.float32, tl.bfloat16, None), tl.bfloat16)


# ---- arithmetic ----


def _no_arithmetic_on_bits(operation: Any) -> Any:
    def checked(self: InterpreterBuilder, *args: Any) -> TensorHandle:
        for arg in args:
            if isinstance(arg, TensorHandle) and arg.dtype.scalar in BITS_ONLY:
                raise TypeError(f"arithmetic on {arg.dtype.scalar}: convert to tl.float32 first")
        return operation(self, *args)

    return checked


def _larger(a: Array, b: Array, choose: Any = np.fmax) -> Array:
    """max.f32: of a number and NaN the number, and +0 above -0, of which NumPy takes either."""
    return np.where((a == 0) & (b == 0), a + b, choose(a, b))


def _smaller(a: Array, b: Array, choose: Any = np.fmin) -> Array:
    """min.f32, likewise."""
    return np.where((a == 0) & (b == 0), -((-a) + (-b)), choose(a, b))


def _clamp(self: InterpreterBuilder, x: TensorHandle, low: TensorHandle, high: TensorHandle, nan: Any) -> TensorHandle:
    result = _smaller(_larger(x.data, low.data), high.data)
    xorsign = np.isnan(x.data) & (low.data == -high.data)  # min.xorsign.abs.f32
    result = np.where(xorsign, np.copysign(high.data, x.data), result)
    if nan == interpreter._ir.PROPAGATE_NAN.ALL:
        result = np.where(np.isnan(x.data), x.data, result)
    return TensorHandle(result.astype(x.data.dtype), x.dtype.scalar)


def _fma(self: InterpreterBuilder, x: TensorHandle, y: TensorHandle, z: TensorHandle) -> TensorHandle:
    """One rounding: the product is exact in float64, the sum is rounded there to odd, then to fp32."""
    if z.data.dtype != np.float32:
        raise TypeError("the interpreter's tl.fma is of fp32")
    product, addend = x.data.astype(np.float64) * y.data.astype(np.float64), z.data.astype(np.float64)
    total = product + addend
    part = total - product
    error = (product - (total - part)) + (addend - part)
    inexact = np.isfinite(total) & (error != 0) & (total.view(np.int64) % 2 == 0)
    total = np.where(inexact, np.nextafter(total, np.copysign(np.inf, error)), total)
    return TensorHandle(total.astype(np.float32), tl.float32)


def _flushed(x: Array) -> Array:
    return np.where(np.abs(x) < np.finfo(x.dtype).smallest_normal, np.copysign(x.dtype.type(0), x), x)


def _umulhi(self: InterpreterBuilder, a: TensorHandle, b: TensorHandle) -> TensorHandle:
    if a.data.itemsize != 4:
        raise TypeError("the interpreter's tl.umulhi is of 32 bits")
    product = a.data.view(np.uint32).astype(np.uint64) * b.data.view(np.uint32).astype(np.uint64)
    return TensorHandle((product >> 32).astype(np.uint32).view(a.data.dtype), a.dtype.scalar)


def _dot(
    self: InterpreterBuilder, a: TensorHandle, b: TensorHandle, accumulator: TensorHandle, *precision: Any
) -> TensorHandle:
    """In the type of the accumulator, fp32 without TF32 or int32."""
    result_type = accumulator.data.dtype

    def operand(x: TensorHandle) -> Array:
        if x.dtype.scalar in BITS_ONLY:
            return _convert_float(x.data, x.dtype.scalar, tl.float32, None).view(np.float32)
        return x.data.astype(result_type)

    product = np.matmul(operand(a), operand(b)).astype(result_type)
    return TensorHandle(product + accumulator.data, accumulator.dtype.scalar)


def _reduce(self: ReduceOps, inputs: tuple[tl.tensor, ...]) -> list[tl.tensor]:
    """Combines halves of whatever shape the rest has: also `tl.max`, whose NaN the interpreter treats differently."""
    arrays = [each.handle.data for each in inputs]
    axis = 0 if self.axis is None else self.axis
    if self.axis is None:
        arrays = [each.reshape(-1) for each in arrays]
    while arrays[0].shape[axis] > 1:
        halves = zip(*(np.split(each, 2, axis) for each in arrays), strict=True)
        first, second = ([self.to_tensor(x, t.dtype) for x, t in zip(half, inputs, strict=True)] for half in halves)
        combined = self.combine_fn(*first, *second)
        arrays = [each.handle.data for each in (combined if isinstance(combined, (tuple, tl.tuple)) else (combined,))]
    if not self.keep_dims:
        arrays = [each.squeeze(axis) for each in arrays]
    elif self.axis is None:
        arrays = [each.reshape((1,) * inputs[0].handle.data.ndim) for each in arrays]
    return [self.to_tensor(x, t.dtype) for x, t in zip(arrays, inputs, strict=True)]


# ---- installation ----


def _install() -> None:
    JITFunction.run = _run
    interpreter._get_np_dtype = _numpy_type
    interpreter._patch_lang = _patch_language
    interpreter._patch_lang_tensor = _patch_tensor
    interpreter._implicit_cvt = _argument
    interpreter._convert_float = _convert_float
    ReduceOps.apply_impl = _reduce
    builder = InterpreterBuilder
    builder.create_masked_load = _checked(builder.create_masked_load, pointers_at=0, mask_at=1)
    builder.create_masked_store = _checked(builder.create_masked_store, pointers_at=0, mask_at=2)
    builder.create_atomic_rmw = _checked(builder.create_atomic_rmw, pointers_at=1, mask_at=3)
    builder.cast_impl = _cast
    builder.get_bf16 = _bf16_constant
    builder.binary_op = _no_arithmetic_on_bits(builder.binary_op)
    builder.unary_op = _no_arithmetic_on_bits(builder.unary_op)
    builder.create_maxnumf = lambda self, a, b: self.binary_op(a, b, _larger)
    builder.create_minnumf = lambda self, a, b: self.binary_op(a, b, _smaller)
    builder.create_maximumf = lambda self, a, b: self.binary_op(a, b, partial(_larger, choose=np.maximum))
    builder.create_minimumf = lambda self, a, b: self.binary_op(a, b, partial(_smaller, choose=np.minimum))
    builder.create_clampf = _no_arithmetic_on_bits(_clamp)
    builder.create_fma = _no_arithmetic_on_bits(_fma)
    builder.create_floor = lambda self, x: self.unary_op(x, lambda data: np.floor(_flushed(data)))
    builder.create_ceil = lambda self, x: self.unary_op(x, lambda data: np.ceil(_flushed(data)))
    builder.create_umulhi = _umulhi
    builder.create_dot = _dot
    # Integers wrap, as they do on a GPU unless a kernel is launched with debug=True.
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)


if not torch.cuda.is_available():
    _install()
