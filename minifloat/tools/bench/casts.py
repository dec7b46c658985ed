"""Suite ``casts``: one large tensor to codes and scales, alone and behind a norm or an activation."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from minifloat.formats import COLUMNWISE, ROWWISE, Format
from minifloat.functional.norm_activation import Activation, Norm, act_value, dact_value, norm_value
from minifloat.operand import Quantized
from minifloat.ops.quantize import reference
from minifloat.quantizer import Quantizer
from minifloat.recipe import QuantizerRole, named
from minifloat.tools.bench import gate
from minifloat.tools.bench.registry import Call, Case, Contender, Measure, Outputs, Roofline, Row

SHAPE = 16384, 8192
TINY = 256, 128
FORMATS = {
    "current per tensor": ("current", "input"),
    "delayed per tensor": ("delayed", "input"),
    "block strips": ("block", "input"),
    "block tiles": ("block", "weight"),
    "mxfp8": ("mxfp8", "input"),
    "nvfp4": ("nvfp4", "input"),
}
"""The recipe and the tensor whose format it is."""
PRODUCERS = ("RMSNorm", "SwiGLU", "SwiGLU's gradient")
ORIENTATIONS = ("rowwise", "both")
GOALS = {"rowwise": 0.90, "both": 0.85}  # of the speed of a copy
BEHIND_PRODUCER = 0.80
PLAIN = ("current per tensor", "delayed per tensor")  # what compiled PyTorch casts beside us
BLOCKS = ("block strips", "mxfp8")  # fused casts, timed beside value and cast

EPS = 1e-5
E4M3, E4M3_MAX = torch.float8_e4m3fn, 448.0
VALUES_BOUND = math.hypot(gate.rounding(3), gate.BOUNDS["bf16"])  # of what E4M3 codes of one scale stand for


def quantizer(name: str, orientation: str) -> Quantizer:
    """Quantizer of one of :data:`FORMATS`."""
    recipe, tensor = FORMATS[name]
    return named(recipe).quantizer(QuantizerRole("linear", tensor)).with_usage(columnwise=orientation == "both")


def gemm_ready(quantized: Quantized, orientation: str) -> Outputs:
    """Codes and scales, in memory as the GEMMs of this device read them: what was not cast so is transposed here."""
    row = quantized.along(ROWWISE)
    outputs = [row.codes, row.scale_inv]
    if orientation == "both":
        column = quantized.along(COLUMNWISE)
        codes = column.codes
        wanted = codes.is_cuda and column.format.block in (0, 128)  # FP8 tensor cores; the rest is emulated
        if wanted and not codes.t().is_contiguous():
            codes = codes.t().contiguous().t()
        outputs += [codes, column.scale_inv]
    return [tensor for tensor in outputs if tensor is not None]


def expected(x: Tensor, how: Quantizer, orientation: str, scale: Tensor | None) -> Outputs:
    """Casts by the reference functions, to the bit."""

    def cast(fmt: Format, dim: int) -> Outputs:
        given = scale if fmt.scale_rule == "given" else reference.amax(x, fmt, dim) if fmt.needs_amax else None
        return reference.cast(x, given, None, fmt, dim)[:2]

    outputs = [*cast(how.row_format, ROWWISE)]
    return [*outputs, *cast(how.format(COLUMNWISE), COLUMNWISE)] if orientation == "both" else outputs


def values_error(value: Tensor, fmt: Format) -> Callable[[Outputs], float]:
    """Makes a function that measures how far E4M3 codes, along the rows first, are from their values."""
    rows, cols = value.shape

    def error(outputs: Outputs) -> float:
        casts = zip(outputs[::2], outputs[1::2], (ROWWISE, COLUMNWISE), strict=False)
        found = [reference.dequantize(codes, scale, None, fmt, dim, rows, cols) for codes, scale, dim in casts]
        return gate.relative_error(found, [value] * (len(outputs) // 2))

    return error


def by_torch(x: Tensor, scale: Tensor | None, both: bool) -> Outputs:
    """Cast left to ``torch.compile``: E4M3 of one scale."""
    factor = E4M3_MAX / x.abs().amax().float().reshape(1) if scale is None else scale
    codes = (x.float() * factor).clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)
    outputs = [codes.view(torch.uint8), factor.reciprocal()]
    return [*outputs, codes.t().contiguous().t().view(torch.uint8), outputs[1]] if both else outputs


def build(name: str, device: torch.device, tiny: bool) -> Case:
    """One format, one or both orientations."""
    x = _random(TINY if tiny else SHAPE, device)
    recipe = FORMATS[name][0]
    scale = _scale(x) if recipe == "delayed" else None
    contenders = []
    for orientation in ORIENTATIONS:
        how = quantizer(name, orientation)
        outputs = expected(x, how, orientation, scale)
        reads = 2 if how.row_format.needs_amax else 1
        roofline = Roofline(x.nbytes * reads + sum(tensor.nbytes for tensor in outputs))
        call = partial(_cast, how, x, scale, orientation)
        goals: dict[Measure, float] = {"roofline": GOALS[orientation]}
        contenders.append(
            Contender(
                f"minifloat {orientation}", partial(_as_is, call), partial(gate.differing, expected=outputs), 0.0,
                roofline, goals,
            )
        )  # fmt: skip
        if name in PLAIN:
            compiled = partial(_compiled, x, scale, orientation == "both")
            label, error = f"torch {orientation}, compiled", values_error(x.float(), how.row_format)
            contenders.append(Contender(label, compiled, error, VALUES_BOUND, roofline, compiled=True))
    return Case(tuple(contenders), axis=None)


def build_produced(producer: str, name: str, device: torch.device, tiny: bool) -> Case:
    """One format behind a norm, an activation or its gradient, which read bf16 and write codes."""
    inputs, value = _inputs(producer, *(TINY if tiny else SHAPE), device)
    scale = _scale(value) if FORMATS[name][0] == "delayed" else None
    contenders = []
    for orientation in ORIENTATIONS:
        how = quantizer(name, orientation)
        fmt = how.row_format
        of_codes = value.numel() * (1 + (fmt.scale_dtype.itemsize / fmt.block if fmt.block else 0))
        written = of_codes * (1 + (orientation == "both")) + (4 * len(value) if producer == "RMSNorm" else 0)
        read = sum(each.nbytes for each in inputs) * (2 if fmt.needs_amax else 1)
        error, roofline = values_error(value, fmt), Roofline(read + written)
        ways = {"minifloat": True} | ({"minifloat value + cast,": False} if name in BLOCKS else {})
        for label, fused in ways.items():
            call = partial(_produce, producer, inputs, how, scale, orientation, fused)
            goals: dict[Measure, float] = {"roofline": BEHIND_PRODUCER} if fused else {}
            contenders.append(
                Contender(f"{label} {orientation}", partial(_as_is, call), error, VALUES_BOUND, roofline, goals)
            )
    return Case(tuple(contenders))


def _inputs(producer: str, rows: int, cols: int, device: torch.device) -> tuple[tuple[Tensor, ...], Tensor]:
    """Inputs of a producer, in bf16, and the value that it makes, in fp32."""
    if producer == "RMSNorm":
        x, gamma = _random((rows, cols), device), 1 + 0.1 * _random((1, cols), device)[0]
        return (x, gamma), F.rms_norm(x.float(), (cols,), gamma.float(), EPS)
    x, dy = _random((rows, 2 * cols), device), _random((rows, cols), device)
    gate_half, up = x.float().chunk(2, -1)
    if producer == "SwiGLU":
        return (x,), F.silu(gate_half) * up
    s = torch.sigmoid(gate_half)
    dgate = dy.float() * up * (s + gate_half * s * (1 - s))
    return (x, dy), torch.cat([dgate, dy.float() * gate_half * s], 1)


def _as_is(call: Call) -> Call:
    """The setup of a call that needs none."""
    return call


def _cast(how: Quantizer, x: Tensor, scale: Tensor | None, orientation: str) -> Outputs:
    amaxes = None if scale is None else (scale,)
    cast = how.cast(x, amaxes, gemm_ready=True) if orientation == "both" else how.cast(x, amaxes)
    return gemm_ready(cast, orientation)


def _produce(
    producer: str, inputs: tuple[Tensor, ...], how: Quantizer, scale: Tensor | None, orientation: str, fused: bool
) -> Outputs:
    """Value and cast, in one kernel where ``fused`` allows it."""
    x, *other = inputs
    if producer == "RMSNorm":
        found = norm_value(x, other[0], None, Norm("RMSNorm", EPS), how, scale=scale, fused=fused)
    elif producer == "SwiGLU":
        found = act_value(x, Activation("swiglu"), how, scale=scale, fused=fused)
    else:
        found = dact_value(other[0], x, Activation("swiglu"), how, scale=scale, fused=fused)
    return gemm_ready(found.cast(how, None if scale is None else (scale,)), orientation)


def _compiled(x: Tensor, scale: Tensor | None, both: bool) -> Call:
    return partial(torch.compile(by_torch, fullgraph=True, dynamic=False), x, scale, both)


def _random(shape: tuple[int, int], device: torch.device) -> Tensor:
    generator = torch.Generator(device).manual_seed(shape[1])
    return torch.randn(shape, device=device, generator=generator).bfloat16()


def _scale(x: Tensor) -> Tensor:
    return (E4M3_MAX / x.abs().amax().float()).reshape(1)


_LABEL = " x ".join(map(str, SHAPE))
ROWS = (
    *(Row("casts", f"{_LABEL} {name}", partial(build, name)) for name in FORMATS),
    *(
        Row("casts", f"{_LABEL} behind {producer}, {name}", partial(build_produced, producer, name))
        for producer in PRODUCERS
        for name in PLAIN + BLOCKS
    ),
)
