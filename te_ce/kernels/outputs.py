"""What a row gives besides its loss, from the statistics of all its columns."""

from __future__ import annotations

import triton
import triton.language as tl

from te_ce.kernels.argmax import NO_COLUMN
from te_ce.kernels.numerics import of_target

# Arguments of the kernels that make a loss of statistics.
OUTPUT_POINTERS = ["log_probs_ptr", "entropy_ptr", "lse_ptr", "z_loss_ptr", "predictions_ptr"]


@triton.jit
def store_outputs(
    pointers,  # of log_probs, entropy, lse, z_loss, predictions; None: not asked for
    rows,
    mask,
    m,  # max z
    from_max,  # z_y - m
    d,
    t,
    argmax,
    target,
    classes,  # V
    ignore_index,
    z_loss_weight,  # w; None: 0
):
    """Differences are taken relative to the max, as in the loss; the lse itself is rounded for its own sake only."""
    log_probs_ptr, entropy_ptr, lse_ptr, z_loss_ptr, predictions_ptr = pointers
    log_d = tl.log(d)
    if log_probs_ptr is not None:
        tl.store(log_probs_ptr + rows, of_target(from_max - log_d, target, classes, ignore_index), mask=mask)
    if entropy_ptr is not None:
        tl.store(entropy_ptr + rows, of_target(log_d - tl.div_rn(t, d), target, classes, ignore_index), mask=mask)
    # Also of a row that is -inf throughout, as its loss.
    lse = tl.where(d > 0.0, m + log_d, float("nan"))
    if lse_ptr is not None:
        tl.store(lse_ptr + rows, of_target(lse, target, classes, ignore_index), mask=mask)
    if z_loss_ptr is not None:
        weight = 0.0 if z_loss_weight is None else z_loss_weight
        tl.store(z_loss_ptr + rows, of_target(weight * lse * lse, target, classes, ignore_index), mask=mask)
    if predictions_ptr is not None:
        # NaN equals no max: of a row that has nothing else, the first column.
        argmax = tl.where(argmax == NO_COLUMN, 0, argmax)
        tl.store(predictions_ptr + rows, argmax.to(tl.int64), mask=mask)
