"""Tensors that are stored as codes and scales: parameters, and outputs of layers on request."""

import minifloat.tensor.handlers  # what PyTorch's operations do to them  # noqa: F401
from minifloat.tensor.base import Gatherer, quantize_all_
from minifloat.tensor.quantized_tensor import QuantizedTensor, _rebuild, quantize  # noqa: F401
from minifloat.tensor.rows import SavedRows

__all__ = ["Gatherer", "QuantizedTensor", "SavedRows", "quantize", "quantize_all_"]
