"""Rank and size of a vocab-parallel group, where None is a group of one."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed import ProcessGroup


def check_group(group: object) -> None:
    """Refuse what is not a group of this process.

    Raises:
        TypeError: `group` is neither a ProcessGroup nor None.
        ValueError: this process is not one of its ranks.
    """
    if group is None:
        return
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("group: expected a group that this rank is in, got one that it is not a member of")
    if not isinstance(group, ProcessGroup):
        raise TypeError(f"group: expected a torch.distributed.ProcessGroup or None, got {type(group).__name__}")
    if dist.get_rank(group) < 0:
        raise ValueError("group: expected a group that this rank is in, got one that it is not a member of")


def group_size(group: ProcessGroup | None) -> int:
    """Number of ranks; 1 for None."""
    return 1 if group is None else group.size()


def group_rank(group: ProcessGroup | None) -> int:
    """Rank of this process within the group; 0 for None."""
    return 0 if group is None else group.rank()
