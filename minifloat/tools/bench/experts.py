"""Suite ``experts``: forward and backward of a ``GroupedLinear`` and of a mixture of experts, beside PyTorch's.

Weights are cast in each step, or once and then kept (``cached``), as over the microbatches of one step.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minifloat.nn import GroupedLinear, MoE
from minifloat.tools.bench import gate
from minifloat.tools.bench.grouped import GEMMS, GROUPS, SHAPES, TINY, TOKENS, Data, expected, torch_operands
from minifloat.tools.bench.modules import Made, Modules, with_weights
from minifloat.tools.bench.modules import expected as expected_step
from minifloat.tools.bench.registry import Call, Case, Contender, Measure, Row

LAYER_RECIPES = "current", "block", "rowwise", "mxfp8"


def layer(data: Data, recipe: str | None, out: int, into: int, cached: bool) -> Call:
    """Forward and backward of a ``GroupedLinear``; ``cached``: with weights that are quantized already."""
    x, w, dy = (data.values[name] for name in ("x", "w", "dy"))
    experts = GroupedLinear(
        data.groups, into, out, bias=False, device=x.device, dtype=x.dtype, single_grouped_weight=True,
        recipe=recipe or "none",
    )  # fmt: skip
    weight = experts.get_parameter("weight")
    with torch.no_grad():
        weight.copy_(w.view(weight.shape))
    source, first = x.clone().requires_grad_(), [True]

    def call() -> list[Tensor]:
        y = experts(source, data.tokens, first[0] if cached else None)
        first[0] = False
        dx, dw = torch.autograd.grad(y, (source, weight), dy)
        return [y.detach(), dx, dw]

    return call


def layer_by_torch(data: Data) -> Call:
    """Makes a call of the layer by ``torch._grouped_mm`` in bf16."""
    x, w = torch_operands(data, "fprop")
    weight, source = w.transpose(1, 2).clone().requires_grad_(), x.clone().requires_grad_()
    ends, dy = data.tokens.offsets[1:], data.values["dy"]

    def call() -> list[Tensor]:
        y = torch._grouped_mm(source, weight.transpose(1, 2), ends)
        dx, dw = torch.autograd.grad(y, (source, weight), dy)
        return [y.detach(), dx, dw]

    return call


def build_layer(groups: int, shape: tuple[int, int], device: torch.device, tiny: bool) -> Case:
    """Forward and backward, with weights that are cast in each step, and with cached ones."""
    (out, into), tokens = shape, TOKENS
    if tiny:
        groups, tokens, out, into = groups // 8, tokens // TINY, out // TINY, into // TINY
    data = Data(groups, tokens, out, into, device)
    error = gate.against([expected(data, gemm) for gemm in GEMMS])
    contenders = [
        Contender("torch bf16", partial(layer_by_torch, data), error, gate.bound("bf16")),
        Contender("minifloat bf16", partial(layer, data, None, out, into, False), error, gate.bound("bf16")),
    ]
    for cached, name in ((cached, name) for name in LAYER_RECIPES for cached in (False, True)):
        title = f"minifloat {name}" + " cached" * cached
        contenders.append(Contender(title, partial(layer, data, name, out, into, cached), error, gate.bound(name)))
    flops = 6.0 * tokens * out * into
    return Case(tuple(contenders), ("torch bf16",), flops=flops, axis=("groups", groups), burst=False)


# ---- a mixture of experts ----


class Sizes(NamedTuple):
    """Sizes of a mixture of experts, and the number of its tokens."""

    hidden: int
    ffn: int
    experts: int
    top_k: int
    tokens: int


QWEN3_30B_A3B = Sizes(hidden=2048, ffn=768, experts=128, top_k=8, tokens=16384)
SMALL = Sizes(hidden=128, ffn=64, experts=8, top_k=4, tokens=256)
MOE_RECIPES = "current", "block", "delayed"
MOE_GOAL = 1.25


def sum_of_rows(y: Tensor, inverse: Tensor) -> Tensor:
    """Sums each token's k rows of ``y``, in float32: one by one in a graph, which reads them faster so."""
    if not torch.compiler.is_compiling():
        return y[inverse].sum(1)
    total = y[inverse[:, 0]].float()
    for choice in range(1, inverse.shape[1]):
        total = total + y[inverse[:, choice]].float()
    return total.to(y.dtype)


class Spread(torch.autograd.Function):
    """Tokens [T, H] to the rows [T k, H] of their experts: a gather in both directions, without atomic additions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(order, inverse)
        return x[order // inverse.shape[1]]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        _, inverse = ctx.saved_tensors
        return sum_of_rows(dy, inverse), None, None


class Collect(torch.autograd.Function):
    """The way back: for each token the sum of its k rows."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(order, inverse)
        return sum_of_rows(y, inverse)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None, None]:
        order, inverse = ctx.saved_tensors
        return dx[order // inverse.shape[1]], None, None


class TorchMoE(nn.Module):
    """Softmax router, SwiGLU experts, probabilities multiplied to the activation: plain PyTorch, its grouped products.

    As fast as PyTorch allows: tokens are gathered both ways, logits are bf16 (ours are fp32), and the elementwise
    parts are left for a compiler to fuse.
    """

    def __init__(self, sizes: Sizes, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        made = partial(torch.empty, device=device, dtype=dtype)
        self.top_k, self.loops = sizes.top_k, dtype == torch.float32
        self.router = nn.Parameter(made(sizes.experts, sizes.hidden))
        self.w1 = nn.Parameter(made(sizes.experts, 2 * sizes.ffn, sizes.hidden))
        self.w2 = nn.Parameter(made(sizes.experts, sizes.hidden, sizes.ffn))

    def forward(self, x: Tensor) -> Tensor:
        """X [T, H] to Y [T, H]."""
        probabilities, indices = F.linear(x, self.router).float().softmax(-1).topk(self.top_k)
        probabilities = probabilities / probabilities.sum(-1, keepdim=True)
        experts, order = indices.flatten().sort()
        inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
        inverse = inverse.view_as(indices)
        ends = torch.searchsorted(experts, torch.arange(len(self.w1), device=x.device), right=True, out_int32=True)
        h = self._multiply(Spread.apply(x, order, inverse), self.w1, ends)  # type: ignore[no-untyped-call]
        gate_, up = h.float().chunk(2, -1)
        p = Spread.apply(probabilities.flatten()[:, None], order, inverse.view(-1, 1))  # type: ignore[no-untyped-call]
        a = (F.silu(gate_) * up * p).to(x.dtype)
        y: Tensor = Collect.apply(self._multiply(a, self.w2, ends), order, inverse)  # type: ignore[no-untyped-call]
        return y

    def _multiply(self, x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
        if not self.loops:
            return torch._grouped_mm(x, w.transpose(1, 2), ends)
        counts = ends.diff(prepend=ends.new_zeros(1)).tolist()  # the reference, in float32
        return torch.cat([rows @ each.t() for rows, each in zip(x.split(counts), w, strict=True)])


class OwnMoE(nn.Module):
    """Ours; ``cached``: its weights are quantized in the first forward alone."""

    def __init__(self, sizes: Sizes, device: torch.device, recipe: str, cached: bool) -> None:
        super().__init__()
        self.moe = MoE(
            *sizes[:4], device=device, dtype=torch.bfloat16, recipe=recipe, single_grouped_weight=True
        )  # fmt: skip
        self.first: bool | None = True if cached else None

    def forward(self, x: Tensor) -> Tensor:
        """X [T, H] to Y [T, H]."""
        first, self.first = self.first, False if self.first is not None else None
        y: Tensor = self.moe(x, first)
        return y


def moe_data(sizes: Sizes, device: torch.device) -> tuple[list[Tensor], Tensor, Tensor]:
    """The weights of router, fc1 and fc2, X and dY in bf16.

    Each token is noise and a part along the router's rows of k experts, of which some are drawn more often: it is these
    that every implementation chooses, however it rounds its logits.
    """
    generator = torch.Generator(device).manual_seed(sizes.experts)
    normal = partial(torch.randn, device=device, generator=generator)
    router = normal(sizes.experts, sizes.hidden) * 0.25 / (sizes.hidden / 2048) ** 0.5 / 2048**0.5
    w1 = normal(sizes.experts, 2 * sizes.ffn, sizes.hidden, dtype=torch.bfloat16).mul_(sizes.hidden**-0.5)
    w2 = normal(sizes.experts, sizes.hidden, sizes.ffn, dtype=torch.bfloat16).mul_(sizes.ffn**-0.5)
    drawn = torch.rand(sizes.experts, device=device, generator=generator).add_(0.5)
    chosen = torch.multinomial(drawn.expand(sizes.tokens, -1), sizes.top_k, generator=generator)
    marks = torch.zeros(sizes.tokens, sizes.experts, device=device).scatter_(1, chosen, 48.0)
    x = normal(sizes.tokens, sizes.hidden) + marks @ router
    dy = normal(sizes.tokens, sizes.hidden, dtype=torch.bfloat16)
    return [router.bfloat16(), w1, w2], x.bfloat16(), dy


def by_torch_moe(sizes: Sizes, values: list[Tensor], dtype: torch.dtype = torch.bfloat16) -> Made:
    """PyTorch's, with these weights."""
    module = TorchMoE(sizes, values[0].device, dtype)
    return with_weights(module, list(module.parameters()), values)


def own_moe(sizes: Sizes, values: list[Tensor], recipe: str, cached: bool = False) -> Made:
    """Ours, with these weights, one parameter of all experts each."""
    module = OwnMoE(sizes, values[0].device, recipe, cached)
    return with_weights(module, list(module.parameters()), values)


def build_moe(sizes: Sizes, device: torch.device, tiny: bool) -> Case:
    """Forward and backward, PyTorch's eager and compiled, ours with weights that are cast in each step, and cached."""
    sizes = SMALL if tiny else sizes
    values, x, dy = moe_data(sizes, device)
    reference = expected_step(by_torch_moe(sizes, values, torch.float32), x, dy)
    row = Modules(x, dy, reference, products=4)
    theirs = partial(by_torch_moe, sizes, values)
    contenders = [row("torch bf16", theirs), row("torch bf16", theirs, compiled=True)]
    contenders.append(row("minifloat bf16", partial(own_moe, sizes, values, "none")))
    goals: dict[Measure, float] = {"ratio": MOE_GOAL}
    for name in MOE_RECIPES:
        make = partial(own_moe, sizes, values, name)
        contenders.append(row(f"minifloat {name}", make, name, goals=goals))
        contenders.append(row(f"minifloat {name} cached", partial(make, cached=True), name))
    flops = 18.0 * sizes.tokens * sizes.top_k * sizes.ffn * sizes.hidden
    baselines = "torch bf16", "torch bf16, compiled"
    return Case(tuple(contenders), baselines, flops=flops, shared_bytes=row.shared_bytes, burst=False)


ROWS = (
    *(
        Row("experts", f"{TOKENS} x {shape[0]} x {shape[1]}, {groups} groups", partial(build_layer, groups, shape))
        for shape in SHAPES
        for groups in GROUPS
    ),
    Row("experts", "MoE 16384 x 2048 x 768, 128 experts, top 8", partial(build_moe, QWEN3_30B_A3B)),
)
