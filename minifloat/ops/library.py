"""How an operation is registered: a schema, a reference for every device, kernels for some, and a fake."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from minifloat import capability

_PLAIN = (Tensor, torch.nn.Parameter)
_LIBRARY = torch.library.Library("minifloat", "DEF")
_REGISTERED: dict[torch._ops.OpOverload, Callable[[str], torch._ops.OpOverload]] = {}
"""Operations, and what registers one that does the same under another name."""


def register(
    schema: str,
    implementation: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    cuda: Callable[..., Any] | None = None,
    random: bool = False,
) -> torch._ops.OpOverload:
    """Defines ``minifloat::<schema>`` and returns it, ready to call.

    ``Library.define`` and ``impl`` cost a fifth of ``torch.library.custom_op`` a call.

    Args:
        implementation: in plain PyTorch, for every device: the definition.
        fake: gives shapes, dtypes and strides alone.
        cuda: the same on kernels of our own, for GPUs that run them (``capability.kernels``).
        random: it draws from PyTorch's generator: a compiler must neither deduplicate nor reorder it.
    """
    name = schema.partition("(")[0]
    tags = (torch.Tag.nondeterministic_seeded,) if random else ()
    _LIBRARY.define(schema, tags=tags)
    _LIBRARY.impl(name, _without_autocast(implementation), "CompositeExplicitAutograd")
    if cuda is not None:
        _LIBRARY.impl(name, _where_kernels_run(cuda, _without_autocast(implementation)), "CUDA")
    torch.library.register_fake(f"minifloat::{name}", fake, lib=_LIBRARY)
    overload: torch._ops.OpOverload = getattr(torch.ops.minifloat, name).default
    arguments = schema[len(name) :]
    _REGISTERED[overload] = lambda other: register(other + arguments, implementation, fake, cuda=cuda, random=random)
    return overload


def again(operation: torch._ops.OpOverload) -> torch._ops.OpOverload:
    """The same operation under another name, for a backward that does once more what its forward did.

    A compiler would find out that it was done, and keep the result until then: the memory that doing it twice saves.
    """
    return _REGISTERED[operation](f"{operation.overloadpacket.__name__}_again")


def directly(x: Tensor) -> bool:
    """Kernels may be called for ``x`` past the dispatcher, which costs 10 to 20 us a call: nobody would notice.

    Not while something is traced, nor where autograd or a dispatch mode (of a test, a profiler, a fake tensor) listens.
    Kernels build no graph, so that autograd does not miss them.
    """
    return (
        x.is_cuda
        and not (x.requires_grad and torch.is_grad_enabled())
        and type(x) in _PLAIN
        and not torch.compiler.is_compiling()
        and not torch._C._len_torch_dispatch_stack()
        and capability.kernels(x.get_device())[0]
        and x.get_device() == torch.cuda.current_device()
    )


def _where_kernels_run(kernels: Callable[..., Any], reference: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(kernels)
    def run(*args: Any) -> Any:
        runs, _ = capability.kernels(torch.cuda.current_device())
        return kernels(*args) if runs else reference(*args)

    return run


def _without_autocast(implementation: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.autocast`` must not reach inside: it would run a reference's fp32 products in bf16."""

    @functools.wraps(implementation)
    def run(*args: Any) -> Any:
        with torch._C._DisableAutocast():
            return implementation(*args)

    return run
