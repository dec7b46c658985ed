"""The weights of converted layers as quantized parameters, and back in high precision."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from minifloat.comm.pytorch import is_dtensor
from minifloat.convert.select import Named
from minifloat.nn import quantized_parameters
from minifloat.nn.grouped_linear import GroupedLinear
from minifloat.nn.linear_state import LinearState
from minifloat.nn.parameters import replace
from minifloat.nn.quantized_parameters import ParameterInit, parameter_init
from minifloat.recipe import OwnRecipe, Recipe
from minifloat.tensor import QuantizedTensor


def wanted(quantize_weights: bool | None) -> bool:
    """Weights are to be quantized; None: as those of modules that are made now."""
    return parameter_init() is not None if quantize_weights is None else quantize_weights


def formats(
    model: nn.Module, layers: Iterable[tuple[Named, OwnRecipe]], quantize_weights: bool | None
) -> dict[Named, ParameterInit]:
    """How the layers whose weights are to be quantized keep them: all of them or none.

    ``layers``: with their recipes. ``quantize_weights``: None: as modules that are made now keep theirs.

    Raises:
        ValueError: a layer has no recipe whose format could be kept; something holds on to the parameters already.
    """
    init = parameter_init()
    if not wanted(quantize_weights):
        return {}
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        raise ValueError(
            "convert: quantize_weights replaces parameters, which DistributedDataParallel holds on to; convert the "
            "model before DistributedDataParallel wraps it"
        )
    found = {}
    for named, recipe in layers:
        own = init
        if own is None and isinstance(recipe, Recipe):
            own = ParameterInit(recipe, False)
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
    """The layers whose weights stay in high precision, and why."""
    owners: dict[int, list[str]] = {}
    for names, module in modules:
        for key, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            owners.setdefault(id(parameter), []).append(f"{names[0]}.{key}")
    found: dict[LinearState, str] = {}
    for layer in layers:
        weights = _weights(layer).values()
        shared = next((owners[id(weight)] for weight in weights if len(owners[id(weight)]) > 1), None)
        if not layer._matrices:
            found[layer] = "its parameter is the transposed weight"
        elif shared is not None:
            found[layer] = f"{' and '.join(shared)} are one parameter"
        elif any(is_dtensor(weight) for weight in weights):
            found[layer] = "it is a DTensor"
    return found


def quantize(layer: LinearState, init: ParameterInit) -> tuple[str, ...]:
    """Replaces the weights of ``layer`` by quantized parameters, and says which."""
    before = {name: layer._weight(name) for name in layer._weight_names}
    if not any(isinstance(weight, QuantizedTensor) for weight in before.values()):
        quantized_parameters.quantize_weights(layer, init)
        if isinstance(layer, GroupedLinear):
            layer._join_weights()
        layer._mark_parameters()
        layer.invalidate()
    return tuple(name for name, weight in before.items() if layer._weight(name) is not weight)


@torch.no_grad()
def dequantize(layer: nn.Module, names: Iterable[str]) -> None:
    """Replaces quantized parameters by their values, or by those that they were made from where these were kept."""
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
