"""``TransformerLayer``: attention and MLP around one residual stream."""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor, nn

from minifloat.nn.attention import MaskType, QKVFormat
from minifloat.nn.layernorm_mlp import LayerNormMLP
from minifloat.nn.multihead_attention import MultiheadAttention


class TransformerLayer(nn.Module):
    """X + attention(norm(X)), to which MLP(norm(that)) is added; each result through dropout before it is added.

    Args:
        hidden_size, num_attention_heads, num_gqa_groups, kv_channels, attention_dropout, window_size, qk_norm_type,
            qk_norm_eps, qk_norm_before_rope, fuse_qkv_params, rotary_pos_interleaved, softmax_scale, softcap: as
            of :class:`~minifloat.MultiheadAttention`; ``self_attn_mask_type`` is its ``attn_mask_type``, and
            ``attn_input_format`` its ``qkv_format``.
        ffn_hidden_size, activation, activation_params: as of :class:`~minifloat.LayerNormMLP`; ``checkpoint_mlp`` is
            its ``checkpoint``.
        layernorm_epsilon, normalization, zero_centered_gamma, bias, init_method, output_layer_init_method,
            params_dtype, device, recipe, name, fuse_wgrad_accumulation: of all parts.
        hidden_dropout: of the results of attention and MLP.
        layer_type: ``"encoder"``, or ``"decoder"``: attention to ``encoder_output`` stands between the two, with
            ``enc_dec_attn_mask_type``.
        parallel_attention_mlp: the MLP reads X too, not what attention made of it.
        apply_residual_connection_post_layernorm: results are added to what the norm gives, not to what it takes.

    Raises:
        ValueError: an unknown layer type, parallel attention and MLP in a decoder, and as of the parts.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        num_attention_heads: int,
        num_gqa_groups: int | None = None,
        layernorm_epsilon: float = 1e-5,
        hidden_dropout: float = 0.1,
        attention_dropout: float = 0.1,
        *,
        layer_type: Literal["encoder", "decoder"] = "encoder",
        self_attn_mask_type: MaskType = "causal",
        enc_dec_attn_mask_type: MaskType = "no_mask",
        attn_input_format: QKVFormat = "sbhd",
        parallel_attention_mlp: bool = False,
        apply_residual_connection_post_layernorm: bool = False,
        activation: str = "gelu",
        activation_params: dict[str, float] | None = None,
        normalization: str = "LayerNorm",
        zero_centered_gamma: bool = False,
        bias: bool = True,
        checkpoint_mlp: bool = False,
        name: str | None = None,
        window_size: tuple[int, int] | None = None,
        layer_number: int | None = None,
        **parts: Any,
    ) -> None:
        super().__init__()
        if layer_type not in ("encoder", "decoder"):
            raise ValueError(f"TransformerLayer: layer_type is {layer_type!r}; choose 'encoder' or 'decoder'")
        if parallel_attention_mlp and layer_type == "decoder":
            raise ValueError("TransformerLayer: parallel_attention_mlp=True is for layer_type='encoder' only")
        self.parallel_attention_mlp = parallel_attention_mlp
        self.residual_post_layernorm = apply_residual_connection_post_layernorm
        shared: dict[str, Any] = {
            "normalization": normalization,
            "zero_centered_gamma": zero_centered_gamma,
            "bias": bias,
            "return_layernorm_output": apply_residual_connection_post_layernorm,
        }
        of_all = ("init_method", "output_layer_init_method", "params_dtype", "device", "recipe")
        shared |= {key: parts[key] for key in (*of_all, "fuse_wgrad_accumulation") if key in parts}

        def attention(part: str, mask: MaskType, **options: Any) -> MultiheadAttention:
            return MultiheadAttention(
                hidden_size,
                num_attention_heads,
                attention_dropout=attention_dropout,
                layernorm_epsilon=layernorm_epsilon,
                num_gqa_groups=num_gqa_groups,
                attn_mask_type=mask,
                qkv_format=attn_input_format,
                input_layernorm=True,
                layer_number=layer_number,
                name=f"{name}.{part}" if name else None,
                **(parts | shared | options),
            )

        self.self_attention = attention("self_attention", self_attn_mask_type, window_size=window_size)
        self.inter_attention = None
        if layer_type == "decoder":
            self.inter_attention = attention("inter_attention", enc_dec_attn_mask_type, attention_type="cross")
        self.layernorm_mlp = LayerNormMLP(
            hidden_size,
            ffn_hidden_size,
            layernorm_epsilon,
            activation=activation,
            activation_params=activation_params,
            checkpoint=checkpoint_mlp,
            name=f"{name}.layernorm_mlp" if name else None,
            **shared,
        )
        self.dropout = nn.Dropout(hidden_dropout)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | tuple[Tensor, Tensor] | None = None,
        *,
        encoder_output: Tensor | None = None,
        enc_dec_attn_mask: Tensor | tuple[Tensor, Tensor] | None = None,
        is_first_microbatch: bool | None = None,
        checkpoint_core_attention: bool = False,
        rotary_pos_emb: Tensor | tuple[Tensor, Tensor] | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_kv: Tensor | None = None,
        core_attention_bias: Tensor | None = None,
    ) -> Tensor:
        """X to Y of the same shape; arguments as of :meth:`MultiheadAttention.forward`.

        ``cu_seqlens_kv`` is that of ``encoder_output`` in a decoder; ``core_attention_bias`` is self attention's.

        Raises:
            ValueError: ``encoder_output`` is missing from a decoder, or given to an encoder.
        """
        if (encoder_output is not None) != (self.inter_attention is not None):
            raise ValueError(
                "TransformerLayer(layer_type='decoder') needs encoder_output"
                if encoder_output is None
                else "TransformerLayer(layer_type='encoder') takes no encoder_output"
            )
        # Keys and values of self attention are as long as its queries.
        cu_seqlens_own = cu_seqlens_kv if self.inter_attention is None else cu_seqlens_q
        common: dict[str, Any] = {
            "is_first_microbatch": is_first_microbatch,
            "checkpoint_core_attention": checkpoint_core_attention,
        }
        attended = self.self_attention(
            hidden_states,
            attention_mask,
            rotary_pos_emb=rotary_pos_emb,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_kv=cu_seqlens_own,
            core_attention_bias=core_attention_bias,
            **common,
        )
        x = self._add(hidden_states, attended)
        if self.inter_attention is not None:
            attended = self.inter_attention(
                x,
                enc_dec_attn_mask,
                encoder_output,
                cu_seqlens_q=cu_seqlens_q,
                cu_seqlens_kv=cu_seqlens_kv,
                **common,
            )
            x = self._add(x, attended)
        if not self.parallel_attention_mlp:
            return self._add(x, self.layernorm_mlp(x, is_first_microbatch))
        transformed = self.layernorm_mlp(hidden_states, is_first_microbatch)
        return x + self.dropout(transformed[0] if self.residual_post_layernorm else transformed)

    def _add(self, x: Tensor, result: Any) -> Tensor:
        """The residual connection: to X, or to what the norm made of it, which then comes with the result."""
        y, residual = result if self.residual_post_layernorm else (result, x)
        added: Tensor = residual + self.dropout(y)
        return added
