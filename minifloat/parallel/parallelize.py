"""``parallelize``: the layers of a model that exists become those of the ranks of a device mesh, in place."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from fnmatch import fnmatchcase
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from minifloat.arguments import Count, checked
from minifloat.comm.group import Group
from minifloat.functional.cross_entropy import vocabulary_shards
from minifloat.functional.etp.rows import Reduction
from minifloat.functional.exchange import Exchange, in_mode, make_exchange
from minifloat.functional.quantize import Mode
from minifloat.nn.embedding import VocabParallelEmbedding
from minifloat.nn.fused_layers import LayerNormLinear, LayerNormMLP
from minifloat.nn.linear import Linear
from minifloat.nn.moe import LayerNormMoE
from minifloat.nn.multihead_attention import MultiheadAttention, check_parallel
from minifloat.nn.quantized_parameters import quantized_weight
from minifloat.nn.tensor_parallel import Partition, partitions
from minifloat.nn.transformer_layer import TransformerLayer
from minifloat.parallel.data_parallel import (
    Ranks,
    ReducedGradients,
    check_once,
    plan_experts,
    plan_rows,
    shard_rows,
    share_experts,
    weight_rows,
)
from minifloat.quantizer import DTYPES
from minifloat.tensor import QuantizedTensor, quantize

Style = Literal["column", "row", "vocabulary", "sequence", "replicated"]
_LAYERS = (TransformerLayer, MultiheadAttention, LayerNormMLP)
_TYPES: dict[str, tuple[type[nn.Module], ...]] = {
    "column": (Linear, LayerNormLinear),
    "row": (Linear,),
    "vocabulary": (nn.Embedding,),
    "sequence": (nn.Module,),
    "replicated": (),
}


class Sharding(NamedTuple):
    """Plan for one module: how its parameters are cut, by their names, and what is done once they are.

    ``summed``: autograd has to see its gradients, which are summed over the ranks, so that no rows are shared out.
    """

    module: nn.Module
    cuts: dict[str, Partition]
    finish: Callable[[], object]
    summed: bool = False


@checked
def parallelize(
    model: nn.Module,
    mesh: DeviceMesh | ProcessGroup | Group,
    *,
    sequence_parallel: bool = True,
    plan: Mapping[str, Style] | None = None,
    etp_reduction: Reduction = "mean",
    reduce_dtype: torch.dtype | None = None,
    recast: bool = False,
    prefetch: Count = 1,
    prefetch_bytes: Count | None = None,
) -> nn.Module:
    """Shards the layers of ``model`` over ranks, in place; before the call every rank has the full model.

    ==========  ========  ===========================================================================================
    dim         data      what a rank keeps
    ==========  ========  ===========================================================================================
    ``"tp"``    the same  its part of the parameters of the layers below, and of what ``plan`` names
    ``"etp"``   its own   its rows of the weight of each :class:`~minifloat.Linear`, :class:`~minifloat.GroupedLinear`
                          and ``nn.Embedding``, gathered before they are used; with ``"tp"`` rows of that part
    ``"eetp"``  its own   if there is one, its rows of the weights of each :class:`~minifloat.GroupedLinear`, of which
                          the ranks of ``"etp"`` then have the same
    ``"ep"``    its own   its experts of each :class:`~minifloat.GroupedMLP`; with ``"etp"`` or ``"eetp"`` their rows
    ``"dp"``    its own   the same as the other ranks of this dim
    ==========  ========  ===========================================================================================

    Backward reduces gradients of all parameters over ``"etp"``, ``"eetp"``, ``"ep"`` and ``"dp"``, without
    ``DistributedDataParallel``. Gradients of experts are already sums over ``"ep"``; ``"mean"`` divides them by its
    size. Call ``model`` itself: a hook of its forward finds the parameters.

    Over ``"tp"`` each :class:`~minifloat.TransformerLayer`, :class:`~minifloat.MultiheadAttention` and
    :class:`~minifloat.LayerNormMLP` is split as by ``set_parallel_mode=True`` and keeps its values, on the ``meta``
    device too. Modules stay the same objects, with recipes, names, hooks and delayed scaling's state; sharded
    parameters are new objects, so make optimizers afterwards. Parameters that modules share stay shared if all of these
    are sharded alike. A piece of a quantized parameter is cast again, from the values before the first cast if these
    were preserved, otherwise from the dequantized values. See ``docs/distributed.md``.

    Args:
        model: the same on all ranks: sizes and values.
        mesh: the ranks: a device mesh with dims ``"dp"``, ``"etp"``, ``"eetp"``, and ``"ep"`` or ``"tp"``, or some of
            these; a group, or one dim of another name, is ``"tp"``. A single rank changes nothing.
        sequence_parallel: as of the layers: activations between them are split along their first dim.
        plan: for further modules, by glob patterns for dotted names (``*`` matches dots too, the first that matches
            wins): ``"column"`` or ``"row"`` for a :class:`~minifloat.Linear` (``"column"`` also for a
            :class:`~minifloat.LayerNormLinear`); ``"vocabulary"`` for an ``nn.Embedding``, which becomes a
            ``VocabParallelEmbedding``; ``"sequence"`` for a module that works on rows of its own, such as a final norm:
            the gradients of its parameters are summed over the ranks; ``"replicated"`` for a module that stays whole
            over ``"etp"`` and ``"ep"``. What is not named stays as it is.
        etp_reduction: of the gradients of ranks with other data: ``"mean"`` or ``"sum"``.
        reduce_dtype: that these are sent and summed in, as FSDP2's; default: that of what they are added to.
        recast: free the codes of a weight's rows, over ``"etp"``, after its forward, and cast them again for backward:
            a byte a parameter less (MXFP8: two). Not where ``is_first_microbatch`` keeps them. Parameters must not be
            written between a forward and its backward, which raises where PyTorch sees it.
        prefetch: how many weights are gathered ahead of their use; ``prefetch_bytes``: at most, of several.

    Returns:
        ``model``.

    Raises:
        ValueError: a size does not divide by the number of ranks; a parameter is a DTensor, sharded already or shared
            with a module that is cut in another way; a pattern fits nothing; dims of several have other names; an
            embedding is sparse or has ``max_norm``; a linear that stays whole fuses or delays its gradient; experts
            are shared out over other ranks than those of ``"ep"``. Nothing was changed then.
    """
    if reduce_dtype not in (None, *DTYPES):
        raise ValueError(f"parallelize: reduce_dtype is {reduce_dtype}; torch.float32 or torch.bfloat16 is needed")
    ranks, plan = Ranks.of(mesh), plan or {}
    exchange = make_exchange("column", sequence_parallel, ranks.tp)
    shards = _plan_modules(model, exchange, plan) if ranks.tp.size > 1 else []
    if shards or ranks.data:
        check_once(model)
    layers = plan_rows(model, ranks, plan, {shard.module for shard in shards if shard.summed})
    experts = plan_experts(model, ranks, plan)
    _check_parameters(model, shards, weight_rows(layers), {fc for each in experts.values() for fc in each.children()})
    _cut(shards)
    share_experts(experts, ranks)
    options = {"recasts": recast, "reduce_dtype": reduce_dtype, "prefetch": (prefetch, prefetch_bytes)}
    shard_rows(model, layers, ranks, etp_reduction, **options)
    return model


def _cut(shards: list[Sharding]) -> None:
    """Does what was planned for the tensor-parallel ranks."""
    made: dict[Tensor, nn.Parameter] = {}
    for shard in shards:
        for name, partition in shard.cuts.items():
            whole = shard.module.get_parameter(name)
            if whole not in made:
                made[whole] = _local_parameter(shard.module, name, whole, partition)
            shard.module.register_parameter(name, made[whole])
    for shard in shards:
        shard.finish()


def _local_parameter(module: nn.Module, name: str, whole: Tensor, partition: Partition) -> nn.Parameter:
    """This rank's piece of a parameter; of a quantized one cast by itself, as of a layer that is made parallel."""
    if not isinstance(whole, QuantizedTensor):
        return nn.Parameter(_local_piece(whole.detach(), partition), requires_grad=whole.requires_grad)
    assert isinstance(module, Linear)
    values, preserve = whole.dequantize().detach(), False
    before = whole.get_high_precision_init_val()
    if before is not None and not whole.is_meta:
        before = before.to(whole.device)
        cast = quantize(before, whole.quantizer, scale=whole.scale)
        preserve = torch.equal(cast.dequantize(), values)  # it has not been trained since
        values = before if preserve else values
    piece = nn.Parameter(_local_piece(values, partition), requires_grad=whole.requires_grad)
    return quantized_weight(module, name, piece, whole.quantizer, preserve)


def _local_piece(whole: Tensor, partition: Partition) -> Tensor:
    """This rank's piece, in memory of its own; a vocabulary need not divide: ``vocabulary_shards``, ``torch.chunk``."""
    if len(partition.parts) > 1:
        return partition.cut(whole)
    return whole.chunk(partition.size, partition.dim)[partition.rank].clone().contiguous()


def _check_parameters(
    model: nn.Module, shards: list[Sharding], rows: Mapping[tuple[nn.Module, str], tuple[int, int]],
    experts: Set[nn.Module],
) -> None:  # fmt: skip
    """Raises where a parameter is none that can be cut, or is another one elsewhere.

    ``rows``: over ``"etp"``; ``experts``: layers that are cut over ``"ep"``.
    """
    cuts = {(shard.module, name): partition for shard in shards for name, partition in shard.cuts.items()}
    users: dict[Tensor, dict[str, tuple[Partition | None, tuple[int, int] | None, bool]]] = {}
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            of_each = cuts.get((module, name)), rows.get((module, name)), module in experts
            users.setdefault(parameter, {})[f"{prefix}.{name}"] = of_each
    for parameter, uses in users.items():
        name, (partition, *_) = next(iter(uses.items()))
        if len(set(uses.values())) > 1:
            raise ValueError(
                f"parallelize: {' and '.join(uses)} are one parameter, which would be cut in different ways; name all "
                "of its modules in plan, or untie them"
            )
        if partition is not None and isinstance(parameter, DTensor):
            raise ValueError(
                f"parallelize: {name} is a DTensor, which cannot be cut; parallelize the model before fully_shard"
            )


# ---- what is done to which module ----


def _plan_modules(model: nn.Module, exchange: Exchange, plan: Mapping[str, Style]) -> list[Sharding]:
    shards: list[Sharding] = []
    inside: set[nn.Module] = set()
    for name, module in model.named_modules():
        if isinstance(module, _LAYERS):
            shards += _plan_layer(name, module, exchange)
            inside |= set(module.modules())
    unused = {pattern: style for pattern, style in plan.items() if style != "replicated"}
    for name, module in model.named_modules():
        pattern = next((each for each in plan if fnmatchcase(name, each)), None)
        if pattern is not None and module not in inside and isinstance(module, _TYPES.get(plan[pattern], ())):
            unused.pop(pattern, None)
            shards += _plan_by_style(name, module, plan[pattern], exchange)
            inside |= set(module.modules()) if isinstance(module, LayerNormLinear) else set()
    if unused:
        raise ValueError(
            f"parallelize: outside of the layers that are sharded as a whole nothing fits {unused}: 'column' is for "
            "minifloat's Linear and LayerNormLinear, 'row' for Linear (convert makes one of an nn.Linear), "
            "'vocabulary' for nn.Embedding, 'sequence' for any module"
        )
    return shards


def _plan_layer(name: str, module: nn.Module, exchange: Exchange) -> list[Sharding]:
    if isinstance(module, MultiheadAttention):
        return _plan_attention(name, module, exchange)
    if isinstance(module, LayerNormMLP):
        halves = 2 if module.activation.gated else 1
        parts = (module.fc1.out_features // halves,) * halves
        first = _plan_linear(f"{name}.fc1", module.fc1, "column", exchange, parts)
        return [first, _plan_linear(f"{name}.fc2", module.fc2, "row", exchange)]
    if isinstance(getattr(module, "layernorm_mlp", None), LayerNormMoE):
        raise ValueError(f"parallelize: {name} has a mixture of experts, which is not tensor-parallel; use fully_shard")
    return [Sharding(module, {}, partial(setattr, module, "_exchange", exchange))]


def _plan_attention(name: str, module: MultiheadAttention, exchange: Exchange) -> list[Sharding]:
    check_parallel(module.heads, module.groups, module.qkv_format, exchange)
    parts: dict[str, tuple[int, ...]] = {"qkv": (module.heads, module.groups, module.groups)}
    if module.attention_type == "cross":
        parts = {"query": (module.heads,), "key_value": (module.groups, module.groups)}
    shards = []
    for part, heads in parts.items():
        rows = tuple([count * module.channels for count in heads])
        shards.append(_plan_linear(f"{name}.{part}", getattr(module, part), "column", exchange, rows))
    shards.append(_plan_linear(f"{name}.proj", module.proj, "row", exchange))
    return [*shards, Sharding(module, {}, partial(module._share_heads, exchange))]


def _plan_by_style(name: str, module: nn.Module, style: Style, exchange: Exchange) -> list[Sharding]:
    if style == "vocabulary":
        assert isinstance(module, nn.Embedding)
        return [_plan_embedding(name, module, exchange)]
    if style == "sequence":
        reduced = ReducedGradients(partial(_sum_of_rows, exchange), recurse=False)
        watch = partial(_watch, module, reduced)
        own = exchange.sequence_parallel and any(True for _ in module.parameters(recurse=False))
        return [Sharding(module, {}, watch, summed=True)] if own else []
    assert style in ("column", "row"), style
    return [_plan_linear(name, module, style, exchange)]


def _plan_linear(
    name: str, module: nn.Module, mode: Mode, exchange: Exchange, parts: tuple[int, ...] | None = None
) -> Sharding:
    """``parts``: rows of what a column-parallel weight is made of, each of which is cut by itself."""
    linear = module.linear if isinstance(module, LayerNormLinear) else module
    if type(linear) is not Linear:
        raise ValueError(f"parallelize: {name} is a {type(linear).__name__}; only a minifloat.Linear can be sharded")
    if linear._exchange.mode is not None:
        raise ValueError(f"parallelize: {name} is sharded already, over {linear._exchange.group.size} ranks")
    exchange = in_mode(exchange, mode)
    rows = linear.parameters_split or {f"rows {i}": count for i, count in enumerate(parts or (linear.out_features,))}
    found = partitions(f"parallelize: {name}", exchange, linear.in_features, rows)
    cuts: dict[str, Partition] = {}
    for kind, names in (("weight", linear._weight_names), ("bias", linear._bias_names)):
        for each in names if kind in found else ():
            one_of_parts = len(names) > 1 and mode == "column"
            cuts[each] = found[kind]._replace(parts=(len(getattr(linear, each)),)) if one_of_parts else found[kind]
    return Sharding(linear, cuts, partial(_finish_linear, linear, exchange, parts))


def _finish_linear(linear: Linear, exchange: Exchange, parts: tuple[int, ...] | None) -> None:
    linear.parallel_mode, linear.sequence_parallel = exchange.mode, exchange.sequence_parallel
    linear._exchange = exchange
    linear._share_out(linear.parameters_split, parts)
    if linear.parameters_split is not None and exchange.mode == "column":
        linear.parameters_split = {each: getattr(linear, f"{each}_weight").shape[0] for each in linear.parameters_split}
    linear._mark_parameters()
    linear.invalidate()


def _plan_embedding(name: str, module: nn.Embedding, exchange: Exchange) -> Sharding:
    if type(module) is not nn.Embedding or module.padding_idx is not None or module.max_norm is not None:
        raise ValueError(
            f"parallelize: {name} is a {type(module).__name__} with padding_idx={module.padding_idx} and "
            f"max_norm={module.max_norm}; 'vocabulary' takes an nn.Embedding without either"
        )
    group, vocabulary = exchange.group, module.num_embeddings
    vocabulary_shards(vocabulary, group.size)  # which raises now, before anything is changed
    cuts = {"weight": Partition(0, (vocabulary,), group.size, group.rank)}
    return Sharding(module, cuts, partial(VocabParallelEmbedding._adopt, module, exchange))


def _watch(module: nn.Module, reduced: ReducedGradients) -> None:
    module.register_forward_pre_hook(reduced)
    reduced(module, ())  # before what reduces over ranks with other data sees the gradients


def _sum_of_rows(exchange: Exchange, gradient: Tensor) -> Tensor:
    """The gradient of a parameter of a module that sees this rank's rows."""
    total = exchange.start_sum_of_rows(gradient.clone()).wait()
    assert total is not None
    return total
