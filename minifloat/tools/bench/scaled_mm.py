"""The three products of a linear by PyTorch's own scaled matmul, of operands that were cast before: the roofline."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from minifloat.backends import supports
from minifloat.formats import Format
from minifloat.tools.bench import gate
from minifloat.tools.bench.registry import Call, Contender, Outputs, UnavailableError

PER_TENSOR, BLOCK = "scaled_mm per tensor", "scaled_mm block 128"
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


class Scaled(NamedTuple):
    """FP8 values [outer, contracted], row-major, and what they are multiplied by."""

    values: Tensor
    scale_inv: Tensor


def products(x: Tensor, w: Tensor, dy: Tensor, error: Callable[[Outputs], float]) -> list[Contender]:
    """Y, dX and dW with the accumulation choices of the recipes: fast in fprop of one scale a tensor, else precise."""
    return [
        Contender(PER_TENSOR, lambda: _per_tensor(x, w, dy), error, gate.bound("current")),
        Contender(BLOCK, lambda: _block(x, w, dy), error, gate.bound("block")),
    ]


def per_tensor(x: Tensor, dtype: torch.dtype) -> Scaled:
    """One scale for all of ``x``, from its amax."""
    scale = torch.finfo(dtype).max / x.abs().amax().float()
    return Scaled((x.float() * scale).to(dtype), scale.reciprocal())


def strips(x: Tensor) -> Scaled:
    """A scale for each 1 x 128, [outer, blocks] with the outer dim consecutive in memory, as cuBLASLt reads them."""
    values, scale_inv = _blocks(x, 1)
    return Scaled(values, scale_inv.t().contiguous().t())


def tiles(x: Tensor) -> Scaled:
    """A scale for each 128 x 128, [contracted, outer] blocks with the contracted dim consecutive, in groups of four."""
    values, scale_inv = _blocks(x, 128)
    padded = torch.nn.functional.pad(scale_inv, (0, -scale_inv.shape[1] % 4))
    return Scaled(values, padded.contiguous().t())


def _blocks(x: Tensor, rows: int) -> Scaled:
    blocks = x.float().reshape(x.shape[0] // rows, rows, x.shape[1] // 128, 128)
    scale = 448 / blocks.abs().amax((1, 3), keepdim=True)
    return Scaled((blocks * scale).to(E4M3).reshape(x.shape), scale.reciprocal()[:, 0, :, 0])


def _per_tensor(x: Tensor, w: Tensor, dy: Tensor) -> Call:
    cast = per_tensor(x, E4M3), per_tensor(w, E4M3), per_tensor(dy, E5M2)
    (qx, qw, qdy), (tx, tw, tdy) = cast, [Scaled(q.values.t().contiguous(), q.scale_inv) for q in cast]

    def multiply(a: Scaled, b: Scaled, fast: bool) -> Tensor:
        result: Tensor = torch._scaled_mm(
            a.values, b.values.t(), scale_a=a.scale_inv, scale_b=b.scale_inv, out_dtype=torch.bfloat16,
            use_fast_accum=fast,
        )  # fmt: skip
        return result

    return lambda: [multiply(qx, qw, True), multiply(qdy, tw, False), multiply(tdy, tx, False)]


def _block(x: Tensor, w: Tensor, dy: Tensor) -> Call:
    strip, tile = (Format(block=128, tile=tile, scale_rule="pow2") for tile in (False, True))
    supported, reason = supports(strip, tile, x.device)
    if not supported:
        raise UnavailableError(reason)
    from torch.nn.functional import ScalingType, SwizzleType, scaled_mm

    qx, qdy, tx, tdy = strips(x), strips(dy), strips(x.t().contiguous()), strips(dy.t().contiguous())
    qw, tw = tiles(w), tiles(w.t().contiguous())

    def multiply(a: Scaled, b: Scaled, scaling: ScalingType) -> Tensor:
        result: Tensor = scaled_mm(
            a.values, b.values.t(), scale_a=a.scale_inv, scale_recipe_a=ScalingType.BlockWise1x128,
            scale_b=b.scale_inv, scale_recipe_b=scaling, swizzle_a=SwizzleType.NO_SWIZZLE,
            swizzle_b=SwizzleType.NO_SWIZZLE, output_dtype=torch.bfloat16,
        )  # fmt: skip
        return result

    one, two = ScalingType.BlockWise1x128, ScalingType.BlockWise128x128
    return lambda: [multiply(qx, qw, two), multiply(qdy, tw, two), multiply(tdy, tx, one)]
