"""What lives in memory: storages that operations made, what is saved for backward, and the bytes it should take."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from minifloat.autocast import autocast
from minifloat.nn.linear_state import prepare
from minifloat.recipe import Recipe


class Storages(TorchDispatchMode):
    """Remembers each storage that an operation returns, weakly, with its size."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                self.sizes[StorageWeakRef(storage)] = storage.nbytes()
        return out

    def alive(self, apart_from: Iterable[Tensor] = ()) -> list[int]:
        """Sizes of the distinct storages that still exist, empty ones and those of ``apart_from`` left out.

        No garbage is collected first: what only a collection frees is memory that training holds for a while.
        """
        others = {StorageWeakRef(tensor.untyped_storage()).cdata for tensor in apart_from}
        found = {ref.cdata: size for ref, size in self.sizes.items() if not ref.expired() and ref.cdata not in others}
        return sorted(size for size in found.values() if size)


def blocks_in(x: int, block: int) -> int:
    """Blocks in ``x``."""
    return -(-x // block)


def operand_bytes(name: str, M: int, K: int, N: int) -> tuple[list[int], list[int]]:
    """Bytes of what backward needs of the input [M, K] and the weight [N, K]: codes, scales and an fp32 amax."""
    return {
        "delayed": ([M * K, 4], [N * K, 4]),
        "current": ([M * K, 4], [N * K, 4]),
        "block": ([M * K, 4 * blocks_in(M, 128) * K], [N * K, 4 * blocks_in(N, 128) * blocks_in(K, 128)]),
        "mxfp8": ([M * K, blocks_in(M, 32) * K], [N * K, blocks_in(N, 32) * K]),
        "nvfp4": ([M * K // 2, blocks_in(M, 16) * K, 4], [N * K // 2, blocks_in(N, 16) * blocks_in(K, 16), 4]),
    }[name]


def saved_sizes(model: nn.Module, x: Tensor, recipe: Recipe | None, backward: bool = True) -> list[int]:
    """Sizes of what lives between forward and backward; the output, parameters and buffers are not counted.

    ``backward`` runs it, after which nothing may live but gradients.
    """
    if recipe is not None:
        prepare(model, recipe)
    with Storages() as storages, autocast(enabled=recipe is not None, recipe=recipe):
        y = model(x * 1)
    mine = [*model.parameters(), *model.buffers()]
    sizes = storages.alive([y, *mine])
    if backward:
        y.sum().backward()
        del y
        assert storages.alive([p.grad for p in mine if p.grad is not None] + mine) == []
    return sizes


def live_tensors() -> tuple[int, int]:
    """Tensors, and the bytes of their storages."""
    _, size = live_storages()
    return sum(isinstance(each, Tensor) and not each.is_meta for each in gc.get_objects()), size


def live_storages() -> tuple[int, int]:
    """Storages that tensors hold, and their bytes: views may come and go."""
    gc.collect()
    plain = [each for each in gc.get_objects() if type(each) is Tensor and each.layout == torch.strided]
    sizes = {storage._cdata: storage.size() for storage in (x.untyped_storage() for x in plain if not x.is_meta)}
    return len(sizes), sum(sizes.values())
