"""The communication of the loss: one all-gather for the whole batch in forward, none in backward.

Gathering the statistics and merging them in rank order on every rank gives all ranks the same bits; a sum-reduction
would leave the order to the library. It is also one latency instead of the two of MAX followed by SUM.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from te_ce.groups import group_size

# Fault record of a rank: number of faulty rows, flat index of the first one, its target.
FAULT_FIELDS = 3


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


def gather_faults(record: Tensor, group: ProcessGroup | None) -> list[list[int]]:
    """Fault records of all ranks, on the host.

    Args:
        record: [FAULT_FIELDS] int64 of this rank.

    Returns:
        one record per rank, in rank order. One all-gather and a host synchronisation.
    """
    ranks = group_size(group)
    gathered = _all_gather(record, group, ranks) if ranks > 1 else record
    records: list[list[int]] = gathered.view(ranks, FAULT_FIELDS).tolist()
    return records


def _all_gather(tensor: Tensor, group: ProcessGroup | None, ranks: int) -> Tensor:
    """All ranks' `tensor`, concatenated along the first dimension, in one collective."""
    gathered = tensor.new_empty((ranks * tensor.shape[0], *tensor.shape[1:]))
    _all_gather_concatenated(gathered, tensor, group=group)
    return gathered


# torch 2.13 renames it and warns about the old name.
_all_gather_concatenated = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
