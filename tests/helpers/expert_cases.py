"""Experts that ranks of a mesh share out, and one process that has all experts and the tokens of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from minifloat import GroupedLinear, GroupedMLP
from minifloat.functional import sort_by_expert

E, H, F, K = 4, 32, 48, 2
BF16 = torch.bfloat16


class Tokens(nn.Module):
    """A linear in high precision before experts whose tokens are routed by a table."""

    def __init__(self, dtype: torch.dtype = BF16, **options: Any) -> None:
        super().__init__()
        self.experts = GroupedMLP(E, H, F, dtype=dtype, **options)
        self.factor = nn.Parameter(torch.rand(H).to(dtype))

    def forward(self, x: Tensor, indices: Tensor, probabilities: Tensor) -> Tensor:
        y: Tensor = self.experts(x * self.factor, sort_by_expert(indices, E), probabilities=probabilities)
        return y


@dataclass(frozen=True)
class Case:
    """A mesh and what runs on it; ``options``: of the experts, ``arguments``: of ``parallelize``.

    ``quantized``: weights are kept as the recipe casts them.
    """

    dims: dict[str, int]
    options: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)
    quantized: bool = False


def data_rank(mesh: DeviceMesh) -> tuple[int, int]:
    """Which data this rank has: the group of ranks that share out experts, and the place among these."""
    names = mesh.mesh_dim_names or ()
    group = 0
    for name in names:
        if name != "ep":
            group = group * mesh[name].size() + mesh.get_local_rank(name)
    return group, mesh.get_local_rank("ep") if "ep" in names else 0


Batch = tuple[Tensor, Tensor, Tensor, Tensor]


def batches(step: int, groups: int, size: int) -> list[list[Batch]]:
    """X, choices, probabilities and dY of each rank, by group; other numbers of tokens on each rank, on one none."""
    generator = torch.Generator(torch.get_default_device()).manual_seed(step)
    found = []
    for group in range(groups):
        of_group = []
        for rank in range(size):
            tokens = 0 if size > 1 and (group, rank) == (0, size - 1) else 5 + 3 * rank + group
            x, dy = (torch.randn(tokens, H, generator=generator).to(BF16) for _ in range(2))
            indices = torch.rand(tokens, E, generator=generator).argsort(1)[:, :K]
            of_group.append((x, indices, torch.rand(tokens, K, generator=generator), dy))
        found.append(of_group)
    return found


def joined(of_ranks: Sequence[Batch]) -> Batch:
    x, indices, p, dy = (torch.cat(parts) for parts in zip(*of_ranks, strict=True))
    return x, indices, p, dy


def own_part(model: nn.Module, name: str, whole: Tensor) -> Tensor:
    """What this rank has of a whole parameter or gradient: of one of all experts its own, of these or a weight rows."""
    for prefix, layer in model.named_modules():
        local = name.removeprefix(f"{prefix}.")
        if isinstance(layer, GroupedLinear) and local in ("weight", "bias"):
            whole = whole[layer.first_expert : layer.first_expert + layer.num_gemms]
        rows: Any = layer.__dict__.get("_etp")
        if rows is not None and local in (extents := rows.rows.extents()):
            whole = whole[..., extents[local][1], :]
    return whole


def gradients(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Y, dX and the gradients of parameters."""
    model.zero_grad()
    x = batch[0].clone().requires_grad_()
    y = model(x, *batch[1:3])
    y.backward(batch[3])
    assert x.grad is not None
    return y.detach(), x.grad, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
