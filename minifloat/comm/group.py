"""The ranks that a collective runs over, as a value: its name in PyTorch, how many they are and which one this is."""

from __future__ import annotations

from typing import NamedTuple

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


class Group(NamedTuple):
    """A process group by name, so that it can be hashed, pickled and traced. One of a single rank never communicates.

    Args:
        name: what PyTorch's functional collectives know the group by; unread where ``size`` is 1.
        size: number of ranks.
        rank: this process's rank within the group.
    """

    name: str = ""
    size: int = 1
    rank: int = 0

    @staticmethod
    def of(group: Group | dist.ProcessGroup | DeviceMesh | None) -> Group:
        """The group of a process group or of a one-dimensional mesh; of None that of this process alone.

        Raises:
            ValueError: the mesh has several dims, or this process is not among the ranks.
        """
        if group is None:
            return Group()
        if isinstance(group, Group):
            return group
        if isinstance(group, DeviceMesh):
            if group.ndim != 1:
                raise ValueError(
                    f"a group is one dim of a device mesh, got {group.ndim} ({group.mesh_dim_names}); "
                    "pass one of them, as in mesh['tp']"
                )
            group = group.get_group()
        rank = dist.get_rank(group)
        if rank < 0:
            members = dist.get_process_group_ranks(group)
            raise ValueError(f"rank {dist.get_rank()} is not in the group, whose ranks are {members}")
        return Group(group.group_name, dist.get_world_size(group), rank)

    @property
    def process_group(self) -> dist.ProcessGroup:
        """PyTorch's object of this name."""
        return group_of_name(self.name)


def group_of_name(name: str) -> dist.ProcessGroup:
    """The process group that has this name on every rank."""
    group: dist.ProcessGroup = dist.distributed_c10d._resolve_process_group(name)  # type: ignore[attr-defined, arg-type]
    return group
