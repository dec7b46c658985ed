"""Suites ``linear``, ``tokens`` and ``shapes``: forward and backward of one Linear, its weight cast at every step."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from minifloat import Linear
from minifloat.recipe import NAMES
from minifloat.tools.bench import peers
from minifloat.tools.bench.modules import Made, Modules, expected, with_weights
from minifloat.tools.bench.registry import Case, Contender, Measure, Roofline, Row
from minifloat.tools.bench.scaled_mm import BLOCK, PER_TENSOR, products

SHAPES: dict[tuple[int, int, int], dict[str, float]] = {
    (16384, 4096, 4096): {"delayed": 1.56, "current": 1.50, "block": 1.45},
    (16384, 28672, 4096): {"delayed": 1.73, "current": 1.67, "block": 1.45},
    (16384, 4096, 14336): {"delayed": 1.67, "current": 1.61, "block": 1.45},
    (8192, 8192, 8192): {"delayed": 1.75, "current": 1.67, "block": 1.45},
    (8192, 4096, 4096): {"delayed": 1.3, "current": 1.3, "block": 1.1},
    (4096, 4096, 4096): {"delayed": 1.3, "current": 1.3},
}
"""(tokens, out, in) and the ratio to torch bf16 to reach: of large ones Transformer Engine's, for blocks more."""

EMULATED_GOAL = 0.7  # of MXFP8 and NVFP4, for which this hardware has no instruction
ROOFLINE_GOAL = 0.95
SWEEP_TOKENS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
GRID_TOKENS = (1024, 4096, 16384)
GRID = (
    (1024, 1024),
    (2048, 2048),
    (8192, 2048),
    (2048, 8192),
    (4096, 4096),
    (14336, 4096),
    (4096, 14336),
    (8192, 8192),
)
GRID_RECIPES = ("current", "delayed", "rowwise", "block", "mxfp8")
"""Recipes of suite ``shapes``, from which ``minifloat advise`` predicts."""
COMPILED = ("delayed", "current", "block")
TINY = 64  # what shapes are divided by on a CPU


def data(device: torch.device, tokens: int, out: int, into: int) -> tuple[Tensor, Tensor, Tensor]:
    """X, W and dY in bf16: random, so that the chip draws the power that real data make it draw."""
    generator = torch.Generator(device).manual_seed(tokens + 3 * out + 7 * into)
    x, w, dy = (
        torch.randn(rows, cols, device=device, generator=generator) for rows, cols in
        ((tokens, into), (out, into), (tokens, out))
    )  # fmt: skip
    return x.bfloat16(), (w * into**-0.5).bfloat16(), dy.bfloat16()


def torch_linear(w: Tensor, dtype: torch.dtype = torch.bfloat16) -> Made:
    """PyTorch's own."""
    layer = nn.Linear(w.shape[1], w.shape[0], bias=False, device=w.device, dtype=dtype)
    return with_weights(layer, [layer.weight], [w])


def our_linear(w: Tensor, recipe: str) -> Made:
    """Ours under a recipe."""
    layer = Linear(w.shape[1], w.shape[0], bias=False, device=w.device, dtype=torch.bfloat16, recipe=recipe)
    return with_weights(layer, [layer.weight], [w])


def torchao_linear(w: Tensor, recipe: str) -> Made:
    """torchao's; it converts the children of a module."""
    converted = peers.torchao_converted(lambda: nn.Sequential(torch_linear(w)[0]), recipe, w.device.type)
    return converted, list(converted.parameters())


def te_linear(w: Tensor, recipe: str) -> Made:
    """Transformer Engine's."""
    module = peers.transformer_engine(
        "Linear", recipe, w.device.type, w.shape[1], w.shape[0], bias=False, params_dtype=torch.bfloat16
    )
    return with_weights(module, list(module.parameters()), [w])


def cast_bytes(tensors: Sequence[Tensor], recipe: str) -> int:
    """Bytes that casts of bf16 tensors move: each is read once, in current scaling twice, and written twice."""
    return sum(tensor.numel() for tensor in tensors) * (2 + 2 * (recipe == "current") + 1 + 1)


def build(tokens: int, out: int, into: int, goals: dict[str, float], device: torch.device, tiny: bool) -> Case:
    """All contenders on one shape."""
    if tiny:
        tokens, out, into = tokens // TINY, out // TINY, into // TINY
    x, w, dy = data(device, tokens, out, into)
    contender = Modules(x, dy, expected(torch_linear(w, torch.float32), x, dy))
    kinds = {"delayed": PER_TENSOR, "current": PER_TENSOR, "block": BLOCK}
    rooflines = {name: Roofline(cast_bytes((x, w, dy), name), kind) for name, kind in kinds.items()}

    def ours(name: str, compiled: bool = False) -> Contender:
        wanted: dict[Measure, float] = {"roofline": ROOFLINE_GOAL} if name in rooflines else {"ratio": EMULATED_GOAL}
        if name in goals:
            wanted["ratio"] = goals[name]
        return contender(
            f"minifloat {name}", partial(our_linear, w, name), name, compiled=compiled, roofline=rooflines.get(name),
            goals=wanted,
        )  # fmt: skip

    torch_bf16 = partial(torch_linear, w)
    contenders = [contender("torch bf16", torch_bf16), contender("torch bf16", torch_bf16, compiled=True)]
    contenders += products(x, w, dy, contender.error)
    contenders += [ours(name) for name in NAMES] + [ours(name, compiled=True) for name in COMPILED]
    for scaling in ("tensorwise", "rowwise"):
        make = partial(torchao_linear, w, scaling)
        contenders.append(contender(f"torchao {scaling}", make, "current", compiled=True, fullgraph=False))
    for name in peers.TE_RECIPES:
        make = partial(te_linear, w, name)
        contenders.append(contender(f"TE {name}", make, name, roofline=rooflines[name]))
    return _case(contenders, contender, (tokens, out, into))


def build_sweep(
    tokens: int, out: int, into: int, recipes: Sequence[str], device: torch.device, tiny: bool
) -> Case:  # fmt: skip
    """Eager contenders at one number of tokens."""
    if tiny:
        tokens, out, into = tokens // 16, out // TINY, into // TINY
    x, w, dy = data(device, tokens, out, into)
    contender = Modules(x, dy, expected(torch_linear(w, torch.float32), x, dy))
    contenders = [contender("torch bf16", partial(torch_linear, w))]
    contenders += [contender(f"minifloat {name}", partial(our_linear, w, name), name) for name in recipes]
    contenders += [contender(f"TE {name}", partial(te_linear, w, name), name) for name in peers.TE_RECIPES]
    return _case(contenders, contender, (tokens, out, into))


def _case(contenders: list[Contender], made: Modules, shape: tuple[int, int, int]) -> Case:
    tokens, out, into = shape
    baselines = ("torch bf16", "torch bf16, compiled")
    return Case(
        tuple(contenders), baselines, flops=6.0 * tokens * out * into, axis=("tokens", tokens),
        memory_baseline="torch bf16", shared_bytes=made.shared_bytes,
    )  # fmt: skip


ROWS = (
    *(Row("linear", " x ".join(map(str, shape)), partial(build, *shape, goals)) for shape, goals in SHAPES.items()),
    *(Row("tokens", f"{m} x 4096 x 4096", partial(build_sweep, m, 4096, 4096, NAMES)) for m in SWEEP_TOKENS),
    *(
        Row("shapes", f"{m} x {out} x {into}", partial(build_sweep, m, out, into, GRID_RECIPES))
        for out, into in GRID
        for m in GRID_TOKENS
    ),
)
