"""Suite ``casts``: one large tensor to codes and scales, alone and behind a norm or an activation."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from minifloat.bench import gate
from minifloat.bench.registry import Call, Case, Contender, Measure, Outputs, Roofline, Row
from minifloat.formats import COLUMNWISE, ROWWISE, Format
from minifloat.functional.producers import Activation, Norm, act_quantize, norm_quantize
from minifloat.kernels.quantize import reference
from minifloat.operand import Quantized
from minifloat.quantizer import Quantizer
from minifloat.recipe import QuantizerRole, named

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
PRODUCERS = ("RMSNorm", "SwiGLU")
ORIENTATIONS = ("rowwise", "both")
GOALS = {"rowwise": 0.90, "both": 0.85}  # of the speed of a copy
BEHIND_PRODUCER = 0.80
PLAIN = ("current per tensor", "delayed per tensor")  # what compiled PyTorch casts beside us, and what producers do

EPS = 1e-5
E4M3, E4M3_MAX = torch.float8_e4m3fn, 448.0
VALUES_BOUND = math.hypot(gate.rounding(3), gate.BOUNDS["bf16"])  # of what E4M3 codes of one scale stand for


def quantizer(name: str, orientation: str) -> Quantizer:
    """Of one of :data:`FORMATS`."""
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
    """The same by the reference functions, to the bit."""

    def cast(fmt: Format, dim: int) -> Outputs:
        given = scale if fmt.scale_rule == "given" else reference.amax(x, fmt, dim) if fmt.needs_amax else None
        return reference.cast(x, given, None, fmt, dim)[:2]

    outputs = [*cast(how.row_format, ROWWISE)]
    return [*outputs, *cast(how.format(COLUMNWISE), COLUMNWISE)] if orientation == "both" else outputs


def values_error(value: Tensor) -> Callable[[Outputs], float]:
    """How far E4M3 codes of one scale are from the values that they stand for."""

    def error(outputs: Outputs) -> float:
        pairs = zip(outputs[::2], outputs[1::2], strict=True)
        return gate.relative_error([c.view(E4M3).float() * s for c, s in pairs], [value] * (len(outputs) // 2))

    return error


def by_torch(x: Tensor, scale: Tensor | None, both: bool) -> Outputs:
    """What is left to ``torch.compile``: E4M3 of one scale."""
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
            label, error = f"torch {orientation}, compiled", values_error(x.float())
            contenders.append(Contender(label, compiled, error, VALUES_BOUND, roofline, compiled=True))
    return Case(tuple(contenders), axis=None)


def build_produced(producer: str, name: str, device: torch.device, tiny: bool) -> Case:
    """One format behind a norm or an activation, which read bf16 and write codes."""
    rows, cols = TINY if tiny else SHAPE
    x = _random((rows, cols if producer == "RMSNorm" else 2 * cols), device)
    gamma = 1 + 0.1 * _random((1, cols), device)[0]
    if producer == "RMSNorm":
        value = F.rms_norm(x.float(), (cols,), gamma.float(), EPS)
    else:
        gate_half, up = x.float().chunk(2, -1)
        value = F.silu(gate_half) * up
    scale = _scale(value) if FORMATS[name][0] == "delayed" else None
    contenders = []
    for orientation in ORIENTATIONS:
        how = quantizer(name, orientation)
        written = value.numel() * (1 + (orientation == "both")) + (4 * rows if producer == "RMSNorm" else 0)
        reads = 1 if scale is not None else 2
        call = partial(_produce, producer, x, gamma, how, scale, orientation)
        contenders.append(
            Contender(
                f"minifloat {orientation}", partial(_as_is, call), values_error(value), VALUES_BOUND,
                Roofline(x.nbytes * reads + written), {"roofline": BEHIND_PRODUCER},
            )
        )  # fmt: skip
    return Case(tuple(contenders))


def _as_is(call: Call) -> Call:
    """The setup of a call that needs none."""
    return call


def _cast(how: Quantizer, x: Tensor, scale: Tensor | None, orientation: str) -> Outputs:
    amaxes = None if scale is None else (scale,)
    cast = how.cast(x, amaxes, gemm_ready=True) if orientation == "both" else how.cast(x, amaxes)
    return gemm_ready(cast, orientation)


def _produce(
    producer: str, x: Tensor, gamma: Tensor, how: Quantizer, scale: Tensor | None, orientation: str
) -> Outputs:
    amaxes = None if scale is None else (scale,)
    if producer == "RMSNorm":
        found = norm_quantize(x, gamma, None, Norm("RMSNorm", EPS), how, amaxes)
    else:
        found = act_quantize(x, Activation("swiglu"), how, amaxes)
    return gemm_ready(found.quantized, orientation)


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
        for name in PLAIN
    ),
)
