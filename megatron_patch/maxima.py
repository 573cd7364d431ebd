"""The largest of each row of deferred logits, without the logits: for metrics of what the model would have said.

Megatron's own, from 0.19 on, is the acceptance rate of multi-token prediction, in every training step and after the
loss: made for that, the logits would take the memory that the fused loss has saved.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from megatron_patch.deferred import Origin

ELEMENTS = 2**25
"""Logits held at a time, at most, on one rank."""


@torch.no_grad()
def row_maxima(origin: Origin) -> tuple[Tensor, Tensor]:
    """Value and index, among this rank's columns, of the largest logit of each row; no gradients.

    Args:
        origin: of logits [s, b, V / TP], from hidden states [s, b, H], or [s / TP, b, H] of this rank, which the layer
            gathers.

    Returns:
        [s, b] in the logits' dtype and int64.

    Collectives: the layer's own, once for each part of the hidden states; the parts are the same on all ranks.
    """
    origin.check_unchanged()
    hidden = origin.hidden.detach()
    ranks = origin.shape[0] // max(hidden.shape[0], 1)
    rows = max(1, ELEMENTS * hidden.shape[0] // max(torch.Size(origin.shape).numel(), 1))
    found = [origin.logits_of(part).max(dim=-1) for part in hidden.split(rows)]
    # A part holds as many rows of every rank, rank by rank.
    values, indices = (
        torch.cat([each.unflatten(0, (ranks, -1)) for each in kind], dim=1).flatten(0, 1)
        for kind in zip(*found, strict=True)
    )
    return values, indices
