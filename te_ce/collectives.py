"""The communication of the loss: one all-gather for the whole batch in forward, none in backward.

Gathering the statistics and merging them in rank order on every rank gives all ranks the same bits; a sum-reduction
would leave the order to the library. It is also one latency instead of the two of MAX followed by SUM.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor
from torch.distributed import ProcessGroup

from te_ce.groups import group_size


def gather_statistics(stats: Tensor, group: ProcessGroup | None) -> Tensor:
    """Statistics of all ranks, in rank order.

    Args:
        stats: [parts, fields, N] of this rank, contiguous; as many parts on every rank.

    Returns:
        [W * parts, fields, N]. One all-gather; none for `group=None` or a group of one.
    """
    ranks = group_size(group)
    if ranks == 1:
        return stats
    return _all_gather(stats, group, ranks)


def gather_records(record: bytes, group: ProcessGroup, device: torch.device | None) -> list[bytes]:
    """Records of all ranks, on the host.

    Args:
        record: of this rank, as long as that of every other.
        device: of this rank's tensors, where it is known.

    Returns:
        one record per rank, in rank order. One all-gather and a host synchronisation.
    """
    # By the group alone: two ranks whose tensors lie on different kinds of devices must still meet.
    kind = c10d._get_object_coll_device(group)
    if device is None or device.type != kind:
        device = torch.device(kind)
    sent = torch.tensor(list(record), dtype=torch.uint8, device=device)
    received = bytes(_all_gather(sent, group, group_size(group)).tolist())
    return [received[start : start + len(record)] for start in range(0, len(received), len(record))]


def _all_gather(tensor: Tensor, group: ProcessGroup | None, ranks: int) -> Tensor:
    """All ranks' `tensor`, concatenated along the first dimension, in one collective."""
    gathered = tensor.new_empty((ranks * tensor.shape[0], *tensor.shape[1:]))
    _all_gather_concatenated(gathered, tensor, group=group)
    return gathered


# torch 2.13 renames it and warns about the old name.
_all_gather_concatenated = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
