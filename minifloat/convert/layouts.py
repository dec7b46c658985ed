"""Layouts of weights that inference engines load, as data: a format, names of tensors, what ``config.json`` says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from minifloat.formats import Format, parse
from minifloat.operand import Operand

WeightLayout = Literal["fp8-block", "fp8-tensor", "fp8-channel", "fp8-block-compressed", "mxfp8", "nvfp4", "mxfp4"]


class LayoutSpec(NamedTuple):
    """Layout of the weight of a linear, or of all experts.

    Attributes:
        format: what it holds, and what ``requantize`` casts to; strips hold what tiles say as well.
        endings: of the names of codes and scales, behind that of the parameter.
        scheme: name of the format, weights and activations as ``compressed-tensors`` describes them; None of others.
    """

    format: Format
    endings: tuple[str, str] = ("", "_scale")
    scheme: tuple[str, dict[str, Any], dict[str, Any] | None] | None = None

    def holds(self, fmt: Format) -> bool:
        """Whether codes and scales of a weight in ``fmt`` can be written as they are."""
        own = self.format
        facts = [(f.element, f.block, f.amax_per_row, f.transform, f.scale_dtype, f.needs_amax) for f in (own, fmt)]
        given = fmt.scale_rule == "given"  # a scale as any other, which needs no amax
        return (facts[0] == facts[1] or (given and facts[0][:-1] == facts[1][:-1])) and fmt.tile >= own.tile

    def tensors(self, operand: Operand) -> Iterator[tuple[str, Tensor]]:
        """Iterates over the endings of names, and copies or views of codes and scales."""
        fmt, (rows, _), codes, scales = operand.format, operand.shape, operand.codes, operand.scale_inv
        assert scales is not None
        if fmt.tile and not self.format.tile:
            scales = scales.repeat_interleave(fmt.block, 0)[:rows]
        if fmt.scale_rule == "two_level":
            scales = scales.view(torch.float8_e4m3fn)
        yield self.endings[0], (codes if fmt.packed else codes.view(torch.float8_e4m3fn)).contiguous()
        yield self.endings[1], (scales.view(rows, 1) if fmt.amax_per_row else scales).contiguous()
        if fmt.scale_rule == "two_level":  # what block scales are divided by
            assert operand.amax is not None
            level = 6 * fmt.block_scale_max / operand.amax
            yield "_global_scale", torch.where(operand.amax == 0, 1.0, level).view(1)

    def config(self, ignored: Sequence[str], experts: Sequence[str], static: bool) -> dict[str, Any]:
        """Describes the layout as ``quantization_config``.

        Args:
            ignored, experts: names of the linears, and of all experts, that are left in high precision.
            static: whether activations have scales in the files.
        """
        left = [*ignored, *experts]
        if self.endings[0] == "_blocks":
            return {"quant_method": "mxfp4", "modules_to_not_convert": left}
        if self.scheme is None:
            fp8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
            return fp8 | {"weight_block_size": [128, 128], "modules_to_not_convert": left}
        name, weights, inputs = self.scheme
        held = {"num_bits": 4 if self.format.packed else 8, "type": "float", "symmetric": True}
        group = {
            "targets": ["Linear"],
            "weights": held | weights | {"dynamic": False},
            "input_activations": inputs and held | inputs | {"dynamic": not static},
        }
        ignore = [*ignored, *(f"re:{each.replace('.', '[.]')}[.].*" for each in experts)]
        method = {"quant_method": "compressed-tensors", "format": name, "quantization_status": "compressed"}
        return method | {"config_groups": {"group_0": group}, "ignore": ignore}


_FLOAT, _TENSOR, _CHANNEL, _TOKEN = "float-quantized", *({"strategy": each} for each in ("tensor", "channel", "token"))
_TILES, _STRIPS = {"strategy": "block", "block_structure": [128, 128]}, {"strategy": "group", "group_size": 128}
_MX = {"strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
_NV = {"strategy": "tensor_group", "group_size": 16, "scale_dtype": "torch.float8_e4m3fn"}
LAYOUTS: dict[WeightLayout, LayoutSpec] = {
    "fp8-block": LayoutSpec(parse("e4m3/128x128/pow2"), ("", "_scale_inv")),
    "fp8-tensor": LayoutSpec(parse("e4m3/tensor/fp32"), scheme=(_FLOAT, _TENSOR, _TENSOR)),
    "fp8-channel": LayoutSpec(parse("e4m3/row/fp32"), scheme=(_FLOAT, _CHANNEL, _TOKEN)),
    "fp8-block-compressed": LayoutSpec(parse("e4m3/128x128/pow2"), scheme=(_FLOAT, _TILES, _STRIPS)),
    "mxfp8": LayoutSpec(parse("e4m3/1x32/e8m0"), scheme=("mxfp8-quantized", _MX, _MX)),
    "nvfp4": LayoutSpec(parse("e2m1/1x16/two_level"), ("_packed", "_scale"), ("nvfp4-pack-quantized", _NV, None)),
    "mxfp4": LayoutSpec(parse("e2m1/1x32/e8m0"), ("_blocks", "_scales")),
}
