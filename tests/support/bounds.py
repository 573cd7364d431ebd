"""The promised precision, against the float64 reference on the same inputs.

loss, log_probs, entropy:  |error| <= 4e-7 max(1, |value|); of the z-loss in the loss as below
loss:     4e-7 |1 - a'| (lse - z_y) more with a' > 1, which smoothing to others has with alpha > 1 - 1/V
lse:      |error| <= 4e-7 max(1, |lse|) + 2^-24 log d, as m and log d may cancel
z_loss:   |error| <= w (4e-7 max(1, lse^2) + 2 |lse| 2^-24 log d)
gradient:         |error| <= half a unit in the last place of the stored dtype + 2e-38
                      + |scale| (1 - tanh^2) ((2e-6 + 3e-7 |z_i - m|) p_i (A + |g_H (z_i - lse)|)
                                              + 2e-6 (|C| + B [i = y])),
                  (and p_i counts as 0 below the smallest normal float32, which shows where A is huge)
                  A = |g| (1 + |2 w lse|) + |g_lse| + |g_lp| + |g_H H|,  B = |g| (1 - a') + |g_lp|,  C = g a'/V
z:                exact, but 4 * 2^-24 |scale cap| under a softcap. To first order, value and gradient may be wrong by
                  as much as this error makes them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from te_ce import LossOptions
from te_ce.outputs import OutputGrads
from tests.support.dense import Dense

# Stored bits of the significand, and exponent of the smallest subnormal.
_FORMATS = {
    torch.float32: (23, -149),
    torch.bfloat16: (7, -133),
    torch.float16: (10, -24),
    torch.float64: (52, -1074),
}
_ROUNDING = 2.0**-24
_SMALLEST = 2.0**-126
# The reference's own rounding of z, where p is so close to 1 that a gradient is made of 1 - p.
_OF_THE_TRUTH = 2.0**-50
_TANH = 4 * _ROUNDING


def unit_in_last_place(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Spacing of `dtype` at `value`, in float64."""
    bits, smallest = _FORMATS[dtype]
    _, exponent = torch.frexp(value.double().abs())
    spacing = torch.ldexp(torch.ones_like(value, dtype=torch.float64), exponent - 1 - bits)
    return spacing.clamp(min=2.0**smallest)


def check_loss(loss: Tensor, truth: Dense) -> None:
    """Loss without other options than smoothing: see `check_value`."""
    check_within("loss", loss, truth.loss, 4e-7 * truth.loss.abs().clamp(min=1.0))


def check_value(name: str, got: Tensor, truth: Dense, target: Tensor, options: LossOptions) -> None:
    """Every row of the loss or of an output within the bound; NaN and infinities exactly where the truth has them."""
    check_within(name, got, getattr(truth, name), value_bound(name, truth, target, options))


def value_bound(name: str, truth: Dense, target: Tensor, options: LossOptions) -> Tensor:
    """Allowed error [N] of the loss or of an output; ignored rows are exact."""
    bound = _value_bound(name, truth, target, options)
    return torch.where(target.cpu().reshape(-1) == options.ignore_index, 0.0, bound).nan_to_num(0.0)


def _value_bound(name: str, truth: Dense, target: Tensor, options: LossOptions) -> Tensor:
    row = _Row(truth, target, options)
    value, magnitude = getattr(truth, name), truth.lse.abs().clamp(min=1.0)
    moved = _ROUNDING * (truth.lse - truth.z.amax(-1)).abs() + row.mean(row.error)
    of_lse = 4e-7 * magnitude + moved
    of_z_loss = options.z_loss_weight * (4e-7 * magnitude**2 + 2 * truth.lse.abs() * moved)
    if name == "lse":
        return of_lse
    if name == "z_loss":
        return of_z_loss
    if name == "entropy":
        return 4e-7 * value.abs().clamp(min=1.0) + row.error_of_entropy
    # The target's own weight in lse cancels that of z_y.
    slope = row.p - row.on_target
    if name == "log_probs":
        return 4e-7 * value.abs().clamp(min=1.0) + (slope.abs() * row.error).sum(-1)
    slope = row.p - row.weight / row.classes - (1 - row.weight) * row.on_target
    # Where the target is to be less likely than any other class, its term is subtracted, and what is left is small.
    cancelled = 4e-7 * max(0.0, row.weight - 1) * truth.log_probs.abs()
    bound = 4e-7 * (value - truth.z_loss).abs().clamp(min=1.0) + cancelled
    return bound + (slope.abs() * row.error).sum(-1) + of_z_loss


def check_predictions(got: Tensor, truth: Dense, options: LossOptions) -> None:
    """The id of the largest z, or of one as large within a softcap's error; rows with NaN are left out."""
    got = got.cpu().reshape(-1)
    assert got.dtype == torch.int64
    comparable = ~truth.z.isnan().any(-1)
    assert ((got >= 0) & (got < truth.z.shape[1]))[comparable].all(), "predictions: not the id of a class"
    chosen = truth.z.gather(1, got.clamp(0, truth.z.shape[1] - 1)[:, None])[:, 0]
    largest = truth.z.amax(-1)
    allowed = 2 * error_of_z(truth, options).amax(-1)
    wrong = comparable & ~((chosen == largest) | (chosen >= largest - allowed))
    assert not wrong.any(), f"predictions: {int(wrong.sum())} of {wrong.numel()} are not the largest"


def check_gradient(
    grad: Tensor,
    truth: Dense,
    logits: Tensor,
    target: Tensor,
    options: LossOptions,
    upstream: Tensor | OutputGrads,
    ulps: float,
) -> None:
    """Every element within the bound, `ulps` units in the last place allowed for the one rounding (half, if exact).

    Args:
        grad, logits: [.., columns], the whole vocabulary; target, upstream: [..].
    """
    columns, classes = logits.shape[-1], truth.z.shape[1]
    grad = grad.detach().cpu().double().reshape(-1, columns)
    if isinstance(upstream, Tensor):
        upstream = OutputGrads(upstream)
    bound = torch.zeros_like(grad)
    bound[:, :classes] = gradient_bound(truth, target, options, upstream)
    bound += ulps * unit_in_last_place(truth.grad.nan_to_num(), logits.dtype)
    check_within("gradient", grad, truth.grad, bound)
    padding = grad[:, classes:]
    assert (padding == 0).all(), "gradient: padding columns are not exactly 0"


def gradient_bound(truth: Dense, target: Tensor, options: LossOptions, upstream: OutputGrads) -> Tensor:
    """Allowed error [N, classes] of the gradient before it is rounded to the dtype of the logits."""
    row = _Row(truth, target, options)
    g, g_lp, g_h, g_lse = (_column(grad, truth) for grad in upstream)
    lse, entropy = truth.lse[:, None], truth.entropy[:, None]
    w = options.z_loss_weight
    a = g.abs() * (1 + (2 * w * lse).abs()) + g_lse.abs() + g_lp.abs() + (g_h * entropy).abs()
    b = (g * (1 - row.weight)).abs() + g_lp.abs()
    c = g.abs() * row.weight / row.classes
    e = (g_h * row.log_p).abs()
    from_max = torch.where(row.p == 0, 0.0, (truth.z - truth.z.amax(-1, keepdim=True)).abs())
    computed = ((2e-6 + 3e-7 * from_max) * row.p + _SMALLEST) * (a + e) + 2e-6 * (c + b * row.on_target)
    size = 1 + torch.where(truth.z.isfinite(), truth.z, 0.0).abs().amax(-1, keepdim=True)
    computed = computed + _OF_THE_TRUTH * size * (a + b + c + e + g_h.abs())

    mean = row.mean(row.error)[:, None]
    of_log_p = row.error + mean
    moved = of_log_p * (a + e) + (2 * w * g).abs() * mean + g_h.abs() * (row.error_of_entropy[:, None] + of_log_p)
    bound = (computed + row.p * moved) * (1 - truth.tanh**2)
    if options.softcap is not None:
        bound = bound + 2 * _TANH * truth.tanh.abs() * (row.p * (a + e) + b * row.on_target + c)
    return (truth.scale.abs() * bound).nan_to_num(0.0, 0.0, 0.0) + 2e-38


def error_of_z(truth: Dense, options: LossOptions) -> Tensor:
    """How wrong z [N, classes] may be in float32."""
    if options.softcap is None:
        return torch.zeros_like(truth.z)
    return torch.where(truth.z.isfinite(), _TANH * (truth.scale * options.softcap).abs(), 0.0)


class _Row:
    """What several bounds need of every row."""

    def __init__(self, truth: Dense, target: Tensor, options: LossOptions) -> None:
        self.classes = truth.z.shape[1]
        self.weight = options.smoothing_weight(self.classes)
        self.p = truth.p[:, : self.classes]
        self.log_p = torch.where(truth.z.isfinite(), truth.z.log_softmax(-1), 0.0)
        y = target.cpu().reshape(-1).long().clamp(0, self.classes - 1)
        self.on_target = torch.zeros_like(self.p).scatter_(1, y[:, None], 1.0)
        self.error = error_of_z(truth, options)
        entropy = -self.mean(self.log_p)
        self.error_of_entropy = self.mean((self.log_p + entropy[:, None]).abs() * self.error)

    def mean(self, value: Tensor) -> Tensor:
        """[N], under the softmax."""
        return (self.p * value).sum(-1)


def _column(grad: Tensor | None, truth: Dense) -> Tensor:
    if grad is None:
        return torch.zeros_like(truth.scale)
    return grad.detach().cpu().double().reshape(-1, 1)


def check_within(name: str, got: Tensor, truth: Tensor, bound: Tensor) -> None:
    """Every element within its bound; NaN and infinities exactly where the truth has them."""
    assert got.numel() == truth.numel(), f"{name}: {got.numel()} elements, expected {truth.numel()}"
    got = got.detach().cpu().double().reshape(truth.shape)
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
