"""Random numbers under tensor parallelism: which ranks draw the same ones.

The ranks of a tensor-parallel group are seeded alike (``torch.manual_seed``), and what every rank computes draws the
same numbers on each: start values, and dropout of activations that all ranks have. What each rank computes a part of,
attention's heads and under sequence parallelism the rows of the residual stream, draws numbers of its own, through
:func:`draw_apart`. Outside of it the generators of the ranks stay alike, for the numbers that follow.

Data-parallel replicas that are to drop different elements are seeded differently, after the model was made. Activation
checkpointing needs nothing else: the generators hold all the state there is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from minifloat.comm.group import Group

T = TypeVar("T")


def draw_apart(group: Group, function: Callable[..., T], x: Tensor, *args: object) -> T:
    """``function(x, *args)``, which draws on the device of ``x`` what no other rank of the group draws.

    All ranks of the group call it together. A compiler leaves it, and what it calls, to PyTorch.
    """
    if torch.compiler.is_compiling():  # whose decorator would bring the compiler along at import
        result: T = torch.compiler.disable(_draw_apart)(group.rank, function, x, *args)
        return result
    return _draw_apart(group.rank, function, x, *args)


def _draw_apart(rank: int, function: Callable[..., T], x: Tensor, *args: object) -> T:
    """Draws from other generators of the host and of the device, which are what they were afterwards.

    Their seed is the host's next number and the rank: it is known without waiting for the device, differs from use to
    use, and a recomputation that brings the host's generator back finds it again.
    """
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("dropout that ranks draw apart cannot be captured in a CUDA graph; set its probability to 0")
    seed, on_host = int(torch.randint(2**62, (), device="cpu")) + rank, x.device.type == "cpu"
    with torch.random.fork_rng([] if on_host else [x.device], device_type="cuda" if on_host else x.device.type):
        torch.default_generator.manual_seed(seed)
        if not on_host:
            torch.get_device_module(x.device).default_generators[x.device.index].manual_seed(seed)
        return function(x, *args)
