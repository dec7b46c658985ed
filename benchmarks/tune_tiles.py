"""Times candidate tiles of the kernels on this GPU and prints GB/s, for the table in `minifloat/ops/tiles.py`.

    python benchmarks/tune_tiles.py [ROWS COLS]

A cast is the same bits with every tile, so that the fastest may be taken; see `minifloat/ops/tiles.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable

import torch
import triton
from torch import Tensor

from minifloat.formats import COLUMNWISE, ROWWISE, Format
from minifloat.ops.activation import kernels as activation
from minifloat.ops.norm.kernels import norm_cast
from minifloat.ops.quantize import blocks, empty_cast, nvfp4, per_tensor
from minifloat.ops.quantize.job import CastJob, CastTarget
from minifloat.ops.tiles import Tile, tile

FORMATS = {
    "cast_tensor current": Format("e4m3"),
    "cast_tensor delayed": Format("e4m3", scale_rule="given"),
    "cast_block strips": Format("e4m3", block=128, scale_rule="pow2"),
    "cast_block tiles": Format("e4m3", block=128, tile=True, scale_rule="pow2"),
    "cast_mx strips": Format("e4m3", block=32, scale_rule="e8m0"),
    "cast_nvfp4 strips": Format("e2m1", block=16, scale_rule="two_level"),
}
TILES = {
    "amax": [Tile(1, cols, warps) for cols in (4096, 8192, 16384, 32768) for warps in (4, 8)],
    "cast_tensor": [
        Tile(rows, cols, warps)
        for rows, cols in ((32, 128), (64, 64), (64, 128), (128, 64), (128, 128), (64, 256), (16, 512), (16, 1024))
        for warps in (4, 8)
    ],
    "cast_block": [
        Tile(rows, cols, warps) for rows, cols in ((128, 128), (128, 64), (64, 128), (32, 128)) for warps in (4, 8, 16)
    ],
    "cast_mx": [
        *[Tile(32, 128, warps) for warps in (1, 2, 4)],
        Tile(64, 128, 4),
        Tile(128, 128, 4),
        Tile(16, 256, 4),
        *[Tile(32, 256, warps) for warps in (2, 4)],
        Tile(32, 512, 4),
    ],
    "cast_nvfp4": [
        Tile(16, cols, warps) for cols, warps in ((256, 2), (256, 4), (512, 4), (512, 8), (1024, 4), (1024, 8))
    ],
}
FUSED_CASTS = [
    Tile(rows, cols, warps)
    for rows, cols in ((32, 128), (16, 128), (64, 128), (32, 64), (16, 256), (32, 256), (128, 128))
    for warps in (2, 4, 8)
]
"""Enlarged to whole blocks, with their warps."""


def job(x: Tensor, fmt: Format, dims: Iterable[int]) -> tuple[CastJob, int]:
    """A job with its outputs, and the bytes that it must move."""
    level = torch.full((1,), 5.0, device=x.device) if fmt.block == 0 or fmt.scale_rule == "two_level" else None
    targets: dict[int, CastTarget] = {}
    moved = x.numel() * x.element_size()
    for dim in dims:
        codes, scale = empty_cast(x, fmt, dim, not fmt.packed and fmt.block in (0, 128))
        targets[dim] = CastTarget(fmt, dim, level, codes, scale, torch.zeros(1, device=x.device), fmt.block in (0, 128))
        moved += codes.numel() + scale.numel() * scale.element_size()
    return CastJob(x, None, targets.get(ROWWISE), targets.get(COLUMNWISE)), moved


def report(name: str, moved: int, candidates: list[Tile], launch: Callable[[Tile], object], default: Tile) -> None:
    speeds = {}
    for candidate in candidates:
        try:
            milliseconds = triton.testing.do_bench(
                lambda t=candidate: launch(t), warmup=10, rep=40, return_mode="median"
            )
        except Exception as error:  # a tile that does not fit the chip is not the fastest
            print(f"  {name} {tuple(candidate)}: {type(error).__name__}")
            continue
        speeds[candidate] = moved / milliseconds / 1e6
    best = sorted(speeds, key=lambda t: -speeds[t])[:4]
    listed = ", ".join(f"{tuple(t)} {speeds[t]:.0f}" for t in best)
    print(f"{name}: {listed}; now {tuple(default)} {speeds.get(default, float('nan')):.0f} GB/s", flush=True)


def main(rows: int = 16384, cols: int = 8192) -> None:
    device = torch.device("cuda")
    x = torch.randn(rows, cols, device=device).bfloat16()
    other = torch.empty_like(x)
    copy = triton.testing.do_bench(lambda: other.copy_(x), warmup=10, rep=40, return_mode="median")
    print(f"copy: {2 * x.numel() * 2 / copy / 1e6:.0f} GB/s")
    amax = [torch.zeros(1, device=device)]
    report("amax", x.numel() * 2, TILES["amax"], lambda t: per_tensor.amax([x], amax, t), tile("amax", device))
    run = {"cast_tensor": per_tensor.cast, "cast_block": blocks.cast, "cast_mx": blocks.cast, "cast_nvfp4": nvfp4.cast}
    for name, fmt in FORMATS.items():
        kernel = name.split()[0]
        for what, dims in (("row", [ROWWISE]), ("column", [COLUMNWISE]), ("both", [ROWWISE, COLUMNWISE])):
            made, moved = job(x, fmt, dims)
            report(
                f"{name} {what}", moved, TILES[kernel], lambda t, k=kernel, j=made: run[k]([j], None, t),
                tile(kernel + _suffix(name, what), device),
            )  # fmt: skip
    fused_casts(x)


def _suffix(name: str, what: str) -> str:
    """Of the line in the table, for bf16 of sizes that allow wide accesses."""
    if name.endswith("tiles"):
        return "_columnwise"
    return "_shared" if what != "row" and name.startswith(("cast_block", "cast_mx")) else ""


def fused_casts(x: Tensor) -> None:
    """Norm, activation and its gradient, cast in blocks by the kernel that computes them: ``x`` is what comes out."""
    size = x.numel()
    wide, gamma = torch.cat([x, x], 1), torch.ones_like(x[0])
    for kind, fmt in (("block", FORMATS["cast_block strips"]), ("mx", FORMATS["cast_mx strips"])):
        for what, dims in (("row", (True, False)), ("both", (True, True))):
            how = None, fmt.spec, *dims, fmt.block == 128
            of_norm = x, gamma, None, "RMSNorm", 1e-5, False, *how
            calls: dict[str, tuple[int, Callable[[Tile], object]]] = {
                "activation": (4, lambda t, h=how: activation.cast(wide, "swiglu", (), *h, choice=t)),
                "activation_backward": (
                    6, lambda t, h=how: activation.backward_cast(x, wide, "swiglu", (), *h, False, choice=t)
                ),
                "norm": (4, lambda t, a=of_norm: norm_cast(*a, None, choice=t)),
            }  # fmt: skip
            for kernel, (read, launch) in calls.items():
                written = sum(dims) * (2 if kernel == "activation_backward" else 1)
                name = f"{kernel}_{kind}" + "_shared" * (what == "both")
                moved = size * (read + written)
                report(f"{name} {what}", moved, FUSED_CASTS, launch, tile(name, x.device))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
