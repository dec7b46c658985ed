"""``MultiheadAttention``: query, key and value from one linear, attention, and the linear of its result."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from minifloat.functional.amp import autocast_to
from minifloat.nn.attention import DotProductAttention, MaskType, QKVFormat
from minifloat.nn.layernorm_linear import LayerNormLinear, call_alone, make_norm, part_name
from minifloat.nn.linear import Linear
from minifloat.nn.parameters import InitMethod
from minifloat.nn.rope import apply_rotary_pos_emb
from minifloat.recipe import Recipe
from minifloat.recompute import checkpoint as run_checkpointed


class MultiheadAttention(nn.Module):
    """Y = attention(X Wq^T, X Wk^T, X Wv^T) Wo^T, with grouped queries, rotary positions and norms where asked for.

    Its parts are ``qkv`` (rows of the weight: all query heads, then all key heads, then all value heads; in cross
    attention ``query`` and ``key_value``), ``core_attention`` and ``proj``. One cast of X serves query, key and value,
    whether their weights are one parameter or three.

    Args:
        hidden_size: width of X and Y.
        num_attention_heads: query heads. ``num_gqa_groups``: key and value heads, default as many.
        kv_channels: width of a head; default ``hidden_size / num_attention_heads``.
        attention_dropout, attn_mask_type, window_size, bottom_right_diagonal, softmax_scale, softcap, qkv_format,
            layer_number: as of :class:`~minifloat.DotProductAttention`.
        input_layernorm: normalize X first (``normalization``, ``layernorm_epsilon``, ``zero_centered_gamma``); the norm
            hands the linear codes.
        attention_type: ``"self"``, or ``"cross"``: keys and values come from ``encoder_output``.
        fuse_qkv_params: one parameter ``weight`` rather than ``query_weight``, ``key_weight`` and ``value_weight``;
            ``fuse_wgrad_accumulation`` needs it.
        rotary_pos_interleaved: as ``interleaved`` of :class:`~minifloat.RotaryPositionEmbedding`.
        qk_norm_type: None, ``"RMSNorm"`` or ``"LayerNorm"``: normalizes each query and key head, with ``qk_norm_eps``,
            before or after the rotation (``qk_norm_before_rope``).
        bias, init_method, params_dtype, device, fuse_wgrad_accumulation, recipe: of the linears, as of
            :class:`~minifloat.Linear`; ``output_layer_init_method``: of ``proj``.
        return_bias: leave adding the bias of ``proj`` to the caller.
        return_layernorm_output: forward also gives the input norm's result.
        name: recipes and errors call the linears ``name.qkv`` (``name.query``, ``name.key_value``) and ``name.proj``;
            without it ``qkv`` and so on.

    Raises:
        ValueError: sizes that do not divide, an unknown type or norm, a norm's result asked for without a norm.
    """

    def __init__(
        self,
        hidden_size: int,
        num_attention_heads: int,
        kv_channels: int | None = None,
        attention_dropout: float = 0.1,
        layernorm_epsilon: float = 1e-5,
        *,
        num_gqa_groups: int | None = None,
        attn_mask_type: MaskType = "causal",
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        softmax_scale: float | None = None,
        softcap: float | None = None,
        qkv_format: QKVFormat = "sbhd",
        layer_number: int | None = None,
        input_layernorm: bool = False,
        normalization: str = "LayerNorm",
        zero_centered_gamma: bool = False,
        attention_type: Literal["self", "cross"] = "self",
        fuse_qkv_params: bool = False,
        rotary_pos_interleaved: bool = False,
        qk_norm_type: str | None = None,
        qk_norm_eps: float = 1e-6,
        qk_norm_before_rope: bool = False,
        bias: bool = True,
        init_method: InitMethod | None = None,
        output_layer_init_method: InitMethod | None = None,
        return_bias: bool = False,
        return_layernorm_output: bool = False,
        fuse_wgrad_accumulation: bool = False,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        recipe: Recipe | str | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__()
        groups = num_attention_heads if num_gqa_groups is None else num_gqa_groups
        _check_sizes(hidden_size, num_attention_heads, groups, kv_channels)
        _check_options(
            attention_type, input_layernorm, return_layernorm_output, fuse_qkv_params, fuse_wgrad_accumulation
        )
        channels = hidden_size // num_attention_heads if kv_channels is None else kv_channels
        self.heads, self.groups, self.channels = num_attention_heads, groups, channels
        self.qkv_format = qkv_format
        self.attention_type = attention_type
        self.return_bias = return_bias
        self.return_layernorm_output = return_layernorm_output
        self.rotary_pos_interleaved = rotary_pos_interleaved
        self.qk_norm_before_rope = qk_norm_before_rope
        linears: dict[str, Any] = {
            "bias": bias,
            "params_dtype": params_dtype,
            "device": device,
            "recipe": recipe,
            "fuse_wgrad_accumulation": fuse_wgrad_accumulation,
        }
        input_norm: dict[str, Any] = {
            "eps": layernorm_epsilon,
            "normalization": normalization,
            "zero_centered_gamma": zero_centered_gamma,
            "return_layernorm_output": return_layernorm_output,
        }
        options = linears | {"init_method": init_method}
        projection = partial(_projection, hidden_size, channels, fuse_qkv_params, options)
        norm = input_norm if input_layernorm else None
        if attention_type == "self":
            heads = {"query": num_attention_heads, "key": groups, "value": groups}
            self.qkv = projection(heads, norm, part_name(name, "qkv"))
        else:
            self.query = projection({"query": num_attention_heads}, norm, part_name(name, "query"))
            self.key_value = projection({"key": groups, "value": groups}, None, part_name(name, "key_value"))
        self.query_norm = self.key_norm = None
        if qk_norm_type is not None:
            head_norm = partial(make_norm, qk_norm_type, channels, qk_norm_eps, False, params_dtype, device)
            self.query_norm, self.key_norm = head_norm(), head_norm()
        self.core_attention = DotProductAttention(
            num_attention_heads,
            channels,
            groups,
            attention_dropout,
            qkv_format,
            attn_mask_type,
            window_size,
            bottom_right_diagonal,
            softmax_scale=softmax_scale,
            softcap=softcap,
            layer_number=layer_number,
        )
        self.proj = Linear(
            num_attention_heads * channels,
            hidden_size,
            return_bias=return_bias,
            init_method=output_layer_init_method or init_method,
            name=part_name(name, "proj"),
            **linears,
        )

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | tuple[Tensor, Tensor] | None = None,
        encoder_output: Tensor | None = None,
        *,
        is_first_microbatch: bool | None = None,
        checkpoint_core_attention: bool = False,
        rotary_pos_emb: Tensor | tuple[Tensor, Tensor] | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_kv: Tensor | None = None,
        core_attention_bias: Tensor | None = None,
        attn_mask_type: MaskType | None = None,
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
    ) -> Any:
        """X to Y, both [s, b, hidden_size], [b, s, hidden_size] or [tokens, hidden_size] as ``qkv_format`` says.

        Args:
            encoder_output: what keys and values are made of in cross attention.
            rotary_pos_emb: angles for :func:`~minifloat.apply_rotary_pos_emb`, or those of queries and of keys.
            checkpoint_core_attention: compute the attention product again in backward rather than keep its parts.
            attention_mask, cu_seqlens_q, cu_seqlens_kv, core_attention_bias, attn_mask_type, window_size,
                bottom_right_diagonal: as of :meth:`DotProductAttention.forward`.

        Returns:
            Y, or a tuple: Y, then the bias if ``return_bias``, then the norm's result if ``return_layernorm_output``.

        Raises:
            ValueError: ``encoder_output`` is missing, or given to self attention.
        """
        self._check_encoder_output(encoder_output)
        (q, k, v), norm_output = self._query_key_value(hidden_states, encoder_output, is_first_microbatch)
        starts_kv = cu_seqlens_q if cu_seqlens_kv is None else cu_seqlens_kv
        q, k = self._positions(q, k, rotary_pos_emb, cu_seqlens_q, starts_kv)
        attend = partial(
            self.core_attention,
            attn_mask_type=attn_mask_type,
            window_size=window_size,
            bottom_right_diagonal=bottom_right_diagonal,
            core_attention_bias=core_attention_bias,
        )
        run = partial(run_checkpointed, attend) if checkpoint_core_attention else attend
        attended = run(q, k, v, attention_mask, cu_seqlens_q, cu_seqlens_kv)
        y, bias = call_alone(self.proj, attended, is_first_microbatch)
        outputs = (y, *([bias] if self.return_bias else []), *norm_output)
        return outputs if len(outputs) > 1 else y

    def _query_key_value(
        self, x: Tensor, encoder_output: Tensor | None, is_first_microbatch: bool | None
    ) -> tuple[tuple[Tensor, ...], list[Tensor]]:
        """Each [..., heads, channels]; and the norm's result, if it is wanted."""
        linear = self.qkv if encoder_output is None else self.query
        projected, n = call_alone(linear, x, is_first_microbatch)
        norm_output = [n] if self.return_layernorm_output else []
        heads = projected.unflatten(-1, (-1, self.channels))
        if encoder_output is None:
            return heads.split((self.heads, self.groups, self.groups), -2), norm_output
        key_value, _ = call_alone(self.key_value, encoder_output, is_first_microbatch)
        return (heads, *key_value.unflatten(-1, (-1, self.channels)).split(self.groups, -2)), norm_output

    def extra_repr(self) -> str:
        rotated = ", rotary_pos_interleaved=True" if self.rotary_pos_interleaved else ""
        return f"attention_type={self.attention_type}" + rotated

    def _check_encoder_output(self, encoder_output: Tensor | None) -> None:
        if (encoder_output is not None) != (self.attention_type == "cross"):
            raise ValueError(
                f"MultiheadAttention(attention_type={self.attention_type!r}) "
                + ("needs encoder_output" if encoder_output is None else "takes no encoder_output")
            )

    def _positions(
        self,
        q: Tensor,
        k: Tensor,
        angles: Tensor | tuple[Tensor, Tensor] | None,
        cu_seqlens_q: Tensor | None,
        cu_seqlens_kv: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Norms and rotation of queries and keys, in the order that was asked for."""
        if self.qk_norm_before_rope:
            q, k = self._normalize(q, k)
        if angles is not None:
            of_q, of_k = angles if isinstance(angles, tuple) else (angles, angles)
            q = self._rotate(q, of_q, cu_seqlens_q)
            k = self._rotate(k, of_k, cu_seqlens_kv)
        return (q, k) if self.qk_norm_before_rope else self._normalize(q, k)

    def _normalize(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        if self.query_norm is None or self.key_norm is None:
            return q, k
        return self.query_norm(q), self.key_norm(k)

    def _rotate(self, x: Tensor, angles: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        packed = cu_seqlens if self.qkv_format == "thd" else None
        return apply_rotary_pos_emb(
            autocast_to(x), angles, self.qkv_format, interleaved=self.rotary_pos_interleaved, cu_seqlens=packed
        )


def _projection(
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
    options = options | {"parameters_split": None if fused or len(rows) == 1 else rows, "name": name}
    if norm is None:
        return Linear(hidden_size, sum(rows.values()), **options)
    return LayerNormLinear(hidden_size, sum(rows.values()), **norm, **options)


def _check_sizes(hidden_size: int, heads: int, groups: int, kv_channels: int | None) -> None:
    if heads < 1 or groups < 1 or heads % groups:
        raise ValueError(
            f"MultiheadAttention: {heads} query heads do not divide into num_gqa_groups={groups} key and value heads"
        )
    if kv_channels is None and hidden_size % heads:
        raise ValueError(
            f"MultiheadAttention: hidden_size={hidden_size} does not divide by {heads} heads; change one of them or "
            "give kv_channels, the width of a head"
        )
    if kv_channels is not None and kv_channels < 1:
        raise ValueError(f"MultiheadAttention: kv_channels={kv_channels}; a head needs at least 1 channel")


def _check_options(
    attention_type: str, input_layernorm: bool, return_layernorm_output: bool, fused: bool, fuse_wgrad: bool
) -> None:
    if attention_type not in ("self", "cross"):
        raise ValueError(f"MultiheadAttention: attention_type is {attention_type!r}; choose 'self' or 'cross'")
    if return_layernorm_output and not input_layernorm:
        raise ValueError("MultiheadAttention: return_layernorm_output=True needs input_layernorm=True")
    if fuse_wgrad and not fused:
        raise ValueError(
            "MultiheadAttention: fuse_wgrad_accumulation=True needs fuse_qkv_params=True: query, key and value then "
            "have one weight, and one main_grad"
        )
