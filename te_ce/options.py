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
from torch import Tensor

Smoothing = Literal["uniform", "others"]
Reduction = Literal["none", "sum", "mean"]

_SMOOTHINGS = ("uniform", "others")
_REDUCTIONS = ("none", "sum", "mean")

# Of the numbers that float32 holds to full precision.
_SMALLEST, _LARGEST = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossOptions:
    """Options of the loss on z = scale cap tanh(x / cap), x a logit; immutable, compared by value.

    Args:
        ignore_index: rows with this target have loss 0 and gradient 0 and do not count in the mean. Any integer,
            a valid class id included.
        label_smoothing: alpha in [0, 1).
        smoothing: which classes receive the smoothed mass. ``"uniform"``: alpha/V to every class (PyTorch,
            Transformer Engine). ``"others"``: alpha/(V-1) to every class but the target (Megatron, NeMo). V is the
            number of real classes of the whole vocabulary, never the width of a shard.
        z_loss_weight: w >= 0 of the term w lse^2 in every row's loss (Chowdhery et al. 2022, PaLM).
        softcap: cap > 0; every logit x becomes cap tanh(x / cap) first (Gemma 2). None: the logits as they are.
        scale: factor of every logit after the softcap, 1 / temperature: a finite number other than 0, or a float32
            tensor of the target's shape, one factor a row; no gradient flows to it.
        vocab_size: V; columns at or past it are padding: outside the softmax, gradient exactly 0. None: every
            column is a class.
        reduction: ``"none"`` (one float32 per target), ``"sum"``, or ``"mean"`` over the rows not ignored (0 where
            there are none).
        check_targets: exchange one fixed-size fault record first and raise on every rank: ``IndexError`` where a target
            is neither a class nor ``ignore_index``, ``ValueError`` where ranks disagree on shapes, dtypes, options or
            the vocabulary. Synchronises with the host. Off, such a row's loss and gradient are NaN.

    Raises:
        TypeError: a field has the wrong type.
        ValueError: a field is outside its range.
    """

    ignore_index: int = -100
    label_smoothing: float = 0.0
    smoothing: Smoothing = "uniform"
    z_loss_weight: float = 0.0
    softcap: float | None = None
    scale: float | Tensor = 1.0
    vocab_size: int | None = None
    reduction: Reduction = "none"
    check_targets: bool = False
    reproducible_tp: bool = False

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
        self._check_transforms()
        for name in ("check_targets", "reproducible_tp"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name}: expected a bool, got {type(getattr(self, name)).__name__}")

    def _check_transforms(self) -> None:
        _require_real("z_loss_weight", self.z_loss_weight)
        if not 0.0 <= self.z_loss_weight < math.inf:
            raise ValueError(f"z_loss_weight: expected a finite number >= 0, got {self.z_loss_weight}")
        if self.softcap is not None:
            _require_real("softcap", self.softcap)
            if not _SMALLEST <= self.softcap <= _LARGEST:
                raise ValueError(f"softcap: expected a finite number > 0 or None, got {self.softcap}")
        if isinstance(self.scale, Tensor):
            check_row_scale(self.scale)
            return
        _require_real("scale", self.scale)
        if not _SMALLEST <= abs(self.scale) <= _LARGEST:
            raise ValueError(f"scale: expected a finite number other than 0, got {self.scale}")

    def __eq__(self, other: object) -> bool:
        """By value; a scale per row by identity, since its values are not to be looked at."""
        if not isinstance(other, LossOptions):
            return NotImplemented
        for name in _FIELD_NAMES:
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine is not theirs and (isinstance(mine, Tensor) or isinstance(theirs, Tensor) or mine != theirs):
                return False
        return True

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


def resolve_options(options: LossOptions | None, fields: dict[str, Any]) -> tuple[LossOptions, Tensor | None]:
    """The options of one call, a ready object or its fields as keywords, and apart from them the scale of each row.

    What is kept from call to call depends on options that are numbers; it must not hold on to a tensor.

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
        row_scale = None
        if isinstance(fields.get("scale"), Tensor):
            fields = dict(fields)
            row_scale = fields.pop("scale")
            check_row_scale(row_scale)
        if torch.compiler.is_compiling():
            return LossOptions(**fields), row_scale
        try:
            return _kept(**fields), row_scale
        except TypeError:  # a field that can't be hashed; or a wrong one, which raises again
            return LossOptions(**fields), row_scale
    if not isinstance(options, LossOptions):
        raise TypeError(f"options: expected a LossOptions, got {type(options).__name__}")
    if fields:
        raise TypeError(
            f"options and {min(fields)!r} were both given: pass one of them, or dataclasses.replace(options, ...)"
        )
    if isinstance(options.scale, Tensor):
        return dataclasses.replace(options, scale=1.0), options.scale
    return options, None


@functools.lru_cache(maxsize=64, typed=True)
def _kept(**fields: Any) -> LossOptions:
    """The options with these fields; a training run asks for the same ones at every step."""
    return LossOptions(**fields)


def check_row_scale(scale: Tensor) -> None:
    """Refuse a scale per row that can't be one, whatever the targets are.

    Raises:
        TypeError: not float32.
        ValueError: it requires a gradient, which it would not get.
    """
    if scale.dtype != torch.float32:
        raise TypeError(
            f"scale: expected a number or a float32 tensor, got a tensor of {str(scale.dtype).removeprefix('torch.')}"
        )
    if scale.requires_grad:
        raise ValueError("scale: expected a tensor without requires_grad, as no gradient flows to it; detach() it")


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
