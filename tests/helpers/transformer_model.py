"""Attention and transformer layers in float64: plain operations on the parameters of a module, by their names.

``options`` are the keyword arguments that the module was made with, its sizes included.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Options = Mapping[str, Any]
Parameters = dict[str, Tensor]
_ACTIVATIONS = {
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "relu": torch.relu,
    "swiglu": lambda x: F.silu(x[..., : x.shape[-1] // 2]) * x[..., x.shape[-1] // 2 :],
}


def parameters_of(module: nn.Module) -> Parameters:
    """Its parameters, as leaves in float64."""
    return {name: p.detach().double().requires_grad_() for name, p in module.named_parameters()}


def linear(p: Parameters, name: str, x: Tensor) -> Tensor:
    def whole(kind: str) -> Tensor | None:
        parts = [p.get(f"{name}.{part}{kind}") for part in ("", "query_", "key_", "value_")]
        found = [part for part in parts if part is not None]
        return torch.cat(found) if found else None

    weight, bias = whole("weight"), whole("bias")
    assert weight is not None
    y = torch.einsum("...k,nk->...n", x, weight)
    return y if bias is None else y + bias


def norm(p: Parameters, name: str, x: Tensor, kind: str, eps: float, zero_centered: bool = False) -> Tensor:
    gamma = p[f"{name}.weight"] + (1 if zero_centered else 0)
    if kind == "RMSNorm":
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * gamma
    centered = x - x.mean(-1, keepdim=True)
    return centered / (centered.square().mean(-1, keepdim=True) + eps).sqrt() * gamma + p[f"{name}.bias"]


def input_norm(p: Parameters, name: str, x: Tensor, options: Options) -> Tensor:
    kind, centered = options.get("normalization", "LayerNorm"), options.get("zero_centered_gamma", False)
    return norm(p, name, x, kind, options.get("layernorm_epsilon", 1e-5), centered)


def rotate(x: Tensor, angles: Tensor, interleaved: bool) -> Tensor:
    """[s, b, h, d] as complex numbers, multiplied by e^(i angle); ``angles`` [s, 1, 1, r] hold each angle twice."""
    r = angles.shape[-1]
    first = torch.arange(0, r, 2) if interleaved else torch.arange(r // 2)
    second = first + (1 if interleaved else r // 2)
    turned = torch.complex(x[..., first], x[..., second]) * torch.exp(1j * angles[: x.shape[0], ..., first].double())
    out = x.clone()
    out[..., first], out[..., second] = turned.real, turned.imag
    return out


def attend(
    q: Tensor, k: Tensor, v: Tensor, kept: Tensor, scale: float, softcap: float | None, bias: Tensor | None
) -> Tensor:
    """[s, b, h, d], [t, b, g, d] and ``kept`` bool, broadcasting to [b, h, s, t], to [s, b, h * d]."""
    heads = []
    for h in range(q.shape[2]):
        group = h * k.shape[2] // q.shape[2]
        scores = torch.einsum("sbd,tbd->bst", q[:, :, h], k[:, :, group]) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if bias is not None:
            scores = scores + bias.double().expand(q.shape[1], q.shape[2], -1, -1)[:, h]
        seen = kept.expand(q.shape[1], q.shape[2], *scores.shape[1:])[:, h]
        weights = torch.where(seen, (scores - scores.amax(-1, keepdim=True)).exp(), 0.0)
        total = weights.sum(-1, keepdim=True)
        heads.append(torch.einsum("bst,tbd->sbd", weights / torch.where(total > 0, total, 1.0), v[:, :, group]))
    return torch.cat(heads, -1)


def multihead_attention(
    p: Parameters,
    options: Options,
    x: Tensor,
    kept: Tensor,
    encoder: Tensor | None = None,
    angles: tuple[Tensor, Tensor] | None = None,
    bias: Tensor | None = None,
    prefix: str = "",
) -> tuple[Tensor, Tensor]:
    """Y and the input norm's result (X without one), from X [s, b, hidden]."""
    heads = options["num_attention_heads"]
    groups = options.get("num_gqa_groups") or heads
    d = options.get("kv_channels") or options["hidden_size"] // heads
    first, has_norm = prefix + ("qkv" if encoder is None else "query"), options.get("input_layernorm", False)
    n = input_norm(p, f"{first}.norm", x, options) if has_norm else x
    projected = linear(p, f"{first}.linear" if has_norm else first, n)
    both = projected[..., heads * d :] if encoder is None else linear(p, f"{prefix}key_value", encoder)
    q = projected[..., : heads * d].unflatten(-1, (heads, d))
    k = both[..., : groups * d].unflatten(-1, (groups, d))
    v = both[..., groups * d :].unflatten(-1, (groups, d))

    def head_norms(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        kind, eps = options.get("qk_norm_type"), options.get("qk_norm_eps", 1e-6)
        if kind is None:
            return q, k
        return norm(p, f"{prefix}query_norm", q, kind, eps), norm(p, f"{prefix}key_norm", k, kind, eps)

    before = options.get("qk_norm_before_rope", False)
    q, k = head_norms(q, k) if before else (q, k)
    if angles is not None:
        interleaved = options.get("rotary_pos_interleaved", False)
        q, k = rotate(q, angles[0], interleaved), rotate(k, angles[1], interleaved)
    q, k = (q, k) if before else head_norms(q, k)
    context = attend(q, k, v, kept, options.get("softmax_scale") or d**-0.5, options.get("softcap"), bias)
    return linear(p, f"{prefix}proj", context), n


def transformer_layer(
    p: Parameters,
    options: Options,
    x: Tensor,
    kept: Tensor,
    encoder: Tensor | None = None,
    kept_encoder: Tensor | None = None,
    angles: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Y from X [s, b, hidden], without dropout."""
    attention = {**options, "input_layernorm": True}
    post = options.get("apply_residual_connection_post_layernorm", False)
    normed_late = options.get("output_layernorm", False)
    own = attention | {"input_layernorm": not normed_late}
    y, n = multihead_attention(p, own, x, kept, angles=angles, prefix="self_attention.")
    h = (n if post else x) + y
    if encoder is not None:
        assert kept_encoder is not None
        y, n = multihead_attention(p, attention, h, kept_encoder, encoder, prefix="inter_attention.")
        h = (n if post else h) + y
    parallel = options.get("parallel_attention_mlp", False)
    n = input_norm(p, "layernorm_mlp.norm", x if parallel else h, options)
    hidden = _ACTIVATIONS[options.get("activation", "gelu")](linear(p, "layernorm_mlp.fc1", n))
    out = (n if post and not parallel else h) + linear(p, "layernorm_mlp.fc2", hidden)
    return input_norm(p, "layernorm", out, options) if normed_late else out
