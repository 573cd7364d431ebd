"""Context parallelism: every rank holds a part of the sequences, and the loss is reduced over other ranks than theirs.

With 4 ranks, 2 parts over 2 tensor-parallel ranks each are another layout. Losses and gradients are those of Megatron's
own loss; heads of multi-token prediction, which fetch labels from the next part, included.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import megatron_gpt as gpt
import pytest
import torch
from fused_head import ask, check_grads
from megatron.core import parallel_state

import megatron_patch
from te_ce.counters import served
from tests.support import cpu_cuda

pytestmark = gpt.QUIET

WORLD = int(os.environ.get("WORLD_SIZE", "1"))


class Layout(NamedTuple):
    """Ranks to a loss, and parts of the sequences."""

    tp: int
    cp: int


LAYOUTS = {"context": Layout(1, WORLD)}
if WORLD == 4:
    LAYOUTS["tensor and context"] = Layout(2, 2)


@pytest.fixture(scope="module", params=LAYOUTS.values(), ids=LAYOUTS)
def layout(request: pytest.FixtureRequest, tp_group: Any) -> Iterator[Layout]:
    found: Layout = request.param
    groups = gpt.model_parallel(found.tp, context_parallel_size=found.cp)
    with cpu_cuda.installed(), torch.compiler.set_stance("force_eager"), gpt.without_cuda(), groups:
        yield found


def part(negative: tuple[int, ...] = ()) -> gpt.Batch:
    """This rank's, another one for every place along the sequence; the same over tensor-parallel ranks."""
    return gpt.make_batch(2, 12, negative, seed=1 + parallel_state.get_context_parallel_rank())


def model_for(layout: Layout, **fields: Any) -> Any:
    return gpt.make_model(layout.tp, context_parallel_size=layout.cp, **fields)


def check_same(model: Any, value: str, losses: int, **arguments: Any) -> None:
    batch = part((-100, -1))
    expected, expected_grads = gpt.loss_and_grads(model, batch, gpt.masked_sum, **arguments)
    megatron_patch.apply(strict=True)
    before = sum(served().values())
    ask(model).config.cross_entropy_fusion_impl = value
    loss, grads = gpt.loss_and_grads(model, batch, gpt.masked_sum, **arguments)
    assert sum(served().values()) - before == losses
    assert megatron_patch.status().heads == ({"fused": losses} if value == "te_ce_linear" else {})
    torch.testing.assert_close(loss * batch.mask, expected * batch.mask, rtol=0, atol=1e-5)
    check_grads(grads, expected_grads)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("value", ["te_ce", "te_ce_linear"])
def test_parts_of_sequences(layout: Layout, value: str, tied: bool) -> None:
    check_same(model_for(layout, tied=tied), value, 1)


@gpt.needs_mtp
@pytest.mark.parametrize("value", ["te_ce", "te_ce_linear"])
def test_heads_that_look_into_the_next_part(layout: Layout, value: str) -> None:
    check_same(model_for(layout, mtp_num_layers=1), value, 2, loss_mask=part((-100, -1)).mask)


def test_a_loss_over_the_wrong_ranks_is_seen(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over those that hold parts of the sequences."""
    from megatron_patch import wiring

    real = wiring.vocab_parallel_cross_entropy
    monkeypatch.setattr(
        wiring,
        "vocab_parallel_cross_entropy",
        lambda *args, **kw: real(*args, **{**kw, "group": parallel_state.get_context_parallel_group()}),
    )
    with pytest.raises(AssertionError):
        check_same(model_for(layout), "te_ce", 1)
