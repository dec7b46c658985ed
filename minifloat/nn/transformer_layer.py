"""``TransformerLayer``: attention and MLP around one residual stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal, Unpack

from torch import Tensor, nn
from torch.nn import functional as F

from minifloat.arguments import Count, Fraction, NonNegativeFloat, Probability, Size, checked
from minifloat.comm.group import draw_apart
from minifloat.nn.attention import MaskType, QKVFormat
from minifloat.nn.fused_layers import LayerNormMLP
from minifloat.nn.moe import LayerNormMoE
from minifloat.nn.multihead_attention import AttentionOptions, MultiheadAttention
from minifloat.nn.options import check_tensor, chosen, place
from minifloat.nn.parts import (
    NORMS,
    BlockOptions,
    LayerOfLinears,
    Normalization,
    call_norm,
    call_on_stream,
    part_name,
)
from minifloat.recompute import exchange_of

_RANKS = "tp_group", "tp_size", "tp_mesh"
_NOT_OF_EXPERTS = (*_RANKS, "sequence_parallel", "etp_group", "etp_reduction")
"""Options of the layer that its experts are not given; they have ranks of their own."""


class LayerOptions(BlockOptions, AttentionOptions, total=False):
    """Options that a layer hands on as they are: of attention and MLP, and of attention alone."""

    kv_channels: Size | None
    fuse_qkv_params: bool
    rotary_pos_interleaved: bool
    qk_norm_type: Normalization | None
    qk_norm_eps: NonNegativeFloat
    qk_norm_before_rope: bool


def _of_mixture(moe: Mapping[str, Any], layout: QKVFormat) -> dict[str, Any]:
    """Arguments of a mixture of experts, whose router is told which dim of its input has the tokens of a sequence."""
    router = moe.get("router") or {}
    return {**moe, "router": {"seq_dim": 1, **router}} if layout == "bshd" and isinstance(router, Mapping) else {**moe}


class TransformerLayer(LayerOfLinears):
    """Transformer layer: S = X + attention(norm(X)), Y = S + MLP(norm(S)), with dropout before both additions.

    Its parts are ``self_attention``, in a decoder ``inter_attention``, ``layernorm_mlp`` and ``dropout``.

    Args:
        hidden_size, num_attention_heads, num_gqa_groups, kv_channels, attention_dropout, window_size,
            bottom_right_diagonal, softmax_scale, softcap, fuse_qkv_params, rotary_pos_interleaved, qk_norm_type,
            qk_norm_eps, qk_norm_before_rope, layer_number, set_parallel_mode, tp_group, tp_size, tp_mesh: as in
            :class:`~minifloat.MultiheadAttention`, of which ``self_attn_mask_type`` is the ``attn_mask_type`` and
            ``attn_input_format`` the ``qkv_format``.
        ffn_hidden_size, activation, activation_params: as in :class:`~minifloat.LayerNormMLP`; ``checkpoint_mlp`` is
            its ``checkpoint``.
        layernorm_epsilon, normalization, zero_centered_gamma, bias, init_method, output_layer_init_method,
            params_dtype, dtype, device, recipe, fuse_wgrad_accumulation: of all parts; etp_group, etp_reduction: of all
            but experts, which have theirs in ``moe``.
        moe: a mixture of experts replaces the MLP, with these arguments of :class:`~minifloat.MoE`, such as
            ``{"num_experts": 8, "top_k": 2}``; each expert is ``ffn_hidden_size`` wide. Not with tensor parallelism.
            With the format ``bshd`` the ``seq_dim`` of its ``TopKRouter`` is 1.
        save_memory: backward recomputes the operands of linears from tensors that norms, attention and activation save
            anyway: ``recompute_norm``, ``save_original_input`` and ``recompute_activation`` of the parts, experts too.
        hidden_dropout: of the results of attention and MLP, by PyTorch's generator.
        drop_path_rate: stochastic depth: the probability with which a sample of the batch skips attention, and
            independently the MLP. Not with the format ``thd``, which has no samples.
        layer_type: ``"encoder"``, or ``"decoder"``: attention to ``encoder_output`` comes between the two, with
            ``enc_dec_attn_mask_type``, ``enc_dec_window_size`` and ``enc_dec_bottom_right_diagonal``.
        parallel_attention_mlp: the MLP reads X, too, not the result of attention.
        apply_residual_connection_post_layernorm: results are added to the norm's output, not to its input.
        output_layernorm: the layer ends with a norm ``layernorm``, and self attention has no norm before it; its result
            is added to X.
        name: recipes and errors call the linears ``name.self_attention.qkv``, ``name.layernorm_mlp.fc1`` and so on;
            default ``layer`` and the ``layer_number``, if that is given.
        sequence_parallel: the residual stream is split too: X and Y [s, b, hidden_size] are this rank's positions, and
            ranks draw different numbers for ``hidden_dropout``, otherwise the same.

    Raises:
        ValueError: an unknown layer type, parallel attention and MLP in a decoder, experts under tensor parallelism,
            ``drop_path_rate`` with ``thd``, and as in the parts.
    """

    @checked
    def __init__(
        self,
        hidden_size: Size,
        ffn_hidden_size: Size,
        num_attention_heads: Size,
        num_gqa_groups: Size | None = None,
        layernorm_epsilon: NonNegativeFloat = 1e-5,
        hidden_dropout: Probability = 0.1,
        attention_dropout: Fraction = 0.1,
        *,
        self_attn_mask_type: MaskType = "causal",
        enc_dec_attn_mask_type: MaskType = "no_mask",
        enc_dec_window_size: tuple[int, int] | None = None,
        enc_dec_bottom_right_diagonal: bool | None = None,
        attn_input_format: QKVFormat = "sbhd",
        layer_type: Literal["encoder", "decoder"] = "encoder",
        parallel_attention_mlp: bool = False,
        apply_residual_connection_post_layernorm: bool = False,
        output_layernorm: bool = False,
        drop_path_rate: Fraction = 0.0,
        activation: str = "gelu",
        activation_params: Mapping[str, float] | None = None,
        moe: Mapping[str, Any] | None = None,
        checkpoint_mlp: bool = False,
        save_memory: bool = False,
        layer_number: Count | None = None,
        name: str | None = None,
        set_parallel_mode: bool = False,
        **options: Unpack[LayerOptions],
    ) -> None:
        super().__init__()
        placement = place(type(self).__name__, options)
        if parallel_attention_mlp and layer_type == "decoder":
            raise ValueError("TransformerLayer: parallel_attention_mlp=True is for layer_type='encoder' only")
        if drop_path_rate and attn_input_format == "thd":
            raise ValueError(
                f"TransformerLayer: drop_path_rate={drop_path_rate} drops samples, which attn_input_format='thd' has "
                "not; use 'sbhd' or 'bshd', or hidden_dropout"
            )
        if not name and layer_number is not None:
            name = f"layer{layer_number}"
        self.parallel_attention_mlp = parallel_attention_mlp
        self.residual_post_layernorm = apply_residual_connection_post_layernorm
        returned = {"return_layernorm_output": apply_residual_connection_post_layernorm}
        of_dense: dict[str, Any] = {"recompute_norm": save_memory, "set_parallel_mode": set_parallel_mode, **returned}
        of_attention: dict[str, Any] = {
            "attention_dropout": attention_dropout,
            "layernorm_epsilon": layernorm_epsilon,
            "num_gqa_groups": num_gqa_groups,
            "qkv_format": attn_input_format,
            "layer_number": layer_number,
            "input_layernorm": True,
            "save_original_input": save_memory,
        }
        attention = partial(MultiheadAttention, hidden_size, num_attention_heads, **of_attention, **of_dense)
        own: dict[str, Any] = {
            **options,
            "attn_mask_type": self_attn_mask_type,
            "name": part_name(name, "self_attention"),
        }
        normed_late = {"input_layernorm": False, "recompute_norm": False, "return_layernorm_output": False}
        self.self_attention = attention(**own | normed_late if output_layernorm else own)
        self.inter_attention = None
        if layer_type == "decoder":
            own |= {"attn_mask_type": enc_dec_attn_mask_type, "name": part_name(name, "inter_attention")}
            own |= {"window_size": enc_dec_window_size, "bottom_right_diagonal": enc_dec_bottom_right_diagonal}
            self.inter_attention = attention(attention_type="cross", **own)
        of_mlp: dict[str, Any] = {
            "activation": activation,
            "activation_params": activation_params,
            "checkpoint": checkpoint_mlp,
            "recompute_activation": save_memory,
            "eps": layernorm_epsilon,
            "name": part_name(name, "layernorm_mlp"),
            **chosen(options, BlockOptions),
        }
        self.layernorm_mlp: LayerNormMLP | LayerNormMoE
        if moe is None:
            self.layernorm_mlp = LayerNormMLP(hidden_size, ffn_hidden_size, **of_mlp, **of_dense)
        elif set_parallel_mode or any(options.get(each) not in (None, 1) for each in _RANKS):
            raise ValueError("TransformerLayer: experts are not tensor-parallel; use moe without tp_group and tp_mesh")
        else:
            of_experts = {key: option for key, option in of_mlp.items() if key not in _NOT_OF_EXPERTS}
            of_experts = {"bias": True, **of_experts, **returned, **_of_mixture(moe, attn_input_format)}
            self.layernorm_mlp = LayerNormMoE(hidden_size, ffn_hidden_size, **of_experts)
        self.dropout = nn.Dropout(hidden_dropout)
        self.drop_path_rate, self._batch_dim = drop_path_rate, attn_input_format.find("b")
        self.layernorm = None
        if output_layernorm:
            of_norm: dict[str, Any] = {"zero_centered_gamma": options.get("zero_centered_gamma", False), **placement}
            self.layernorm = NORMS[options.get("normalization", "LayerNorm")](hidden_size, layernorm_epsilon, **of_norm)
        self._exchange = self.self_attention._exchange

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
        rows_per_rank: Sequence[int] | None = None,
        encoder_rows_per_rank: Sequence[int] | None = None,
    ) -> Tensor:
        """Computes Y of the shape of X; arguments as in :meth:`MultiheadAttention.forward`.

        ``cu_seqlens_kv`` is that of ``encoder_output`` in a decoder; ``core_attention_bias`` is self attention's.

        Raises:
            ValueError: ``encoder_output`` is missing from a decoder, or given to an encoder.
        """
        check_tensor(hidden_states, self, "hidden_states")
        if (encoder_output is not None) != (self.inter_attention is not None):
            raise ValueError(
                "TransformerLayer(layer_type='decoder') needs encoder_output"
                if encoder_output is None
                else "TransformerLayer(layer_type='encoder') takes no encoder_output; use layer_type='decoder'"
            )
        of_all: dict[str, Any] = {"is_first_microbatch": is_first_microbatch, "rows_per_rank": rows_per_rank}
        of_attention = {"checkpoint_core_attention": checkpoint_core_attention, "cu_seqlens_q": cu_seqlens_q}
        x, attended = self._sublayer(
            self.self_attention, hidden_states, None, attention_mask, rotary_pos_emb=rotary_pos_emb,
            cu_seqlens_kv=cu_seqlens_kv if self.inter_attention is None else cu_seqlens_q,
            core_attention_bias=core_attention_bias, **of_attention, **of_all,
        )  # fmt: skip
        if self.inter_attention is not None:
            x, attended = self._sublayer(
                self.inter_attention, x, attended, enc_dec_attn_mask, encoder_output, cu_seqlens_kv=cu_seqlens_kv,
                encoder_rows_per_rank=encoder_rows_per_rank, **of_attention, **of_all,
            )  # fmt: skip
        if self.parallel_attention_mlp:
            _, transformed = self._sublayer(self.layernorm_mlp, hidden_states, None, **of_all)
            y = x + attended + transformed
        else:
            x, transformed = self._sublayer(self.layernorm_mlp, x, attended, **of_all)
            y = x + transformed
        return y if self.layernorm is None else call_norm(self.layernorm, y, exchange_of(self))

    def _sublayer(
        self, part: nn.Module, x: Tensor, residual: Tensor | None, *args: Any, **options: Any
    ) -> tuple[Tensor, Tensor]:
        """Calls ``part(x + residual)``: returns what its result is to be added to, and that result after dropout.

        It is added to what the part's norm is of, or to what that makes of it. The next part's norm adds the two.
        """
        kinds = MultiheadAttention, LayerNormMLP
        y, n, stream = call_on_stream(part, kinds, x, residual, *args, **options)
        return n if self.residual_post_layernorm and n is not None else stream, self._drop(y)

    def _drop(self, y: Tensor) -> Tensor:
        """Drops values; of rows that no other rank has, if that is how the residual stream is split. Drops samples."""
        apart = self._exchange.sequence_parallel and self.training and self.dropout.p > 0
        dropped: Tensor = draw_apart(exchange_of(self).group, self.dropout, y) if apart else self.dropout(y)
        if not (self.training and self.drop_path_rate):
            return dropped
        shape = [size if dim == self._batch_dim else 1 for dim, size in enumerate(y.shape)]
        return dropped * F.dropout(y.new_ones(shape), self.drop_path_rate)

    def extra_repr(self) -> str:
        options = ["decoder" if self.inter_attention is not None else "encoder"]
        options += ["parallel_attention_mlp=True"] if self.parallel_attention_mlp else []
        options += ["apply_residual_connection_post_layernorm=True"] if self.residual_post_layernorm else []
        options += [f"drop_path_rate={self.drop_path_rate}"] if self.drop_path_rate else []
        return ", ".join(options)
