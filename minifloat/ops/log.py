"""Logs what a function makes, launches and calls, for a replay. Needs no Triton: libraries are called on a CPU, too."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Call(NamedTuple):
    """Call by :func:`library`, and its result."""

    function: Callable[..., Tensor]
    tensors: Sequence[Tensor]
    rest: tuple[Any, ...]
    result: Tensor


class Log(NamedTuple):
    """Launches and calls, in order, with the memory and the zeros that were made for them."""

    steps: list[Any]
    made: list[Tensor]
    zeros: list[Tensor]


class _Local(threading.local):
    """Log of this thread's launches. Autograd has a thread for each device."""

    def __init__(self) -> None:
        self.log: Log | None = None


_local = _Local()


@contextmanager
def recorded() -> Iterator[Log]:
    """Logs what this thread launches inside, to be launched again with other tensors."""
    outer, _local.log = _local.log, Log([], [], [])
    try:
        yield _local.log
    finally:
        _local.log = outer


def recording() -> bool:
    """Whether this thread is inside of :func:`recorded`."""
    return _local.log is not None


def append(step: Any) -> None:
    """Logs a launch or a call; to be called where :func:`recording`."""
    assert _local.log is not None
    _local.log.steps.append(step)


def unlogged() -> None:
    """Says that something is launched past the log: what runs now cannot be replayed."""
    if _local.log is not None:
        _local.log.steps.append(None)


def made(tensor: Tensor) -> Tensor:
    """Logs memory that kernels fill, and returns it."""
    if _local.log is not None and tensor.numel():
        _local.log.made.append(tensor)
    return tensor


def allocate(shape: tuple[int, int], dtype: torch.dtype, device: torch.device, transposed: bool = False) -> Tensor:
    """Memory of a matrix that kernels fill, logged; ``transposed``: its columns are consecutive, not its rows."""
    stride = (1, shape[0]) if transposed else (shape[1], 1)
    return made(torch.empty_strided(shape, stride, dtype=dtype, device=device))


def zeros(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """fp32 zeros that kernels raise, logged."""
    filled = torch.zeros(shape, dtype=torch.float32, device=device)
    if _local.log is not None and filled.numel():
        _local.log.zeros.append(filled)
    return filled


def library(function: Callable[..., Tensor], tensors: Sequence[Tensor], *rest: Any) -> Tensor:
    """Calls ``function(tensors, *rest)``, logged: what PyTorch or a library of its does between launches.

    It reads and writes no other tensors.
    """
    result = function(tensors, *rest)
    if _local.log is not None:
        append(Call(function, tensors, rest, result))
    return result
