"""``MultiheadAttention``: query, key and value from one linear, attention, and the linear of its result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal, Unpack

from torch import Tensor, nn

from minifloat.arguments import Count, Fraction, NonNegativeFloat, Size, checked
from minifloat.comm.group import draw_apart
from minifloat.functional.autograd import autocast_to
from minifloat.functional.exchange import ColumnSequence, Exchange
from minifloat.functional.quantize import Mode
from minifloat.functional.rope import apply_rotary_pos_emb, split_rotated
from minifloat.nn import parts
from minifloat.nn.attention import CoreOptions, DotProductAttention, MaskType, QKVFormat
from minifloat.nn.fused_layers import LayerNormLinear
from minifloat.nn.linear import Linear
from minifloat.nn.options import DenseOptions, InitMethod, TensorParallelOptions, check_tensor, chosen, place
from minifloat.nn.tensor_parallel import tensor_parallel
from minifloat.recompute import checkpoint, checkpoint_without_dropout, exchange_of


class AttentionOptions(DenseOptions, CoreOptions, total=False):
    """Options of the linears of attention, and of what is between them."""


class MultiheadAttention(parts.LayerOfLinears):
    """Multi-head attention, Y = attention(X Wq^T, X Wk^T, X Wv^T) Wo^T, with grouped queries, rotation and norms.

    Its parts are ``qkv`` (rows of the weight: all query heads, then all key heads, then all value heads; in cross
    attention ``query`` and ``key_value``), ``core_attention`` and ``proj``. One cast of X serves query, key and value.

    Args:
        hidden_size: width of X and Y.
        num_attention_heads: query heads. ``num_gqa_groups``: key and value heads, by default the same number.
        kv_channels: width of a head; default ``hidden_size / num_attention_heads``.
        attention_dropout, attn_mask_type, window_size, bottom_right_diagonal, softmax_scale, softcap, qkv_format,
            layer_number: as in :class:`~minifloat.DotProductAttention`.
        input_layernorm: normalize X first (``normalization``, ``layernorm_epsilon``, ``zero_centered_gamma``), as in
            :class:`~minifloat.LayerNormLinear`.
        attention_type: ``"self"``, or ``"cross"``: keys and values come from ``encoder_output``.
        fuse_qkv_params: one parameter ``weight`` rather than ``query_weight``, ``key_weight`` and ``value_weight``;
            ``fuse_wgrad_accumulation`` needs it.
        rotary_pos_interleaved: ``interleaved`` of :class:`~minifloat.RotaryPositionEmbedding`.
        qk_norm_type: None, ``"RMSNorm"`` or ``"LayerNorm"``: normalizes each query and key head, with ``qk_norm_eps``,
            before or after the rotation (``qk_norm_before_rope``).
        bias, init_method, params_dtype, dtype, device, fuse_wgrad_accumulation, recipe, etp_group, etp_reduction: of
            the linears, as in :class:`~minifloat.Linear`; ``output_layer_init_method``: of ``proj``.
        return_bias: return the bias of ``proj``, which the caller adds.
        recompute_norm: of the input norm, as in :class:`~minifloat.LayerNormLinear`.
        save_original_input: of ``proj``: its backward reads the result of attention, which attention saves anyway.
        return_layernorm_output: forward also gives the input norm's result.
        name: recipes and errors call the linears ``name.qkv`` (``name.query``, ``name.key_value``) and ``name.proj``.
        set_parallel_mode: each rank of ``tp_group`` or ``tp_mesh``, ``tp_size`` of them, computes some of the heads:
            the linears before attention are column-parallel, query, key and value each separately, and ``proj`` is
            row-parallel. Arguments are sizes of the full layer; ranks draw different numbers for dropout.
        sequence_parallel: X, ``encoder_output`` and Y are split by rows over the same ranks, along the sequence (for
            ``thd``: the tokens); attention sees the full sequence.

    With H query heads and G key and value heads of D channels, p ranks, s positions of S on a rank, b sequences:

    ==================  ====================  ==================================================================
    on one rank         shape                 sequence parallel
    ==================  ====================  ==================================================================
    X, Y, dX, dY        [S, b, hidden]        [s, b, hidden]
    q; k, v             [S, b, H/p or G/p, D] the same: X is gathered for them, and again for dW
    Wq; Wk, Wv          [H/p D or G/p D, hidden]
    Wo                  [hidden, H/p D]       Y = sum over the ranks, scattered; dY gathered for dgrad and wgrad
    norms               [hidden], [D]         gradients summed over the ranks (of ``qk_norm_type`` always)
    ==================  ====================  ==================================================================

    Raises:
        ValueError: sizes that do not divide, an unknown type or norm, a norm's result asked for without a norm; heads
            that do not divide by the number of ranks, ``bshd`` with ``sequence_parallel``.
    """

    @checked
    def __init__(
        self,
        hidden_size: Size,
        num_attention_heads: Size,
        kv_channels: Size | None = None,
        attention_dropout: Fraction = 0.1,
        layernorm_epsilon: NonNegativeFloat = 1e-5,
        *,
        num_gqa_groups: Size | None = None,
        attn_mask_type: MaskType = "causal",
        qkv_format: QKVFormat = "sbhd",
        layer_number: Count | None = None,
        input_layernorm: bool = False,
        normalization: parts.Normalization = "LayerNorm",
        zero_centered_gamma: bool = False,
        attention_type: Literal["self", "cross"] = "self",
        fuse_qkv_params: bool = False,
        rotary_pos_interleaved: bool = False,
        qk_norm_type: parts.Normalization | None = None,
        qk_norm_eps: NonNegativeFloat = 1e-6,
        qk_norm_before_rope: bool = False,
        bias: bool = True,
        init_method: InitMethod | None = None,
        output_layer_init_method: InitMethod | None = None,
        return_bias: bool = False,
        return_layernorm_output: bool = False,
        recompute_norm: bool = False,
        save_original_input: bool = False,
        name: str | None = None,
        set_parallel_mode: bool = False,
        **options: Unpack[AttentionOptions],
    ) -> None:
        super().__init__()
        placement = place(type(self).__name__, options)
        groups = num_attention_heads if num_gqa_groups is None else num_gqa_groups
        check_sizes(hidden_size, num_attention_heads, groups, kv_channels)
        asked = {"return_layernorm_output": return_layernorm_output, "recompute_norm": recompute_norm}
        check_options(input_layernorm, asked, fuse_qkv_params, options.get("fuse_wgrad_accumulation", False))
        norm = {"eps": layernorm_epsilon, "normalization": normalization, "zero_centered_gamma": zero_centered_gamma}
        column: Mode | None = "column" if set_parallel_mode else None
        exchange = tensor_parallel("MultiheadAttention", column, **chosen(options, TensorParallelOptions))
        channels = hidden_size // num_attention_heads if kv_channels is None else kv_channels
        self.heads, self.groups, self.channels = num_attention_heads, groups, channels
        self.qkv_format, self.attention_type = qkv_format, attention_type
        self.return_bias, self.return_layernorm_output = return_bias, return_layernorm_output
        self.rotary_pos_interleaved, self.qk_norm_before_rope = rotary_pos_interleaved, qk_norm_before_rope
        of_linears = chosen(options, DenseOptions)
        of_columns = of_linears | {"bias": bias, "init_method": init_method, "parallel_mode": column}
        projection = partial(make_projection, hidden_size, channels, fuse_qkv_params, of_columns)
        of_norm = norm | asked if input_layernorm else None
        if attention_type == "self":
            heads = {"query": num_attention_heads, "key": groups, "value": groups}
            self.qkv = projection(heads, of_norm, parts.part_name(name, "qkv"))
        else:
            self.query = projection({"query": num_attention_heads}, of_norm, parts.part_name(name, "query"))
            self.key_value = projection({"key": groups, "value": groups}, None, parts.part_name(name, "key_value"))
        self.query_norm = self.key_norm = None
        if qk_norm_type is not None:
            head_norm = partial(parts.NORMS[qk_norm_type], channels, qk_norm_eps, **placement)
            self.query_norm, self.key_norm = head_norm(), head_norm()
        of_core = chosen(options, CoreOptions) | {"attn_mask_type": attn_mask_type, "layer_number": layer_number}
        self.core_attention = DotProductAttention(
            num_attention_heads, channels, groups, attention_dropout, qkv_format, **of_core
        )
        self.proj = Linear(
            num_attention_heads * channels, hidden_size, bias, return_bias=return_bias,
            init_method=output_layer_init_method or init_method, name=parts.part_name(name, "proj"),
            parallel_mode="row" if set_parallel_mode else None, save_original_input=save_original_input, **of_linears,
        )  # fmt: skip
        self._share_heads(exchange)

    def _share_heads(self, exchange: Exchange) -> None:
        """Attends with this rank's part of the heads from now on; the linears are sharded already.

        Raises:
            ValueError: heads that do not divide by the number of ranks, ``bshd`` with sequence parallelism.
        """
        size = exchange.group.size
        check_parallel(self.heads, self.groups, self.qkv_format, exchange)
        self._exchange = exchange
        self.heads, self.groups = self.heads // size, self.groups // size
        self.core_attention.num_attention_heads = self.heads
        self.core_attention.num_gqa_groups = self.groups

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
        rows_per_rank: Sequence[int] | None = None,
        encoder_rows_per_rank: Sequence[int] | None = None,
        residual: Tensor | None = None,
        return_residual: bool = False,
    ) -> Any:
        """Computes Y from X, both [s, b, hidden_size], [b, s, hidden_size] or [tokens, hidden_size].

        Args:
            encoder_output: the source of keys and values in cross attention.
            rotary_pos_emb: angles for :func:`~minifloat.apply_rotary_pos_emb`, or those of queries and of keys.
            checkpoint_core_attention: recompute the attention product in backward rather than save its parts.
            attention_mask, cu_seqlens_q, cu_seqlens_kv, core_attention_bias, attn_mask_type, window_size,
                bottom_right_diagonal: as in :meth:`DotProductAttention.forward`; of all heads and, under sequence
                parallelism, of the full sequence.
            rows_per_rank: under sequence parallelism, the number of positions (``thd``: tokens) of X and Y on each
                rank, and of ``encoder_output`` ``encoder_rows_per_rank``; equal by default.
            residual: of the shape of X, added to it first. ``return_residual``: forward also returns that sum, or X
                without a residual; with ``input_layernorm``, :meth:`LayerNormLinear.forward` adds them.

        Returns:
            Y, or a tuple: Y, then the bias if ``return_bias``, then the norm's result if ``return_layernorm_output``,
            then the residual stream if ``return_residual``.

        Raises:
            ValueError: ``encoder_output`` is missing, or given to self attention.
        """
        check_tensor(hidden_states, self, "hidden_states")
        if encoder_output is not None:
            check_tensor(encoder_output, self, "encoder_output")
        if (encoder_output is not None) != (self.attention_type == "cross"):
            raise ValueError(
                f"MultiheadAttention(attention_type={self.attention_type!r}) "
                + ("needs encoder_output" if encoder_output is None else "takes no encoder_output")
            )
        options = {"is_first_microbatch": is_first_microbatch, "rows_per_rank": rows_per_rank}
        exchange = exchange_of(self)
        of_q, of_k = rotary_pos_emb if isinstance(rotary_pos_emb, tuple) else (rotary_pos_emb, rotary_pos_emb)
        starts = (cu_seqlens_q, cu_seqlens_q if cu_seqlens_kv is None else cu_seqlens_kv)
        (q, k, v), n, stream = self._query_key_value(
            hidden_states, residual, encoder_output, encoder_rows_per_rank, (of_q, of_k), starts, exchange, options
        )
        bias = None if core_attention_bias is None else summing(exchange).replicated(core_attention_bias)
        attend = partial(
            self.core_attention,
            attn_mask_type=attn_mask_type,
            window_size=window_size,
            bottom_right_diagonal=bottom_right_diagonal,
            core_attention_bias=own_heads(bias, self.heads, exchange),
        )
        drops = self.training and self.core_attention.attention_dropout > 0
        run = attend
        if checkpoint_core_attention:
            run = partial(checkpoint if drops else checkpoint_without_dropout, attend)
        if exchange.mode is not None and drops:
            run = partial(draw_apart, exchange.group, run)
        attended = run(q, k, v, own_heads(attention_mask, self.heads, exchange), cu_seqlens_q, cu_seqlens_kv)
        y, bias = parts.call_unfused(self.proj, attended, **options)
        return parts.outputs(y, (self.return_bias, bias), (self.return_layernorm_output, n), (return_residual, stream))

    def _query_key_value(
        self, x: Tensor, residual: Tensor | None, encoder_output: Tensor | None, encoder_rows: Sequence[int] | None,
        angles: tuple[Tensor | None, Tensor | None], starts: tuple[Tensor | None, Tensor | None], exchange: Exchange,
        options: dict[str, Any],
    ) -> tuple[tuple[Tensor, ...], Tensor | None, Tensor]:  # fmt: skip
        """Computes q, k and v [..., heads, channels], normed and turned; the norm's result, if wanted; the stream.

        ``angles``, ``starts``: of queries and of keys. ``options``: of the linears.
        """
        linear = self.qkv if encoder_output is None else self.query
        projected, n, stream = parts.call_on_stream(linear, (LayerNormLinear,), x, residual, **options)
        heads = projected.unflatten(-1, (-1, self.channels))
        of_q, of_k = angles
        if self.qkv_format != "thd":
            starts = (None, None)
        if encoder_output is not None:
            options = options | {"rows_per_rank": encoder_rows}
            key_value, _ = parts.call_unfused(self.key_value, encoder_output, **options)
            q, (k, v) = heads, key_value.unflatten(-1, (-1, self.channels)).split(self.groups, -2)
        elif of_q is None or of_k is None or (self.qk_norm_before_rope and self.query_norm is not None):
            q, k, v = heads.split((self.heads, self.groups, self.groups), -2)
        else:
            q, k, v = split_rotated(
                autocast_to(heads), (self.heads, self.groups, self.groups), (of_q, of_k), self.qkv_format,
                self.rotary_pos_interleaved, starts,
            )  # fmt: skip
            of_q = of_k = None
        q = self._norm_and_turn(q, self.query_norm, of_q, starts[0], exchange)
        k = self._norm_and_turn(k, self.key_norm, of_k, starts[1], exchange)
        return (q, k, v), n, stream

    def extra_repr(self) -> str:
        rotated = ", rotary_pos_interleaved=True" if self.rotary_pos_interleaved else ""
        shared = f", tp_size={self._exchange.group.size}" if self._exchange.mode is not None else ""
        return f"attention_type={self.attention_type}" + rotated + shared

    def _norm_and_turn(
        self, x: Tensor, norm: nn.Module | None, angles: Tensor | None, starts: Tensor | None, exchange: Exchange
    ) -> Tensor:
        """Norms and turns queries or keys, in the order that was asked for."""
        if norm is not None and self.qk_norm_before_rope:
            x = parts.call_norm(norm, x, summing(exchange))
        if angles is not None:
            interleaved = self.rotary_pos_interleaved
            x = apply_rotary_pos_emb(autocast_to(x), angles, self.qkv_format, None, interleaved, cu_seqlens=starts)
        return x if norm is None or self.qk_norm_before_rope else parts.call_norm(norm, x, summing(exchange))


# ---- the linears of queries, keys and values, this rank's heads, and checks ----


def make_projection(
    hidden_size: int, channels: int, fused: bool, options: dict[str, Any], heads: Mapping[str, int],
    norm: dict[str, Any] | None, name: str | None,
) -> Linear | LayerNormLinear:  # fmt: skip
    """Makes the linear of these heads, in as many parameters if not ``fused``; behind a norm of these options."""
    rows = {kind: count * channels for kind, count in heads.items()}
    split = None if fused or len(rows) == 1 else rows
    options = options | {"parameters_split": split, "fused_parts": list(rows.values()), "name": name}
    if norm is None:
        return Linear(hidden_size, sum(rows.values()), **options)
    return LayerNormLinear(hidden_size, sum(rows.values()), **norm, **options)


def summing(exchange: Exchange) -> Exchange:
    """Returns the exchange of parameters that serve the heads of all ranks: it sums their gradients."""
    return exchange if exchange.mode is None else ColumnSequence(exchange.group)


def own_heads(t: Any, heads: int, exchange: Exchange) -> Any:
    """Cuts this rank's ``heads`` out of a mask or bias [b, h, s, t] of all of them; leaves anything else as it is."""
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
    """Checks options that depend on each other; ``of_norm``: by name those that need an input norm."""
    for name, asked in of_norm.items():
        if asked and not input_layernorm:
            raise ValueError(f"MultiheadAttention: {name}=True needs input_layernorm=True")
    if fuse_wgrad and not fused:
        raise ValueError(
            "MultiheadAttention: fuse_wgrad_accumulation=True needs fuse_qkv_params=True: query, key and value then "
            "have one weight, and one main_grad"
        )


def check_parallel(heads: int, groups: int, qkv_format: str, exchange: Exchange) -> None:
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
