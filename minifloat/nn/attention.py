"""``DotProductAttention``: masks, layouts and packed sequences around PyTorch's; rotary positions (Su et al. 2021)."""

from __future__ import annotations

from collections.abc import Callable
from numbers import Integral
from typing import Annotated, Literal, Self, TypedDict, get_args

import torch
from torch import Tensor, nn

from minifloat.arguments import Accepts, Count, Device, Fraction, PositiveFloat, Size, checked
from minifloat.functional.attention import (
    Backend,
    Band,
    Mask,
    TokenPlaces,
    attention,
    check_cu_seqlens,
    choose_backend,
    packed_places,
    padded_places,
    simplified,
)
from minifloat.functional.autograd import autocast_to
from minifloat.nn.options import check_tensor

RotaryPercent = Annotated[float, Accepts("a number above 0, at most 1", lambda value: 0 < value <= 1)]


class RotaryPositionEmbedding(nn.Module):
    """Computes the angles ``position * rotary_base^(-2 i / dim)`` of each position and pair ``i`` of channels, in fp32.

    Args:
        dim: channels of a head; ``int(dim * rotary_percent)`` of them, an even number, are rotated.
        rotary_percent: the rotated fraction of a head, its first channels; above 0, at most 1.
        seq_len_interpolation_factor: positions are divided by it (Chen et al. 2023).
        pretrained_max_position_embeddings: with a factor: sequences that end (``offset + max_seq_len``) beyond the
            factor times this are divided by ``end / pretrained_max_position_embeddings`` instead, so that they fit.
        rotary_base: the base of the frequencies.
        interleaved: pairs are neighbours (2 i, 2 i + 1) rather than halves (i, i + dim / 2).
        device: where the angles are computed; ``module.to`` moves it.

    Raises:
        ValueError: no channel to rotate, or an odd number of channels.
    """

    inv_freq: Tensor

    @checked
    def __init__(
        self,
        dim: Size,
        rotary_percent: RotaryPercent = 1.0,
        seq_len_interpolation_factor: PositiveFloat | None = None,
        pretrained_max_position_embeddings: Size | None = None,
        rotary_base: PositiveFloat = 10000.0,
        interleaved: bool = False,
        *,
        device: Device | None = None,
    ) -> None:
        super().__init__()
        self.dim = int(dim * rotary_percent)
        if self.dim < 2 or self.dim % 2:
            raise ValueError(
                f"RotaryPositionEmbedding: {self.dim} channels would be turned ({rotary_percent} of dim={dim}); "
                "an even number of at least 2 is needed"
            )
        self.rotary_base = rotary_base
        self.seq_len_interpolation_factor = seq_len_interpolation_factor
        self.pretrained_max_position_embeddings = pretrained_max_position_embeddings
        self.interleaved = interleaved
        self.register_buffer("inv_freq", torch.empty(self.dim // 2, device=device), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Recomputes the frequencies, in fp64 and rounded once, so they are equal on every device."""
        exponent = torch.arange(0, self.dim, 2, dtype=torch.float64, device="cpu") / self.dim
        self.inv_freq = (self.rotary_base**-exponent).float().to(self.inv_freq.device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.reset_parameters()  # module.bfloat16() must not round the frequencies, nor to_empty lose them
        return self

    @checked
    def forward(self, max_seq_len: Count, offset: Count = 0) -> Tensor:
        """Computes the angles of the positions ``offset`` to ``offset + max_seq_len``, fp32 [max_seq_len, 1, 1, dim].

        Each angle appears twice, at both channels of its pair, for :func:`~minifloat.apply_rotary_pos_emb`.
        """
        position = torch.arange(max_seq_len, dtype=torch.float32, device=self.inv_freq.device) + offset
        factor, pretrained = self.seq_len_interpolation_factor, self.pretrained_max_position_embeddings
        step, end = 1.0 if factor is None else 1 / factor, offset + max_seq_len
        if factor is not None and pretrained is not None and end > pretrained * factor:
            step = pretrained / end
        frequency = self.inv_freq
        twice = frequency.repeat_interleave(2) if self.interleaved else torch.cat((frequency, frequency))
        return (position * step)[:, None, None, None] * twice

    def extra_repr(self) -> str:
        return f"{self.dim}, rotary_base={self.rotary_base}, interleaved={self.interleaved}"


QKVFormat = Literal["sbhd", "bshd", "thd"]
MaskType = Literal[
    "no_mask", "padding", "causal", "padding_causal", "causal_bottom_right", "padding_causal_bottom_right", "arbitrary"
]
_MASK_TYPES = get_args(MaskType)


class CoreOptions(TypedDict, total=False):
    """Options of :class:`DotProductAttention` that a layer hands on to it."""

    window_size: tuple[int, int] | None
    bottom_right_diagonal: bool | None
    softmax_scale: PositiveFloat | None
    softcap: PositiveFloat | None


_TO_BHSD = {"sbhd": (1, 2, 0, 3), "bshd": (0, 2, 1, 3)}


class DotProductAttention(nn.Module):
    """Attention, softmax(q k^T scale) v, with masks, sliding windows, softcap, dropout and packed sequences.

    It has no parameters, and runs on PyTorch's SDPA or FlexAttention: ``print`` shows which, and why. A masked key has
    no influence on a query and gets no gradient from it, unless it is NaN or infinite. A query whose keys are all
    masked gives 0.

    Args:
        num_attention_heads: heads of the queries.
        kv_channels: channels of a head; a pair for those of queries and keys, and of values.
        num_gqa_groups: heads of keys and values, a divisor of the query heads; by default the same number.
        attention_dropout: the probability that a weight is dropped while training, by PyTorch's generator.
        qkv_format: ``"sbhd"`` for [s, b, h, d], ``"bshd"`` for [b, s, h, d], ``"thd"`` for [tokens, h, d] packed.
        attn_mask_type: ``"causal"`` aligns query 0 with key 0, ``"causal_bottom_right"`` the last ones. ``"padding"``
            and its combinations mask padding; ``"arbitrary"`` takes any mask. Packed sequences never attend to each
            other.
        window_size: ``(left, right)``, the number of keys before and after its own position that a query sees; -1 for
            all.
        bottom_right_diagonal: alignment of that position if the numbers of keys and queries differ; None aligns
            ``"causal"`` and ``"padding_causal"`` at the top left and everything else at the bottom right.
        softmax_scale: ``1 / sqrt(channels)`` of queries and keys by default.
        softcap: bounds scaled scores to ``softcap * tanh(score / softcap)`` (Gemma 2, 2024).
        layer_number: the module's number in errors.

    Raises:
        ValueError: options out of range or unknown.
    """

    @checked
    def __init__(
        self,
        num_attention_heads: Size,
        kv_channels: Size | tuple[Size, Size],
        num_gqa_groups: Size | None = None,
        attention_dropout: Fraction = 0.0,
        qkv_format: QKVFormat = "sbhd",
        attn_mask_type: MaskType = "causal",
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        *,
        softmax_scale: PositiveFloat | None = None,
        softcap: PositiveFloat | None = None,
        layer_number: Count | None = None,
    ) -> None:
        super().__init__()
        self.layer_number = layer_number
        self.num_attention_heads = num_attention_heads
        self.num_gqa_groups = num_attention_heads if num_gqa_groups is None else num_gqa_groups
        self.kv_channels = (
            (kv_channels, kv_channels) if isinstance(kv_channels, int | Integral) else (kv_channels[0], kv_channels[1])
        )
        self.attention_dropout = attention_dropout
        self.qkv_format = qkv_format
        self.attn_mask_type = attn_mask_type
        self.window_size = window_size
        self.bottom_right_diagonal = bottom_right_diagonal
        self.softmax_scale = self.kv_channels[0] ** -0.5 if softmax_scale is None else softmax_scale
        self.softcap = softcap
        if num_attention_heads % self.num_gqa_groups:
            raise ValueError(
                f"{self._label}: {num_attention_heads} heads do not divide by num_gqa_groups={self.num_gqa_groups}; "
                "change one of them"
            )
        self._check_mask_type(attn_mask_type)
        self._band(attn_mask_type, window_size)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | tuple[Tensor, Tensor] | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_kv: Tensor | None = None,
        *,
        attn_mask_type: MaskType | None = None,
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        core_attention_bias: Tensor | None = None,
    ) -> Tensor:
        """Attends from queries [..., h, d] to keys and values [..., groups, d] in ``qkv_format``; returns [..., h * d].

        Args:
            attention_mask: bool, True where something is **masked out**. For ``"padding"``, [b, 1, 1, s] or [b, s] of
                the tokens, or a pair for queries and keys if these differ; for ``"arbitrary"``, broadcastable to [b, h,
                s, t].
            cu_seqlens_q, cu_seqlens_kv: int [b + 1], the start of each sequence and the end of the last. ``"thd"``
                needs them; with other formats they give the lengths for ``"padding"`` masks. Keys default to those of
                the queries. Tokens after the last sequence attend to nothing.
            attn_mask_type, window_size, bottom_right_diagonal: instead of the module's, for this call.
            core_attention_bias: broadcasts to [b, h, s, t]; added to the scores after scale and softcap.

        Raises:
            ValueError: shapes that do not fit each other or the module; a mask or lengths missing or unused.
        """
        mask_type = attn_mask_type or self.attn_mask_type
        self._check_mask_type(mask_type)
        self._check_inputs(query, key, value)
        q, k, v = [self._to_bhsd(autocast_to(t)) for t in (query, key, value)]
        band = self._band(mask_type, window_size or self.window_size)
        given = self.bottom_right_diagonal if bottom_right_diagonal is None else bottom_right_diagonal
        top_left = mask_type in ("causal", "padding_causal") if given is None else not given
        bottom_right = mask_type.endswith("bottom_right") or not top_left
        starts = cu_seqlens_q, cu_seqlens_q if cu_seqlens_kv is None else cu_seqlens_kv
        query_places, key_places = self._places(mask_type, q, k, attention_mask, starts, bottom_right)
        diagonal = 0
        if query_places is None:
            self._check_unused("cu_seqlens_q", cu_seqlens_q)
            self._check_unused("attention_mask", None if mask_type == "arbitrary" else attention_mask)
            diagonal = k.shape[2] - q.shape[2] if bottom_right else 0
            band = simplified(band, diagonal, q.shape[2], k.shape[2])
        if self.qkv_format == "thd":
            self._check_unused("core_attention_bias", core_attention_bias)
        bias, kept = core_attention_bias, None
        if mask_type == "arbitrary":
            if not isinstance(attention_mask, Tensor) or attention_mask.dtype != torch.bool:
                raise ValueError(
                    f"{self._label}: attn_mask_type='arbitrary' needs attention_mask, bool, True where masked out"
                )
            kept = ~self._fits("attention_mask", attention_mask, q, k)
        bias = None if bias is None else self._fits("core_attention_bias", bias, q, k)
        mask = Mask(band, diagonal, query_places, key_places, kept, bias)
        dropout = self.attention_dropout if self.training else 0.0
        out = attention(q, k, v, mask, scale=self.softmax_scale, softcap=self.softcap, dropout=dropout)
        return self._from_bhsd(out)

    def backend(self, device: str, dtype: torch.dtype = torch.bfloat16) -> Backend:
        """Names the backend on a type of device with the module's own options, and the reason."""
        band = self._band(self.attn_mask_type, self.window_size)
        nowhere = torch.empty(0, device="meta")
        apart = self.qkv_format == "thd" or "padding" in self.attn_mask_type
        mask = Mask(
            band,
            query=TokenPlaces(nowhere, nowhere) if apart else None,
            kept=nowhere if self.attn_mask_type == "arbitrary" else None,
        )
        dropout = self.training and self.attention_dropout > 0
        return choose_backend(
            device, mask.kind, dtype, min(self.kv_channels), softcap=self.softcap is not None, dropout=dropout
        )

    def extra_repr(self) -> str:
        options = [f"{self.num_attention_heads} heads, {self.num_gqa_groups} groups, {self.kv_channels} channels"]
        options += [self.qkv_format, self.attn_mask_type]
        for name in ("window_size", "softcap", "attention_dropout"):
            if getattr(self, name):
                options.append(f"{name}={getattr(self, name)}")
        options += [f"{device}: {b.name} ({b.reason})" for device in ("cpu", "cuda") for b in [self.backend(device)]]
        return ", ".join(options)

    # ---- masks ----

    def _band(self, mask_type: str, window: tuple[int, int] | None) -> Band:
        left, right = (-1, -1) if window is None else window
        if left < -1 or right < -1:
            raise ValueError(f"{self._label}: window_size is {window}; counts of keys are needed, or -1 for all")
        if "causal" in mask_type:
            right = 0
        return Band(None if left == -1 else left, None if right == -1 else right)

    def _places(
        self, mask_type: str, q: Tensor, k: Tensor, mask: Tensor | tuple[Tensor, Tensor] | None,
        starts: tuple[Tensor | None, Tensor | None], bottom_right: bool,
    ) -> tuple[TokenPlaces, TokenPlaces] | tuple[None, None]:  # fmt: skip
        """Finds the sequence and position of each token, of packed or padded sequences."""
        if self.qkv_format == "thd":
            self._check_unused("attention_mask", mask)
            names = ("cu_seqlens_q", "cu_seqlens_kv")
            packed = [check_cu_seqlens(self, *each) for each in zip(names, starts, strict=True)]
            if packed[0].shape != packed[1].shape:
                raise ValueError(
                    f"{self._label}: cu_seqlens_q has {packed[0].numel()} entries, cu_seqlens_kv "
                    f"{packed[1].numel()}; queries and keys need as many sequences"
                )
            return packed_places(packed[0], packed[1], q.shape[2], k.shape[2], bottom_right)
        if "padding" not in mask_type:
            return None, None
        if (mask is None) == (starts[0] is None):
            raise ValueError(
                f"{self._label}: a padding mask needs either attention_mask, True where there is padding, or "
                f"cu_seqlens_q; {'neither' if mask is None else 'both'} given"
            )
        if mask is None:
            valid = [self._filled(*each) for each in zip(("q", "kv"), starts, (q, k), strict=True)]
        else:
            masks = mask if isinstance(mask, tuple) else (mask, mask)
            valid = [~self._padding(m, t) for m, t in zip(masks, (q, k), strict=True)]
        return padded_places(valid[0], valid[1], bottom_right)

    def _filled(self, name: str, cu_seqlens: Tensor | None, t: Tensor) -> Tensor:
        """Builds a mask, bool [B, S], True on as many tokens of each row as its sequence has."""
        lengths = check_cu_seqlens(self, f"cu_seqlens_{name}", cu_seqlens).diff()
        if lengths.shape[0] != t.shape[0]:
            raise ValueError(
                f"{self._label}: cu_seqlens_{name} is of {lengths.shape[0]} sequences, the batch of {t.shape[0]}"
            )
        return torch.arange(t.shape[2], device=t.device) < lengths[:, None]

    def _padding(self, mask: Tensor, t: Tensor) -> Tensor:
        if mask.dtype != torch.bool or mask.shape not in ((t.shape[0], 1, 1, t.shape[2]), (t.shape[0], t.shape[2])):
            raise ValueError(
                f"{self._label}: a padding mask is {mask.dtype} of shape {tuple(mask.shape)}; bool "
                f"{(t.shape[0], 1, 1, t.shape[2])} is needed, or a pair of masks where keys differ from queries"
            )
        return mask.reshape(t.shape[0], t.shape[2])

    def _fits(self, name: str, t: Tensor, q: Tensor, k: Tensor) -> Tensor:
        shape = (*q.shape[:3], k.shape[2])
        if t.dim() > 4 or any(n not in (1, m) for n, m in zip(t.shape[::-1], shape[::-1], strict=False)):
            raise ValueError(f"{self._label}: {name} has shape {tuple(t.shape)}; it must broadcast to {shape}")
        return t

    # ---- layouts and checks ----

    def _to_bhsd(self, t: Tensor) -> Tensor:
        return t.transpose(0, 1)[None] if self.qkv_format == "thd" else t.permute(_TO_BHSD[self.qkv_format])

    def _from_bhsd(self, t: Tensor) -> Tensor:
        if self.qkv_format == "thd":
            return t[0].transpose(0, 1).flatten(1)
        return t.permute((2, 0, 1, 3) if self.qkv_format == "sbhd" else (0, 2, 1, 3)).flatten(2)

    @property
    def _label(self) -> str:
        return "DotProductAttention" + ("" if self.layer_number is None else f" of layer {self.layer_number}")

    def _check_mask_type(self, mask_type: str) -> None:
        if mask_type not in _MASK_TYPES:
            raise ValueError(f"{self._label}: attn_mask_type is {mask_type!r}; {', '.join(_MASK_TYPES)}")
        if mask_type == "arbitrary" and self.qkv_format == "thd":
            raise ValueError(f"{self._label}: packed sequences have no arbitrary mask; use qkv_format='bshd'")

    def _check_unused(self, name: str, given: object) -> None:
        if given is not None:
            raise ValueError(
                f"{self._label}: {name} has no use with {self.qkv_format} and attn_mask_type="
                f"{self.attn_mask_type!r}; leave it out, or use bshd and a padding mask type or 'arbitrary'"
            )

    def _check_inputs(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        dims = len(self.qkv_format)
        channels, value_channels = self.kv_channels
        expected = (
            ("query", query, self.num_attention_heads, channels),
            ("key", key, self.num_gqa_groups, channels),
            ("value", value, self.num_gqa_groups, value_channels),
        )
        for name, t, heads, width in expected:
            check_tensor(t, self, name)
            if t.dim() != dims or t.shape[-2:] != (heads, width):
                raise ValueError(
                    f"{self._label}: {name} has shape {tuple(t.shape)}; {self.qkv_format} of {heads} heads and "
                    f"{width} channels is needed"
                )
        batch = {"sbhd": 1, "bshd": 0}.get(self.qkv_format)
        if key.shape[:-2] != value.shape[:-2] or (batch is not None and query.shape[batch] != key.shape[batch]):
            raise ValueError(
                f"{self._label}: query {tuple(query.shape)}, key {tuple(key.shape)} and value {tuple(value.shape)} "
                "differ in batch or length; keys and values need the same of both, queries the same batch"
            )
