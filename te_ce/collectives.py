"""The communication of the loss: one all-gather for the whole batch in forward, none in backward.

Gathering the statistics and merging them in rank order on every rank gives all ranks the same bits; a sum-reduction
would leave the order to the library. It is also one latency instead of the two of MAX followed by SUM.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from te_ce.groups import group_size

# Fault record of a rank: number of faulty rows, flat index of the first one, its target.
FAULT_FIELDS = 3


def gather_statistics(stats: Tensor, group: ProcessGroup | None) -> Tensor:
    """Statistics of all ranks, in rank order.

    Args:
        stats: [fields, N] of this rank, contiguous.

    Returns:
        [W, fields, N]. One all-gather; none for `group=None` or a group of one.
    """
    ranks = group_size(group)
    if ranks == 1:
        return stats[None]
    gathered = stats.new_empty((ranks, *stats.shape))
    dist.all_gather_into_tensor(gathered, stats, group=group)
    return gathered


def gather_faults(record: Tensor, group: ProcessGroup | None) -> list[list[int]]:
    """Fault records of all ranks, on the host.

    Args:
        record: [FAULT_FIELDS] int64 of this rank.

    Returns:
        one record per rank, in rank order. One all-gather and a host synchronisation.
    """
    ranks = group_size(group)
    if ranks > 1:
        gathered = torch.empty((ranks, FAULT_FIELDS), dtype=record.dtype, device=record.device)
        dist.all_gather_into_tensor(gathered, record, group=group)
        record = gathered
    return record.view(ranks, FAULT_FIELDS).tolist()
