"""Weights of public checkpoints in MXFP4, bit for bit: those of gpt-oss and of DeepSeek-V4's experts.

Both hold the codes that a rowwise MXFP4 operand has here, two a byte with the even element in the low half, and the
same bytes of scales; shapes and dtypes differ.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

from minifloat.arguments import checked
from minifloat.capability import is_mxfp4
from minifloat.formats import COLUMNWISE, IDENTITY, ROWWISE
from minifloat.nn.grouped_linear import GroupedLinear
from minifloat.nn.linear import Linear
from minifloat.operand import Operand, Quantized
from minifloat.quantizer import Quantizer
from minifloat.tensor import QuantizedTensor

BLOCK = 32
Layout = Literal["gpt-oss", "deepseek"]
_BYTES = (torch.uint8, torch.int8, torch.float8_e8m0fnu)


@checked
def load_mxfp4(layer: Linear | GroupedLinear, blocks: Tensor, scales: Tensor) -> None:
    """Writes a weight of a checkpoint to that of ``layer``, whose rowwise codes and scales are those bytes then.

    The columnwise operand, which dgrad reads, is cast from the values that they stand for.

    Args:
        layer: its weight is kept in MXFP4, as inside of ``quantized_model_init(recipe="w4a8")`` or ``"mxfp4"``; not
            split over ranks.
        blocks: codes, two a byte: uint8 [N, K / 32, 16], as ``*_blocks`` of gpt-oss, or int8 [N, K / 2], as ``weight``
            of DeepSeek-V4's experts; of a :class:`GroupedLinear` [G, ...].
        scales: uint8 or ``float8_e8m0fnu`` [N, K / 32], ``*_scales`` or ``scale`` there; of a grouped one [G, ...].

    Raises:
        TypeError: ``layer`` is no such module, ``blocks`` or ``scales`` are no bytes.
        ValueError: the weight is not kept in MXFP4 strips, or blocks and scales have other shapes.
    """
    weights = list(_weights(layer))
    codes, exponents = _rows(blocks, scales)
    sizes, (_, cols) = [weight.shape[0] for weight in weights], weights[0].shape
    lead = (layer.num_gemms,) if isinstance(layer, GroupedLinear) else ()
    wanted = (*lead, sum(sizes) // math.prod(lead), cols // BLOCK)
    if cols % BLOCK or exponents.shape != wanted:
        raise ValueError(
            f"{layer._label}: scales are {list(scales.shape)}; a weight of {[*wanted[:-1], cols]} has {list(wanted)}"
        )
    parts = (each.flatten(0, -2).split(sizes) for each in (codes, exponents))
    with torch.no_grad():
        for weight, own, exponent in zip(weights, *parts, strict=True):
            weight.copy_(_tensor(own.to(weight.device), exponent.to(weight.device), weight))


@checked
def save_mxfp4(layer: Linear | GroupedLinear, layout: Layout = "gpt-oss") -> tuple[Tensor, Tensor]:
    """Codes and scales of the rowwise operand of a weight that is kept in MXFP4, as :func:`load_mxfp4` takes them.

    Args:
        layout: ``"gpt-oss"``, uint8 [N, K / 32, 16] and uint8 [N, K / 32], or ``"deepseek"``, int8 [N, K / 2] and
            ``float8_e8m0fnu`` [N, K / 32]; of a :class:`GroupedLinear` [G, ...]. Copies.

    Raises:
        TypeError, ValueError: as :func:`load_mxfp4`; K is no multiple of 32, or an unknown layout.
    """
    operands = [weight.operands.along(ROWWISE) for weight in _weights(layer)]
    if operands[0].shape[1] % BLOCK:
        raise ValueError(
            f"{layer._label}: {operands[0].shape[1]} columns; such checkpoints have whole blocks of {BLOCK}"
        )
    lead = (layer.num_gemms,) if isinstance(layer, GroupedLinear) else ()
    codes = torch.cat([operand.codes for operand in operands])
    scales = torch.cat([each.scale_inv for each in operands if each.scale_inv is not None])
    codes, scales = (each.view(*lead, len(each) // math.prod(lead), -1) for each in (codes, scales))
    if layout == "gpt-oss":
        return codes.view(*scales.shape, BLOCK // 2), scales
    return codes.view(torch.int8), scales.view(torch.float8_e8m0fnu)


def _weights(layer: Linear | GroupedLinear) -> Iterator[QuantizedTensor]:
    """The weights, whose rows follow each other, which are kept in MXFP4 strips."""
    for name in layer._weight_names:
        weight: Tensor = layer._weight(name)
        fmt = weight.quantizer.row_format if isinstance(weight, QuantizedTensor) else IDENTITY
        if not isinstance(weight, QuantizedTensor) or not is_mxfp4(fmt) or fmt.tile:
            raise ValueError(
                f"{layer._label}: its {name} is kept as {fmt.spec}, not in MXFP4 strips; make the layer inside of "
                'quantized_model_init(recipe="w4a8"), or convert it with quantize_weights=True'
            )
        yield weight


def _rows(blocks: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """The bytes as codes [..., N, K / 2] and scales [..., N, K / 32], uint8."""
    for name, tensor in (("blocks", blocks), ("scales", scales)):
        if tensor.dtype not in _BYTES:
            raise TypeError(f"{name} are {tensor.dtype}; uint8, int8 or float8_e8m0fnu is needed")
    packed = (*scales.shape[:-1], scales.shape[-1] * BLOCK // 2) if scales.dim() else ()
    if blocks.shape not in (packed, (*scales.shape, BLOCK // 2)) or scales.dim() < 2:
        raise ValueError(
            f"blocks are {list(blocks.shape)} and scales {list(scales.shape)}; blocks are {BLOCK // 2} bytes for each "
            "scale, in a dim of their own or in that of the scales"
        )
    return blocks.contiguous().view(torch.uint8).view(packed), scales.contiguous().view(torch.uint8)


def _tensor(codes: Tensor, scales: Tensor, like: QuantizedTensor) -> QuantizedTensor:
    """Codes and scales as a tensor like ``like``, whose columnwise operand is cast from what they stand for."""
    quantizer, shape = like.quantizer, (like.shape[0], like.shape[1])
    row = Operand(codes, scales, None, quantizer.row_format, ROWWISE, shape, like.dtype)
    column = None
    if quantizer.columnwise:
        column = Quantizer(quantizer.format(COLUMNWISE), rowwise=False)(row.dequantize(torch.float32)).columnwise
    return QuantizedTensor.from_operands(
        Quantized(row if quantizer.rowwise else None, column), quantizer, shape, like.dtype
    )
