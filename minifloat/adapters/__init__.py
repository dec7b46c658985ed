"""Adapters for other libraries: each module imports one of them, which `minifloat` itself does not need."""
