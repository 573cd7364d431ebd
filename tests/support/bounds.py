"""The promised precision, against the float64 reference on the same inputs.

loss:      |error| <= 4e-7 max(1, |L|)
gradient:  |error| <= half a unit in the last place of the stored dtype
                      + (2e-6 + 3e-7 |z_i - m|) p_i |g| + 2e-6 (|C| + |B| [i = y]) + 2e-38,  B = g (1 - a'), C = g a'/V
"""

from __future__ import annotations

import torch
from torch import Tensor

from te_ce import LossOptions
from tests.support.dense import Dense

# Stored bits of the significand, and exponent of the smallest subnormal.
_FORMATS = {
    torch.float32: (23, -149),
    torch.bfloat16: (7, -133),
    torch.float16: (10, -24),
    torch.float64: (52, -1074),
}


def unit_in_last_place(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Spacing of `dtype` at `value`, in float64."""
    bits, smallest = _FORMATS[dtype]
    _, exponent = torch.frexp(value.double().abs())
    spacing = torch.ldexp(torch.ones_like(value, dtype=torch.float64), exponent - 1 - bits)
    return spacing.clamp(min=2.0**smallest)


def check_loss(loss: Tensor, truth: Dense) -> None:
    """Every row within the bound; NaN and infinities exactly where the truth has them."""
    loss = loss.detach().cpu().double().reshape(-1)
    bound = 4e-7 * truth.loss.abs().clamp(min=1.0)
    _check_within("loss", loss, truth.loss, bound)


def check_gradient(
    grad: Tensor, truth: Dense, logits: Tensor, target: Tensor, options: LossOptions, g: Tensor, ulps: float
) -> None:
    """Every element within the bound, `ulps` units in the last place allowed for the one rounding (half, if exact).

    Args:
        grad, logits: [.., columns], the whole vocabulary; target, g: [..].
    """
    columns = logits.shape[-1]
    classes = columns if options.vocab_size is None else options.vocab_size
    dtype = logits.dtype
    grad = grad.detach().cpu().double().reshape(-1, columns)
    z = logits.detach().cpu().double().reshape(-1, columns)
    g, y = g.detach().cpu().double().reshape(-1, 1).abs(), target.cpu().reshape(-1).long()
    weight = options.smoothing_weight(classes)
    from_max = (z - z[:, :classes].amax(-1, keepdim=True)).abs()
    bound = (2e-6 + 3e-7 * from_max) * truth.p * g + 2e-6 * g * weight / classes
    on_target = torch.zeros_like(bound).scatter_(1, y.clamp(0, columns - 1)[:, None], 1.0)
    bound += 2e-6 * g * (1 - weight) * on_target
    bound = bound.nan_to_num(0.0, 0.0) + 2e-38 + ulps * unit_in_last_place(truth.grad.nan_to_num(), dtype)
    _check_within("gradient", grad, truth.grad, bound)
    padding = grad[:, classes:]
    assert (padding == 0).all(), "gradient: padding columns are not exactly 0"


def _check_within(name: str, got: Tensor, truth: Tensor, bound: Tensor) -> None:
    assert got.shape == truth.shape, f"{name}: shape {tuple(got.shape)}, expected {tuple(truth.shape)}"
    finite = truth.isfinite()
    assert torch.equal(got[~finite].nan_to_num(1.5, 2.5, 3.5), truth[~finite].nan_to_num(1.5, 2.5, 3.5)), (
        f"{name}: NaN or infinity where the reference has another"
    )
    error = (got - truth).abs()[finite]
    excess = error - bound.expand_as(truth)[finite]
    worst = int(excess.argmax()) if excess.numel() else 0
    if not (excess <= 0).all():
        raise AssertionError(
            f"{name}: {int((excess > 0).sum())} of {excess.numel()} outside the bound; "
            f"worst: got {got[finite][worst]:.9g}, expected {truth[finite][worst]:.9g}, "
            f"error {error[worst]:.3g}, bound {bound.expand_as(truth)[finite][worst]:.3g}"
        )
