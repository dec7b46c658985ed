"""Rotary position embedding, RoFormer (Su et al. 2021): pairs of channels turned by an angle of their position."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Self

import torch
from torch import Tensor, nn

from minifloat.arguments import Accepts, Count, Device, PositiveFloat, Size, checked

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

        Each angle is there twice, at both channels of its pair, for :func:`~minifloat.apply_rotary_pos_emb`.
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
