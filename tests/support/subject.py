"""The implementations under test, and how one process runs them on any number of shards."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import te_ce.call
import te_ce.linear.call
import te_ce.problem as problem_module
from te_ce import LossOptions, VocabShard, vocab_parallel_cross_entropy
from te_ce.autograd import LossCall
from te_ce.backend import Backend
from te_ce.outputs import OutputGrads
from te_ce.problem import ShardProblem


def forget_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the next call go through the kernels that `te_ce.kernels.launch` names then."""
    from te_ce.kernels import launch, launch_gradient, launch_linear, launcher

    monkeypatch.setattr(launcher, "_variants", {})
    for launches in (
        launch._statistics_launches,
        launch._loss_launches,
        launch._merge_launches,
        launch_gradient._gradient_launches,
        launch_linear._combine_launch,
        launch_linear._scaling_launch,
    ):
        launches.cache_clear()


@dataclasses.dataclass(frozen=True)
class Subject:
    """A backend on a device.

    Attributes:
        ulps: rounding allowed on a stored gradient, in units in the last place: half, but the interpreter truncates
            float32 to bfloat16 where the hardware rounds.
    """

    name: str
    backend: Backend
    device: torch.device
    ulps: dict[torch.dtype, float] = dataclasses.field(default_factory=dict)
    # Calls that it resolved; a copy with another backend begins anew.
    resolved: dict[Any, LossCall] = dataclasses.field(default_factory=dict, init=False, compare=False)

    def allowed_ulps(self, dtype: torch.dtype) -> float:
        return self.ulps.get(dtype, 0.5)

    @contextlib.contextmanager
    def serving(self) -> Iterator[None]:
        """Within: the public functions are served by this backend, whatever the environment says."""

        def choose(logits: Tensor) -> Backend:
            # Not a recording mock: one that keeps its arguments would be another owner of the logits.
            return self.backend

        with (
            mock.patch.multiple(te_ce.call, choose_backend=choose, _resolved=self.resolved),
            mock.patch.object(te_ce.linear.call, "choose_backend", choose),
        ):
            yield

    @contextlib.contextmanager
    def reading_in_parts_of(self, columns: int) -> Iterator[None]:
        """Within: rows of more than `columns` columns a rank are read in parts, as very long ones are."""
        with mock.patch.object(problem_module, "WHOLE_COLUMNS", columns):
            self._forget_problems()
            yield
        self._forget_problems()

    @contextlib.contextmanager
    def reproducible_blocks_of(self, columns: int) -> Iterator[None]:
        """Within: `reproducible_tp` has blocks of so many columns."""
        with mock.patch.object(problem_module, "REPRODUCIBLE_BLOCK", columns):
            self._forget_problems()
            yield
        self._forget_problems()

    def _forget_problems(self) -> None:
        problem_module.resolve_problem.cache_clear()
        self.resolved.clear()

    def loss(self, logits: Tensor, target: Tensor, **keywords: Any) -> Any:
        """The public function, served by this backend."""
        with self.serving():
            loss = vocab_parallel_cross_entropy(logits, target, **keywords)
        self.let_go()
        return loss

    def let_go(self) -> None:
        """The interpreter leaves a kernel's arguments in a cycle of references: another owner of the logits."""
        if self.name == "triton-interpreter":
            gc.collect()

    def run_shards(
        self, logits: Tensor, target: Tensor, g: Tensor, options: LossOptions, widths: Sequence[int]
    ) -> tuple[list[Tensor], Tensor]:
        """Loss and gradient of logits cut into shards of `widths`, as that many ranks would compute them.

        Returns:
            the loss [N] of each rank, and the gradient [.., sum of widths] put together again.
        """
        size = sum(widths)
        starts = [sum(widths[:rank]) for rank in range(len(widths))]
        shards = [VocabShard(start, start + width, size) for start, width in zip(starts, widths, strict=True)]
        problems = [ShardProblem.resolve(options, shard, len(shards)) for shard in shards]
        parts = [logits[..., shard.start : shard.stop].contiguous() for shard in shards]
        stats = [self.backend.row_statistics(part, target, each) for part, each in zip(parts, problems, strict=True)]
        gathered = torch.cat(stats)
        losses, grads = [], []
        for part, problem in zip(parts, problems, strict=True):
            loss, saved, _ = self.backend.merge_statistics(gathered, target, problem)
            out = torch.full_like(part, torch.nan)
            self.backend.logits_gradient(part, target, OutputGrads(g), saved, out, problem)
            losses.append(loss)
            grads.append(out)
        return losses, torch.cat(grads, -1)
