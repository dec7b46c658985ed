"""Poison for uninitialised memory: what ``torch.empty`` and its kin give is NaN, so that a read of it shows."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch

SIGNED_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64)


def poison(tensor: torch.Tensor) -> None:
    """Overwrite a new tensor with NaN, or with the largest value of an integer type.

    All bits set is NaN in the floating-point types used here, float8 and e8m0 included. The whole storage is filled, so
    that the gaps of a strided tensor are poisoned too. Fake tensors and other subclasses have no memory of their own.
    """
    if type(tensor) is not torch.Tensor or tensor.is_meta:
        return
    if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
        return  # each replay of the graph would poison again what a flag on the device has it keep
    with torch._C._DisableTorchDispatch():  # a test that counts operations does not see this one
        tensor.untyped_storage().fill_(0xFF)  # type: ignore[attr-defined]
        if tensor.dtype == torch.bool:
            tensor.data.fill_(True)  # a bool byte of 0xFF is not a bool
        elif tensor.dtype in SIGNED_INTEGERS:
            tensor.data.fill_(torch.iinfo(tensor.dtype).max)  # -1, all bits set, would be a valid index


def _poisoned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(make)
    def empty(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = make(*args, **kwargs)
        if not torch.compiler.is_compiling():
            poison(tensor)
        return tensor

    return empty


def poison_empties() -> None:
    """Let the functions that give uninitialised memory, called from Python, give poison."""
    with torch.device("cpu"):
        torch.empty(0)  # device contexts list the constructors at first use: they must list the real ones
    torch.empty = _poisoned(torch.empty)
    torch.empty_like = _poisoned(torch.empty_like)
    torch.empty_strided = _poisoned(torch.empty_strided)
    torch.Tensor.new_empty = _poisoned(torch.Tensor.new_empty)  # type: ignore[method-assign]
    tape = sys.modules.get("minifloat.ops.tape")  # which tests of the package have imported
    if tape is not None:
        tape.empty_strided = _poisoned(tape.empty_strided)  # type: ignore[attr-defined]
