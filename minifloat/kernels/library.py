"""How an operation is registered: a schema, one implementation for every device, and a fake."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

_LIBRARY = torch.library.Library("minifloat", "DEF")


def register(
    schema: str, implementation: Callable[..., Any], fake: Callable[..., Any], *, random: bool = False
) -> torch._ops.OpOverload:
    """Defines ``minifloat::<schema>`` and returns it, ready to call.

    ``Library.define`` and ``impl`` cost a fifth of ``torch.library.custom_op`` a call. ``random`` marks an operation
    that draws from PyTorch's generator, which a compiler must neither deduplicate nor reorder.
    """
    name = schema.partition("(")[0]
    tags = (torch.Tag.nondeterministic_seeded,) if random else ()
    _LIBRARY.define(schema, tags=tags)
    _LIBRARY.impl(name, _without_autocast(implementation), "CompositeExplicitAutograd")
    torch.library.register_fake(f"minifloat::{name}", fake, lib=_LIBRARY)
    overload: torch._ops.OpOverload = getattr(torch.ops.minifloat, name).default
    return overload


def _without_autocast(implementation: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.autocast`` must not reach inside: it would run a reference's fp32 products in bf16."""

    @functools.wraps(implementation)
    def run(*args: Any) -> Any:
        with torch._C._DisableAutocast():
            return implementation(*args)

    return run
