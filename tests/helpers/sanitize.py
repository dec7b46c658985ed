"""Launches every Triton kernel of minifloat on small matrices, for NVIDIA's compute-sanitizer to look at.

    python tests/helpers/sanitize.py [--only SUBSTRING]
    compute-sanitizer --tool memcheck --error-exitcode 1 python tests/helpers/sanitize.py
    compute-sanitizer --tool racecheck --error-exitcode 1 python tests/helpers/sanitize.py

The first line compiles 250 variants of the kernels into Triton's cache, in about four minutes, which the others then
find there; minifloat must be importable, installed or on PYTHONPATH. Results are not looked at here: that is what
``test_triton_*.py`` do. The sizes are such that tiles end within a matrix in both dims, rows begin at multiples of 16
bytes or anywhere, and a launch takes one matrix or several. Memory comes from CUDA itself, not from PyTorch's
allocator, which hands out parts of large blocks: there a wrong address is memory of somebody else's, and no error.

At the end stands how often each kernel was launched; the exit code is 1 if one never was. Without a GPU launches go to
Triton's interpreter, on fewer matrices, which proves that the list of operations is complete and little else.
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import minifloat.ops
from minifloat.formats import COLUMNWISE, ROWWISE, Format
from minifloat.ops import tape
from minifloat.ops.activation import NAMES, kernels, out_columns, parameters_of
from minifloat.ops.delayed import gpu as delayed
from minifloat.ops.launch import Kernel, count_launches
from minifloat.ops.matmul.kernels import Scales, finish, k_major_copy, spread, values
from minifloat.ops.norm import NORMALIZATIONS
from minifloat.ops.norm import kernels as norm_kernels
from minifloat.ops.permute import kernels as permutation
from minifloat.ops.quantize import amax_shape, decode, empty_cast, gpu
from minifloat.ops.tape import Tape
from minifloat.quantizer import cast_all
from minifloat.recipe import QuantizerRole, named

BF16, FP32 = torch.bfloat16, torch.float32
Shape = tuple[int, int]
Group = Callable[[torch.device], None]

RAGGED: list[Shape] = [(0, 16), (1, 16), (33, 144), (129, 272), (257, 528)]
"""Rows begin at multiples of 16 bytes. Of none there is still a scale."""
ODD: Shape = (37, 99)
"""Rows begin anywhere."""
WIDE: Shape = (3, 16400)
"""A norm reads such rows in chunks."""

GIVEN = Format("e4m3", scale_rule="given")
STRIPS = Format("e4m3", 128, scale_rule="pow2")
TILES = Format("e4m3", 128, tile=True, amax_epsilon=1e-3)
MX = Format("e4m3", 32, scale_rule="e8m0")
NV = Format("e2m1", 16, scale_rule="two_level")
NV_TILES = replace(NV, tile=True)
ROTATED = replace(NV, transform="hadamard16")
LINES = replace(NV, amax_per_row=True)
PAIRS = [
    *[(fmt, fmt) for fmt in (Format("e4m3"), Format("e5m2", scale_rule="pow2"), GIVEN, STRIPS, TILES, MX)],
    (NV, ROTATED),
    (replace(NV, rounding="stochastic"), replace(ROTATED, rounding="stochastic")),
    *[(fmt, fmt) for fmt in (NV_TILES, LINES, replace(NV, rounding="four_over_six_mae"))],
    2 * (replace(NV_TILES, rounding="four_over_six_mse", block_scale_max=256.0),),
]
"""Rowwise and columnwise formats, which one launch casts to: a kind of every kernel's work each."""
RECIPES = ("current", "delayed", "block", "mxfp8", "nvfp4")


# ---- what the operations read ----


def matrix(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Random numbers, drawn on the CPU, where no sanitizer looks at PyTorch's kernels."""
    return torch.randn(shape).to(dtype).to(device)


def ones(shape: Sequence[int], device: torch.device) -> Tensor:
    return torch.ones(shape).to(device)


def operand(fmt: Format, dim: int, shape: Shape, device: torch.device) -> tuple[Tensor, Tensor, Tensor | None]:
    """Codes, in the memory order that a GEMM reads, scales and amax, of anything."""
    codes, scale_inv = empty_cast(torch.empty(shape, device=device), fmt, dim, not fmt.packed)
    codes.copy_(torch.randint(256, codes.shape))
    scale_inv.copy_(torch.randint(100, 120, scale_inv.shape))
    amax = ones(amax_shape(fmt, dim, *shape), device) if fmt.scale_rule == "two_level" else None
    return codes, scale_inv, amax


# ---- the groups of operations ----


def cast_lists(
    xs: Sequence[Tensor], row: Format | None, column: Format | None, noop: Tensor | None = None, grids: bool = False
) -> None:
    """One cast of each of ``xs`` along each dim that has a format; ``grids``: the amaxes of blocks are given."""
    sources: list[Tensor] = []
    levels: list[Tensor | None] = []
    rngs: list[Tensor | None] = []
    formats, dims = [], []
    for x in xs:
        # The same objects along both dims, so that one pass makes both casts.
        whole, rng = ones((1,), x.device), torch.tensor([5, 2**40 + 6]).to(x.device)
        for fmt, dim in ((row, ROWWISE), (column, COLUMNWISE)):
            if fmt is not None:
                shape = amax_shape(fmt, dim, *x.shape)
                level = whole if shape == (1,) else ones(shape, x.device) if grids or fmt.amax_per_row else None
                sources.append(x)
                levels.append(level)
                rngs.append(rng if fmt.rounding == "stochastic" else None)
                formats.append(fmt)
                dims.append(dim)
    k_major = [not fmt.packed and x.dtype == BF16 for fmt, x in zip(formats, sources, strict=True)]
    gpu.cast(sources, levels, rngs, [fmt.spec for fmt in formats], dims, k_major, noop)


def casts(row: Format, column: Format, device: torch.device) -> None:
    lists: list[tuple[list[Shape], torch.dtype]] = [(RAGGED, BF16), ([ODD], FP32)]
    if device.type == "cpu":  # the interpreter takes long
        lists = [([(1, 16), (17, 48)], BF16)]
    for shapes, dtype in lists:
        xs = [matrix(shape, dtype, device) for shape in shapes]
        for formats in ((row, None), (None, column), (row, column)):
            cast_lists(xs, *formats)


def casts_under_a_flag(device: torch.device) -> None:
    xs = [matrix(shape, BF16, device) for shape in ((33, 144), (16, 64))]
    for row, column in ((GIVEN, GIVEN), (MX, MX), (NV, ROTATED)):
        for flag in (0.0, 1.0):
            cast_lists(xs, row, column, noop=flag * ones((1,), device))


def casts_with_amaxes(device: torch.device) -> None:
    for fmt in (STRIPS, TILES, MX):
        cast_lists([matrix((129, 272), BF16, device)], fmt, fmt, grids=True)


def casts_to_values(device: torch.device) -> None:
    """Both orientations as values, and one of them as codes."""
    nothing: list[Tensor | None] = [None, None]
    for fmt in (MX, replace(MX, element="e2m1")):
        for shape, chosen in (((129, 272), (True, True)), ((33, 144), (True, False))):
            xs = [matrix(shape, BF16, device)] * 2
            gpu.cast(xs, nothing, nothing, [fmt.spec] * 2, [ROWWISE, COLUMNWISE], [False] * 2, None, chosen)


def amaxes(device: torch.device) -> None:
    per_tensor = Format()
    for dtype in (BF16, FP32):
        xs = [matrix(shape, dtype, device) for shape in (*RAGGED, ODD)]
        gpu.amax(xs, [per_tensor.spec] * len(xs), [ROWWISE] * len(xs))
    for x in (matrix((129, 272), BF16, device), matrix(ODD, FP32, device)):
        gpu.amax([x, x], [NV.spec, ROTATED.spec], [ROWWISE, COLUMNWISE])  # in one reading
        for fmt in (ROTATED, LINES, STRIPS, TILES, MX):
            for dim in (COLUMNWISE,) if fmt is ROTATED else (ROWWISE, COLUMNWISE):
                gpu.amax([x], [fmt.spec], [dim])


def dequantize(device: torch.device) -> None:
    shape = (129, 272)
    for fmt in (Format(), Format("e5m2"), STRIPS, TILES, MX, NV, NV_TILES, LINES):
        decode.dequantize(*operand(fmt, ROWWISE, shape, device), fmt.spec, ROWWISE, *shape, BF16)
    for fmt in (Format(), STRIPS, MX, NV, ROTATED, LINES):
        decode.dequantize(*operand(fmt, COLUMNWISE, shape, device), fmt.spec, COLUMNWISE, *shape, BF16)
        decode.dequantize(*operand(fmt, COLUMNWISE, ODD, device), fmt.spec, COLUMNWISE, *ODD, FP32)


def spread_out(device: torch.device) -> None:
    """The emulated product's operands, as bf16, and its epilogue."""
    for fmt in (Format(), STRIPS, TILES, MX, NV, NV_TILES):
        for shape, dim in (((129, 272), ROWWISE), (ODD, COLUMNWISE)):
            outer = shape[0] if dim == ROWWISE else shape[1]
            spread(*operand(fmt, dim, shape, device), fmt, dim, dim, outer)
            if fmt.block and fmt.scaling.power_of_two:
                values(*operand(fmt, dim, shape, device), fmt, dim, dim, outer)
    for (m, n), rows, dtype in (((129, 272), True, BF16), (ODD, False, FP32)):
        left, right = (ones((size if rows else 1,), device) for size in (m, n))
        for bias in (None, matrix((n,), BF16, device)):
            finish(matrix((m, n), FP32, device), Scales(left, right, 2688.0), bias, dtype)


def transposes(device: torch.device) -> None:
    for shape in ((129, 272), ODD):
        codes = torch.randint(256, shape, dtype=torch.uint8).to(device)
        for align in ((1, 1), (16, 16), (16, 128)):
            for transposed in (False, True):
                k_major_copy(codes, transposed, align)


def delayed_scaling(device: torch.device) -> None:
    for layers, length, slots, algorithm in ((1, 1024, 3, "max"), (3, 16, 2, "most_recent"), (33, 1, 3, "max")):
        histories = [matrix((length, slots), FP32, device).abs() for _ in range(layers)]
        scales = [ones((slots,), device) for _ in range(layers)]
        delayed.record(histories[0], range(slots), [ones((1,), device) for _ in range(slots)])
        delayed.update(histories, scales, [f"e4m3/margin=0/{algorithm}"] * layers)


def norms(normalization: str, device: torch.device) -> None:
    wide = [WIDE] * (device.type == "cuda")  # the interpreter takes long
    for i, shape in enumerate([(0, 16), (1, 16), (129, 272), ODD, *wide]):
        dtype, zero_centered = (BF16, FP32)[i % 2], i % 2 == 0
        x, residual, dy = (matrix(shape, dtype, device) for _ in range(3))
        gamma = matrix(shape[1:], dtype, device)
        beta = gamma if normalization == "LayerNorm" and i > 1 else None
        of = gamma, beta, normalization, 1e-5, zero_centered
        other = residual if i % 2 or shape == WIDE else None
        _, mean, rsigma, *_ = norm_kernels.norm_forward(x, *of, dtype, True, other)
        for wanted in ((True, True), (True, False), (False, True))[: 3 if shape == ODD else 1]:
            norm_kernels.norm_cast(x, *of, ones((1,), device), GIVEN.spec, *wanted, True, other)
        for dresidual in (residual, None)[: 2 if shape == ODD else 1]:
            norm_kernels.norm_backward(dy, x, gamma, mean, rsigma, normalization, zero_centered, dresidual)


def activations(name: str, device: torch.device) -> None:
    cases: list[tuple[Shape, torch.dtype]] = [((33, 288), BF16)]
    if name in ("sigmoid", "swiglu"):
        cases += [((37, 102), FP32), ((0, 16), BF16)]
    formula, scale = (name, parameters_of(name)), ones((1,), device)
    for shape, dtype in cases:
        x, dy = matrix(shape, dtype, device), matrix((shape[0], out_columns(name, shape[1])), dtype, device)
        wanted = (True, dtype == BF16)
        kernels.forward(x, *formula, dtype, True)
        kernels.cast(x, *formula, scale, GIVEN.spec, *wanted, True)
        kernels.backward(dy, x, *formula, dtype, True, dtype == BF16)
        kernels.backward_cast(dy, x, *formula, scale, "e5m2/tensor/given", *wanted, True, True)


def produced_blocks(device: torch.device) -> None:
    """Norms, activations and their gradients that are cast in blocks at once; of two halves each is whole blocks."""
    on_gpu = device.type == "cuda"  # the interpreter takes long
    for fmt in (STRIPS, TILES, MX) if on_gpu else (MX,):
        for shape, dtype in (((129, 272), BF16), (ODD, FP32)) if on_gpu else (((33, 48), BF16),):
            gamma = matrix(shape[1:], dtype, device)
            for wanted in ((True, True, True), (True, False, True), (False, True, False))[: 3 if shape == ODD else 1]:
                how = None, fmt.spec, *wanted
                x, dy = matrix(shape, dtype, device), matrix(shape, dtype, device)
                halves, of_halves = (matrix((shape[0], n * fmt.block), dtype, device) for n in (2, 1))
                kernels.cast(matrix((shape[0], 2 * shape[1]), dtype, device), "swiglu", (), *how)
                kernels.cast(x, "sigmoid", (), *how)
                kernels.backward_cast(dy, x, "gelu", (), *how, True)
                kernels.backward_cast(of_halves, halves, "swiglu", (), *how, False)
                options = "LayerNorm", 1e-5, False, None, fmt.spec, *wanted
                norm_kernels.norm_cast(x, gamma, gamma, *options, dy if dtype == BF16 else None)


def permutations(device: torch.device) -> None:
    """Tokens to rows and back, some of which are dropped; a row of several chunks, too."""
    cases: list[tuple[int, int, int, torch.dtype]] = [
        (0, 2, 16, BF16), (33, 3, 144, BF16), (37, 2, 99, FP32), (5, 1, 1040, BF16), (9, 2, 48, torch.float64)
    ]  # fmt: skip
    for tokens, k, columns, dtype in cases:
        rows = torch.randperm(tokens * k, dtype=torch.int32).view(tokens, k).to(device)
        of = rows, torch.tensor([0, tokens, max(tokens * k - 2, 0)], dtype=torch.int32).to(device)
        x, y = matrix((tokens, columns), dtype, device), matrix((tokens * k, columns), dtype, device)
        p = matrix((tokens, k), torch.promote_types(dtype, FP32), device)
        for probabilities in (p, None):
            permutation.permute(x, probabilities, *of)
            permutation.unpermute(y, probabilities, *of)
        permutation.unpermute_backward(x, y, p, *of)


def replays(device: torch.device) -> None:
    """Casts of a layer's tensors, recorded, then replayed by address with others; on a CPU by the reference."""
    tapings: list[object] = []
    taped = mock.patch.object(tape, "Tape", lambda inputs: (tapings.append(inputs), Tape(inputs))[1])
    with taped, torch.no_grad():
        for name in RECIPES:
            roles = [QuantizerRole("linear", kind, "") for kind in ("input", "weight", "grad_output")]
            quantizers = [named(name).resolve(role)[0] for role in roles]
            for _ in range(2):
                xs = [matrix(shape, BF16, device) for shape in ((33, 144), (272, 144), ODD)]
                cast_all(xs, quantizers, scales=[ones((1,), device)] * len(xs), gemm_ready=True)
    assert len(tapings) == (len(RECIPES) if device.type == "cuda" else 0), len(tapings)


GROUPS: dict[str, Group] = {
    **{f"cast {row.spec}, {column.spec}": partial(casts, row, column) for row, column in PAIRS},
    "cast under a flag": casts_under_a_flag,
    "cast with given amaxes of blocks": casts_with_amaxes,
    "cast to values": casts_to_values,
    "amax": amaxes,
    "dequantize": dequantize,
    "spread and finish": spread_out,
    "transpose": transposes,
    "delayed scaling": delayed_scaling,
    **{f"norm {name}": partial(norms, name) for name in NORMALIZATIONS},
    **{f"activation {name}": partial(activations, name) for name in NAMES},
    "norm and activation in blocks": produced_blocks,
    "permutation": permutations,
    "replay": replays,
}


# ---- which kernels there are, and which were launched ----


def held(value: Any) -> list[Kernel]:
    """The kernels that an attribute of a module is, or has in it."""
    if isinstance(value, dict):
        value = list(value.values())
    return [each for each in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(each, Kernel)]


def all_kernels() -> dict[str, Kernel]:
    """Every kernel of the package, by its name.

    Raises:
        ValueError: two have the same name, by which launches are counted.
    """
    found: dict[str, Kernel] = {}
    for info in pkgutil.walk_packages(minifloat.ops.__path__, "minifloat.ops."):
        for value in vars(importlib.import_module(info.name)).values():
            for kernel in held(value):
                if found.setdefault(kernel.name, kernel) is not kernel:
                    raise ValueError(f"two kernels are called {kernel.name}; rename the one of {info.name}")
    return found


def launch(groups: dict[str, Group], device: torch.device) -> Counter[str]:
    """Runs the operations and counts launches by kernel. A group's name is printed first: a crash leaves it last."""
    with count_launches() as total:
        for name, run in groups.items():
            print(f"{name}:", end=" ", flush=True)
            before, start = total.total(), time.monotonic()
            run(device)
            if device.type == "cuda":
                torch.cuda.synchronize()
            print(f"{total.total() - before} launches, {time.monotonic() - start:.1f} s", flush=True)
    return total


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="", metavar="SUBSTRING", help="only groups of operations whose name has it")
    only = parser.parse_args(arguments).only
    groups = {name: run for name, run in GROUPS.items() if only in name}
    if not groups:
        parser.error(f"no group has {only!r} in its name; there are: {'; '.join(GROUPS)}")
    known = all_kernels()
    torch.manual_seed(0)
    launches = launch(groups, prepare())
    for name in sorted(known.keys() | launches.keys()):
        print(f"{launches[name]:6} {name}")
    print(f"{launches.total():6} in all")
    never = [] if only else sorted(known.keys() - launches.keys())
    if never:
        print(f"never launched: {', '.join(never)}")
    elsewhere = sorted(launches.keys() - known.keys())
    if elsewhere:
        print(f"launched, but in no module of minifloat.ops, so that others there may be missed: {elsewhere}")
    return 1 if never or elsewhere else 0


def prepare() -> torch.device:
    """The GPU, with memory from CUDA itself; or the CPU, with Triton's interpreter."""
    if torch.cuda.is_available():
        torch.cuda.init()
        torch.cuda.memory.caching_allocator_enable(False)
        return torch.device("cuda")
    sys.path.insert(0, str(Path(__file__).parents[2]))
    importlib.import_module("tests.helpers.triton_interpreter")
    return torch.device("cpu")


if __name__ == "__main__":
    sys.exit(main())
