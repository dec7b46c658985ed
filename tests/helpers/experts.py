"""Tiny mixture-of-experts models of transformers, and their experts as linears of their own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from minifloat import GroupedLinear, Linear
from minifloat.convert import ConversionReport, convert
from minifloat.nn.quantized_parameters import quantized_rows
from minifloat.optim import MasterWeights

E, H, F = 4, 32, 48
IDS = torch.randint(3, 48, (2, 16), generator=torch.Generator().manual_seed(7))
SIZES = {
    "vocab_size": 48, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "hidden_size": H,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts_per_tok": 2,
    "max_position_embeddings": 4096,
}  # fmt: skip


def mixtral() -> Any:
    config = transformers.MixtralConfig(intermediate_size=F, num_local_experts=E, **SIZES)
    return transformers.MixtralForCausalLM(config)


def qwen3() -> Any:
    sizes = {"intermediate_size": 64, "moe_intermediate_size": F, "num_experts": E, "head_dim": 8}
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**sizes, **SIZES))


def gpt_oss() -> Any:
    sizes = {"intermediate_size": F, "num_local_experts": E, "head_dim": 8}
    model = transformers.GptOssForCausalLM(transformers.GptOssConfig(**sizes, **SIZES))
    for name, parameter in model.named_parameters():
        if name.endswith("_proj_bias"):  # which are zeros at first
            nn.init.normal_(parameter)
    return model


NAMES = [f"model.layers.{i}.mlp.experts.{part}_proj" for i in range(2) for part in ("gate_up", "down")]


def experts_only(model: nn.Module, recipe: Any, **options: Any) -> ConversionReport:
    return convert(model, recipe, lambda module, name: ".experts." in name, **options)


def block(make: Callable[[], Any]) -> Any:
    """The experts of a layer, with weights that are large enough for outputs that are no rounding errors."""
    experts = make().model.layers[0].mlp.experts
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.3)
    return experts


def inputs(tokens: int = 23) -> tuple[Tensor, Tensor, Tensor]:
    """X, the experts of each token, of which the last one has none, and their weights."""
    x, weights = torch.randn(tokens, H, requires_grad=True), torch.rand(tokens, 2, requires_grad=True)
    index = torch.stack([torch.randperm(E - 1)[:2] for _ in range(tokens)])
    return x, index, weights


def train(model: nn.Module, steps: int) -> list[float]:
    quantized = any(isinstance(module, GroupedLinear) and quantized_rows(module) for module in model.modules())
    kind: Any = partial(MasterWeights, optimizer_class=torch.optim.AdamW) if quantized else torch.optim.AdamW
    optimizer = kind(model.parameters(), lr=5e-3)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


class Loop(nn.Module):
    """The experts as one ``minifloat.Linear`` for each and projection, called one after the other."""

    def __init__(self, experts: Any, recipe: Any) -> None:
        super().__init__()
        self.gate, self.linears = experts._apply_gate, nn.ModuleDict()
        for name in ("gate_up_proj", "down_proj"):
            weight, bias = getattr(experts, name).detach(), getattr(experts, f"{name}_bias", None)
            for i in range(E):
                own = weight[i].t() if experts.is_transposed else weight[i]
                linear = self.linears[f"{name}{i}"] = Linear(*own.t().shape, bias=bias is not None, recipe=recipe)
                linear.load_state_dict({"weight": own} | ({} if bias is None else {"bias": bias[i]}))

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        places = [(index == i).nonzero(as_tuple=True) for i in range(E)]
        rows = [self.linears[f"gate_up_proj{i}"](x[token]) for i, (token, _) in enumerate(places)]
        # Together: vectorized and other elements of PyTorch's sigmoid differ in the last bit.
        gated = self.gate(torch.cat(rows)).split([len(token) for token, _ in places])
        slots = torch.zeros(*index.shape, H)
        for i, place in enumerate(places):
            slots = slots.index_put(place, self.linears[f"down_proj{i}"](gated[i]))
        return slots[:, 0] * weights[:, :1] + slots[:, 1] * weights[:, 1:]

    def stacked(self, name: str, transposed: bool) -> Tensor:
        """The gradients of the parameter of all experts that is called so."""
        kind = "bias" if name.endswith("_bias") else "weight"
        linears = [self.linears[f"{name.removesuffix('_bias')}{i}"] for i in range(E)]
        all_of = torch.stack([getattr(linear, kind).grad for linear in linears])
        return all_of.transpose(1, 2) if transposed and kind == "weight" else all_of
