"""Low precision for models that were built from PyTorch's own layers, and back again."""

from minifloat.convert.convert import convert, revert
from minifloat.convert.export import export
from minifloat.convert.select import ConversionReport, Converted, DefaultFilter, FilterFn, LeftAlone, Rule
from minifloat.convert.serving import export_weights, quantized_weights
from minifloat.convert.weights import dequantize_weights, load_mxfp4, save_mxfp4

__all__ = [
    "ConversionReport", "Converted", "DefaultFilter", "FilterFn", "LeftAlone", "Rule", "convert",
    "dequantize_weights", "export", "export_weights", "load_mxfp4", "quantized_weights", "revert", "save_mxfp4",
]  # fmt: skip
