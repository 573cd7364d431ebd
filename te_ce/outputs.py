"""What a call gives besides the loss: the names, their object, and the gradients that come back for them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor

# The order in which layers below hand them on.
OUTPUTS = ("log_probs", "entropy", "lse", "z_loss", "predictions")


class LossOutput(NamedTuple):
    """The loss and, where asked for, what else is known of every row; None what was not asked for.

    All but the loss have the target's shape whatever the reduction. Of z = scale cap tanh(x / cap) and y the target:

    Attributes:
        loss: float32, [..] or a scalar, as `reduction` says.
        log_probs: float32 [..], z_y - lse; differentiable, and 0 in ignored rows, as the two that follow.
        entropy: float32 [..], -sum p_i log p_i in nats.
        lse: float32 [..], log sum exp(z_i).
        z_loss: float32 [..], the term w lse^2 of the loss, for logging: not differentiable. 0 in ignored rows.
        predictions: int64 [..], global id of the largest z, the smaller one of equals; in ignored rows too.
    """

    loss: Tensor
    log_probs: Tensor | None = None
    entropy: Tensor | None = None
    lse: Tensor | None = None
    z_loss: Tensor | None = None
    predictions: Tensor | None = None


class OutputGrads(NamedTuple):
    """Gradients [..] of the differentiable outputs, any strides; None: nobody uses that output."""

    loss: Tensor | None
    log_probs: Tensor | None = None
    entropy: Tensor | None = None
    lse: Tensor | None = None


def resolve_outputs(outputs: object) -> tuple[str, ...]:
    """The names asked for, each once, in the order of `OUTPUTS`.

    Raises:
        TypeError: not a collection of names.
        ValueError: a name that is no output.
    """
    expected = f"outputs: expected a collection of names among {', '.join(OUTPUTS)}"
    if isinstance(outputs, str) or not isinstance(outputs, Iterable):
        hint = f'; write outputs=("{outputs}",)' if isinstance(outputs, str) else ""
        raise TypeError(f"{expected}, got {outputs!r}{hint}")
    names = list(outputs)
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"{expected}, got {name!r} among them")
        if name not in OUTPUTS:
            raise ValueError(f"{expected}, got {name!r} among them")
    return tuple(name for name in OUTPUTS if name in names)
