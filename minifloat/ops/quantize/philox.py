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
        rng: int64 [2], seed and offset, or [3], with the number of the first of these rows in the whole of a tensor
            that is sharded along M. They stay on the device: reading them would stall it.
    """
    count = shape.numel()
    block = torch.arange((count + 15) // 16 + rng.numel() - 2, dtype=torch.int64, device=rng.device)
    first = rng[2:] * shape[1]  # element of the whole, [0] or [1]
    if first.numel():
        block = block + first // 16
    orientation = 0 if dim == ROWWISE else 1 << 31
    high, low = (rng[:2] >> 32) & _LOW, rng[:2] & _LOW  # of seed and offset
    counter = [block & _LOW, (block >> 32) | orientation, low[1].expand_as(block), high[1].expand_as(block)]
    words = philox4x32_10(torch.stack(counter), torch.stack([low[0], high[0]]))
    # The low four of an int64's eight bytes, which every device that PyTorch runs on stores lowest first.
    found = words.t().contiguous().view(torch.uint8).reshape(-1, 4, 8)[..., :4].reshape(-1)
    if first.numel():  # which need not begin a block
        found = found[torch.arange(count, device=rng.device) + first % 16]
    return found[:count].reshape(shape)


def philox4x32_10(counter: Tensor, key: Tensor) -> Tensor:
    """Ten rounds on ``counter`` [4, blocks] with ``key`` [2]: 32-bit words in int64, for all 64 bits of a product.

    Words 0 and 2 are multiplied and words 1 and 3 are not: two pairs, so that an operation serves two words.
    """
    multiplier = _constant(_MULTIPLIERS, key)[:, None]
    weyl = _constant(_WEYL, key)
    even, odd = counter[0::2], counter[1::2]
    for turn in range(10):
        product = even * multiplier
        keys = (key + turn * weyl) & _LOW
        even, odd = ((product >> 32) & _LOW).flip(0) ^ odd ^ keys[:, None], (product & _LOW).flip(0)
    return torch.stack([even, odd], 1).flatten(0, 1)


def _constant(pair: tuple[int, int], like: Tensor) -> Tensor:
    """int64 [2] made on the device: copying it there would break a CUDA graph's capture."""
    return torch.arange(2, dtype=torch.int64, device=like.device) * (pair[1] - pair[0]) + pair[0]
