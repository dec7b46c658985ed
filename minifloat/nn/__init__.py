"""Modules: each composes the functions below it with one short autograd function."""

from minifloat.nn.linear import Linear
from minifloat.nn.parameters import quantized_model_init
from minifloat.nn.prepare import prepare

__all__ = ["Linear", "prepare", "quantized_model_init"]
