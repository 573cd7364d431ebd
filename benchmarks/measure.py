"""Time and memory of one function on one device: the median of many runs, with a cold cache."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

# Larger than any L2: what a run left there does not help the next one.
_FLUSH_BYTES = 256 << 20


class Timing(NamedTuple):
    """Milliseconds: median, 20th and 80th percentile."""

    median: float
    low: float
    high: float


def time_ms(function: Callable[[], object], device: torch.device, runs: int) -> Timing:
    """Time `function`, which must leave its inputs as it found them; a fixed number of runs."""
    for _ in range(3):
        function()
    timer = _time_on_gpu if device.type == "cuda" else _time_on_cpu
    samples = sorted(timer(function) for _ in range(runs))
    return Timing(statistics.median(samples), samples[runs // 5], samples[-1 - runs // 5])


def _time_on_gpu(function: Callable[[], object]) -> float:
    torch.empty(_FLUSH_BYTES, dtype=torch.int8, device="cuda").zero_()
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    function()
    stop.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(stop))


def _time_on_cpu(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return (time.perf_counter() - start) * 1e3


def copy_bandwidth(device: torch.device, gigabytes: float) -> float:
    """Bytes per second of a device copy, read and write counted: the ceiling of whatever moves as many bytes."""
    source = torch.empty(int(gigabytes * 2**29), dtype=torch.bfloat16, device=device).normal_()
    target = torch.empty_like(source)
    milliseconds = time_ms(lambda: target.copy_(source), device, 10).median
    return 2 * source.numel() * source.element_size() / milliseconds * 1e3


def peak_extra_bytes(function: Callable[[], object]) -> int:
    """Peak device memory of `function` above what is allocated now. CUDA only."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before
