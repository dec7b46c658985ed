"""Modules: each composes the functions below it with one short autograd function."""

from minifloat.nn.linear import Linear
from minifloat.nn.prepare import prepare

__all__ = ["Linear", "prepare"]
