"""A step in a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def captured(step: Callable[[], tuple[Tensor, ...]]) -> tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...]]:
    """`step` in a graph, after three runs on a side stream, and what the graph writes its results to."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    # "thread_local": the watchdog of a process group may talk to the driver meanwhile.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        outputs = step()
    return graph, outputs


def new_inputs(logits: Tensor, target: Tensor, g: Tensor, classes: int, ignored: int, seed: int) -> None:
    """Other values in place: the first `ignored` rows ignored, targets below `classes`; the same for the same seed."""
    random = torch.Generator(device="cuda").manual_seed(seed)
    logits.copy_(torch.randn(logits.shape, generator=random, device="cuda").mul_(3))
    target.random_(classes, generator=random)
    target[:ignored] = -100
    g.normal_(generator=random)
