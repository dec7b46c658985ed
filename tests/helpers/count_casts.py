"""Counts the casts that run."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from minifloat.ops.quantize import cast


class CountCasts(TorchDispatchMode):
    """Counts casts by (format, dim they scale along), and the tensors that are cast by shape."""

    def __init__(self) -> None:
        super().__init__()
        self.formats: Counter[tuple[str, int]] = Counter()
        self.shapes: Counter[tuple[int, ...]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.minifloat.cast.default:
            tensors, _, _, formats, dims, *_ = cast.read(args)
            self.formats.update(zip(formats, dims, strict=True))
            self.shapes.update(tuple(x.shape) for x in tensors)
        return func(*args, **(kwargs or {}))
