"""One training run: Megatron's schedule, DDP and optimizer over the training split, Megatron's way of averaging.

The loss of a micro-batch is the mean over its tokens; a step's loss is the mean over its micro-batches and over
the data-parallel ranks. Losses stay on the device between two log lines, so that a step never waits for the host.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func

from gpt.config import Config
from gpt.data import Text, micro_batches
from gpt.device import Ranks, peak_memory, reset_peak_memory
from gpt.report import Recorder

Batches = Iterator[dict[str, torch.Tensor]]


@dataclass
class History:
    """A run's curve: the training loss of every step, the held-out loss after some steps, in nats a token.

    `norms` holds the gradient's norm at every step, None where Megatron does not compute it (no clipping).
    """

    name: str
    train: list[float] = field(default_factory=list)
    held_out: list[tuple[int, float]] = field(default_factory=list)
    norms: list[float | None] = field(default_factory=list)


def train(
    name: str, config: Config, model: DistributedDataParallel, text: Text, ranks: Ranks, recorder: Recorder
) -> History:
    """Trains `model` for train.steps; the same seed, data order and schedule whatever the loss. Collective."""
    run = _Run(config, model, text, ranks)
    history = History(name)
    reset_peak_memory(ranks.device)
    settings = config.train
    pending: list[torch.Tensor] = []
    norms: list[float | None] = []
    recorder.begin(name, settings.steps)
    since = time.perf_counter()
    for step in range(1, settings.steps + 1):
        loss, norm = run.step()
        pending.append(loss)
        norms.append(norm)
        recorder.advance()
        evaluate = step % settings.eval_interval == 0 or step == settings.steps
        if not evaluate and step % settings.log_interval:
            continue
        losses = run.averaged(torch.stack(pending)).tolist()  # waits for the device
        tokens = len(pending) * settings.global_batch_size * config.model.seq_length
        speed = tokens / (time.perf_counter() - since)
        recorder.log(step, losses, norms, speed, peak_memory(ranks.device), run.learning_rate())
        history.train += losses
        history.norms += norms
        pending.clear()
        norms.clear()
        if evaluate:
            history.held_out.append((step, run.evaluate()))
            recorder.held_out(*history.held_out[-1])
        since = time.perf_counter()  # neither evaluation nor writing counts as training time
    recorder.end()
    return history


class _Run:
    def __init__(self, config: Config, model: DistributedDataParallel, text: Text, ranks: Ranks) -> None:
        self.config, self.model, self.text, self.ranks = config, model, text, ranks
        self.dp_group = parallel_state.get_data_parallel_group()
        self.dp_size: int = self.dp_group.size()
        self.micro_batches = config.train.global_batch_size // (config.train.micro_batch_size * self.dp_size)
        self.optimizer = get_megatron_optimizer(_optimizer_config(config), [model])
        self.scheduler = _scheduler(config, self.optimizer)
        self.schedule = get_forward_backward_func()
        # Megatron's own seam between the schedule and a scaled loss; the scale is 1 in float32 and bfloat16.
        model.config.grad_scale_func = self.optimizer.scale_loss
        self.training_data = self._data(text.train)

    def step(self) -> tuple[torch.Tensor, float | None]:
        """The loss, on the device, and the norm of the gradient before it was clipped."""
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        loss = self._forward_backward(self.training_data)
        _, norm, _ = self.optimizer.step()
        self.scheduler.step(1)
        return loss, None if norm is None else float(norm)

    @torch.no_grad()
    def evaluate(self) -> float:
        self.model.eval()
        data = self._data(self.text.held_out)
        losses = [self._forward_backward(data, forward_only=True) for _ in range(self.config.train.eval_batches)]
        self.model.train()
        return self.averaged(torch.stack(losses)).mean().item()

    def averaged(self, losses: torch.Tensor) -> torch.Tensor:
        """The mean over the data-parallel ranks; the tensor-parallel ranks hold the same values."""
        if self.dp_size > 1:
            torch.distributed.all_reduce(losses, group=self.dp_group)
        return losses / self.dp_size

    def learning_rate(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    def _data(self, dataset: Any) -> Batches:
        return micro_batches(dataset, self.config, self.dp_group.rank(), self.dp_size, self.ranks.device)

    def _forward_backward(self, data: Batches, forward_only: bool = False) -> torch.Tensor:
        reports = self.schedule(
            forward_step_func=_forward_step,
            data_iterator=data,
            model=[self.model],
            num_microbatches=self.micro_batches,
            seq_length=self.config.model.seq_length,
            micro_batch_size=self.config.train.micro_batch_size,
            forward_only=forward_only,
        )
        return torch.stack([report["loss"] for report in reports]).mean()


def _forward_step(data: Batches, model: torch.nn.Module) -> tuple[torch.Tensor, Callable[..., Any]]:
    batch = next(data)
    losses = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    return losses, partial(_mean_loss, batch["loss_mask"])


def _mean_loss(mask: torch.Tensor, losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """`losses` [micro_batch_size, seq_length], as the model returns them; `mask` is 0 where a token does not count."""
    loss = (losses.float() * mask).sum() / mask.sum().clamp(min=1)
    # A copy: the schedule divides the returned loss in place.
    return loss, {"loss": loss.detach().clone()}


def _optimizer_config(config: Config) -> OptimizerConfig:
    settings = config.optimizer
    bf16 = config.model.dtype == "bfloat16"
    return OptimizerConfig(
        optimizer="adam",
        lr=settings.lr,
        min_lr=settings.min_lr,
        weight_decay=settings.weight_decay,
        adam_beta1=settings.beta1,
        adam_beta2=settings.beta2,
        clip_grad=settings.clip_grad,
        bf16=bf16,
        params_dtype=torch.bfloat16 if bf16 else torch.float32,
    )


def _scheduler(config: Config, optimizer: Any) -> OptimizerParamScheduler:
    """Linear warm-up, then a cosine down to min_lr at the last step."""
    settings = config.optimizer
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0 if settings.warmup_steps else settings.lr,
        max_lr=settings.lr,
        min_lr=settings.min_lr,
        lr_warmup_steps=settings.warmup_steps,
        # A run may end within its warm-up.
        lr_decay_steps=max(config.train.steps, settings.warmup_steps + 1),
        lr_decay_style="cosine",
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=config.train.steps,
        wd_incr_style="constant",
    )
