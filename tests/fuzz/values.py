"""The tensors of one example, from a seed and the names of their kinds: the same on every device and at every call."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor

from te_ce import LossOptions
from te_ce.outputs import OutputGrads

KINDS = (
    "normal",
    "huge spread",
    "extreme",
    "offset",
    "constant",
    "ties",
    "masked",
    "nothing left",
    "denormal",
    "NaN",
    "infinity",
    "confident",
)
"""Of logits: what their values are like."""

UPSTREAMS = ("normal", "ones", "zero", "some zero", "huge", "tiny")
"""Of gradients that come back."""

TARGETS = ("classes", "some ignored", "all ignored", "some bad", "last column")
"""Of targets."""


@dataclasses.dataclass(frozen=True)
class Values:
    """Kinds of values, and the seed that they are made of."""

    seed: int = 0
    logits: str = "normal"
    target: str = "some ignored"
    upstream: str = "normal"
    has_row_scale: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Example:
    """What an example of every property has.

    Attributes:
        rows: leading dimensions.
        outputs: asked for besides the loss.
        without_gradient: those among them, or the loss, that no gradient comes back for.
    """

    rows: tuple[int, ...]
    dtype: torch.dtype
    values: Values
    options: LossOptions
    outputs: tuple[str, ...]
    without_gradient: frozenset[str]


class Batch(NamedTuple):
    """Logits [.., columns], target [..], options with the scale of each row, if any, and upstream gradients [..]."""

    logits: Tensor
    target: Tensor
    options: LossOptions
    grads: OutputGrads


def batch(
    values: Values, rows: tuple[int, ...], columns: int, dtype: torch.dtype, options: LossOptions, device: torch.device
) -> Batch:
    """The tensors; float64 logits have float64 upstream gradients."""
    random = torch.Generator().manual_seed(values.seed)
    classes = columns if options.vocab_size is None else options.vocab_size
    target = make_target(values.target, rows, classes, options.ignore_index, random)
    logits = make_logits(values.logits, rows, columns, dtype, target, random)
    if values.has_row_scale:
        scale = torch.rand(rows, generator=random) * 2 + 0.25
        scale.view(-1)[::3] *= -1
        options = dataclasses.replace(options, scale=scale.to(device))
    of_values = torch.float64 if dtype == torch.float64 else torch.float32
    grads = (make_upstream(values.upstream, rows, random).to(device, of_values) for _ in OutputGrads._fields)
    return Batch(logits.to(device), target.to(device), options, OutputGrads(*grads))


def make_logits(
    kind: str, rows: tuple[int, ...], columns: int, dtype: torch.dtype, target: Tensor, random: torch.Generator
) -> Tensor:
    """[.., columns] of `dtype`."""
    x = torch.randn(*rows, columns, generator=random, dtype=torch.float64) * 3
    largest = 1e4 if dtype == torch.float16 else 1e6

    def some(share: float, *size: int) -> Tensor:
        return torch.rand(size, generator=random) < share

    if kind == "huge spread":
        x *= 1e3
    elif kind == "extreme":
        x = torch.where(some(0.5, *x.shape), x, x.sign() * (6e4 if dtype == torch.float16 else 1e30))
    elif kind == "offset":
        x += (torch.randint(0, 2, (*rows, 1), generator=random) * 2 - 1) * largest
    elif kind == "constant":
        x = torch.randn(*rows, 1, generator=random, dtype=torch.float64).expand_as(x) * largest
    elif kind == "ties":
        x = (x / 3).round()
    elif kind in ("masked", "nothing left"):
        begin = torch.randint(0, columns, (*rows, 1), generator=random)
        column = torch.arange(columns)
        x[(column >= begin) & (column < begin + max(1, columns // 2))] = -torch.inf
        if kind == "nothing left":
            x[some(0.5, *rows)] = -torch.inf
    elif kind == "denormal":
        x *= 1e-40
    elif kind in ("NaN", "infinity"):
        x[some(0.3, *rows, 1) & some(0.3, *x.shape)] = torch.nan if kind == "NaN" else torch.inf
    elif kind == "confident":
        nines = torch.randint(1, 7, (*rows, 1), generator=random).double()
        place = target.long().clamp(0, columns - 1).unsqueeze(-1)
        rest = x.scatter(-1, place, -torch.inf).logsumexp(-1, keepdim=True).nan_to_num(neginf=0.0)
        x.scatter_(-1, place, rest + nines * 2.302585)
    return x.to(dtype)


def make_target(kind: str, rows: tuple[int, ...], classes: int, ignore_index: int, random: torch.Generator) -> Tensor:
    """[..] int64."""
    target = torch.randint(classes, rows, generator=random)
    if kind == "last column":
        target.fill_(classes - 1)
    elif kind == "some bad":
        outside = torch.tensor([-1, classes, classes + 1, -(2**31), 2**31 - 1, -2, 10 * classes])
        bad = outside[torch.randint(len(outside), rows, generator=random)]
        target = torch.where(torch.rand(rows, generator=random) < 0.3, bad, target)
    share = {"some ignored": 0.3, "all ignored": 2.0, "some bad": 0.1}.get(kind, 0.0)
    target[torch.rand(rows, generator=random) < share] = ignore_index
    return target


def make_upstream(kind: str, rows: tuple[int, ...], random: torch.Generator) -> Tensor:
    """[..] float32."""
    g = torch.randn(rows, generator=random)
    if kind == "ones":
        return torch.ones_like(g)
    if kind == "zero":
        return torch.zeros_like(g)
    if kind == "some zero":
        return torch.where(torch.rand(rows, generator=random) < 0.5, 0.0, g)
    return g * {"huge": 1e30, "tiny": 1e-30}.get(kind, 1.0)
