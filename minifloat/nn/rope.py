"""Rotary position embedding, RoFormer (Su et al. 2021): pairs of channels turned by an angle of their position."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal, Self

import torch
from torch import Tensor, nn

from minifloat.arguments import Accepts, Count, Device, PositiveFloat, Size, checked
from minifloat.functional import attention_mask

TensorFormat = Literal["sbhd", "bshd", "thd"]
RotaryPercent = Annotated[float, Accepts("a number above 0, at most 1", lambda value: 0 < value <= 1)]


class RotaryPositionEmbedding(nn.Module):
    """The angles ``position * rotary_base^(-2 i / dim)`` of each position and pair ``i`` of channels, in fp32.

    Args:
        dim: channels of a head; ``int(dim * rotary_percent)`` of them, an even number, are turned.
        rotary_percent: the part of a head that is turned, its first channels; above 0, at most 1.
        seq_len_interpolation_factor: positions are divided by it (Chen et al. 2023).
        pretrained_max_position_embeddings: with a factor: sequences that end beyond the factor times this are divided
            by ``end / pretrained_max_position_embeddings`` instead, so that they fit. ``end`` is
            ``offset + max_seq_len``; a position has one angle in all calls of one ``end``, and may have another in
            calls of another one.
        rotary_base: the base of the frequencies.
        interleaved: pairs are neighbours (2 i, 2 i + 1) rather than halves (i, i + dim / 2).
        device: where the angles are computed; ``module.to`` moves it.

    Raises:
        ValueError: nothing to turn, or an odd number of channels.
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
        """Computes the frequencies anew, in fp64 and rounded once, so that they are the same on every device."""
        exponent = torch.arange(0, self.dim, 2, dtype=torch.float64, device="cpu") / self.dim
        self.inv_freq = (self.rotary_base**-exponent).float().to(self.inv_freq.device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.reset_parameters()  # module.bfloat16() must not round the frequencies, nor to_empty lose them
        return self

    @checked
    def forward(self, max_seq_len: Count, offset: Count = 0) -> Tensor:
        """Angles of the positions ``offset`` to ``offset + max_seq_len``, fp32 [max_seq_len, 1, 1, dim].

        Each angle is there twice, at both channels of its pair, for :func:`apply_rotary_pos_emb`.
        """
        position = torch.arange(max_seq_len, dtype=torch.float32, device=self.inv_freq.device) + offset
        factor, pretrained = self.seq_len_interpolation_factor, self.pretrained_max_position_embeddings
        step, end = 1.0 if factor is None else 1 / factor, offset + max_seq_len
        if factor is not None and pretrained is not None and end > pretrained * factor:
            step = pretrained / end
        angle = (position * step)[:, None] * self.inv_freq
        both = torch.stack((angle, angle), -1).flatten(1) if self.interleaved else torch.cat((angle, angle), -1)
        return both[:, None, None]

    def extra_repr(self) -> str:
        return f"{self.dim}, rotary_base={self.rotary_base}, interleaved={self.interleaved}"


@checked
def apply_rotary_pos_emb(
    t: Tensor,
    freqs: Tensor,
    tensor_format: TensorFormat = "sbhd",
    start_positions: Tensor | None = None,
    interleaved: bool = False,
    *,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Turns the first ``r`` channels of each head by the angles of its position; the rest stay as they are.

    The pair (a, b) becomes (a cos - b sin, a sin + b cos), computed in fp32 and returned in the dtype of ``t``.

    Args:
        t: [s, b, h, d], [b, s, h, d] or [tokens, h, d], as ``tensor_format`` says.
        freqs: angles [positions, 1, 1, r], ``r <= d``, from :class:`RotaryPositionEmbedding`.
        start_positions: int [b], the position of each sequence's first token; 0 if None.
        interleaved: as in :class:`RotaryPositionEmbedding`.
        cu_seqlens: int [b + 1] for ``thd``: where the packed sequences start, and where the last one ends. Positions
            start again at each.

    Raises:
        ValueError: an unknown format, shapes that do not fit, more tokens than angles, ``thd`` without ``cu_seqlens``.
            Lengths and starts that are on a device are not read back: a position beyond the angles is an error of
            indexing there.
    """
    _check(t, freqs, tensor_format, start_positions, cu_seqlens)
    angles = _angles(t, freqs.flatten(1), tensor_format, start_positions, cu_seqlens)
    r = freqs.shape[-1]
    cos, sin = angles.cos(), angles.sin()
    turned = t[..., :r].float()
    result = (turned * cos + _quarter_turn(turned, interleaved) * sin).to(t.dtype)
    return result if r == t.shape[-1] else torch.cat((result, t[..., r:]), -1)


def _angles(
    t: Tensor, freqs: Tensor, tensor_format: str, start_positions: Tensor | None, cu_seqlens: Tensor | None
) -> Tensor:
    """[positions, r] laid out so as to broadcast over ``t``."""
    if cu_seqlens is not None:
        position = attention_mask.positions(cu_seqlens, t.shape[0])
        sequence = attention_mask.sequence_ids(cu_seqlens, t.shape[0])
        last = cu_seqlens.numel() - 2
        if start_positions is not None and last >= 0:
            position = position + start_positions[sequence.clamp(max=last)]
        return freqs[position.where(sequence <= last, 0)][:, None]  # tokens behind the last sequence: any angle
    dim = 0 if tensor_format == "sbhd" else 1
    if start_positions is None:
        angles = freqs[: t.shape[dim]]
        return angles[:, None, None] if dim == 0 else angles[:, None]
    position = start_positions[:, None] + torch.arange(t.shape[dim], device=start_positions.device)
    return freqs[position.t() if dim == 0 else position][:, :, None]


def _quarter_turn(x: Tensor, interleaved: bool) -> Tensor:
    """Each pair (a, b) as (-b, a)."""
    if interleaved:
        pairs = x.unflatten(-1, (-1, 2))
        return torch.stack((-pairs[..., 1], pairs[..., 0]), -1).flatten(-2)
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


def _check(
    t: Tensor, freqs: Tensor, tensor_format: str, start_positions: Tensor | None, cu_seqlens: Tensor | None
) -> None:
    name = "apply_rotary_pos_emb"
    if t.dim() != len(tensor_format):
        raise ValueError(f"{name}: t has shape {tuple(t.shape)}; {tensor_format} has {len(tensor_format)} dims")
    if freqs.dim() != 4 or freqs.shape[1:3] != (1, 1) or freqs.shape[-1] % 2 or freqs.shape[-1] > t.shape[-1]:
        raise ValueError(
            f"{name}: freqs has shape {tuple(freqs.shape)}; [positions, 1, 1, r] is needed, r even and at most the "
            f"{t.shape[-1]} channels of t"
        )
    if tensor_format == "thd":
        attention_mask.check_cu_seqlens(name, "cu_seqlens", cu_seqlens)
        sequences = -1 if cu_seqlens is None else cu_seqlens.numel() - 1
    elif cu_seqlens is not None:
        raise ValueError(f"{name}: cu_seqlens is for tensor_format='thd', not {tensor_format!r}; leave it out")
    else:
        length, sequences = t.shape[:2] if tensor_format == "sbhd" else (t.shape[1], t.shape[0])
        if start_positions is None and length > freqs.shape[0]:
            raise ValueError(
                f"{name}: {length} tokens but angles of {freqs.shape[0]} positions; "
                f"make them with RotaryPositionEmbedding(...)({length})"
            )
    if start_positions is not None and start_positions.shape != (sequences,):
        raise ValueError(
            f"{name}: start_positions has shape {tuple(start_positions.shape)}; one for each of {sequences} sequences"
        )
