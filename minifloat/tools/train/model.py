"""A Llama-style language model whose linear layers come from a factory.

RMSNorm, rotary positions (RoPE), grouped-query attention through PyTorch's SDPA and a SwiGLU MLP. The linears inside
the blocks are what a recipe quantizes. The embedding, the norms, the attention product and the output head stay in high
precision: the first and the last layer carry few of the FLOPs and most of the sensitivity.

Shape suffixes: B batch, T time (tokens), N tokens of a batch (of this rank), D model width, H query heads, G key/value
heads, E head width, F MLP width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minifloat import Linear, Recipe
from minifloat.distributed import gathered_once
from minifloat.tools.train.ranks import ALONE, Ranks, fill_normal

# (in_features, out_features) -> a linear without bias; on several ranks with what `Ranks.linear` gives
LinearFactory = Callable[..., nn.Linear]


MOST = {
    "dim": 2**20, "layers": 10_000, "heads": 2**16, "kv_heads": 2**16, "hidden": 2**22, "context": 2**22,
    "vocabulary": 2**24,
}  # fmt: skip
"""No model is larger; settings that say so, in a checkpoint too, are a mistake or an attack."""

OPTIONS = {
    "dim": "--hidden", "layers": "--layers", "heads": "--heads", "kv_heads": "--kv-heads", "hidden": "--mlp-hidden",
    "context": "--context", "vocabulary": "--vocabulary",
}  # fmt: skip
"""What `minifloat train` calls them, as users of other libraries know them."""


@dataclass(frozen=True)
class ModelConfig:
    """The sizes of one `Transformer`; every width is a multiple of 16, the smallest scaling block of any format."""

    dim: int
    layers: int
    heads: int
    kv_heads: int
    hidden: int
    context: int
    vocabulary: int = 256
    rope_base: float = 10_000.0

    def __post_init__(self) -> None:
        for name, most in MOST.items():
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= most:
                raise ValueError(f"{OPTIONS[name]} is {value!r}; choose a whole number from 1 to {most:,}")
        if self.heads % self.kv_heads:
            raise ValueError(
                f"{self.heads} query heads do not divide by {self.kv_heads} key/value heads; change --heads or "
                "--kv-heads"
            )
        if self.dim % self.heads:
            raise ValueError(f"the width {self.dim} does not divide by {self.heads} heads; change --hidden or --heads")
        for name, width in ((OPTIONS["dim"], self.dim), (OPTIONS["hidden"], self.hidden)):
            if width % 16:
                raise ValueError(f"{name} is {width}; choose a multiple of 16")
        if self.head_dim % 16:
            raise ValueError(
                f"heads are {self.head_dim} wide, --hidden over --heads; choose them so that it is a multiple of 16"
            )

    def check_ranks(self, ranks: int) -> None:
        """Raises ValueError where a rank would have a part of a head."""
        most = math.gcd(self.heads, self.kv_heads)
        if most % ranks:
            raise ValueError(
                f"{self.heads} query and {self.kv_heads} key/value heads do not divide by {ranks} ranks; "
                f"choose a --tp that divides {most}, or another --model"
            )

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads

    @property
    def learning_rate(self) -> float:
        """What trains it well: the best peak rate of Adam falls with the width."""
        return 3e-3 * 128 / self.dim

    @property
    def parameters(self) -> int:
        """How many a model of these sizes has."""
        attention = 2 * self.dim * (self.dim + self.kv_heads * self.head_dim)
        block = attention + 3 * self.dim * self.hidden + 2 * self.dim
        return self.layers * block + (2 * self.vocabulary + 1) * self.dim

    def with_vocabulary(self, size: int) -> ModelConfig:
        """The same sizes for so many tokens."""
        return replace(self, vocabulary=size)

    def settings(self) -> dict[str, Any]:
        """The fields as JSON has them."""
        return asdict(self)

    def make(self, recipe: Recipe | None, seed: int, ranks: Ranks = ALONE) -> nn.Module:
        """A new model, whose linears compute in `recipe`; each rank keeps its part."""
        return Transformer(self, partial(Linear, bias=False, recipe=recipe), seed=seed, ranks=ranks).shard()

    @property
    def linears(self) -> int:
        """How many linears the factory makes: query, key, value, output, gate, up and down of each block."""
        return 7 * self.layers


MODELS: dict[str, ModelConfig] = {
    "micro": ModelConfig(dim=32, layers=2, heads=2, kv_heads=1, hidden=96, context=64),  # smoke tests
    "tiny": ModelConfig(dim=128, layers=4, heads=4, kv_heads=2, hidden=384, context=128),  # minutes on two CPU cores
    "small": ModelConfig(dim=512, layers=8, heads=8, kv_heads=2, hidden=1536, context=512),
    "base": ModelConfig(dim=768, layers=16, heads=12, kv_heads=4, hidden=2304, context=1024),  # over 100M parameters
}


def rope_tables(context: int, head_dim: int, base: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines, each fp32 [context, head_dim / 2]: position times frequency."""
    frequency = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angle = torch.arange(context, dtype=torch.float32)[:, None] * frequency
    return angle.cos(), angle.sin()


def rotate(x_BHTE: Tensor, cos_TE: Tensor, sin_TE: Tensor) -> Tensor:
    """RoPE: turns each pair (x[i], x[i + E/2]) by its position's angle; computed in fp32, returned in x's dtype."""
    a, b = x_BHTE.float().chunk(2, dim=-1)
    return torch.cat((a * cos_TE - b * sin_TE, a * sin_TE + b * cos_TE), dim=-1).to(x_BHTE.dtype)


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions; [N, D] to [N, D]."""

    def __init__(self, config: ModelConfig, linear: LinearFactory, ranks: Ranks) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.query = linear(config.dim, config.heads * config.head_dim, **ranks.linear("column"))
        self.key = linear(config.dim, config.kv_heads * config.head_dim, **ranks.linear("column"))
        self.value = linear(config.dim, config.kv_heads * config.head_dim, **ranks.linear("column"))
        self.output = linear(config.heads * config.head_dim, config.dim, **ranks.linear("row"))

    def forward(self, x_ND: Tensor, cos_TE: Tensor, sin_TE: Tensor) -> Tensor:
        length = cos_TE.shape[0]
        with gathered_once():
            q_ND, k_ND, v_ND = self.query(x_ND), self.key(x_ND), self.value(x_ND)
        q_BHTE = rotate(self._heads(q_ND, length), cos_TE, sin_TE)
        k_BGTE = rotate(self._heads(k_ND, length), cos_TE, sin_TE)
        v_BGTE = self._heads(v_ND, length)
        y_BHTE = F.scaled_dot_product_attention(q_BHTE, k_BGTE, v_BGTE, is_causal=True, enable_gqa=True)
        out: Tensor = self.output(y_BHTE.transpose(1, 2).flatten(2).flatten(0, 1))
        return out

    def _heads(self, x_ND: Tensor, length: int) -> Tensor:
        """[B, heads, T, E]: all tokens, whatever this rank's are, and this rank's heads."""
        return x_ND.unflatten(0, (-1, length)).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)); [N, D] to [N, D]."""

    def __init__(self, config: ModelConfig, linear: LinearFactory, ranks: Ranks) -> None:
        super().__init__()
        self.gate = linear(config.dim, config.hidden, **ranks.linear("column"))
        self.up = linear(config.dim, config.hidden, **ranks.linear("column"))
        self.down = linear(config.hidden, config.dim, **ranks.linear("row"))

    def forward(self, x_ND: Tensor) -> Tensor:
        with gathered_once():
            gate_NF, up_NF = self.gate(x_ND), self.up(x_ND)
        out: Tensor = self.down(F.silu(gate_NF) * up_NF)
        return out


class Block(nn.Module):
    """Pre-norm attention and MLP around one residual stream."""

    def __init__(self, config: ModelConfig, linear: LinearFactory, ranks: Ranks) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=1e-6)
        self.attention = Attention(config, linear, ranks)
        self.mlp_norm = nn.RMSNorm(config.dim, eps=1e-6)
        self.mlp = SwiGLU(config, linear, ranks)

    def forward(self, x_ND: Tensor, cos_TE: Tensor, sin_TE: Tensor) -> Tensor:
        x_ND = x_ND + self.attention(self.attention_norm(x_ND), cos_TE, sin_TE)
        out: Tensor = x_ND + self.mlp(self.mlp_norm(x_ND))
        return out


class Transformer(nn.Module):
    """Tokens [B, T] (int64) to next-token logits [B, T, V]; T is at most `config.context`.

    `linear` makes each linear inside the blocks. `seed` decides every initial value, whatever the recipe and the number
    of `ranks`, so that two models of one config and seed start equal. Where ranks split the tokens, each gives the
    logits of its own, [N, V].
    """

    def __init__(self, config: ModelConfig, linear: LinearFactory, *, seed: int = 0, ranks: Ranks = ALONE) -> None:
        super().__init__()
        self.config = config
        self.ranks = ranks
        config.check_ranks(ranks.tp.size)
        self.embedding = nn.Embedding(config.vocabulary, config.dim)
        self.blocks = nn.ModuleList(Block(config, linear, ranks) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.dim, eps=1e-6)
        self.head = nn.Linear(
            config.dim, config.vocabulary, bias=False
        )  # never the factory's: the head is not quantized
        cos_TE, sin_TE = rope_tables(config.context, config.head_dim, config.rope_base)
        self.register_buffer("cos_TE", cos_TE, persistent=False)
        self.register_buffer("sin_TE", sin_TE, persistent=False)
        self.reset_parameters(seed)

    @torch.no_grad()
    def reset_parameters(self, seed: int) -> None:
        """Normal weights of variance 1 / in_features; the two that write to the residual stream shrink with depth."""
        generator = torch.Generator().manual_seed(seed)
        depth_scale = 1 / math.sqrt(2 * self.config.layers)
        self.embedding.weight.normal_(std=self.config.dim**-0.5, generator=generator)
        widths = {"attention.output": self.config.heads * self.config.head_dim, "mlp.down": self.config.hidden}
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                width = next((width for end, width in widths.items() if name.endswith(end)), 0)
                std = depth_scale * width**-0.5 if width else self.config.dim**-0.5
                fill_normal(module.weight, std, generator, self.ranks)

    def shard(self) -> Transformer:
        """Lets the ranks that share the data keep rows of each parameter (FSDP2), block by block, on their devices."""
        from minifloat.distributed import fully_shard

        if self.ranks.data.size > 1:
            for module in (*self.blocks, self):
                fully_shard(module, mesh=self.ranks.data_mesh)
        return self

    def forward(self, tokens_BT: Tensor) -> Tensor:
        length = tokens_BT.shape[1]
        if length > self.config.context:
            raise ValueError(f"{length} tokens in a sequence exceed the model's context of {self.config.context}")
        cos_TE, sin_TE = self.get_buffer("cos_TE")[:length], self.get_buffer("sin_TE")[:length]
        x_ND = self.embedding(self.ranks.own(tokens_BT.flatten()))
        for block in self.blocks:
            x_ND = block(x_ND, cos_TE, sin_TE)
        x_ND = self.norm(x_ND)
        logits: Tensor = self.head(x_ND if self.ranks.splits_tokens else x_ND.unflatten(0, tokens_BT.shape))
        return logits
