"""Norm of gradients where backward left them, of sharded models too, and clipping by it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from minifloat.arguments import Accepts, checked, shown
from minifloat.comm.collectives import all_gather_rows, all_reduce
from minifloat.comm.dtensor_ddp import is_dtensor
from minifloat.comm.group import Group, ShardMap

MaxNorm = Annotated[float, Accepts("a number of at least 0, or infinity,", lambda value: value >= 0, alone=True)]


def gradient(p: Tensor) -> Tensor | None:
    """Returns the gradient: ``main_grad`` and ``grad``, where backward has put something into them."""
    if not getattr(p, "grad_added_to_main_grad", False):
        return p.grad
    main_grad: Tensor = p.main_grad  # type: ignore[attr-defined]
    return main_grad if p.grad is None else main_grad + p.grad


@checked
def gradient_norm(
    parameters: Tensor | Iterable[Tensor], tp_group: Group | ProcessGroup | DeviceMesh | None = None
) -> Tensor:
    """Computes the 2-norm of the full model's gradients; each parameter counts once, however it is sharded.

    Parameters with an attribute ``tensor_model_parallel`` or ``etp_group`` are shards, and each shard counts; with
    ``ep_group`` they are experts, which differ by rank; a DTensor counts by its placements. All others are replicated
    over ``tp_group`` and data-parallel ranks, whose gradients must have been averaged before.
    ``minifloat.distributed.fully_shard`` keeps the attributes; PyTorch's loses them. Norms of single gradients are
    fp32, exchanged in one all-gather, so all ranks get the same bits; unsharded fp32 gradients give the bits of
    ``torch.nn.utils.clip_grad_norm_``.

    Args:
        parameters: the same ones in the same order on all ranks of the group, of experts as many; those without a
            gradient are skipped. What a gradient is, ``main_grad`` or ``grad``, :func:`gradient` says.
        tp_group: the ranks over which parameters are sharded.

    Raises:
        ValueError: some parameter is a part, and there is no group of several ranks.
    """
    group = Group.of(tp_group)
    replicated, parts = _norms_of_parameters(_listed(parameters))
    if len(parts) and group.size == 1:
        raise ValueError(
            f"gradient_norm: {len(parts)} parameters are a rank's parts (tensor_model_parallel) and there is no group "
            "of several ranks; pass the one that they are sharded over as tp_group"
        )
    norms = _gathered(_joined([replicated, parts]), group)
    once, everywhere = norms.split([len(replicated), len(parts)], 1)
    return torch.linalg.vector_norm(torch.cat([once[0], everywhere.flatten()]))


@checked
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor], max_norm: MaxNorm, tp_group: Group | ProcessGroup | DeviceMesh | None = None
) -> Tensor:
    """Scales all gradients in place to a :func:`gradient_norm` of at most ``max_norm``; returns the norm before.

    Like ``torch.nn.utils.clip_grad_norm_``, for sharded models and ``main_grad`` too. All ranks scale by the same
    factor, ``max_norm / (norm + 1e-6)`` or 1. An infinite or NaN norm makes gradients NaN or 0, as in PyTorch.
    """
    parameters = _listed(parameters)
    norm = gradient_norm(parameters, tp_group)
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    held = [p.grad for p in parameters if p.grad is not None]
    held += [p.main_grad for p in parameters if getattr(p, "grad_added_to_main_grad", False)]  # type: ignore[attr-defined]
    for alike in _by_place(held):
        local = [grad.to_local() if is_dtensor(grad) else grad for grad in alike]  # type: ignore[attr-defined]
        torch._foreach_mul_(local, factor.to(local[0].device))
    return norm


def _listed(parameters: Tensor | Iterable[Tensor]) -> list[Tensor]:
    listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    for each in listed:
        if not isinstance(each, Tensor):
            raise TypeError(f"parameters: {shown(each)} is among them; tensors are needed, as of model.parameters()")
    return listed


def _norms_of_parameters(parameters: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Computes fp32 norms of gradients that tensor-parallel ranks all have, and of their parts.

    Over each ``etp_group`` those of whole parameters, over each ``ep_group`` one of all experts.
    """
    by_groups: dict[tuple[Group, Group], tuple[list[Tensor], list[Tensor]]] = defaultdict(lambda: ([], []))
    for p in parameters:
        grad, experts = gradient(p), getattr(p, "ep_group", Group())
        if grad is not None or experts.size > 1:  # other ranks' experts may have gradients
            held = by_groups[getattr(p, "etp_group", Group()), experts]
            held[getattr(p, "tensor_model_parallel", False)].extend([] if grad is None else [grad])
    found: tuple[list[Tensor], list[Tensor]] = ([], [])
    for (rows, experts), (replicated, parts) in by_groups.items():
        own = _joined([*_norms(replicated), *_norms(parts)])
        whole = own if rows.size == 1 or not len(own) else torch.linalg.vector_norm(_gathered(own, rows), dim=0)
        split = list(whole.split([len(replicated), len(parts)]))
        if experts.size > 1:
            of_rank = torch.stack([torch.linalg.vector_norm(each) for each in split]).to(parameters[0].device)
            of_all = torch.linalg.vector_norm(_gathered(of_rank, experts), dim=0)
            split = [of_all[:1], of_all[1 : 1 + bool(parts)]]
        for norms, each in zip(found, split, strict=True):
            norms.append(each)
    return _joined(found[0]), _joined(found[1])


def _joined(norms: Sequence[Tensor]) -> Tensor:
    return torch.cat([each.to(norms[0].device) for each in norms]) if norms else torch.zeros(0)


def _gathered(norms: Tensor, group: Group) -> Tensor:
    """Gathers the norms of all ranks, [size, n]."""
    return norms[None] if group.size == 1 else all_gather_rows(norms[None], ShardMap.even(1, group.size), group)


def _norms(grads: Sequence[Tensor]) -> list[Tensor]:
    """Computes fp32 2-norms, of those of each place together; of DTensors as a whole."""
    return [_norms_of_dtensors(alike) if is_dtensor(alike[0]) else _local_norms(alike) for alike in _by_place(grads)]


def _local_norms(grads: list[Tensor]) -> Tensor:
    return torch.stack(torch._foreach_norm(grads, 2, dtype=torch.float32))


def _norms_of_dtensors(grads: Sequence[Any]) -> Tensor:
    """Computes norms of DTensors of one placement; ``_foreach_norm`` has no dtype there from PyTorch 2.14 on."""
    mesh, placements = grads[0].device_mesh, grads[0].placements
    if any(each.is_partial() for each in placements):
        return _local_norms([grad.full_tensor() for grad in grads])
    norms = _local_norms([grad.to_local() for grad in grads])
    for dim, each in enumerate(placements):
        if not each.is_replicate():
            norms = all_reduce(norms**2, Group.of(mesh.get_group(dim))) ** 0.5
    return norms


def _by_place(grads: Sequence[Tensor]) -> list[list[Tensor]]:
    """Groups what is on the same device, DTensors of the same mesh and placements."""
    places: dict[Any, list[Tensor]] = defaultdict(list)
    for grad in grads:
        places[grad.device, getattr(grad, "device_mesh", None), getattr(grad, "placements", None)].append(grad)
    return list(places.values())
