"""Stopwatches, bandwidths, memory and host time: how everything here is measured.

A run is: `prepare` (untimed: puts back logits that a provider has overwritten, so that nobody is timed on gradients),
a write over a buffer larger than the L2 cache, then the timed function between two CUDA events. Counts are fixed:
loops that adapt would let ranks run apart. Three numbers per function:

    device_ms   the device is kept busy while the host queues: the time of the kernels
    eager_ms    the device is idle when the host starts: what a user sees, gaps between launches included
    graph_ms    as eager_ms, of one replay of the function captured in a CUDA graph

On the CPU the first two are wall time, and there is no graph.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

# Larger than any L2: what a run left there does not help the next one.
FLUSH_BYTES = 256 << 20
WARM_UP = 3
# A GPU at 2 GHz spins for about a millisecond; slower clocks only make it longer.
_CYCLES_PER_MS = 2_000_000
_LONGEST_SPIN_MS = 10.0


class Timing(NamedTuple):
    """Milliseconds: median, 20th and 80th percentile."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, samples: list[float]) -> Timing:
        """Of raw samples, in any order."""
        ordered = sorted(samples)
        fifth = len(ordered) // 5
        return cls(statistics.median(ordered), ordered[fifth], ordered[-1 - fifth])


@functools.cache
def _flush_buffer(device: torch.device) -> Tensor:
    """Kept for good, so that no run finds its memory in the allocator's cache."""
    return torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device)


def on_gpu(device: torch.device) -> bool:
    """Whether events, graphs and memory statistics are there."""
    return device.type == "cuda"


def _unchanged(samples: list[float]) -> list[float]:
    return samples


@dataclasses.dataclass(frozen=True)
class Stopwatch:
    """Times functions on one device, `runs` runs each.

    Under tensor parallelism `align` makes the ranks start together, and `slowest` turns a rank's samples into the
    maxima over the ranks. `align` must queue its work on the current stream.
    """

    device: torch.device
    runs: int
    align: Callable[[], object] | None = None
    slowest: Callable[[list[float]], list[float]] = _unchanged

    def device_ms(self, function: Callable[[T], object], prepare: Callable[[], T]) -> Timing:
        """Time of `function(prepare())` on the device, with the host ahead of it."""
        host_ms = self._warm_up(function, prepare)
        # Twice what the host needs to queue the work; a function that waits for the device cannot be outrun.
        spin = int(min(max(1.0, 2 * host_ms), _LONGEST_SPIN_MS) * _CYCLES_PER_MS)
        return self._time(function, prepare, spin, self.runs)

    def eager_ms(self, function: Callable[[T], object], prepare: Callable[[], T]) -> Timing:
        """Time of `function(prepare())` that starts on an idle device."""
        self._warm_up(function, prepare)
        return self._time(function, prepare, 0, self.runs)

    def sustained_ms(self, function: Callable[[None], object]) -> float:
        """Milliseconds of a run in the middle of many, one right after the other, as in training.

        A GPU at its power limit runs slower than one that has rested. The first third of the runs brings it there and
        does not count. Caches are not emptied: for functions that read more than they hold.
        """
        if not on_gpu(self.device):
            return statistics.median(self._run_on_cpu(function, lambda: None, 0) for _ in range(self.runs))
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(self.runs + 1)]
        marks[0].record()
        for mark in marks[1:]:
            function(None)
            mark.record()
        torch.cuda.synchronize()
        samples = [float(start.elapsed_time(stop)) for start, stop in itertools.pairwise(marks)]
        return statistics.median(samples[self.runs // 3 :])

    def _warm_up(self, function: Callable[[T], object], prepare: Callable[[], T]) -> float:
        host_ms = 0.0
        for _ in range(WARM_UP):
            argument = prepare()
            self.synchronize()
            start = time.perf_counter()
            function(argument)
            host_ms = (time.perf_counter() - start) * 1e3
        self.synchronize()
        return host_ms

    def _time(self, function: Callable[[T], object], prepare: Callable[[], T], spin: int, runs: int) -> Timing:
        run = self._run_on_gpu if on_gpu(self.device) else self._run_on_cpu
        return Timing.of(self.slowest([run(function, prepare, spin) for _ in range(runs)]))

    def _run_on_gpu(self, function: Callable[[T], object], prepare: Callable[[], T], spin: int) -> float:
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        argument = prepare()
        _flush_buffer(self.device).zero_()
        if spin:
            torch.cuda._sleep(spin)
        if self.align:
            self.align()
        if not spin:
            torch.cuda.synchronize()
        start.record()
        function(argument)
        stop.record()
        torch.cuda.synchronize()
        return float(start.elapsed_time(stop))

    def _run_on_cpu(self, function: Callable[[T], object], prepare: Callable[[], T], spin: int) -> float:
        argument = prepare()
        if self.align:
            self.align()
        start = time.perf_counter()
        function(argument)
        return (time.perf_counter() - start) * 1e3

    def synchronize(self) -> None:
        """Wait for the device."""
        if on_gpu(self.device):
            torch.cuda.synchronize()


def capture(function: Callable[[None], T], prepare: Callable[[], None]) -> tuple[torch.cuda.CUDAGraph, T]:
    """`function` in a CUDA graph, after three runs on a side stream; and what the graph writes its results to.

    `prepare` runs before each of them and before the capture, never inside the graph. CUDA only.
    """
    # Memory that the other stream's runs have left cached is of no use to this one.
    torch.cuda.empty_cache()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            prepare()
            function(None)
    torch.cuda.current_stream().wait_stream(stream)
    prepare()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    graph = torch.cuda.CUDAGraph()
    # The outer context: after a capture that failed, the current stream is this one again.
    # "thread_local": another thread, such as the watchdog of a process group, may talk to the driver meanwhile.
    with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(graph, capture_error_mode="thread_local"):
        results = function(None)
    return graph, results


def host_us(function: Callable[[None], object], device: torch.device) -> float:
    """Host microseconds of one call of a tiny problem, over 200 calls (20 on the CPU) that nobody waits for."""
    calls = 200 if on_gpu(device) else 20
    watch = Stopwatch(device, 1)
    for _ in range(WARM_UP):
        function(None)
    watch.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        function(None)
    elapsed = time.perf_counter() - start
    watch.synchronize()
    return elapsed / calls * 1e6


class Bandwidth(NamedTuple):
    """Bytes per second that this device reaches; `copy` counts what is read and what is written."""

    copy: float
    read: float


def bandwidth(device: torch.device, size: int | None = None) -> Bandwidth:
    """Measure both on buffers of `size` bytes (2 GiB on a GPU): the ceilings of whatever moves as many bytes.

    Reading is the better of a sum and a maximum in float32; in bfloat16 both are bound by arithmetic.
    """
    size = size or (2 << 30 if on_gpu(device) else 32 << 20)
    watch = Stopwatch(device, 10)
    # Not zeros: they cost a GPU less power than numbers do.
    source = torch.randn(size // 4, dtype=torch.float32, device=device)
    copied = torch.empty_like(source)

    def seconds(function: Callable[[], Any]) -> float:
        return watch.device_ms(lambda _: function(), lambda: None).median / 1e3

    copying = seconds(lambda: copied.copy_(source))
    reading = min(seconds(lambda: torch.sum(source)), seconds(lambda: torch.amax(source)))
    return Bandwidth(2 * size / copying, size / reading)


def peak_extra_bytes(function: Callable[[T], object], prepare: Callable[[], T]) -> int:
    """Peak device memory of `function(prepare())` above what was allocated when it started. CUDA only."""
    argument = prepare()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function(argument)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def restore(target: Tensor, source: Tensor) -> None:
    """Copy `source` over `target`, a leaf included."""
    with torch.no_grad():
        target.copy_(source)
