"""Train PyTorch transformers in 8-bit and 4-bit floating point, on a GPU or a CPU.

    import minifloat

    layer = minifloat.Linear(1024, 4096, recipe="current")          # an nn.Linear with a recipe of its own
    with minifloat.autocast(recipe=minifloat.MXFP8BlockScaling()):  # or one for all layers that have none
        y = model(x)

``README.md`` shows the rest; ``docs/architecture.md`` says how it is built.
"""

from typing import TYPE_CHECKING, Any

from minifloat import optim, quantizer
from minifloat.arguments import checked
from minifloat.autocast import autocast, get_default_recipe
from minifloat.convert import ConversionReport, DefaultFilter, convert, export, load_mxfp4, revert, save_mxfp4
from minifloat.formats import Format
from minifloat.functional.cross_entropy import cross_entropy, linear_cross_entropy
from minifloat.functional.rope import apply_rotary_pos_emb
from minifloat.graphs import make_graphed_callables
from minifloat.nn import (
    DotProductAttention,
    EtpEmbedding,
    GroupedLinear,
    GroupedMLP,
    LayerNorm,
    LayerNormLinear,
    LayerNormMLP,
    Linear,
    MoE,
    MultiheadAttention,
    RMSNorm,
    RotaryPositionEmbedding,
    TopKRouter,
    TransformerLayer,
    VocabParallelEmbedding,
    cast_weights,
    prepare,
    quantized_model_init,
    router_losses,
)
from minifloat.nn.inspect import inspect
from minifloat.operand import Operand, Quantized
from minifloat.quantizer import Quantizer
from minifloat.recipe import (
    CustomRecipe,
    DelayedScaling,
    DelayedScalingRequest,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowwiseScaling,
    MXFP4BlockScaling,
    MXFP6BlockScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QuantizerRole,
    Recipe,
    W4A8BlockScaling,
)
from minifloat.recompute import checkpoint, checkpoint_context_fn
from minifloat.tensor import QuantizedTensor
from minifloat.tools.explain import explain

# What layers call for each forward is checked where users call it.
cast_all = checked(quantizer.cast_all)
find_amaxes = checked(quantizer.find_amaxes)

__version__ = "0.2.0"

__all__ = [
    "ConversionReport", "CustomRecipe", "DefaultFilter", "DelayedScaling", "DelayedScalingRequest",
    "DotProductAttention", "EtpEmbedding", "Float8BlockScaling", "Float8CurrentScaling", "Float8RowwiseScaling",
    "Format", "GroupedLinear", "GroupedMLP", "LayerNorm", "LayerNormLinear", "LayerNormMLP", "Linear",
    "MXFP4BlockScaling", "MXFP6BlockScaling", "MXFP8BlockScaling", "MoE", "MultiheadAttention", "NVFP4BlockScaling",
    "Operand", "Quantized", "QuantizedTensor", "Quantizer", "QuantizerRole", "RMSNorm", "Recipe",
    "RotaryPositionEmbedding", "TopKRouter", "TransformerLayer", "VocabParallelEmbedding", "W4A8BlockScaling",
    "apply_rotary_pos_emb", "autocast", "cast_all", "cast_weights", "checkpoint", "checkpoint_context_fn", "convert",
    "cross_entropy", "explain", "export", "find_amaxes", "get_default_recipe", "inspect", "linear_cross_entropy",
    "load_mxfp4", "make_graphed_callables", "optim", "prepare", "quantized_model_init", "revert", "router_losses",
    "save_mxfp4",
]  # fmt: skip

if not TYPE_CHECKING:  # which would take every name for one that exists

    def __getattr__(name: str) -> Any:
        """Finds names of Transformer Engine and torchao, where those libraries have them."""
        from minifloat.compat import find

        return find(name, __name__)
