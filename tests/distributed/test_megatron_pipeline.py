"""Pipeline stages under Megatron's own schedules: the last stage serves every loss, the others none.

Every rank is a stage; with 4 ranks, 2 stages of 2 tensor-parallel ranks are another layout. Interleaved: each rank
holds two stages. Losses and gradients are those of Megatron's own loss.
"""

from __future__ import annotations

import functools
import inspect
import os
from typing import Any, NamedTuple

import megatron_gpt as gpt
import pytest
import torch
import torch.distributed as dist
from fused_head import check_grads
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

import megatron_patch
from te_ce.counters import served
from tests.support import cpu_cuda

pytestmark = gpt.QUIET

WORLD = int(os.environ.get("WORLD_SIZE", "1"))
MICRO_BATCHES = 2 * WORLD
B, S = 2, 12


class Layout(NamedTuple):
    """How the ranks are split, and how many stages a rank holds."""

    tp: int
    pp: int
    chunks: int


LAYOUTS = {"pipeline": Layout(1, WORLD, 1), "interleaved": Layout(1, WORLD, 2)}
if WORLD == 4:
    LAYOUTS["tensor and pipeline"] = Layout(2, 2, 1)


@pytest.fixture(scope="module", params=LAYOUTS.values(), ids=LAYOUTS)
def layout(request, tp_group):
    found: Layout = request.param
    virtual = {"virtual_pipeline_model_parallel_size": found.chunks} if found.chunks > 1 else {}
    groups = gpt.model_parallel(found.tp, pipeline_model_parallel_size=found.pp, **virtual)
    with cpu_cuda.installed(), torch.compiler.set_stance("force_eager"), gpt.without_cuda(), groups:
        yield found


def stages(layout: Layout, tied: bool) -> list[Any]:
    """This rank's stages, one layer each."""
    fields = {
        "num_layers": layout.pp * layout.chunks,
        "pipeline_model_parallel_size": layout.pp,
        "deallocate_pipeline_outputs": True,
        "sequence_parallel": layout.tp > 1 and gpt.torch_norm is not None,
        "batch_p2p_comm": False,
    }
    if layout.chunks > 1:
        fields["virtual_pipeline_model_parallel_size"] = layout.chunks
    found = []
    for chunk in range(layout.chunks):
        place = {"pre_process": chunk == 0 and parallel_state.is_pipeline_first_stage(ignore_virtual=True)}
        place["post_process"] = (
            parallel_state.is_pipeline_last_stage(ignore_virtual=True) and chunk == layout.chunks - 1
        )
        if layout.chunks > 1:
            if "vp_stage" in inspect.signature(gpt.GPTModel).parameters:
                place["vp_stage"] = chunk
            else:
                parallel_state.set_virtual_pipeline_model_parallel_rank(chunk)
        found.append(gpt.make_model(layout.tp, tied=tied, seed=chunk, stage=place, **fields))
    return found


def step(data, model):
    batch = next(data)
    return gpt.forward(model, batch, batch.labels), functools.partial(mean, batch.mask)


def mean(mask: Tensor, losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    loss = (losses * mask).sum() / mask.sum()
    return loss, {"losses": losses.detach().clone()}


def train(models: list[Any], layout: Layout) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Per-token losses of every micro-batch, on the last stage, and the gradients of this rank's parameters."""
    batches = [gpt.make_batch(B, S, (-100, -1), seed=number) for number in range(MICRO_BATCHES)]
    data: Any = [iter(batches) for _ in models]
    for model in models:
        model.zero_grad(set_to_none=True)
    reports = get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=data if len(models) > 1 else data[0],
        model=models if len(models) > 1 else models[0],
        num_microbatches=MICRO_BATCHES,
        seq_length=S,
        micro_batch_size=B,
        forward_only=False,
    )
    grads = {
        f"{number} {name}": parameter.grad.clone()
        for number, model in enumerate(models)
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    return [report["losses"] for report in reports], grads


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("value", ["te_ce", "te_ce_linear"])
def test_schedule(layout: Layout, value: str, tied: bool) -> None:
    models = stages(layout, tied)
    losses, expected = train(models, layout)
    is_last = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
    assert len(losses) == (MICRO_BATCHES if is_last else 0)
    for model in models:
        model.config.cross_entropy_loss_fusion, model.config.cross_entropy_fusion_impl = True, value
    megatron_patch.apply(strict=True)
    before = sum(served().values())
    found, grads = train(models, layout)
    assert sum(served().values()) - before == len(losses)
    assert megatron_patch.status().heads == ({"fused": len(losses)} if is_last and value == "te_ce_linear" else {})
    for ours, theirs in zip(found, losses, strict=True):
        assert (ours == 0).sum() == 2  # labels that Megatron masks after the loss
        torch.testing.assert_close(ours[ours != 0], theirs[ours != 0], rtol=0, atol=1e-5)
    check_grads(grads, expected)


def test_a_loss_that_is_wrong_is_seen(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the test above would show nothing."""
    from megatron_patch import wiring

    models = stages(layout, False)
    _, expected = train(models, layout)
    for model in models:
        model.config.cross_entropy_loss_fusion, model.config.cross_entropy_fusion_impl = True, "te_ce"
    monkeypatch.setattr(
        wiring, "vocab_parallel_cross_entropy", gpt.broken_losses(wiring.vocab_parallel_cross_entropy)["doubled"]
    )
    megatron_patch.apply()
    _, grads = train(models, layout)
    with pytest.raises(AssertionError):
        check_grads(grads, expected)
    dist.barrier()
