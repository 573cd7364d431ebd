"""What happens to the ranks, one function a scenario: each returns what its rank saw. The last rank is the odd one."""

from __future__ import annotations

import os
import signal
import time
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor.debug import CommDebugMode

from te_ce import collectives, linear_cross_entropy, vocab_parallel_cross_entropy
from te_ce.linear import token_walk, vocabulary_walk
from tests.faults.ranks import COLUMNS, Case, Rank, dense_loss, make_case, make_linear, observe

Seen = dict[str, Any]


def _die(*_: object, **__: object) -> NoReturn:
    """Without a word to anybody: no destructor runs."""
    os._exit(3)


def hangs(me: Rank) -> Seen:
    """The last rank never comes back, for the harness to find out."""
    if me.is_odd:
        time.sleep(600)
    return {}


def dies_before_the_collective(me: Rank, checked: bool) -> Seen:
    """The others call the loss."""
    me.init()
    case = make_case(me.rank, me.ranks)
    before = case.logits.detach().clone()
    dist.barrier()
    if me.is_odd:
        _die()
    seen = observe(lambda: _loss(case, check_targets=checked))
    return seen | {"logits_kept": torch.equal(before, case.logits)}


def is_killed_in_the_collective(me: Rank, checked: bool) -> Seen:
    """While the others wait in it: a second after it was reached."""
    me.init()
    case = make_case(me.rank, me.ranks)
    before = case.logits.detach().clone()
    if me.is_odd:

        def killed(*_: object, **__: object) -> None:
            time.sleep(1.0)
            os.kill(os.getpid(), signal.SIGKILL)

        collectives._all_gather_concatenated = killed
    dist.barrier()
    seen = observe(lambda: _loss(case, check_targets=checked))
    return seen | {"logits_kept": torch.equal(before, case.logits)}


def dies_in_backward_of_the_linear_loss(me: Rank, how: str) -> Seen:
    """Before the sum of dX, which is in forward where the tokens' weights are given."""
    me.init()
    sequence_parallel, weighted = how == "sequence_parallel", how == "token_weights"
    hidden, weight, target = make_linear(me.rank, me.ranks, sequence_parallel)
    before = hidden.detach().clone(), weight.detach().clone()
    if me.is_odd:
        vocabulary_walk.start_sum = token_walk.start_sum = _die
    more: dict[str, Any] = {"token_weights": torch.ones(target.shape), "reduction": "sum"} if weighted else {}
    more["sequence_parallel"] = sequence_parallel
    losses: list[Tensor] = []

    def step() -> None:
        losses.append(linear_cross_entropy(hidden, weight, target, group=dist.group.WORLD, **more))
        losses[0].sum().backward()

    seen = observe(step)
    kept = torch.equal(before[0], hidden) and torch.equal(before[1], weight)
    grads = [each is not None for each in (hidden.grad, weight.grad)]
    return seen | {"parameters_kept": kept, "grads": grads, "in_backward": bool(losses)}


def dies_in_backward_of_the_loss(me: Rank) -> Seen:
    """It has no collective: the others come to its end."""
    me.init()
    case = make_case(me.rank, me.ranks)
    loss = _loss(case)
    if me.is_odd:
        loss.register_hook(_die)
    seen = observe(lambda: loss.sum().backward())
    grad = case.logits.grad
    next_call = observe(lambda: _loss(case))
    return seen | {"wrong": None if grad is None else case.wrong_grad(grad), "next": next_call}


def disagrees(me: Rank, what: str, checked: bool) -> Seen:
    """The last rank has something else than the others."""
    me.init()
    case, options = make_case(me.rank, me.ranks), dict[str, Any](check_targets=checked)
    logits, target = case.logits.detach(), case.target
    if me.is_odd:
        logits, target, more = _changed(what, logits, target)
        options |= more
    before = logits.clone()
    logits.requires_grad_()
    loss, grad = _dense(case, what, me)
    losses: list[Tensor] = []

    def step() -> None:
        loss = vocab_parallel_cross_entropy(logits, target, group=dist.group.WORLD, **options)
        losses.append(loss if isinstance(loss, Tensor) else loss.loss)
        losses[0].sum().backward()

    seen = observe(step) | {"logits_kept": torch.equal(before, logits)}
    if losses and losses[0].shape == loss.shape:
        seen["wrong"] = _distance(losses[0], loss)
    if logits.grad is not None and logits.grad.shape == grad.shape:
        seen["wrong_grad"] = _distance(logits.grad, grad)
    return seen


def _dense(case: Case, what: str, me: Rank) -> tuple[Tensor, Tensor]:
    """Loss and this rank's gradient of the logits as the ranks have them: those of the last one may be rounded."""
    logits = case.whole.double()
    if what == "bfloat16":
        odd = logits[..., (me.ranks - 1) * COLUMNS :]
        odd.copy_(odd.bfloat16())
    return dense_loss(logits, case.target, me.rank)


def _distance(found: Tensor, expected: Tensor) -> float:
    return float((found.detach().double() - expected).abs().max())


def _changed(what: str, logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
    options: dict[str, Any] = {}
    if what == "fewer rows":
        logits, target = logits[:, 1:].contiguous(), target[:, 1:]
    elif what == "more rows":
        logits, target = torch.cat([logits, logits]), torch.cat([target, target])
    elif what == "bfloat16":
        logits = logits.bfloat16()
    elif what == "float64":
        logits = logits.double()
    elif what == "width":
        logits = logits[..., :-1].contiguous()
    elif what == "smoothing":
        options = {"label_smoothing": 0.1}
    else:
        options = {"outputs": [what]}
    return logits, target, options


def hands_over_a_destroyed_group(me: Rank, world: bool) -> Seen:
    """On all ranks; nothing may be sent."""
    me.init()
    group = dist.group.WORLD if world else dist.new_group()
    case = make_case(me.rank, me.ranks)
    dist.destroy_process_group(group)
    with CommDebugMode() as mode:
        seen = observe(lambda: vocab_parallel_cross_entropy(case.logits, case.target, group=group, check_targets=True))
    return seen | {"collectives": mode.get_total_counts()}


def _loss(case: Case, **options: Any) -> Tensor:
    return vocab_parallel_cross_entropy(case.logits, case.target, group=dist.group.WORLD, **options)
