"""Suite ``fused``: RMSNorm + SwiGLU MLP, a whole transformer layer, and a stack of layers for its memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minifloat import LayerNormMLP, TransformerLayer
from minifloat.tools.bench import peers
from minifloat.tools.bench.modules import Made, Modules, expected, with_weights
from minifloat.tools.bench.registry import Case, Contender, Measure, Row

EPS = 1e-5


@dataclass(frozen=True)
class Sizes:
    """Sizes of a layer and of its input."""

    batch: int
    tokens: int
    hidden: int
    ffn: int
    heads: int
    groups: int

    @property
    def qkv(self) -> int:
        """Rows of the weight that makes queries, keys and values."""
        return self.hidden // self.heads * (self.heads + 2 * self.groups)


FULL = Sizes(batch=2, tokens=8192, hidden=4096, ffn=14336, heads=32, groups=8)
TINY = Sizes(batch=2, tokens=128, hidden=64, ffn=224, heads=4, groups=1)

RECIPES = ("delayed", "current", "block")
MLP_GOALS = {"delayed": 1.70, "current": 1.62, "block": 1.50}
LAYER_GOALS = {"delayed": 1.50, "current": 1.45, "block": 1.38}
STACK = 4


class TorchMLP(nn.Module):
    """RMSNorm, gate and up in one linear, SwiGLU, down: plain PyTorch."""

    def __init__(self, sizes: Sizes, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.empty(sizes.hidden, device=device, dtype=dtype))
        linear = partial(nn.Linear, bias=False, device=device, dtype=dtype)
        self.fc1, self.fc2 = linear(sizes.hidden, 2 * sizes.ffn), linear(sizes.ffn, sizes.hidden)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.fc1(F.rms_norm(x, x.shape[-1:], self.gamma, EPS)).chunk(2, -1)
        result: Tensor = self.fc2(F.silu(gate) * up)
        return result


class TorchLayer(nn.Module):
    """Causal attention of grouped queries by SDPA, and :class:`TorchMLP`, around a residual stream."""

    def __init__(self, sizes: Sizes, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.heads, self.groups = sizes.heads, sizes.groups
        self.gamma = nn.Parameter(torch.empty(sizes.hidden, device=device, dtype=dtype))
        linear = partial(nn.Linear, bias=False, device=device, dtype=dtype)
        self.qkv, self.proj = linear(sizes.hidden, sizes.qkv), linear(sizes.hidden, sizes.hidden)
        self.mlp = TorchMLP(sizes, device, dtype)

    def forward(self, x: Tensor, rotary_pos_emb: tuple[Tensor, Tensor] | None = None) -> Tensor:
        qkv = self.qkv(F.rms_norm(x, x.shape[-1:], self.gamma, EPS)).unflatten(-1, (self.heads + 2 * self.groups, -1))
        q, k, v = qkv.transpose(1, 2).split((self.heads, self.groups, self.groups), 1)
        if rotary_pos_emb is not None:
            q, k = (_rotated(each, *rotary_pos_emb) for each in (q, k))
        if x.dtype == torch.float32:  # SDPA shares heads in 16 bits only; in fp32 it would make whole score matrices
            k, v = (each.repeat_interleave(self.heads // self.groups, 1) for each in (k, v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        x = x + self.proj(attended.transpose(1, 2).flatten(2))
        result: Tensor = x + self.mlp(x)
        return result


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Halves of each head's channels turned by angles [T, D] of its position."""
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


def torch_mlp(sizes: Sizes, weights: Sequence[Tensor], dtype: torch.dtype = torch.bfloat16) -> Made:
    """Plain PyTorch's, in the order of parameters gamma, fc1, fc2."""
    module = TorchMLP(sizes, weights[0].device, dtype)
    return with_weights(module, list(module.parameters()), weights)


def our_mlp(sizes: Sizes, weights: Sequence[Tensor], recipe: str | None) -> Made:
    """Ours; without a recipe the bf16 path."""
    module = LayerNormMLP(
        sizes.hidden, sizes.ffn, EPS, bias=False, normalization="RMSNorm", activation="swiglu", recipe=recipe,
        device=weights[0].device, params_dtype=torch.bfloat16,
    )  # fmt: skip
    return with_weights(module, list(module.parameters()), weights)


def te_mlp(sizes: Sizes, weights: Sequence[Tensor], recipe: str | None) -> Made:
    """Transformer Engine's."""
    module = peers.transformer_engine(
        "LayerNormMLP", recipe, weights[0].device.type, sizes.hidden, sizes.ffn, eps=EPS, bias=False,
        normalization="RMSNorm", activation="swiglu", params_dtype=torch.bfloat16,
    )  # fmt: skip
    return with_weights(module, list(module.parameters()), weights)


def torch_layers(sizes: Sizes, layers: int, weights: Sequence[Tensor], dtype: torch.dtype = torch.bfloat16) -> Made:
    """Plain PyTorch's: of each layer gamma, qkv, proj, and then the MLP's parameters."""
    module = nn.Sequential(*(TorchLayer(sizes, weights[0].device, dtype) for _ in range(layers)))
    return with_weights(module, list(module.parameters()), weights)


def our_layers(
    sizes: Sizes, layers: int, weights: Sequence[Tensor], recipe: str | None, dtype: torch.dtype = torch.bfloat16,
    **options: Any,
) -> Made:  # fmt: skip
    """Ours, with parameters of ``dtype`` and other options; without a recipe the bf16 path."""
    options = {"attn_input_format": "bshd"} | options
    layer = partial(
        TransformerLayer, sizes.hidden, sizes.ffn, sizes.heads, sizes.groups, EPS, 0.0, 0.0,
        fuse_qkv_params=True, normalization="RMSNorm", activation="swiglu", bias=False, params_dtype=dtype,
        device=weights[0].device, recipe=recipe, **options,
    )  # fmt: skip
    module = nn.Sequential(*(layer() for _ in range(layers)))
    return with_weights(module, list(module.parameters()), weights)


def te_layers(sizes: Sizes, layers: int, weights: Sequence[Tensor], recipe: str | None) -> Made:
    """Transformer Engine's, with queries, keys and values one after the other as everybody else has them."""
    layer = partial(
        peers.transformer_engine, "TransformerLayer", recipe, weights[0].device.type, sizes.hidden, sizes.ffn,
        sizes.heads, num_gqa_groups=sizes.groups, layernorm_epsilon=EPS, hidden_dropout=0.0, attention_dropout=0.0,
        attn_input_format="bshd", fuse_qkv_params=True, qkv_weight_interleaved=False, normalization="RMSNorm",
        activation="swiglu", bias=False, params_dtype=torch.bfloat16,
    )  # fmt: skip
    module = nn.Sequential(*(layer() for _ in range(layers)))
    return with_weights(module, list(module.parameters()), weights)


def random_weights(shapes: Sequence[tuple[int, ...]], device: torch.device) -> list[Tensor]:
    """bf16: norm weights near one, matrices of a scale that keeps what they multiply near one."""
    generator = torch.Generator(device).manual_seed(0)
    values = [torch.randn(shape, device=device, generator=generator) for shape in shapes]
    return [(1 + 0.1 * v if v.dim() == 1 else v * v.shape[1] ** -0.5).bfloat16() for v in values]


def mlp_shapes(sizes: Sizes) -> list[tuple[int, ...]]:
    return [(sizes.hidden,), (2 * sizes.ffn, sizes.hidden), (sizes.hidden, sizes.ffn)]


def layer_shapes(sizes: Sizes) -> list[tuple[int, ...]]:
    return [(sizes.hidden,), (sizes.qkv, sizes.hidden), (sizes.hidden, sizes.hidden), *mlp_shapes(sizes)]


def _inputs(sizes: Sizes, device: torch.device) -> tuple[Tensor, Tensor]:
    generator = torch.Generator(device).manual_seed(1)
    shape = sizes.batch, sizes.tokens, sizes.hidden
    x, dy = (torch.randn(shape, device=device, generator=generator).bfloat16() for _ in range(2))
    return x, dy


def build_mlp(device: torch.device, tiny: bool) -> Case:
    """RMSNorm + SwiGLU MLP: a result lies behind two products of the forward and two of the backward."""
    sizes = TINY if tiny else FULL
    (x, dy), weights = _inputs(sizes, device), random_weights(mlp_shapes(sizes), device)
    contender = Modules(x, dy, expected(torch_mlp(sizes, weights, torch.float32), x, dy), products=4)
    plain, ours = partial(torch_mlp, sizes, weights), partial(our_mlp, sizes, weights)
    contenders = [contender("torch bf16", plain), contender("torch bf16", plain, compiled=True)]
    contenders += [contender("minifloat bf16", partial(ours, None))]
    for compiled, names in ((False, RECIPES), (True, ("delayed", "current"))):
        for name in names:
            goals: dict[Measure, float] = {"ratio": MLP_GOALS[name]}
            make = partial(ours, name)
            contenders.append(contender(f"minifloat {name}", make, name, compiled=compiled, goals=goals))
    contenders += _torchao(contender, plain)
    contenders += [contender(f"TE {name}", partial(te_mlp, sizes, weights, name), name) for name in RECIPES]
    return _case(contenders, contender, 6.0 * x.shape[0] * x.shape[1] * sum(w.numel() for w in weights if w.dim() == 2))


def build_layers(layers: int, device: torch.device, tiny: bool) -> Case:
    """Whole layers: eight products each, forward and backward, along the longest way from an input to a result."""
    sizes = TINY if tiny else FULL
    (x, dy), weights = _inputs(sizes, device), random_weights(layer_shapes(sizes) * layers, device)
    reference = expected(torch_layers(sizes, layers, weights, torch.float32), x, dy)
    contender = Modules(x, dy, reference, products=8 * layers)
    plain, ours = partial(torch_layers, sizes, layers, weights), partial(our_layers, sizes, layers, weights)
    contenders = [contender("torch bf16", plain), contender("torch bf16", plain, compiled=True)]
    contenders += [contender("minifloat bf16", partial(ours, None))]
    for name in RECIPES:
        goals: dict[Measure, float] = {"ratio": LAYER_GOALS[name], "memory": 1.1 if layers == 1 else 1.0}
        contenders.append(contender(f"minifloat {name}", partial(ours, name), name, goals=goals))
    if layers == 1:
        contenders += _torchao(contender, plain)
    te = partial(te_layers, sizes, layers, weights)
    contenders += [contender(f"TE {name}", partial(te, name), name) for name in RECIPES]
    tokens = x.shape[0] * x.shape[1]
    products = 6.0 * tokens * sum(w.numel() for w in weights if w.dim() == 2)
    attention = 3.5 * 4 * tokens * sizes.tokens / 2 * sizes.hidden * layers  # causal: half; backward is 2.5 forwards
    return _case(contenders, contender, products + attention, burst=layers == 1)


def _torchao(contender: Modules, plain: partial[Made]) -> list[Contender]:
    def converted() -> Made:
        module = peers.torchao_converted(lambda: plain()[0], "tensorwise", contender.x.device.type)
        return module, list(module.parameters())

    return [contender("torchao tensorwise", converted, "current", compiled=True, fullgraph=False)]


def _case(contenders: list[Contender], made: Modules, flops: float, burst: bool = True) -> Case:
    """The baseline is the better of compiled PyTorch and our own bf16; memory is compared with our own bf16."""
    baselines = ("torch bf16", "torch bf16, compiled", "minifloat bf16")
    return Case(
        tuple(contenders), baselines, flops, memory_baseline="minifloat bf16", shared_bytes=made.shared_bytes,
        burst=burst,
    )  # fmt: skip


ROWS = (
    Row("fused", "RMSNorm + SwiGLU MLP", build_mlp),
    Row("fused", "transformer layer", partial(build_layers, 1)),
    Row("fused", f"{STACK} transformer layers", partial(build_layers, STACK)),
)
