"""A Llama-style language model of `minifloat.TransformerLayer`s.

RMSNorm, rotary positions (RoPE), grouped-query attention and a SwiGLU MLP, without biases. The linears of the layers
are what a recipe quantizes. The embedding, the norms, the attention product and the output head stay in high precision:
the first and the last layer carry few of the FLOPs and most of the sensitivity.

Shape suffixes: B batch, T time (positions, of this rank), D model width, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from minifloat import Recipe, RotaryPositionEmbedding, TransformerLayer
from minifloat.distributed import fully_shard, parallelize
from minifloat.tools.train.ranks import ALONE, Ranks

EPSILON = 1e-6  # of the norms
AUX_LOSS = 0.01  # the coefficient of the load balancing loss, as in the Switch Transformer (arXiv:2101.03961)
MOST_EXPERTS = 1024

MOST = {
    "dim": 2**20, "layers": 10_000, "heads": 2**16, "kv_heads": 2**16, "hidden": 2**22, "context": 2**22,
    "vocabulary": 2**24,
}  # fmt: skip
"""No model is larger; settings that say so, in a checkpoint too, are a mistake or an attack."""

OPTIONS = {
    "dim": "--hidden", "layers": "--layers", "heads": "--heads", "kv_heads": "--kv-heads", "hidden": "--mlp-hidden",
    "context": "--context", "vocabulary": "--vocabulary",
}  # fmt: skip
"""Options of `minifloat train` for the sizes, as users of other libraries know them."""


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
    experts: int = 0
    top_k: int = 2
    expert_bias_rate: float = 0.0  # 0: a loss balances experts, no bias

    def __post_init__(self) -> None:
        for name, most in MOST.items():
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= most:
                raise ValueError(f"{OPTIONS[name]} is {value!r}; choose a whole number from 1 to {most:,}")
        if type(self.experts) is not int or not 0 <= self.experts <= MOST_EXPERTS:
            raise ValueError(f"--experts is {self.experts!r}; choose a whole number from 0 to {MOST_EXPERTS:,}")
        if type(self.top_k) is not int or not 1 <= self.top_k <= (self.experts or MOST_EXPERTS):
            raise ValueError(f"--top-k is {self.top_k!r}; choose a whole number from 1 to --experts {self.experts}")
        if type(self.expert_bias_rate) not in (int, float) or not 0 <= self.expert_bias_rate <= 1:
            raise ValueError(f"--expert-bias-rate is {self.expert_bias_rate!r}; choose from 0 to 1, such as 1e-3")
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
        """Raises ValueError where a rank would have a part of a head, or of an expert."""
        if self.experts and ranks > 1:
            raise ValueError("--experts are not tensor-parallel; use --fsdp, --etp or --ep without --tp")
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
        """Learning rate that trains it well: the best peak rate of Adam falls with the width."""
        return 3e-3 * 128 / self.dim

    @property
    def parameters(self) -> int:
        """Counts the parameters of a model of these sizes."""
        attention = 2 * self.dim * (self.dim + self.kv_heads * self.head_dim)
        mlp = 3 * self.dim * self.hidden * (self.experts or 1) + self.dim * self.experts
        block = attention + mlp + 2 * self.dim
        return self.layers * block + (2 * self.vocabulary + 1) * self.dim

    def with_vocabulary(self, size: int) -> ModelConfig:
        """Sizes for a vocabulary of so many tokens."""
        return replace(self, vocabulary=size)

    def settings(self) -> dict[str, Any]:
        """The fields as JSON has them; those of experts where there are some, which older checkpoints do not name."""
        rate = self.experts and self.expert_bias_rate
        named = {"experts": self.experts, "top_k": self.experts, "expert_bias_rate": rate}
        return {name: value for name, value in asdict(self).items() if named.get(name, True)}

    def make(self, recipe: Recipe | None, seed: int, ranks: Ranks = ALONE) -> nn.Module:
        """A new model, whose linears compute in `recipe`; each rank keeps its part."""
        return Transformer(self, recipe, seed=seed, ranks=ranks).shard()

    def layer(self, recipe: Recipe | None, name: str) -> TransformerLayer:
        """A new block."""
        return TransformerLayer(
            self.dim, self.hidden, self.heads, self.kv_heads, EPSILON, hidden_dropout=0.0, attention_dropout=0.0,
            normalization="RMSNorm", activation="swiglu", bias=False, fuse_qkv_params=True, recipe=recipe, name=name,
            moe=self.mixture,
        )  # fmt: skip

    @property
    def mixture(self) -> dict[str, Any] | None:
        """Arguments of a layer's experts, if it has some: they are balanced as Switch's or as DeepSeek-V3's."""
        if not self.experts:
            return None
        sizes = {"num_experts": self.experts, "top_k": self.top_k}
        if not self.expert_bias_rate:
            return {**sizes, "aux_loss_coefficient": AUX_LOSS}
        return {**sizes, "router": {"score_function": "sigmoid", "expert_bias_rate": self.expert_bias_rate}}

    @property
    def linears(self) -> int:
        """Number of linears that compute in a recipe: `qkv`, `proj`, `fc1` and `fc2` of each block."""
        return 4 * self.layers


MODELS: dict[str, ModelConfig] = {
    "micro": ModelConfig(dim=32, layers=2, heads=2, kv_heads=1, hidden=96, context=64),  # smoke tests
    "tiny": ModelConfig(dim=128, layers=4, heads=4, kv_heads=2, hidden=384, context=128),  # minutes on two CPU cores
    "mini": ModelConfig(dim=384, layers=6, heads=6, kv_heads=2, hidden=1152, context=512),  # 10M parameters
    "small": ModelConfig(dim=512, layers=8, heads=8, kv_heads=2, hidden=1536, context=512),
    "30m": ModelConfig(dim=512, layers=8, heads=8, kv_heads=4, hidden=1280, context=1024),  # with 8,192 tokens, as
    "124m": ModelConfig(dim=768, layers=12, heads=12, kv_heads=12, hidden=3072, context=1024),  # studies have them
    "base": ModelConfig(dim=768, layers=16, heads=12, kv_heads=4, hidden=2304, context=1024),  # over 100M parameters
}


class Transformer(nn.Module):
    """Tokens [B, T] (int64) to next-token logits [B, T, V]; T is at most `config.context`.

    `seed` decides every initial value, whatever the recipe and the number of `ranks`, so that two models of one config
    and seed start equal. Where ranks split the sequences, each gives the logits of its own positions.
    """

    def __init__(
        self, config: ModelConfig, recipe: Recipe | None = None, *, seed: int = 0, ranks: Ranks = ALONE
    ) -> None:
        super().__init__()
        self.config, self.ranks = config, ranks
        config.check_ranks(ranks.tp.size)
        self.embedding = nn.Embedding(config.vocabulary, config.dim)
        self.blocks = nn.ModuleList(config.layer(recipe, f"blocks.{i}") for i in range(config.layers))
        self.norm = nn.RMSNorm(config.dim, eps=EPSILON)
        self.head = nn.Linear(config.dim, config.vocabulary, bias=False)  # never quantized
        self.positions = RotaryPositionEmbedding(config.head_dim, rotary_base=config.rope_base)
        self.reset_parameters(seed)

    @torch.no_grad()
    def reset_parameters(self, seed: int) -> None:
        """Normal weights of variance 1 / in_features; the two that write to the residual stream shrink with depth."""
        generator = torch.Generator().manual_seed(seed)
        depth_scale = 1 / math.sqrt(2 * self.config.layers)
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                scale = depth_scale if ".proj." in name or ".fc2." in name else 1.0
                weight.normal_(std=scale * weight.shape[1] ** -0.5, generator=generator)

    def shard(self) -> Transformer:
        """Leaves this rank its part of each linear, and the rows that extended tensor parallelism or FSDP2 gives it."""
        if self.ranks.alone:
            return self
        plan: dict[str, Any] = dict.fromkeys(("embedding", "norm", "head"), "sequence")
        mesh = self.ranks.tp if self.ranks.mesh is None else self.ranks.mesh
        parallelize(self, mesh, sequence_parallel=self.ranks.sequence_parallel, plan=plan)
        if self.ranks.mesh is None and self.ranks.data.size > 1:
            for module in (*self.blocks, self):
                fully_shard(module, mesh=self.ranks.data_mesh)
        return self

    def forward(self, tokens_BT: Tensor) -> Tensor:
        length = tokens_BT.shape[1]
        if length > self.config.context:
            raise ValueError(f"{length} tokens in a sequence exceed the model's context of {self.config.context}")
        angles, rows = self.positions(length), self.ranks.positions(length)
        x_TBD = self.embedding(self.ranks.own(tokens_BT).t())
        for block in self.blocks:
            x_TBD = block(x_TBD, rotary_pos_emb=angles, rows_per_rank=rows)
        logits: Tensor = self.head(self.norm(x_TBD).transpose(0, 1))
        return logits
