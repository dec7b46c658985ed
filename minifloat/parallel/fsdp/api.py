"""``fully_shard``: PyTorch's FSDP2, with the weights of quantized linears gathered as codes."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from minifloat.arguments import checked
from minifloat.comm.sharded_cast import is_plain
from minifloat.formats import COLUMNWISE
from minifloat.nn.etp import etp_parameters
from minifloat.nn.grouped_linear import GroupedLinear
from minifloat.nn.linear import Linear
from minifloat.nn.linear_state import LinearState
from minifloat.parallel.fsdp import pytorch
from minifloat.parallel.fsdp.pytorch import ShardedParameter
from minifloat.parallel.fsdp.weight import ShardedWeight, cast_shards, owners
from minifloat.quantizer import DTYPES
from minifloat.recipe import Recipe, RecipeLike, as_recipe
from minifloat.tensor import QuantizedTensor
from minifloat.tensor.rows import row_unit, rows_of

_TP_ATTRIBUTES = ("tensor_model_parallel", "partition_dim", "partition_stride", "partition_parts")
"""What a tensor-parallel parameter says of itself, and the DTensor that takes its place must say too."""


@checked
def fully_shard(
    module: nn.Module,
    *,
    mesh: DeviceMesh | None = None,
    recipe: RecipeLike | None = None,
    reshard_after_forward: bool | int | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    ignored_params: set[nn.Parameter] | None = None,
) -> nn.Module:
    """Shards parameters as ``torch.distributed.fsdp.fully_shard`` does, and gathers weights quantized.

    Call it bottom-up, as PyTorch's own, and on the whole model in the end. What is sharded stays a DTensor in high
    precision: optimizers, clipping and checkpoints are those of any FSDP2 model. The weight of a
    :class:`~minifloat.Linear`, also as a part of a fused module, whose own recipe quantizes weights, is gathered as
    codes and scales: those of quantizing the whole weight, of one parameter or of several, bit for bit, whatever the
    number of rows and of ranks; so is each weight of a :class:`~minifloat.GroupedLinear` whose experts have one each.
    Each pass sends the orientation that it reads. The rest is gathered in high precision, as in PyTorch: norms,
    embeddings, biases, and weights that :func:`sharded_weights` does not list.

    Weights are cast from the sharded parameters, once at the start of each forward of the outermost module, with
    one all-reduce for all amaxes. ``mp_policy.param_dtype`` is the dtype of what they stand for in the layer, and of
    their gradients, not one that they are rounded to first. Delayed scaling's buffers are not sharded; the ranks of
    ``mesh`` must reduce its amaxes, which they do unless told otherwise.

    Args:
        mesh, reshard_after_forward, mp_policy, offload_policy, ignored_params: as of PyTorch's. Over two dims of a mesh
            the second one shards, and amaxes are reduced over it; the first one replicates.
        recipe: a recipe or its short name, which every linear in ``module`` that has none of its own gets for good:
            what is gathered cannot depend on the ``autocast`` around a call.

    Raises:
        TypeError, ValueError: ``recipe`` is not one; several modules, which take a call each.
        ValueError: a linear fuses or delays its weight gradient, which FSDP2 would not reduce; rows that ``etp_group``
            shares out are not among ``ignored_params``.
    """
    _check_ignored(module, ignored_params or set())
    _set_recipes(module, recipe)
    options = {"mp_policy": mp_policy, "offload_policy": offload_policy, "ignored_params": ignored_params}
    given: dict[str, Any] = {name: option for name, option in options.items() if option is not None}
    before = {}
    for each in module.modules():
        for name, parameter in each.named_parameters(recurse=False):  # a move to the device loses what is noted on it
            initial = parameter.get_high_precision_init_val() if isinstance(parameter, QuantizedTensor) else None
            before[each, name] = parameter, dict(vars(parameter)), initial
    torch_fully_shard(module, mesh=mesh, reshard_after_forward=reshard_after_forward, **given)
    layers = owners(module)
    for group in pytorch.param_groups(module):
        by_matrix: dict[tuple[LinearState, tuple[str, ...]], dict[str, Any]] = {}
        for param in group.fsdp_params:
            holder, own_name, shared = pytorch.holder_of(param)
            layer, names, name = layers.get((holder, own_name), (None, (), ""))
            whole, noted, initial = before[holder, own_name]
            param.sharded_param.__dict__.update({mark: noted[mark] for mark in _TP_ATTRIBUTES if mark in noted})
            if isinstance(whole, QuantizedTensor):
                _gather_quantized(whole, initial, layer, {name: param}, group)
            elif isinstance(layer, LinearState) and not shared:
                by_matrix.setdefault((layer, names), {})[name] = param
        for (layer, names), params in by_matrix.items():
            if tuple(params) == names:  # else others are ignored, or shared
                _gather_as_codes(layer, params, group)
    for each in module.modules():
        if isinstance(each, GroupedLinear):
            each._join_weights()  # frees the memory of the wholes
    pytorch.cast_before_forward(module, _cast)
    return module


@checked
def sharded_weights(module: nn.Module) -> dict[str, tuple[str, str]]:
    """The parameters below ``module`` that are gathered as codes: by name, the formats, rowwise and columnwise.

    Of linears these are all weights but those that several modules share, transposed ones, ones that backward reads in
    high precision, ones of several parameters (``parameters_split``) with a block of rows that lies in two of them, and
    those of all experts in one parameter.
    """
    names = {id(each): name for name, each in module.named_modules()}
    found = {}
    for parameter in pytorch.parameters_below(module):
        weight = parameter.weight
        spec = weight.quantizer.row_format.spec, weight.quantizer.format(COLUMNWISE).spec
        found[f"{names[id(weight.layer)]}.{parameter.name}".lstrip(".")] = spec
    return found


def _check_ignored(module: nn.Module, ignored: set[nn.Parameter]) -> None:
    """Raises where FSDP2 would take rows that differ between ranks for the same ones."""
    held = etp_parameters(module) - ignored
    name = next((name for name, parameter in module.named_parameters() if parameter in held), None)
    if name is not None:
        raise ValueError(
            f"fully_shard: {name} is a rank's rows of a weight that etp_group shares, and gathers itself; pass "
            "ignored_params=minifloat.distributed.etp_parameters(model)"
        )


def _set_recipes(module: nn.Module, recipe: RecipeLike | None) -> None:
    chosen = None if recipe is None or recipe == "none" else as_recipe(recipe)
    kinds = {type(each) for each in module.modules() if each is not module}
    if chosen is not None and nn.Linear in kinds and not any(isinstance(each, Linear) for each in module.modules()):
        warnings.warn(
            f"fully_shard(recipe=...) of {type(module).__name__}: its nn.Linear know no recipe, and are gathered in "
            "high precision; convert(model, recipe) first",
            stacklevel=4,  # past ``checked``
        )
    for layer in module.modules():
        if not isinstance(layer, LinearState):
            continue
        for option in ("fuse_wgrad_accumulation", "delay_wgrad_compute"):
            if getattr(layer, option) and layer._etp is None:
                raise ValueError(
                    f"{layer._label}: {option} leaves gradients where FSDP2 does not reduce them; do without it"
                )
        layer._keeps_weight = False
        if layer.recipe is None and chosen is not None:
            layer.recipe = chosen
        if isinstance(layer.recipe, Recipe):
            layer._config(layer.recipe)  # with delayed scaling's buffers, which FSDP2 then moves to the device


def _gather_as_codes(layer: LinearState, params: Mapping[str, Any], group: Any) -> None:
    """Lets a weight of a layer be gathered as codes, unless it has to be gathered in high precision.

    ``params``: by name its parameters, which ``group`` gathers.
    """
    if not isinstance(layer.recipe, Recipe):
        return
    weights = [layer._weight(name) for name in params]
    if not all(pytorch.is_sharded_by_rows(param) for param in params.values()):
        return
    if any(weight.numel() == 0 or weight.dtype not in DTYPES or weight.dtype != weights[0].dtype for weight in weights):
        return
    config = layer._config(layer.recipe)
    if config.backward_override == "high_precision":
        return
    if not (config.weight.row_format.quantized and config.weight.format(COLUMNWISE).quantized):
        return
    quantizer = config.weight.with_usage(rowwise=True, columnwise=config.backward_override is None)
    if len(params) > 1 and not is_plain(quantizer):
        return
    if any(weight.shape[0] % row_unit(quantizer) for weight in weights[:-1]):  # a block would lie in two parameters
        return
    ShardedWeight(layer, quantizer, config.delayed, params, group)


def _gather_quantized(
    whole: QuantizedTensor, initial: Tensor | None, layer: LinearState | None, params: Mapping[str, Any], group: Any
) -> None:
    """Lets a quantized parameter be gathered. This rank keeps its rows of the codes, cast with what the whole was."""
    (param,) = params.values()
    if not isinstance(layer, LinearState) or not pytorch.is_sharded_by_rows(param):
        raise ValueError(
            f"{getattr(layer, '_label', type(pytorch.holder_of(param)[0]).__name__)}: fully_shard takes quantized "
            "parameters of linears, sharded by rows; keep this one in high precision"
        )
    if param.offload_to_cpu and param.device.type != "cpu":
        raise ValueError(
            f"{layer._label}: quantized parameters cannot be offloaded to the CPU; keep them in high precision, or "
            "give no offload_policy"
        )
    shards, ranks = pytorch.shards_of(param)
    rows = rows_of(whole, shards, ranks)
    rows.scale, rows.amax_group = whole.scale, ranks.process_group if ranks.size > 1 else None
    if initial is not None:
        rows.set_high_precision_init_val(initial[shards.first(ranks.rank) : shards.end(ranks.rank)])
    pytorch.set_local_rows(param, rows)
    ShardedWeight(layer, rows.quantizer, None, params, group)


def _cast(parameters: list[ShardedParameter]) -> None:
    weights = dict.fromkeys(parameter.weight for parameter in parameters)
    columnwise = torch.is_grad_enabled()
    cast_shards([weight for weight in weights if not weight.is_gathered(columnwise)], columnwise)
