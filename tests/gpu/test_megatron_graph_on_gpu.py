"""Megatron's full-iteration CUDA graph: a GPTModel's forward and backward captured once, replayed on other batches."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "megatron"))

import megatron_gpt as gpt
from fused_head import check_grads
from megatron.core import full_cuda_graph
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import random

import megatron_patch
from te_ce.counters import served

pytestmark = pytest.mark.filterwarnings("ignore")

MICRO_BATCHES, B, S = 2, 2, 16


@pytest.fixture(scope="module", autouse=True)
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=torch.device("cuda", 0))
    try:
        with gpt.model_parallel(1), torch.compiler.set_stance("force_eager"):
            random.model_parallel_cuda_manual_seed(1234, use_cudagraphable_rng=True)
            yield
    finally:
        megatron_patch.revert()
        dist.destroy_process_group()


def batches(seed: int) -> list[dict[str, Tensor]]:
    found = [gpt.make_batch(B, S, (-100, -1)[: seed % 3], seed=10 * seed + number) for number in range(MICRO_BATCHES)]
    return [{"tokens": each.tokens, "labels": each.labels.contiguous(), "mask": each.mask} for each in found]


def step(data: Any, model: Any) -> tuple[Tensor, Any]:
    batch = gpt.Batch(**next(data))
    return gpt.forward(model, batch, batch.labels), functools.partial(mean, batch.mask)


def mean(mask: Tensor, losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    loss = (losses * mask).sum() / mask.sum()
    return loss, {"losses": losses.detach().clone()}


def train(run: Any, model: Any, seed: int) -> list[Tensor]:
    """One iteration's losses; the gradients are added to what the parameters have."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.zero_()
    reports = run(
        forward_step_func=step,
        data_iterator=iter(batches(seed)),
        model=model,
        num_microbatches=MICRO_BATCHES,
        seq_length=S,
        micro_batch_size=B,
        forward_only=False,
    )
    return [report["losses"].clone() for report in reports]


def gradients(model: Any) -> dict[str, Tensor]:
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("value", ["te_ce", "te_ce_linear"])
def test_iterations_are_replayed(value: str) -> None:
    megatron_patch.apply(strict=True)
    model = gpt.make_model()
    model.config.cross_entropy_loss_fusion, model.config.cross_entropy_fusion_impl = True, value
    plain = get_forward_backward_func()
    expected = {}
    for seed in range(1, 6):
        losses = train(plain, model, seed)
        expected[seed] = losses, gradients(model)
    full_cuda_graph.StaticBufferLoader.static_buffers = {"training": [], "validation": []}
    graphed = full_cuda_graph.FullCudaGraphWrapper(plain, cuda_graph_warmup_steps=2)
    graphed.reset_cuda_graph("training")
    before = served()["triton"]
    for seed in range(1, 6):
        losses = train(graphed, model, seed)
        torch.cuda.synchronize()
        assert all(torch.equal(*pair) for pair in zip(losses, expected[seed][0], strict=True)), f"iteration {seed}"
        check_grads(gradients(model), expected[seed][1])
    # Two iterations before the capture, and the capture; the replays call nothing.
    assert served()["triton"] - before == 3 * MICRO_BATCHES
    graphed.reset_cuda_graph("training")
