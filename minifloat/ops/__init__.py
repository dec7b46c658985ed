"""The operations everything else is made of, one folder each: the reference in plain PyTorch, and what runs it faster.

Every operation is registered with ``torch.library`` under the name ``minifloat`` and has a fake, so that a compiled
graph and a CUDA graph hold it as one opaque node. Formats pass through the schema as their ``spec`` strings. No
operation reads a value back to the host, and none holds more than one GEMM.
"""

import torch
from torch import Tensor

new = tuple.__new__
"""``new(Operand, (codes, ...))``: a NamedTuple without the call of its Python constructor, where a call counts."""


def allocate(shape: tuple[int, int], dtype: torch.dtype, device: torch.device, transposed: bool = False) -> Tensor:
    """Memory of a matrix that kernels fill; ``transposed``: its columns are consecutive, not its rows."""
    return torch.empty_strided(shape, (1, shape[0]) if transposed else (shape[1], 1), dtype=dtype, device=device)
