"""Modules: each composes the functions below it with one short autograd function."""

from minifloat.nn.attention import DotProductAttention, RotaryPositionEmbedding
from minifloat.nn.cast_model_weights import cast_weights
from minifloat.nn.embedding import EtpEmbedding, VocabParallelEmbedding
from minifloat.nn.fused_layers import LayerNormLinear, LayerNormMLP
from minifloat.nn.grouped_linear import GroupedLinear
from minifloat.nn.grouped_mlp import GroupedMLP
from minifloat.nn.linear import Linear
from minifloat.nn.linear_state import prepare
from minifloat.nn.moe import MoE, router_losses
from minifloat.nn.multihead_attention import MultiheadAttention
from minifloat.nn.norm import LayerNorm, RMSNorm
from minifloat.nn.quantized_parameters import quantized_model_init
from minifloat.nn.router import TopKRouter
from minifloat.nn.transformer_layer import TransformerLayer

__all__ = [
    "DotProductAttention", "EtpEmbedding", "GroupedLinear", "GroupedMLP", "LayerNorm", "LayerNormLinear",
    "LayerNormMLP", "Linear", "MoE", "MultiheadAttention", "RMSNorm", "RotaryPositionEmbedding", "TopKRouter",
    "TransformerLayer", "VocabParallelEmbedding", "cast_weights", "prepare", "quantized_model_init", "router_losses",
]  # fmt: skip
