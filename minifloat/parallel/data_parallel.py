"""Parameters and ranks with other data: reduced gradients, DDP, and the rows that ``parallelize`` shares out (ETP)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, NamedTuple
from weakref import ReferenceType, ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from minifloat.arguments import checked
from minifloat.comm.collectives import all_reduce
from minifloat.comm.dtensor_ddp import MARK, history_names, is_dtensor, unreduced
from minifloat.comm.group import Group
from minifloat.functional.etp.prefetch_queue import queue_of
from minifloat.functional.etp.rows import Reduction
from minifloat.nn import tensor_parallel
from minifloat.nn.embedding import EtpEmbedding, VocabParallelEmbedding
from minifloat.nn.expert_parameters import check_experts_not_replicated, ep_parameters
from minifloat.nn.grouped_linear import GroupedLinear
from minifloat.nn.grouped_mlp import GroupedMLP
from minifloat.nn.linear import Linear
from minifloat.nn.linear_state import LinearState
from minifloat.nn.tensor_parallel import check_not_replicated, etp_parameters, etp_weights
from minifloat.parallel.fsdp import hooks
from minifloat.tensor import QuantizedTensor

RanksLike = dist.ProcessGroup | DeviceMesh | Group


class ReducedGradients:
    """A forward pre-hook of a module: ``reduce`` sees each gradient of its parameters before it is accumulated.

    That of experts that ranks share out is told which ranks these are, ``ep_group``.

    It watches the parameters that the module has by then, which ``to_empty`` and the like may have made anew; neither
    rows of a weight, whose gradients are reduced as they are computed, nor DTensors; with ``recurse`` none that FSDP2
    reduces, be it gathered or not.
    """

    def __init__(self, reduce: Callable[..., Tensor | None], *, recurse: bool) -> None:
        self._reduce, self.recurse = reduce, recurse
        self._watched: dict[str, ReferenceType[Tensor]] = {}

    def __call__(self, module: nn.Module, inputs: Any) -> None:
        elsewhere = hooks.managed_below(module) if self.recurse else ()
        rows = etp_parameters(module)  # not by their marks, which a parameter that was put in their place lacks
        experts = ep_parameters(module)
        for name, parameter in module.named_parameters(recurse=self.recurse):
            path, _, local_name = name.rpartition(".")
            if elsewhere and (module.get_submodule(path), local_name) in elsewhere:
                continue
            known = self._watched.get(name)
            own = parameter not in rows and not is_dtensor(parameter)
            if own and parameter.requires_grad and (known is None or known() is not parameter):
                ranks = experts.get(parameter)
                parameter.register_hook(self._reduce if ranks is None else partial(self._reduce, ep_group=ranks))
                self._watched[name] = ref(parameter)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_watched": {}}


@checked
def reduce_replicated(
    model: nn.Module,
    groups: RanksLike | Sequence[RanksLike],
    reduction: Reduction = "mean",
    reduce_dtype: torch.dtype | None = None,
) -> None:
    """Reduces the gradients of replicated parameters over ranks with different data, before they are accumulated.

    Use it for models whose layers were made with ``etp_group`` or ``ep_group``;
    :func:`~minifloat.distributed.parallelize` calls it. Sharded weights reduce their own gradients and are skipped.
    Experts' gradients, sums over the tokens of ``ep_group``, are reduced over the other groups; ``"mean"`` divides
    them, like dense ones, by the number of all ranks. Gradients of sharded rows of experts, which ``etp_reduction``
    divides, are also divided by the size of ``ep_group``. Call it once, on the module whose forward runs first. It does
    not reduce ``main_grad`` or gradients of ``backward_dw``.

    Args:
        groups: the ranks: ``etp_group``, ``ep_group``, and those of data parallelism where it is not
            ``DistributedDataParallel``'s.
        reduction: of the gradients of all of these ranks.
        reduce_dtype: that they are sent and summed in; default: their own.

    Raises:
        ValueError: the ranks of a group are some of an ``ep_group``, or all of it and others, which have other experts.
    """
    each = [groups] if isinstance(groups, RanksLike) else groups
    ranks = [group for group in map(Group.of, each) if group.size > 1]
    summed = [each for each in set(ep_parameters(model).values()) if len(_replicas(ranks, each)) < len(ranks)]
    for weight in etp_weights(model):  # which are to be divided as the biases of these experts are
        if (experts := getattr(weight.rows.layer, "ep_group", Group())) in summed:
            weight.rows.sharding = weight.rows.sharding._replace(summed=experts.size)
    if ranks:
        model.register_forward_pre_hook(
            ReducedGradients(partial(_reduced, ranks, reduction == "mean", reduce_dtype), recurse=True)
        )


def _reduced(
    groups: Sequence[Group], mean: bool, dtype: torch.dtype | None, gradient: Tensor | None,
    ep_group: Group | None = None,
) -> Tensor | None:  # fmt: skip
    if gradient is None:  # it goes past autograd
        return None
    total = gradient.to(dtype or gradient.dtype, copy=True)
    for group in groups if ep_group is None else _replicas(groups, ep_group):
        total = queue_of(group).sum_at_once(partial(all_reduce, total, group))
    return (total.div_(math.prod([group.size for group in groups])) if mean else total).to(gradient.dtype)


def _members(group: Group) -> frozenset[int]:
    """Finds the ranks anew: after a restart of torch.distributed other groups have the same names."""
    return frozenset(dist.get_process_group_ranks(group.process_group))


def _replicas(groups: Sequence[Group], ep_group: Group) -> list[Group]:
    """Leaves out the ranks of ``ep_group``, over which gradients of experts are sums already.

    Raises:
        ValueError: they are a part of others, or others of them.
    """
    experts = _members(ep_group)
    for group in groups:
        if len(_members(group) & experts) > 1 and _members(group) != experts:
            raise ValueError(
                f"reduce_replicated: a group has ranks {sorted(_members(group))}, and ranks {sorted(experts)} share "
                "out experts (ep_group), whose gradients would be mixed; pass ep_group itself, and groups of ranks "
                "that have the same experts"
            )
    return [group for group in groups if _members(group) != experts]


@checked
def data_parallel(module: nn.Module, **options: Any) -> DistributedDataParallel:
    """Wraps ``module`` in ``DistributedDataParallel``; ranks give the results of one process with all data.

    It differs from ``DistributedDataParallel(module)`` in three ways:

    - It sends quantized parameters as codes and scales, with the values before the first cast. DDP sends dequantized
      values, and each rank casts them again.
    - It never broadcasts delayed scaling's buffers; DDP does until a first forward that is not compiled.
    - It refuses at once a linear whose weight gradient would never be reduced.

    Make optimizers afterwards: masters then start from the first rank's values.

    Args:
        module: the same one on all ranks, on its device; the values of the first rank count.
        options: of ``DistributedDataParallel``. ``init_sync=False`` broadcasts nothing, also here.

    Raises:
        ValueError: a linear has ``fuse_wgrad_accumulation`` or ``delay_wgrad_compute``, and DDP does not ignore its
            weight; or a weight is sharded over ``etp_group``, or experts over ``ep_group``.
    """
    check_not_replicated(module)
    check_experts_not_replicated(module)
    ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    for name, linear in module.named_modules():
        if not isinstance(linear, LinearState) or not (linear.fuse_wgrad_accumulation or linear.delay_wgrad_compute):
            continue
        # As PyTorch asks it, with a dot also where a module has no name.
        if linear._etp is None and not ignored.issuperset(f"{name}.{weight}" for weight in linear._weight_names):
            raise unreduced(linear._label)
    histories = history_names(module)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ignored | histories)
    quantized = [
        (parameter, parameter.detach().clone(), parameter.get_high_precision_init_val())
        for name, parameter in module.named_parameters()
        if isinstance(parameter, QuantizedTensor) and name not in ignored
    ]
    wrapped = DistributedDataParallel(module, **options)
    setattr(wrapped, MARK, True)
    if options.get("init_sync", True):
        _synchronize(quantized, [b for n, b in module.named_buffers() if n in histories], wrapped.process_group)
    return wrapped


@torch.no_grad()
def _synchronize(
    quantized: Iterable[tuple[QuantizedTensor, Tensor, Tensor | None]], buffers: Iterable[Tensor],
    group: dist.ProcessGroup,
) -> None:  # fmt: skip
    """Gives all ranks what the first one has.

    Each parameter comes with a copy of it, and its values before the first cast, as they were before DDP took it.
    """
    _broadcast(buffers, group)
    for parameter, codes, initial in quantized:
        assert isinstance(codes, QuantizedTensor)
        _broadcast((getattr(codes, name) for name in codes.__tensor_flatten__()[0]), group)
        parameter.copy_(codes)
        if parameter.scale is not None and codes.scale is not None:
            parameter.scale.copy_(codes.scale)  # which what DDP wrote may have changed
        if initial is not None:
            values = initial.to(parameter.device)
            _broadcast([values], group)
            parameter.set_high_precision_init_val(values)


def _broadcast(tensors: Iterable[Tensor], group: dist.ProcessGroup) -> None:
    for tensor in tensors:
        if tensor.numel():
            dist.broadcast(tensor.view(torch.uint8), group=group, group_src=0)  # bytes: not all backends have float8


_SHARDED = (Linear, GroupedLinear, nn.Embedding, EtpEmbedding, VocabParallelEmbedding)
_DIMS = ("dp", "ep", "etp", "eetp", "tp")


class Ranks(NamedTuple):
    """The dims of a mesh.

    Args:
        tp: tensor parallelism.
        etp: ranks with other data that share the rows of weights.
        eetp: others, which share the rows of experts; None: ``etp`` does.
        dp: ranks with other data that have the same rows.
        ep: ranks with other data that share out experts.
    """

    tp: Group = Group()
    etp: Group = Group()
    eetp: Group | None = None
    dp: Group = Group()
    ep: Group = Group()

    @staticmethod
    def of(mesh: DeviceMesh | ProcessGroup | Group) -> Ranks:
        """Reads the dims of a mesh by their names; a group, or a mesh of one dim of another name, is ``tp``.

        Raises:
            ValueError: one of several dims has another name, or none; PyTorch, which sorts the ranks of a group,
                numbers those of a dim in different orders; there are both ``"ep"`` and ``"tp"``.
        """
        names = (mesh.mesh_dim_names or ()) if isinstance(mesh, DeviceMesh) else ()
        if not isinstance(mesh, DeviceMesh) or (mesh.ndim == 1 and not set(names) & set(_DIMS)):
            return Ranks(tp=Group.of(mesh))
        if len(names) != mesh.ndim or not set(names) <= set(_DIMS):
            raise ValueError(
                f"parallelize: the dims of the mesh are named {mesh.mesh_dim_names}; name them "
                f"init_device_mesh(..., mesh_dim_names={_DIMS}), or some of these, or pass one of them, as in "
                "mesh['tp']"
            )
        for dim, name in enumerate(names):
            order = mesh.mesh.argsort(dim).movedim(dim, -1).reshape(-1, mesh.size(dim))
            if (order != order[0]).any():  # on all ranks alike: ranks of a group would have pieces of different parts
                raise ValueError(
                    f"parallelize: the ranks of {name!r} in the mesh {mesh.mesh.tolist()} are in different orders, and "
                    "the groups of PyTorch are sorted; order the ranks of each dim alike, as init_device_mesh does"
                )
        ranks = Ranks(**{name: Group.of(mesh[name]) for name in names})
        if min(ranks.ep.size, ranks.tp.size) > 1:
            raise ValueError(
                f"parallelize: the mesh has {ranks.ep.size} ranks of 'ep' and {ranks.tp.size} of 'tp', and experts are "
                "not tensor-parallel; use 'etp' in place of 'tp'"
            )
        return ranks

    @property
    def data(self) -> tuple[Group, ...]:
        """Groups of several ranks that have other data."""
        return tuple(each for each in (self.etp, self.eetp, self.ep, self.dp) if each is not None and each.size > 1)

    def rows(self, module: nn.Module) -> Group:
        """Returns the ranks that share the weight of ``module``; its replicas are on all others."""
        return self.eetp if self.eetp is not None and isinstance(module, GroupedLinear) else self.etp


def check_once(model: nn.Module) -> None:
    """Raises where something in ``model`` is sharded, or has its gradients reduced, over ranks with other data."""
    for name, module in model.named_modules():
        if (held := module.__dict__.get("_etp")) is not None:
            raise ValueError(
                f"parallelize: {name} is sharded already, over {held.sharding.group.size} ranks of etp_group"
            )
        if any(isinstance(hook, ReducedGradients) and hook.recurse for hook in module._forward_pre_hooks.values()):
            raise ValueError(
                f"parallelize: the gradients of {name or type(module).__name__} are reduced over ranks with other data "
                "already; call parallelize once, with a mesh of all dims"
            )


def plan_rows(
    model: nn.Module, ranks: Ranks, plan: Mapping[str, str], summed: Set[nn.Module] = frozenset()
) -> dict[str, nn.Module]:
    """Lists by name the modules of whose weight each rank of ``etp`` is to keep some rows.

    Args:
        plan: as in ``parallelize``.
        summed: modules whose gradients are summed over tensor-parallel ranks as autograd sees them; they stay whole.

    Raises:
        ValueError: one cannot be sharded; autograd does not see the gradient of one that is not.
    """
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules() if ranks.data else ():
        style = next((plan[pattern] for pattern in plan if fnmatchcase(name, pattern)), None)
        if type(module) in _SHARDED and ranks.rows(module).size > 1 and style != "replicated" and module not in summed:
            _check_layer(name, module)
            found[name] = module
        elif isinstance(module, LinearState) and (module.fuse_wgrad_accumulation or module.delay_wgrad_compute):
            raise ValueError(
                f"parallelize: {name} has fuse_wgrad_accumulation or delay_wgrad_compute and is not sharded over "
                "'etp', so that nothing reduces its gradient; do without them"
            )
    return found


def plan_experts(model: nn.Module, ranks: Ranks, plan: Mapping[str, str]) -> dict[str, GroupedMLP]:
    """Lists by name the experts that the ranks of ``ep`` are to share out.

    Raises:
        ValueError: ranks cannot share them, or other ranks do already.
    """
    found: dict[str, GroupedMLP] = {}
    for name, module in model.named_modules():
        if isinstance(module, GroupedLinear) and module.ep_group not in (Group(), ranks.ep):
            raise ValueError(
                f"parallelize: {name} was made with an ep_group of {module.ep_group.size} ranks, which are no dim 'ep' "
                "of the mesh; make it with ep_group=mesh['ep'], or without, and pass the mesh of all dims"
            )
        style = next((plan[pattern] for pattern in plan if fnmatchcase(name, pattern)), None)
        if isinstance(module, GroupedMLP) and module.ep_group.size < ranks.ep.size and style != "replicated":
            _check_experts(name, module, ranks.ep.size)
            found[name] = module
    return found


def share_experts(experts: Mapping[str, GroupedMLP], ranks: Ranks) -> None:
    """Leaves each rank of ``ep`` its experts, as :func:`plan_experts` found them; shared parameters stay shared."""
    shared: dict[Tensor, nn.Parameter] = {}
    for each in experts.values():
        each._share_experts(ranks.ep, shared)


def _check_experts(name: str, module: GroupedMLP, size: int) -> None:
    if module.num_experts % size:
        raise ValueError(
            f"parallelize: {name} has {module.num_experts} experts, which {size} ranks of 'ep' cannot share alike; "
            "choose a size that divides them"
        )
    for each, fc in (("fc1", module.fc1), ("fc2", module.fc2)):
        if not isinstance(fc, GroupedLinear):
            raise ValueError(
                f"parallelize: {name}.{each} is a {type(fc).__name__}, whose experts cannot be shared out; keep the "
                "GroupedLinear, or name the experts in plan as 'replicated'"
            )
        _check_unsharded(f"{name}.{each}", fc)


def _check_layer(name: str, module: nn.Module) -> None:
    if isinstance(module, nn.Embedding) and (module.sparse or module.max_norm is not None):
        raise ValueError(
            f"parallelize: {name} has sparse={module.sparse} and max_norm={module.max_norm}, with which ranks cannot "
            "share or replicate it; make the embedding without"
        )
    _check_unsharded(name, module)


def _check_unsharded(name: str, module: nn.Module) -> None:
    for each, parameter in module.named_parameters():
        if isinstance(parameter, DTensor):
            raise ValueError(
                f"parallelize: {name}.{each} is a DTensor, whose rows are shared out already; parallelize the model "
                "before fully_shard"
            )


def weight_rows(layers: Mapping[str, nn.Module]) -> dict[tuple[nn.Module, str], tuple[int, int]]:
    """Lists sharded parameters by module and name: rows of the matrix, and the first of the parameter."""
    found: dict[tuple[nn.Module, str], tuple[int, int]] = {}
    for module in layers.values():
        names = module._weight_names if isinstance(module, LinearState) else ("weight",)
        lengths = [module.get_parameter(name).shape[-2] for name in names]
        for place, name in enumerate(names):
            found[module, name] = sum(lengths), sum(lengths[:place])
    return found


def shard_rows(
    model: nn.Module, layers: Mapping[str, nn.Module], ranks: Ranks, reduction: Reduction, **options: Any
) -> None:
    """Does what :func:`plan_rows` has planned, with ``options`` of ``Sharding``, and reduces all other gradients."""
    shared: dict[Tensor, nn.Parameter] = {}
    for module in layers.values():
        layer = EtpEmbedding._adopt_whole(module) if type(module) is nn.Embedding else module
        assert isinstance(layer, LinearState | EtpEmbedding)
        group = ranks.rows(module)
        summed = layer.ep_group if isinstance(layer, GroupedLinear) else Group()
        replicas = tuple(each for each in ranks.data if each not in (group, summed))
        rows = tensor_parallel.shard_rows(layer, group, reduction, replicas, shared)
        rows.sharding = rows.sharding._replace(summed=summed.size, **options)
        layer.invalidate()
    if ranks.data:
        reduce_replicated(model, ranks.data, reduction, reduce_dtype=options["reduce_dtype"])
