"""What the scenarios share: the group of a rank, tensors of a loss and their dense answer, how to look at a call."""

from __future__ import annotations

import dataclasses
import datetime
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tests.faults.launch import TIMEOUT_S

COLUMNS = 8  # of a rank
FEATURES = 4


@dataclasses.dataclass(frozen=True)
class Rank:
    """This process among `ranks`, which have `folder` in common."""

    rank: int
    ranks: int
    folder: Path

    @property
    def is_odd(self) -> bool:
        """Whether this is the one that something happens to: the last."""
        return self.rank == self.ranks - 1

    def init(self, name: str = "store") -> None:
        """The default process group, over gloo and a store that outlives every rank."""
        store = dist.FileStore(str(self.folder / name), self.ranks)
        timeout = datetime.timedelta(seconds=TIMEOUT_S)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.ranks, timeout=timeout)

    def meet(self, name: str, within_s: float = 30.0) -> None:
        """Wait for all ranks, by files: works whatever has become of the groups."""
        (self.folder / f"{name}{self.rank}").touch()
        deadline = time.monotonic() + within_s
        while not all((self.folder / f"{name}{rank}").exists() for rank in range(self.ranks)):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{name}: not all ranks came")
            time.sleep(0.02)


def observe(call: Callable[[], object]) -> dict[str, Any]:
    """Type and text of what `call` raises, None where it does not, and after how long."""
    start, error = time.monotonic(), None
    try:
        call()
    except Exception as raised:
        error = raised
    return {
        "error": None if error is None else type(error).__name__,
        "message": str(error),
        "seconds": time.monotonic() - start,
    }


@dataclasses.dataclass(frozen=True)
class Case:
    """Logits of 6 rows, cut by columns, and what their loss and its gradient are.

    Attributes:
        whole: [2, 3, ranks * COLUMNS], the same on every rank.
        logits: [2, 3, COLUMNS], this rank's, a leaf.
        target: [2, 3].
        loss, grad: [2, 3] and [2, 3, COLUMNS], see `dense_loss`.
    """

    whole: Tensor
    logits: Tensor
    target: Tensor
    loss: Tensor
    grad: Tensor

    def wrong_grad(self, grad: Tensor) -> float:
        """Largest distance from the right one."""
        return float((grad.double() - self.grad).abs().max())


def make_case(rank: int, ranks: int) -> Case:
    """A leaf of its own at every call."""
    generator = torch.Generator().manual_seed(3)
    whole = 3 * torch.randn(2, 3, ranks * COLUMNS, generator=generator)
    target = torch.randint(0, ranks * COLUMNS, (2, 3), generator=generator)
    logits = whole[..., rank * COLUMNS : (rank + 1) * COLUMNS].clone().requires_grad_()
    return Case(whole, logits, target, *dense_loss(whole, target, rank))


def dense_loss(whole: Tensor, target: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Loss of every row in float64, and the gradient of their sum by this rank's columns."""
    dense = whole.detach().double().requires_grad_()
    loss = F.cross_entropy(dense.flatten(0, -2), target.flatten(), reduction="none").view(target.shape)
    (grad,) = torch.autograd.grad(loss.sum(), dense)
    return loss.detach(), grad[..., rank * COLUMNS : (rank + 1) * COLUMNS]


def make_linear(rank: int, ranks: int, sequence_parallel: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states [ranks, 3, FEATURES] (or this rank's one), weight [COLUMNS, FEATURES], target [ranks, 3]."""
    generator = torch.Generator().manual_seed(4)
    hidden = torch.randn(ranks, 3, FEATURES, generator=generator)
    weight = torch.randn(ranks * COLUMNS, FEATURES, generator=generator)
    target = torch.randint(0, ranks * COLUMNS, (ranks, 3), generator=generator)
    hidden = hidden[rank : rank + 1] if sequence_parallel else hidden
    mine = weight[rank * COLUMNS : (rank + 1) * COLUMNS]
    return hidden.clone().requires_grad_(), mine.clone().requires_grad_(), target
