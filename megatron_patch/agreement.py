"""Do all ranks take the same path? The fused loss and the one on logits have different collectives.

A hook on the output layer of the first rank only, say to log, would make that rank alone compute its loss on logits:
the sums over the ranks that follow would then mix two different things, or wait for ever. So the ranks of a group tell
each other once, at the first loss that asks for te_ce_linear.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_patch.application import Application


def agree_on_path(fused: bool, logits: Tensor, group: object, application: Application) -> None:
    """Compare what the ranks are about to do, until those of the group agree; at most the device's synchronisation.

    Args:
        fused: whether this rank fuses its loss with the output layer.
        logits: gives the device.
        group: the tensor-parallel group; anything but a process group of more than one rank is left alone.
        application: remembers which groups have agreed.

    Raises:
        RuntimeError: on every rank, if they differ; names the ranks that fuse, and those that do not.

    Collectives: one all-gather of a number, until they agree.
    """
    if not isinstance(group, ProcessGroup) or group.size() == 1 or group in application.agreed:
        return
    if logits.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    mine = torch.tensor([int(fused)], device=logits.device)
    everybody = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(everybody, mine, group=group)
    paths = [int(each) for each in everybody]
    if len(set(paths)) > 1:
        fusing, others = ([rank for rank, path in enumerate(paths) if path == value] for value in (1, 0))
        raise RuntimeError(
            f"te_ce_linear: ranks {fusing} of the tensor-parallel group fuse the loss with the output layer, ranks "
            f"{others} compute it on logits; do the same on all of them, as with hooks on the output layer"
        )
    application.agreed.add(group)
