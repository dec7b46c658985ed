"""Names of other libraries: programs written for Transformer Engine or torchao run with only their imports changed."""

import sys
from importlib import import_module
from typing import Any


def find(name: str, module: str) -> Any:
    """Finds what another library calls ``name``, for an attribute that ``module`` does not have.

    Raises:
        AttributeError: there is no such thing; it says what to use where that is known.
    """
    ways_out: dict[str, str] = {}
    for library in ("te", "torchao"):
        names = import_module(f"minifloat.compat.{library}")
        if name in names.__all__:
            return getattr(names, name)
        ways_out |= names.WAYS_OUT
    hint = f"; {ways_out[name]}" if name in ways_out else ""
    raise AttributeError(f"module {module!r} has no attribute {name!r}{hint}", name=name, obj=sys.modules[module])
