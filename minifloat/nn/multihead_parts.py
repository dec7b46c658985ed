"""Parts of ``MultiheadAttention``: the linears of queries, keys and values, its share of the heads, and checks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from minifloat.functional.exchange import ColumnSequence, Local
from minifloat.nn.layernorm_linear import LayerNormLinear
from minifloat.nn.linear import Linear


def make_projection(
    hidden_size: int,
    channels: int,
    fused: bool,
    options: dict[str, Any],
    heads: Mapping[str, int],
    norm: dict[str, Any] | None,
    name: str | None,
) -> Linear | LayerNormLinear:
    """The linear that makes these heads, in as many parameters if not ``fused``; behind a norm of these options."""
    rows = {kind: count * channels for kind, count in heads.items()}
    split = None if fused or len(rows) == 1 else rows
    options = options | {"parameters_split": split, "fused_parts": list(rows.values()), "name": name}
    if norm is None:
        return Linear(hidden_size, sum(rows.values()), **options)
    return LayerNormLinear(hidden_size, sum(rows.values()), **norm, **options)


def summing(exchange: Local) -> Local:
    """For parameters that serve the heads of all ranks: gradients are summed as under sequence parallelism."""
    return exchange if exchange.mode is None else ColumnSequence(exchange.group)


def own_heads(t: Any, heads: int, exchange: Local) -> Any:
    """This rank's ``heads`` of a mask or bias with a dim for those of all, [b, h, s, t]; anything else as it is."""
    if exchange.mode is None or not isinstance(t, Tensor) or t.dim() < 3:
        return t
    return t.narrow(-3, exchange.group.rank * heads, heads) if t.shape[-3] == heads * exchange.group.size else t


def check_sizes(hidden_size: int, heads: int, groups: int, kv_channels: int | None) -> None:
    if heads % groups:
        raise ValueError(
            f"MultiheadAttention: {heads} query heads do not divide into num_gqa_groups={groups} key and value heads"
        )
    if kv_channels is None and hidden_size % heads:
        raise ValueError(
            f"MultiheadAttention: hidden_size={hidden_size} does not divide by {heads} heads; change one of them or "
            "give kv_channels, the width of a head"
        )


def check_options(input_layernorm: bool, of_norm: Mapping[str, bool], fused: bool, fuse_wgrad: bool) -> None:
    """``of_norm``: options by name that need an input norm."""
    for name, asked in of_norm.items():
        if asked and not input_layernorm:
            raise ValueError(f"MultiheadAttention: {name}=True needs input_layernorm=True")
    if fuse_wgrad and not fused:
        raise ValueError(
            "MultiheadAttention: fuse_wgrad_accumulation=True needs fuse_qkv_params=True: query, key and value then "
            "have one weight, and one main_grad"
        )


def check_encoder_output(attention_type: str, encoder_output: Tensor | None) -> None:
    if (encoder_output is not None) != (attention_type == "cross"):
        raise ValueError(
            f"MultiheadAttention(attention_type={attention_type!r}) "
            + ("needs encoder_output" if encoder_output is None else "takes no encoder_output")
        )


def check_parallel(heads: int, groups: int, qkv_format: str, exchange: Local) -> None:
    """Raises where a rank would have a part of a head, or not one piece of each sequence.

    Raises:
        ValueError: query heads, or key and value heads, do not divide by the number of ranks; sequence parallelism with
            batches first.
    """
    size = exchange.group.size
    for count, what in ((heads, "query heads (num_attention_heads)"), (groups, "key and value heads (num_gqa_groups)")):
        if count % size:
            raise ValueError(
                f"MultiheadAttention: {count} {what} do not divide by tp_size={size}; each rank computes whole heads"
            )
    if exchange.sequence_parallel and qkv_format == "bshd":
        raise ValueError(
            "MultiheadAttention: sequence_parallel=True splits dim 0 over the ranks, which is the batch in "
            "qkv_format='bshd' (attn_input_format of TransformerLayer); use 'sbhd' or 'thd', where it is the sequence"
        )
