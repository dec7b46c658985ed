"""Extended tensor parallelism of a model that exists: what ``parallelize`` shares out over ranks with other data."""

from __future__ import annotations

from collections.abc import Mapping, Set
from fnmatch import fnmatchcase
from typing import NamedTuple

from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from minifloat.comm.group import Group
from minifloat.functional.etp.rows import Reduction
from minifloat.nn import etp
from minifloat.nn.embedding import EtpEmbedding, VocabParallelEmbedding
from minifloat.nn.grouped_linear import GroupedLinear
from minifloat.nn.linear import Linear
from minifloat.nn.linear_state import LinearState
from minifloat.parallel.data_parallel import ReducedGradients, reduce_replicated

_SHARDED = (Linear, GroupedLinear, nn.Embedding, EtpEmbedding, VocabParallelEmbedding)
_DIMS = ("dp", "etp", "eetp", "tp")


class Ranks(NamedTuple):
    """The dims of a mesh.

    Args:
        tp: tensor parallelism.
        etp: ranks with other data that share the rows of weights.
        eetp: others, which share the rows of experts; None: ``etp`` does.
        dp: ranks with other data that have the same rows.
    """

    tp: Group = Group()
    etp: Group = Group()
    eetp: Group | None = None
    dp: Group = Group()

    @staticmethod
    def of(mesh: DeviceMesh | ProcessGroup | Group) -> Ranks:
        """Of dims of these names; a group, or a mesh of one dim of another name, is ``tp``.

        Raises:
            ValueError: one of several dims has another name, or none; PyTorch, which sorts the ranks of a group,
                numbers those of a dim in different orders.
        """
        names = (mesh.mesh_dim_names or ()) if isinstance(mesh, DeviceMesh) else ()
        if not isinstance(mesh, DeviceMesh) or (mesh.ndim == 1 and not set(names) & set(_DIMS)):
            return Ranks(tp=Group.of(mesh))
        if len(names) != mesh.ndim or not set(names) <= set(_DIMS):
            raise ValueError(
                f"parallelize: the dims of the mesh are named {mesh.mesh_dim_names}; name them "
                "init_device_mesh(..., mesh_dim_names=('dp', 'etp', 'eetp', 'tp')), or some of these, or pass one of "
                "them, as in mesh['tp']"
            )
        for dim, name in enumerate(names):
            order = mesh.mesh.argsort(dim).movedim(dim, -1).reshape(-1, mesh.size(dim))
            if (order != order[0]).any():  # on all ranks alike: ranks of a group would have pieces of different parts
                raise ValueError(
                    f"parallelize: the ranks of {name!r} in the mesh {mesh.mesh.tolist()} are in different orders, and "
                    "the groups of PyTorch are sorted; order the ranks of each dim alike, as init_device_mesh does"
                )
        return Ranks(**{name: Group.of(mesh[name]) for name in names})

    @property
    def data(self) -> tuple[Group, ...]:
        """Those of several ranks that have other data."""
        return tuple(each for each in (self.etp, self.eetp, self.dp) if each is not None and each.size > 1)

    def rows(self, module: nn.Module) -> Group:
        """Which share the weight of ``module``; its replicas are on all others."""
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
    """By name the modules of whose weight each rank of ``etp`` is to keep some rows.

    Args:
        plan: as of ``parallelize``.
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


def _check_layer(name: str, module: nn.Module) -> None:
    if isinstance(module, nn.Embedding) and (module.sparse or module.max_norm is not None):
        raise ValueError(
            f"parallelize: {name} has sparse={module.sparse} and max_norm={module.max_norm}, with which ranks cannot "
            "share or replicate it; make the embedding without"
        )
    for each, parameter in module.named_parameters(recurse=False):
        if isinstance(parameter, DTensor):
            raise ValueError(
                f"parallelize: {name}.{each} is a DTensor, whose rows are shared out already; parallelize the model "
                "before fully_shard"
            )


def weight_rows(layers: Mapping[str, nn.Module]) -> dict[tuple[nn.Module, str], tuple[int, int]]:
    """By module and name the parameters that are sharded: rows of the matrix, and the first of the parameter."""
    found: dict[tuple[nn.Module, str], tuple[int, int]] = {}
    for module in layers.values():
        names = module._weight_names if isinstance(module, LinearState) else ("weight",)
        lengths = [module.get_parameter(name).shape[-2] for name in names]
        for place, name in enumerate(names):
            found[module, name] = sum(lengths), sum(lengths[:place])
    return found


def shard_rows(
    model: nn.Module,
    layers: Mapping[str, nn.Module],
    ranks: Ranks,
    reduction: Reduction,
    recast: bool,
    prefetch: int,
    prefetch_bytes: int | None,
) -> None:
    """Does what :func:`plan_rows` has planned, and reduces the gradients of all other parameters."""
    shared: dict[Tensor, nn.Parameter] = {}
    for module in layers.values():
        layer = EtpEmbedding._adopt_whole(module) if type(module) is nn.Embedding else module
        assert isinstance(layer, LinearState | EtpEmbedding)
        group = ranks.rows(module)
        rows = etp.shard_rows(layer, group, reduction, tuple(each for each in ranks.data if each != group), shared)
        rows.sharding = rows.sharding._replace(recasts=recast, prefetch=(prefetch, prefetch_bytes))
        layer.invalidate()
    if ranks.data:
        reduce_replicated(model, ranks.data, reduction)
