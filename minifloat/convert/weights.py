"""Quantized parameters of converted layers, and MXFP4 weights of public checkpoints, bit for bit."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from minifloat.arguments import checked
from minifloat.backends import is_mxfp4
from minifloat.comm.dtensor_ddp import is_dtensor
from minifloat.convert.experts import attached
from minifloat.convert.select import Named
from minifloat.formats import COLUMNWISE, IDENTITY, ROWWISE
from minifloat.nn import quantized_parameters
from minifloat.nn.grouped_linear import GroupedLinear
from minifloat.nn.linear import Linear
from minifloat.nn.linear_state import LinearState
from minifloat.nn.options import replace
from minifloat.nn.quantized_parameters import ParameterInit, parameter_init
from minifloat.operand import Operand, Quantized
from minifloat.quantizer import Quantizer
from minifloat.recipe import OwnRecipe, Recipe
from minifloat.tensor import QuantizedTensor


def formats(
    model: nn.Module, layers: Iterable[tuple[Named, OwnRecipe]], quantize_weights: bool | None
) -> dict[Named, ParameterInit]:
    """Returns the formats of the layers whose weights are to be quantized: all of them or none.

    ``layers``: with their recipes. ``quantize_weights``: None: as modules that are made now keep theirs.

    Raises:
        ValueError: a layer has no recipe whose format could be kept; something holds on to the parameters already.
    """
    init = parameter_init()
    if quantize_weights is False or (quantize_weights is None and init is None):
        return {}
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        raise ValueError(
            "convert: quantize_weights replaces parameters, which DistributedDataParallel holds on to; convert the "
            "model before DistributedDataParallel wraps it"
        )
    found = {}
    for named, recipe in layers:
        own = init or (ParameterInit(recipe, False) if isinstance(recipe, Recipe) else None)
        if own is None:
            raise ValueError(
                f"convert: quantize_weights=True needs a format for the weight of {named.names[0]!r}, which takes its "
                'recipe from autocast: give convert a recipe, or call it inside of quantized_model_init(recipe="mxfp8")'
            )
        for name, weight in _weights(named.module).items():
            hooks = weight._backward_hooks or getattr(weight, "_post_accumulate_grad_hooks", None)
            if hooks or weight.grad is not None:
                raise ValueError(
                    f"convert: quantize_weights replaces parameters, and {named.names[0]}.{name} has "
                    f"{'hooks' if hooks else 'a gradient'} that would be lost; convert before hooks are registered and "
                    "an optimizer is made, and between steps after zero_grad()"
                )
        found[named] = own
    return found


def obstacles(modules: Sequence[Named], layers: Iterable[LinearState]) -> dict[LinearState, str]:
    """Finds the layers whose weights stay in high precision, and why."""
    owners: dict[int, list[str]] = {}
    for names, module in modules:
        for key, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            owners.setdefault(id(parameter), []).append(f"{names[0]}.{key}")
    found: dict[LinearState, str] = {}
    for layer in layers:
        weights = _weights(layer).values()
        shared = next((owners[id(weight)] for weight in weights if len(owners[id(weight)]) > 1), None)
        if not layer._matrices and not isinstance(layer, GroupedLinear):
            found[layer] = "its parameter is the transposed weight"
        elif shared is not None:
            found[layer] = f"{' and '.join(shared)} are one parameter"
        elif any(is_dtensor(weight) for weight in weights):
            found[layer] = "it is a DTensor"
    return found


def quantize(layer: LinearState, init: ParameterInit) -> tuple[str, ...]:
    """Replaces the weights of ``layer`` by quantized parameters, and says which."""
    before = _weights(layer)
    if not any(isinstance(weight, QuantizedTensor) for weight in before.values()):
        quantized_parameters.quantize_weights(layer, init)
        if isinstance(layer, GroupedLinear):
            layer._join_weights()
        layer._mark_parameters()
        layer.invalidate()
    kept = _weights(layer)  # of all experts in one parameter other ones
    return tuple(name for name, weight in before.items() if kept.get(name) is not weight)


@torch.no_grad()
def dequantize(module: nn.Module, names: Iterable[str]) -> None:
    """Replaces quantized parameters by their values, or by those that they were made from where these were kept.

    ``names``: of parameters that were made quantized, of converted experts those of transformers.
    """
    for name in names:
        layer: nn.Module = next((each for each in attached(module) if each.parameter == name), module)
        if isinstance(layer, GroupedLinear) and name not in layer._weight_names:
            _dequantize(layer, layer._weight_names)
            layer._unite_weights(name)
        else:
            _dequantize(layer, [name])


@torch.no_grad()
def dequantize_weights(model: nn.Module) -> None:
    """Replaces quantized parameters by their values in high precision, which the layers cast from then on.

    A moving average needs them, since codes round its small updates away, in silence if it is no ``AveragedModel``:
    ``dequantize_weights(average := AveragedModel(model))``.
    """
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, weight in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if isinstance(weight, QuantizedTensor) and weight not in made:
                _dequantize(module, [name])
                made[weight] = module.get_parameter(name)
            elif weight in made:
                replace(module, name, made[weight])


def _dequantize(layer: nn.Module, names: Iterable[str]) -> None:
    for name in names:
        weight = layer.get_parameter(name)
        if isinstance(weight, QuantizedTensor):
            initial = weight.get_high_precision_init_val()
            values = weight.dequantize() if initial is None else initial.to(weight.device, copy=True)
            parameter = nn.Parameter(values, weight.requires_grad)
            parameter.grad = weight.grad
            replace(layer, name, parameter)
    if isinstance(layer, GroupedLinear):
        layer._join_weights()


def _weights(module: nn.Module) -> dict[str, Tensor]:
    if isinstance(module, LinearState):
        return {name: module._weight(name) for name in module._weight_names}
    return {"weight": module.weight}  # type: ignore[dict-item]


# ---- MXFP4 of public checkpoints: gpt-oss, and the experts of DeepSeek-V4 ----

# Both hold the codes that a rowwise MXFP4 operand has here, two a byte with the even element in the low half, and the
# same bytes of scales; shapes and dtypes differ.
BLOCK = 32
Layout = Literal["gpt-oss", "deepseek"]
_BYTES = (torch.uint8, torch.int8, torch.float8_e8m0fnu)


@checked
def load_mxfp4(layer: Linear | GroupedLinear, blocks: Tensor, scales: Tensor) -> None:
    """Copies the codes and scales of an MXFP4 checkpoint, bit for bit, to the rowwise operand of ``layer.weight``.

    The columnwise operand, which dgrad reads, is cast from the dequantized values.

    Args:
        layer: its weight is kept in MXFP4, as inside of ``quantized_model_init(recipe="w4a8")``; not split over ranks.
        blocks: codes, two a byte: uint8 [N, K / 32, 16], as ``*_blocks`` of gpt-oss, or int8 [N, K / 2], as ``weight``
            of DeepSeek-V4's experts; of a :class:`GroupedLinear` [G, ...].
        scales: uint8 or ``float8_e8m0fnu`` [N, K / 32], ``*_scales`` or ``scale`` there; of a grouped one [G, ...].

    Raises:
        TypeError: ``layer`` is no such module, ``blocks`` or ``scales`` are no bytes.
        ValueError: the weight is not kept in MXFP4 strips, or blocks and scales have other shapes.
    """
    weights = list(_mxfp4_weights(layer))
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
    """Returns codes and scales of the rowwise operand of an MXFP4 weight, in the layout of :func:`load_mxfp4`.

    Args:
        layout: ``"gpt-oss"``, uint8 [N, K / 32, 16] and uint8 [N, K / 32], or ``"deepseek"``, int8 [N, K / 2] and
            ``float8_e8m0fnu`` [N, K / 32]; of a :class:`GroupedLinear` [G, ...]. Copies.

    Raises:
        TypeError, ValueError: as :func:`load_mxfp4`; K is no multiple of 32, or an unknown layout.
    """
    operands = [weight.operands.along(ROWWISE) for weight in _mxfp4_weights(layer)]
    if operands[0].shape[1] % BLOCK:
        raise ValueError(
            f"{layer._label}: {operands[0].shape[1]} columns; such checkpoints have whole blocks of {BLOCK}"
        )
    lead = (layer.num_gemms,) if isinstance(layer, GroupedLinear) else ()
    codes = torch.cat([operand.codes for operand in operands]).unflatten(0, (*lead, -1))
    scales = torch.cat([each.scale_inv for each in operands if each.scale_inv is not None]).unflatten(0, (*lead, -1))
    if layout == "gpt-oss":
        return codes.view(*scales.shape, BLOCK // 2), scales
    return codes.view(torch.int8), scales.view(torch.float8_e8m0fnu)


def _mxfp4_weights(layer: Linear | GroupedLinear) -> Iterator[QuantizedTensor]:
    """Iterates over the weights, whose rows follow each other, which are kept in MXFP4 strips."""
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
    """Views the bytes as codes [..., N, K / 2] and scales [..., N, K / 32], uint8."""
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
    """Makes codes and scales a tensor like ``like``, whose columnwise operand is cast from what they stand for."""
    quantizer, shape = like.quantizer, (like.shape[0], like.shape[1])
    row = Operand(codes, scales, None, quantizer.row_format, ROWWISE, shape, like.dtype)
    column = None
    if quantizer.columnwise:
        column = Quantizer(quantizer.format(COLUMNWISE), rowwise=False)(row.dequantize(torch.float32)).columnwise
    return QuantizedTensor.from_operands(
        Quantized(row if quantizer.rowwise else None, column), quantizer, shape, like.dtype
    )
