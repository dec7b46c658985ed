"""Grouped products beside PyTorch's: suite ``grouped``, one GEMM of operands cast before.

Groups are of uneven sizes in multiples of 16, which PyTorch's FP8 product needs and ours does not.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from minifloat.formats import COLUMNWISE, ROWWISE
from minifloat.functional import dgrad, fprop, quantize_groups, wgrad
from minifloat.functional.grouped import GroupLayout
from minifloat.functional.quantize import values_of
from minifloat.operand import Quantized
from minifloat.recipe import QuantizerRole, named
from minifloat.tools.bench import gate
from minifloat.tools.bench.registry import Call, Case, Contender, Row, UnavailableError

TOKENS = 32768
GROUPS = 8, 32, 128
SHAPES = (4096, 7168), (7168, 2048)
"""Output and input features of each group."""
GEMMS = {"fprop": ("x", "w"), "dgrad": ("dy", "w"), "wgrad": ("dy", "x")}
"""Operands of each product, each contracted along the dim below."""
ALONG = {"fprop": (ROWWISE, ROWWISE), "dgrad": (ROWWISE, COLUMNWISE), "wgrad": (COLUMNWISE, COLUMNWISE)}
ROLES = {"x": "input", "w": "weight", "dy": "grad_output"}
RECIPES = "current", "rowwise", "block", "mxfp8", "nvfp4"
TINY = 32  # what features and tokens are divided by on a CPU; groups by 8
FP8 = torch.float8_e4m3fn


class Data:
    """X [M, K], W [G N, K] and dY [M, N] in bf16, and which rows are of which group."""

    def __init__(self, groups: int, tokens: int, out: int, into: int, device: torch.device) -> None:
        generator = torch.Generator(device).manual_seed(groups + out)
        shapes = {"x": (tokens, into), "w": (groups * out, into), "dy": (tokens, out)}
        self.values = {
            name: torch.randn(shape, device=device, dtype=torch.bfloat16, generator=generator)
            for name, shape in shapes.items()
        }
        cuts = torch.randint(tokens // 16 + 1, (groups - 1,), generator=torch.Generator().manual_seed(groups))
        ends = torch.cat([cuts.sort().values * 16, torch.tensor([tokens])])
        counts = ends.diff(prepend=torch.zeros(1, dtype=ends.dtype))
        self.counts, self.groups = counts.tolist(), groups
        self.tokens = GroupLayout.of(counts, tokens, device, "bench", wait=False)
        self.weights = GroupLayout.uniform(groups, out, device)

    def layout(self, name: str) -> GroupLayout:
        """Layout of one of the matrices."""
        return self.weights if name == "w" else self.tokens


def expected(data: Data, gemm: str) -> Tensor:
    """The product of each group in float32."""
    a, b = (data.values[name] for name in GEMMS[gemm])
    parts = []
    offsets = [0, *torch.tensor(data.counts).cumsum(0).tolist()]
    for group, (first, end) in enumerate(pairwise(offsets)):
        left = a[first:end].float()
        if gemm == "wgrad":
            parts.append(left.t() @ b[first:end].float())
        else:
            weight = b.view(data.groups, -1, b.shape[1])[group].float()
            parts.append(left @ (weight.t() if gemm == "fprop" else weight))
    return torch.stack(parts) if gemm == "wgrad" else torch.cat(parts)


def ours(data: Data, gemm: str, recipe: str | None) -> Call:
    """Ours, of values in bf16 without a recipe."""
    operands = []
    for name, along in zip(GEMMS[gemm], ALONG[gemm], strict=True):
        x, layout = data.values[name], data.layout(name)
        if recipe is None:
            value = values_of(x, layout.offsets)
            operands.append(Quantized(value, value))
            continue
        quantizer = named(recipe).quantizer(QuantizerRole("linear", ROLES[name]))
        quantizer = quantizer.with_usage(rowwise=along == ROWWISE, columnwise=along == COLUMNWISE)
        operands.append(quantize_groups(x, layout.offsets, quantizer, gemm_ready=True))
    fast = gemm == "fprop" and recipe == "current"
    multiply: Any = {"fprop": fprop, "dgrad": dgrad, "wgrad": wgrad}[gemm]
    return lambda: [multiply(*operands, out_dtype=torch.bfloat16, fast_accum=fast)]


def by_torch(data: Data, gemm: str) -> Call:
    """``torch._grouped_mm`` in bf16."""
    a, b = torch_operands(data, gemm)
    ends = data.tokens.offsets[1:]
    return lambda: [torch._grouped_mm(a, b, ends)]


def by_torch_fp8(data: Data, gemm: str) -> Call:
    """``torch._scaled_grouped_mm``, one scale a row."""
    a, b = torch_operands(data, gemm)
    ends = data.tokens.offsets[1:]
    if gemm == "wgrad":
        bounds = list(pairwise([0, *ends.tolist()]))
        amaxes = [
            torch.stack([each[first:end].abs().amax(0) if end > first else each.new_ones(each.shape[1])
                         for first, end in bounds]).float()
            for each in (a.t(), b)
        ]  # fmt: skip
        of_row = torch.repeat_interleave(torch.tensor(data.counts, device=a.device))
        scales = [(amax / 448).clamp(min=1e-12) for amax in amaxes]
        left = (a.t() / scales[0][of_row]).to(FP8).t().contiguous()
        right = (b / scales[1][of_row]).to(FP8).t().contiguous().t()
        scales = [scale.reshape(-1) for scale in scales]
    else:
        scales = [(each.abs().amax(dim).float() / 448) for each, dim in ((a, 1), (b, 1))]
        left = (a / scales[0][:, None]).to(FP8)
        right = (b / scales[1][:, None, :]).to(FP8).transpose(1, 2).contiguous().transpose(1, 2)
    fast, (a_scale, b_scale) = gemm == "fprop", scales
    return lambda: [
        torch._scaled_grouped_mm(left, right, a_scale, b_scale, ends, out_dtype=torch.bfloat16, use_fast_accum=fast)
    ]


def torch_operands(data: Data, gemm: str) -> tuple[Tensor, Tensor]:
    """Operands as PyTorch takes them: [M, K] and [G, K, N], or [N, M] and [M, K]."""
    a, b = (data.values[name] for name in GEMMS[gemm])
    if a.device.type != "cuda":
        raise UnavailableError("PyTorch's grouped products are timed on a CUDA device")
    if gemm == "wgrad":
        return a.t(), b
    weights = b.view(data.groups, -1, b.shape[1])
    return a, weights.transpose(1, 2) if gemm == "fprop" else weights


def build(gemm: str, groups: int, shape: tuple[int, int], device: torch.device, tiny: bool) -> Case:
    """All contenders on one product."""
    (out, into), tokens = shape, TOKENS
    if tiny:
        groups, tokens, out, into = groups // 8, tokens // TINY, out // TINY, into // TINY
    data = Data(groups, tokens, out, into, device)
    error = gate.against([expected(data, gemm)])
    contenders = [
        Contender("torch bf16", partial(by_torch, data, gemm), error, gate.bound("bf16")),
        Contender("torch rowwise", partial(by_torch_fp8, data, gemm), error, gate.bound("rowwise")),
        Contender("minifloat bf16", partial(ours, data, gemm, None), error, gate.bound("bf16")),
    ]
    for name in RECIPES:
        contenders.append(Contender(f"minifloat {name}", partial(ours, data, gemm, name), error, gate.bound(name)))
    flops = 2.0 * tokens * out * into
    return Case(tuple(contenders), ("torch bf16",), flops=flops, axis=("groups", groups), burst=False)


ROWS = tuple(
    Row("grouped", f"{gemm} {TOKENS} x {shape[0]} x {shape[1]}, {groups} groups", partial(build, gemm, groups, shape))
    for shape in SHAPES
    for groups in GROUPS
    for gemm in GEMMS
)
