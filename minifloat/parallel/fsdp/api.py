"""``fully_shard`` on top of PyTorch's, and the state dict of a sharded model as that of the unsharded one, and back."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor

from minifloat.arguments import Device, checked
from minifloat.comm.collectives import all_reduce_max
from minifloat.comm.dtensor_ddp import local_part, sharded_like
from minifloat.comm.group import Group
from minifloat.comm.sharded_cast import gather, is_plain
from minifloat.formats import COLUMNWISE
from minifloat.nn.expert_parameters import ep_parameters
from minifloat.nn.grouped_linear import GroupedLinear
from minifloat.nn.linear import Linear
from minifloat.nn.linear_state import LinearState
from minifloat.nn.tensor_parallel import etp_parameters
from minifloat.operand import Operand
from minifloat.parallel.fsdp import hooks
from minifloat.parallel.fsdp.experts import ShardedExperts
from minifloat.parallel.fsdp.hooks import ShardedParameter
from minifloat.parallel.fsdp.weight import ShardedWeight, cast_shards, owners
from minifloat.quantizer import DTYPES
from minifloat.recipe import Recipe, RecipeLike, as_recipe
from minifloat.tensor import QuantizedTensor
from minifloat.tensor.rows import QuantizedRows, row_unit, rows_of

_MARKS = ("tensor_model_parallel", "partition_dim", "partition_stride", "partition_parts", "ep_group")
"""Attributes of a parameter that ranks of another dim share, which the DTensor in its place must have too."""


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
    """Shards parameters like ``torch.distributed.fsdp.fully_shard``, and gathers weights as codes.

    Call it bottom-up, like PyTorch's, and on the whole model at the end. Shards stay DTensors in high precision:
    optimizers, clipping and checkpoints are those of any FSDP2 model. If a layer's own recipe quantizes weights, the
    weight of a :class:`~minifloat.Linear`, alone or in a fused module, is gathered as codes and scales, equal to those
    of the quantized full weight, bit for bit, for any number of rows and of ranks; so is each expert's weight of a
    :class:`~minifloat.GroupedLinear` and of converted experts. Each pass gathers the orientation that it reads. All
    else is gathered in high precision, as in PyTorch: norms, embeddings, biases, and weights that
    :func:`sharded_weights` does not list.

    Weights are cast from the sharded parameters, once at the start of each forward of the outermost module, with one
    all-reduce for all amaxes. ``mp_policy.param_dtype`` is the logical dtype of the gathered weight and of its
    gradient; weights are not rounded to it before the cast. Delayed scaling's buffers are not sharded; the ranks of
    ``mesh`` must reduce its amaxes, as they do by default.

    Experts distributed over an ``ep_group`` take a separate call, over ranks that have the same experts; their
    gradients, sums over the tokens of ``ep_group``, are also divided by its size.

    Args:
        mesh, reshard_after_forward, mp_policy, offload_policy, ignored_params: as of PyTorch's. Over two dims of a mesh
            the second one shards, and amaxes are reduced over it; the first one replicates.
        recipe: a recipe or its short name, which every linear in ``module`` that has none of its own gets for good:
            what is gathered cannot depend on the ``autocast`` around a call. A layer's recipe may become ``"none"``
            later; a weight in high precision is then gathered so.

    Raises:
        TypeError, ValueError: ``recipe`` is not one; several modules, which take a call each.
        ValueError: a linear fuses or delays its weight gradient, which FSDP2 would not reduce; rows that ``etp_group``
            shares out are not among ``ignored_params``; ranks of ``mesh`` have other experts, or other parameters are
            in a call with experts; ``reshard_after_forward`` is a number of ranks.
    """
    if not isinstance(reshard_after_forward, bool | None):
        raise ValueError(
            f"fully_shard: reshard_after_forward={reshard_after_forward!r} would gather both orientations of the "
            "codes in forward, as many bytes as backward saves; use True or False, on a mesh of fewer ranks if need be"
        )
    _check_ignored(module, ignored_params or set())
    shared_by = _check_experts(module, mesh, ignored_params or set())
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
    for group in hooks.param_groups(module):
        if shared_by.size > 1:  # by which gradients are divided, too
            group.gradient_divide_factor = float(shared_by.size * group.mesh_info.mesh.size())
            # gloo can only sum; of a single rank PyTorch would divide once more.
            group.force_sum_reduction_for_comms = group.mesh_info.shard_mesh_size > 1
        by_matrix: dict[tuple[LinearState, tuple[str, ...]], dict[str, Any]] = {}
        for param in group.fsdp_params:
            holder, local_name, shared = hooks.holder_of(param)
            layer, names, name = layers.get((holder, local_name), (None, (), ""))
            full, noted, initial = before[holder, local_name]
            param.sharded_param.__dict__.update({mark: noted[mark] for mark in _MARKS if mark in noted})
            if isinstance(full, QuantizedTensor):
                _gather_quantized(full, initial, layer, {name: param}, group)
            elif isinstance(layer, LinearState) and not shared:
                by_matrix.setdefault((layer, names), {})[name] = param
        for (layer, names), params in by_matrix.items():
            if tuple(params) == names:  # else others are ignored, or shared
                _gather_as_codes(layer, params, group)
    for each in module.modules():
        if isinstance(each, GroupedLinear):
            each._join_weights()  # frees the memory of full weights
    hooks.cast_before_forward(module, _cast)
    return module


@checked
def sharded_weights(module: nn.Module) -> dict[str, tuple[str, str]]:
    """Lists the parameters in ``module`` that are gathered as codes: by name, their rowwise and columnwise formats.

    It omits weights that several modules share, transposed ones, ones that backward reads in high precision, and ones
    of several parameters (``parameters_split``) that share a block of rows.
    """
    names = {each: name for name, each in module.named_modules()}
    found = {}
    for parameter in [each for each in hooks.parameters_below(module) if not each.weight.left_unquantized]:
        quantizer, (holder, name, _) = parameter.weight.quantizer, hooks.holder_of(parameter)
        found[f"{names[holder]}.{name}".lstrip(".")] = quantizer.row_format.spec, quantizer.format(COLUMNWISE).spec
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


def _check_experts(module: nn.Module, mesh: DeviceMesh | None, ignored: set[nn.Parameter]) -> Group:
    """Finds the ranks that share out the experts of this call, whose parameters are not sharded yet.

    Raises:
        ValueError: FSDP2 would take different experts for the same ones, or other parameters are among them.
    """
    experts = ep_parameters(module)
    named = [(name, p) for name, p in module.named_parameters() if p not in ignored and not isinstance(p, DTensor)]
    name, found = next(((name, experts[p]) for name, p in named if p in experts), ("", Group()))
    if found.size == 1:
        return found
    ranks = set(range(dist.get_world_size()) if mesh is None else mesh.mesh.flatten().tolist())
    others = ranks & set(dist.get_process_group_ranks(found.process_group))
    if len(others) > 1:
        raise ValueError(
            f"fully_shard: {name} is of this rank's experts (ep_group), and ranks {sorted(others)} have others; shard "
            "the experts first, by a call of their own over the ranks that have the same ones, as mesh['dp'], or pass "
            "ignored_params=set(minifloat.distributed.ep_parameters(model))"
        )
    dense = next((name for name, p in named if p not in experts), None)
    if dense is not None:
        raise ValueError(
            f"fully_shard: {dense} is no expert's, and its gradient is averaged over other ranks than that of {name}; "
            "shard the experts first, by a call of their own, as fully_shard(moe.experts, mesh=mesh['dp'])"
        )
    return found


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


def _gather_as_codes(layer: LinearState, params: dict[str, Any], group: Any) -> None:
    """Lets a weight of a layer be gathered as codes, unless it has to be gathered in high precision.

    ``params``: by name its parameters, which ``group`` gathers.
    """
    if not isinstance(layer.recipe, Recipe):
        return
    weights = [layer._weight(name) for name in params]
    if not all(hooks.is_sharded_by_rows(param) for param in params.values()):
        return
    if any(weight.numel() == 0 or weight.dtype not in DTYPES or weight.dtype != weights[0].dtype for weight in weights):
        return
    config = layer._config(layer.recipe)
    if config.backward_override == "high_precision":
        return
    if not (config.weight.row_format.quantized and config.weight.format(COLUMNWISE).quantized):
        return
    quantizer = config.weight.with_usage(rowwise=True, columnwise=config.backward_override is None)
    if weights[0].dim() == 3:
        if all(fmt.rounding != "stochastic" for fmt, _ in quantizer.casts):  # whose bits depend on who draws them
            ShardedExperts(layer, quantizer, config.delayed, params, group)
        return
    if len(params) > 1 and not is_plain(quantizer):
        return
    if any(weight.shape[0] % row_unit(quantizer) for weight in weights[:-1]):  # a block would lie in two parameters
        return
    ShardedWeight(layer, quantizer, config.delayed, params, group)


def _gather_quantized(
    full: QuantizedTensor, initial: Tensor | None, layer: LinearState | None, params: dict[str, Any], group: Any
) -> None:
    """Lets a quantized parameter be gathered. This rank keeps its rows of the codes."""
    (param,) = params.values()
    if not isinstance(layer, LinearState) or not hooks.is_sharded_by_rows(param):
        raise ValueError(
            f"{getattr(layer, '_label', type(hooks.holder_of(param)[0]).__name__)}: fully_shard takes quantized "
            "parameters of linears, sharded by rows; keep this one in high precision"
        )
    if param.offload_to_cpu and param.device.type != "cpu":
        raise ValueError(
            f"{layer._label}: quantized parameters cannot be offloaded to the CPU; keep them in high precision, or "
            "give no offload_policy"
        )
    shards, ranks = hooks.shards_of(param)
    rows = rows_of(full, shards, ranks)
    rows.scale, rows.amax_group = full.scale, ranks.process_group if ranks.size > 1 else None
    if initial is not None:
        rows.set_high_precision_init_val(initial[shards.first(ranks.rank) : shards.end(ranks.rank)])
    param.sharded_param._local_tensor = rows
    param._sharded_param_data = rows.new_empty(0, dtype=torch.uint8)  # frees the shard that FSDP2 has made
    ShardedWeight(layer, rows.quantizer, None, params, group)


def _cast(parameters: list[ShardedParameter]) -> None:
    weights = dict.fromkeys(parameter.weight for parameter in parameters)
    columnwise = torch.is_grad_enabled()
    cast_shards([weight for weight in weights if not weight.is_gathered(columnwise)], columnwise)


@checked
@torch.no_grad()
def full_state_dict(model: nn.Module, *, device: Device | None = None, only_rank0: bool = False) -> dict[str, Any]:
    """Gathers the state dict of the unsharded model, for its ``load_state_dict``; a collective.

    Quantized parameters are full :class:`~minifloat.QuantizedTensor`, with the codes and scales of the shards, bit for
    bit. ``torch.distributed.checkpoint.state_dict.get_model_state_dict`` gives dequantized values instead, which
    another cast may round differently.

    Args:
        device: where all tensors are put, one by one; None: each stays where the model is.
        only_rank0: the other ranks get an empty dict.
    """
    _check_gathered(model)
    kept = not only_rank0 or dist.get_rank() == 0
    state: dict[str, Any] = {}
    for key, value in model.state_dict().items():
        full = _unsharded(value) if isinstance(value, DTensor) else value
        if kept:
            state[key] = full.to(device) if device is not None and isinstance(full, Tensor) else full
    return state


@checked
@torch.no_grad()
def load_full_state_dict(
    model: nn.Module, state: Mapping[str, Any], *, strict: bool = True, from_rank0: bool = False
) -> None:
    """Loads a state dict of :func:`full_state_dict` or of the unsharded model; a collective.

    Codes are copied to a parameter of the same formats. Otherwise values are cast with amaxes that the ranks reduce:
    codes of another recipe, or high precision, give the codes of the unsharded model.

    Args:
        state: on every rank, or with ``from_rank0`` on rank 0, which sends the others one tensor after the other.
        strict: as in ``load_state_dict``.

    Raises:
        RuntimeError: what ``load_state_dict`` raises: keys that are missing or unknown, another shape.
    """
    own = model.state_dict()
    sent_on = next((t.device_mesh.device_type for t in own.values() if isinstance(t, DTensor)), "cpu")
    described = [[(key, v.detach().to("meta") if isinstance(v, Tensor) else v) for key, v in state.items()]]
    if from_rank0:
        dist.broadcast_object_list(described, 0)
    local: dict[str, Any] = {}
    for key, description in described[0]:
        value = _broadcast_from_rank0(state.get(key), description, sent_on) if from_rank0 else state[key]
        local[key] = _resharded(value, own.get(key))
    model.load_state_dict(local, strict)


def _check_gathered(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if getattr(parameter, "tensor_model_parallel", False):
            raise ValueError(
                f"{name} is tensor-parallel, and its FSDP2 ranks together have one tensor-parallel rank's share of it: "
                "save minifloat.distributed.sharded_state_dict(model), from which any number of ranks loads"
            )
    experts = ep_parameters(model)
    own = next((name for name, parameter in model.named_parameters() if parameter in experts), None)
    if own is not None:
        raise ValueError(
            f"{own} is of this rank's experts, and other ranks of ep_group have others, which full_state_dict does "
            "not gather: save minifloat.distributed.sharded_state_dict(model), from which any number of ranks loads"
        )


def _unsharded(sharded: DTensor) -> Tensor:
    rows = sharded._local_tensor
    if not isinstance(rows, QuantizedRows):
        there: Any = sharded.to(sharded.device_mesh.device_type)  # where offloaded shards are gathered, too
        full: Tensor = there.full_tensor()
        return full
    cover, part = rows.cover, rows.part
    assert cover.group is not None
    rowwise, columnwise = (operand is not None for operand in part)
    operands = gather(part, cover.all_owned, cover.group, rowwise=rowwise, columnwise=columnwise)
    reduced = operands.map(lambda o: _with_reduced_amax(o, cover.group))
    return QuantizedTensor.from_operands(reduced, rows.quantizer, sharded.shape, rows.dtype)


def _with_reduced_amax(operand: Operand, group: Any) -> Operand:
    """Reduces the amax that delayed scaling has measured on each rank's rows."""
    if operand.format.scale_rule != "given" or operand.amax is None:
        return operand
    return operand._replace(amax=all_reduce_max([operand.amax], group)[0])


def _resharded(full: Any, target: Any) -> Any:
    """Shards a tensor as ``target`` is, if that is sharded and of the same size."""
    if not isinstance(full, Tensor) or not isinstance(target, DTensor) or full.shape != target.shape:
        return full
    rows = target._local_tensor
    if isinstance(rows, QuantizedRows) and isinstance(full, QuantizedTensor) and rows.quantizer == full.quantizer:
        assert rows.cover.group is not None
        own: Tensor = rows_of(full, rows.cover.shards, rows.cover.group)
    else:
        own = local_part(full.dequantize() if isinstance(full, QuantizedTensor) else full, target)
    return sharded_like(target, own.to(target.device))


def _broadcast_from_rank0(value: Any, described: Any, device: str) -> Any:
    """Broadcasts what rank 0 has; ``described``: the same, tensors on meta."""
    if not isinstance(described, Tensor):
        return described

    def memory(t: Tensor) -> Tensor:
        return (torch.empty_like(t, device=device) if t.is_meta else t.detach().to(device)).contiguous()

    source = value if dist.get_rank() == 0 else described
    tensor = source._map(memory) if isinstance(source, QuantizedTensor) else memory(source)
    for buffer in tensor._buffers().values() if isinstance(tensor, QuantizedTensor) else (tensor,):
        if buffer.numel():
            dist.broadcast(buffer.view(-1).view(torch.uint8), 0)
    return tensor
