"""Accelerate, and the Trainer of transformers on top of it: FSDP2 that gathers codes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.distributed import fsdp

from minifloat.distributed import fully_shard


@contextmanager
def gather_codes() -> Iterator[None]:
    """Inside, ``Accelerator.prepare`` and ``Trainer.train`` shard with :func:`minifloat.distributed.fully_shard`.

    The plugin's options stay (``FullyShardedDataParallelPlugin(fsdp_version=2)``); the weights of converted layers are
    then gathered as codes. Modules that Accelerate shards as a list, the last norm and the head, are PyTorch's. Inside,
    ``torch.distributed.fsdp.fully_shard``, which Accelerate looks up when it shards, is ours for every caller.
    """
    original = fsdp.fully_shard

    def shard(module: nn.Module | list[nn.Module], **options: Any) -> Any:
        return original(module, **options) if isinstance(module, list) else fully_shard(module, **options)

    fsdp.fully_shard = shard
    try:
        yield
    finally:
        fsdp.fully_shard = original
