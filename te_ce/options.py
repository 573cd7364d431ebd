"""Everything that changes the value of the loss, as one frozen object that is passed on whole.

An option that is retyped at every level is an option that gets lost at one of them. Here it is checked once,
where it is made, and every layer below receives this same object.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, Literal

import torch

Smoothing = Literal["uniform", "others"]
Reduction = Literal["none", "sum", "mean"]

_SMOOTHINGS = ("uniform", "others")
_REDUCTIONS = ("none", "sum", "mean")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossOptions:
    """Options of the loss; immutable, compared by value.

    Args:
        ignore_index: rows with this target have loss 0 and gradient 0 and do not count in the mean. Any integer,
            a valid class id included.
        label_smoothing: alpha in [0, 1).
        smoothing: which classes receive the smoothed mass. ``"uniform"``: alpha/V to every class (PyTorch,
            Transformer Engine). ``"others"``: alpha/(V-1) to every class but the target (Megatron, NeMo). V is the
            number of real classes of the whole vocabulary, never the width of a shard.
        vocab_size: V; columns at or past it are padding: outside the softmax, gradient exactly 0. None: every
            column is a class.
        reduction: ``"none"`` (one float32 per target), ``"sum"``, or ``"mean"`` over the rows not ignored (0 where
            there are none).
        check_targets: exchange a fault record first and raise ``IndexError`` on every rank when a target is neither
            a class nor ``ignore_index``. Synchronises with the host. Off, such a row's loss and gradient are NaN.

    Raises:
        TypeError: a field has the wrong type.
        ValueError: a field is outside its range.
    """

    ignore_index: int = -100
    label_smoothing: float = 0.0
    smoothing: Smoothing = "uniform"
    vocab_size: int | None = None
    reduction: Reduction = "none"
    check_targets: bool = False

    def __post_init__(self) -> None:
        _require_int("ignore_index", self.ignore_index)
        _require_real("label_smoothing", self.label_smoothing)
        if not 0.0 <= self.label_smoothing < 1.0:
            raise ValueError(f"label_smoothing: expected a number in [0, 1), got {self.label_smoothing}")
        _require_one_of("smoothing", self.smoothing, _SMOOTHINGS)
        _require_one_of("reduction", self.reduction, _REDUCTIONS)
        if self.vocab_size is not None:
            _require_int("vocab_size", self.vocab_size)
            if self.vocab_size < 1:
                raise ValueError(f"vocab_size: expected at least 1 class, got {self.vocab_size}")
        if not isinstance(self.check_targets, bool):
            raise TypeError(f"check_targets: expected a bool, got {type(self.check_targets).__name__}")

    def smoothing_weight(self, classes: int) -> float:
        """Weight a' of the mean term in L = (1 - a') (lse - z_y) + a' (lse - mean z), for `classes` = V.

        ``"uniform"``: alpha. ``"others"``: alpha V / (V - 1), the same distribution written over all V classes.

        Raises:
            ValueError: ``"others"`` with V = 1 and alpha > 0: there is no other class.
        """
        alpha = float(self.label_smoothing)
        if alpha == 0.0 or self.smoothing == "uniform":
            return alpha
        if classes == 1:
            raise ValueError('smoothing: "others" needs at least 2 classes, the vocabulary has 1; use "uniform"')
        return alpha * classes / (classes - 1)


def resolve_options(options: LossOptions | None, fields: dict[str, Any]) -> LossOptions:
    """The options of one call: either a ready object or its fields as keywords.

    Raises:
        TypeError: both were given, a keyword is not a field of `LossOptions`, or `options` is something else.
    """
    if options is None:
        # Not a difference of sets, which torch.compile of torch 2.11 cannot trace.
        unknown = [name for name in fields if name not in _FIELD_NAMES]
        if unknown:
            raise TypeError(
                f"unexpected keyword {min(unknown)!r}: expected a field of LossOptions ({', '.join(_FIELD_NAMES)})"
            )
        if torch.compiler.is_compiling():
            return LossOptions(**fields)
        try:
            return _kept(**fields)
        except TypeError:  # a field that can't be hashed; or a wrong one, which raises again
            return LossOptions(**fields)
    if not isinstance(options, LossOptions):
        raise TypeError(f"options: expected a LossOptions, got {type(options).__name__}")
    if fields:
        raise TypeError(
            f"options and {min(fields)!r} were both given: pass one of them, or dataclasses.replace(options, ...)"
        )
    return options


@functools.lru_cache(maxsize=64, typed=True)
def _kept(**fields: Any) -> LossOptions:
    """The options with these fields; a training run asks for the same ones at every step."""
    return LossOptions(**fields)


_FIELD_NAMES = tuple(field.name for field in dataclasses.fields(LossOptions))


def _require_int(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: expected an int, got {type(value).__name__}")
    if not -(2**63) <= value < 2**63:
        raise ValueError(f"{name}: expected a 64-bit integer, got {value}")


def _require_real(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}: expected a number, got {type(value).__name__}")
    if math.isnan(value):
        raise ValueError(f"{name}: expected a number, got nan")


def _require_one_of(name: str, value: object, choices: tuple[str, ...]) -> None:
    if not isinstance(value, str):
        raise TypeError(f"{name}: expected one of {', '.join(choices)}, got {type(value).__name__}")
    if value not in choices:
        raise ValueError(f"{name}: expected one of {', '.join(choices)}, got {value!r}")
