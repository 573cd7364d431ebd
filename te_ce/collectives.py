"""The communication of the losses. On logits: one all-gather for the whole batch in forward, none in backward.

Gathering the statistics and merging them in rank order on every rank gives all ranks the same bits; a sum-reduction
would leave the order to the library. It is also one latency instead of the two of MAX followed by SUM.

The linear loss sums the gradient of the hidden states over the group as well, and with sequence parallelism gathers
them first.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor
from torch.distributed import ProcessGroup, Work

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


def gather_sequence(hidden: Tensor, group: ProcessGroup | None) -> Tensor:
    """Hidden states of all ranks: [s / W, .., H] of each to [s, .., H]. One all-gather; none for a group of one."""
    ranks = group_size(group)
    return hidden if ranks == 1 else _all_gather(hidden.contiguous(), group, ranks)


class PendingSum(NamedTuple):
    """A sum over the ranks that is on its way; `source` stays as it is until then."""

    result: Tensor
    work: Work | None
    source: Tensor

    def wait(self) -> Tensor:
        """The sum; the current stream waits for it, the host does not (with gloo it does)."""
        if self.work is not None:
            self.work.wait()
        return self.result


def start_sum(partial: Tensor, group: ProcessGroup | None, scatter: bool) -> PendingSum:
    """Begin to sum `partial` [s, .., H] over the ranks: all of it on every rank, or with `scatter` [s / W, .., H].

    One all-reduce, or one reduce-scatter; none for a group of one. An all-reduce is in place.
    """
    ranks = group_size(group)
    if ranks == 1:
        return PendingSum(partial, None, partial)
    if not scatter:
        return PendingSum(partial, dist.all_reduce(partial, group=group, async_op=True), partial)
    result = partial.new_empty((partial.shape[0] // ranks, *partial.shape[1:]))
    return PendingSum(result, _reduce_scatter_concatenated(result, partial, group=group, async_op=True), partial)


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


# torch 2.13 renames them and warns about the old names.
_all_gather_concatenated = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_concatenated = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
