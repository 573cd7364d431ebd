"""What may be passed as a vocab-parallel group, and its rank and size, where None is a group of one."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

Group = ProcessGroup | DeviceMesh | None

_NO_MEMBER = "group: expected a group that this rank is in, got one that it is not a member of"


def resolve_group(group: object) -> ProcessGroup | None:
    """The process group that `group` stands for: itself, or that of a DeviceMesh of one dimension.

    Raises:
        TypeError: `group` is none of ProcessGroup, DeviceMesh and None.
        ValueError: this process is not one of its ranks, the group was destroyed, or the mesh has more dimensions than
            one.
    """
    if group is None:
        return None
    if not isinstance(group, ProcessGroup):
        group = _group_of_mesh(group)
    try:
        rank = dist.get_rank(group)
    except ValueError as error:
        raise ValueError(f"group: expected a process group in use, got one that was destroyed ({error})") from error
    if rank < 0:
        raise ValueError(_NO_MEMBER)
    return group


def _group_of_mesh(mesh: object) -> ProcessGroup:
    if mesh is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(_NO_MEMBER)
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"group: expected a torch.distributed.ProcessGroup, a 1-D DeviceMesh or None, got {type(mesh).__name__}"
        )
    if mesh.ndim != 1:
        raise ValueError(
            f"group: expected a 1-D DeviceMesh, got one with dimensions {mesh.mesh_dim_names} of sizes "
            f'{tuple(mesh.shape)}; pass the vocab-parallel one, as in mesh["tp"]'
        )
    if mesh.get_coordinate() is None:
        raise ValueError(_NO_MEMBER)
    return mesh.get_group()


def group_size(group: ProcessGroup | None) -> int:
    """Number of ranks; 1 for None."""
    return 1 if group is None else group.size()


def group_rank(group: ProcessGroup | None) -> int:
    """Rank of this process within the group; 0 for None."""
    return 0 if group is None else group.rank()
