"""The `minifloat` command, outside of the package, whose import takes seconds, for PyTorch: help does not need it."""

import sys
from importlib.util import find_spec, module_from_spec


def main() -> None:
    """Enters the package as Python's import does, but leaves what it executes to `load`, once a command runs."""
    spec = find_spec("minifloat")
    assert spec is not None
    sys.modules.setdefault("minifloat", module_from_spec(spec))
    from minifloat.tools.cli import main

    main()
