"""Random bits for stochastic rounding that depend on nothing but (seed, offset, element index, orientation).

So the same element draws the same bits in a kernel, in the reference, and on whatever rank of a sharded tensor it lies.
Philox4x32-10 of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011), 16 elements to one block.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minifloat.formats import ROWWISE

_LOW = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


def random_bytes(rng: Tensor, shape: torch.Size, dim: int) -> Tensor:
    """uint8 [M, K]: byte ``i % 16`` of Philox block ``i // 16`` for element ``i = m * K + k``.

    Args:
        rng: int64 [2], seed and offset. They stay on the device: reading them would stall it.
    """
    count = shape.numel()
    block = torch.arange((count + 15) // 16, dtype=torch.int64, device=rng.device)
    seed, offset = rng[0], rng[1]
    orientation = 0 if dim == ROWWISE else 1 << 31
    counter = [block & _LOW, (block >> 32) & _LOW | orientation, offset & _LOW, (offset >> 32) & _LOW]
    words = philox4x32_10(counter, [seed & _LOW, (seed >> 32) & _LOW])
    bytes_ = torch.stack([(word >> shift) & 0xFF for word in words for shift in (0, 8, 16, 24)], dim=-1)
    return bytes_.to(torch.uint8).reshape(-1)[:count].reshape(shape)


def philox4x32_10(counter: list[Tensor], key: list[Tensor]) -> list[Tensor]:
    """Ten rounds on four 32-bit words held in int64, whose wrap-around keeps all 64 bits of a 32 x 32 product."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((product1 >> 32) & _LOW) ^ c1 ^ k0,
            product1 & _LOW,
            ((product0 >> 32) & _LOW) ^ c3 ^ k1,
            product0 & _LOW,
        )
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return [c0, c1, c2, c3]
