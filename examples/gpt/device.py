"""The one place that knows what the ranks run on: the device, the backend, and what Megatron needs without a GPU.

Megatron's schedule, gradient buffers, rotary embedding and optimizer name the device "cuda" in a few places. Where
there is no GPU, those modules get a view of torch in which such a tensor is made on the CPU, so that CPU and GPU
runs go through the same Megatron code.
"""

from __future__ import annotations

import contextlib
import datetime
import gc
import importlib
import os
import signal
import threading
import time
import types
from dataclasses import dataclass
from typing import Any

import torch

from gpt.config import Config, ConfigError

# Long enough for rank 0 to read and tokenize a large corpus while the others wait.
TIMEOUT = datetime.timedelta(hours=2)


@dataclass(frozen=True)
class Ranks:
    """This process among those that torchrun started, and its device."""

    rank: int
    world_size: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        return self.rank == 0


def check(config: Config) -> None:
    """ConfigError if this machine cannot do what the configuration asks."""
    if not torch.cuda.is_available():
        for key, value, only in (
            ("model.dtype", config.model.dtype, "float32"),
            ("optimizer.clip_grad", config.optimizer.clip_grad, 0.0),
        ):
            if value != only:
                raise ConfigError(f"{key}: expected {only} without a GPU (Megatron's optimizer), found {value}")
        return
    gpus, local = torch.cuda.device_count(), int(os.environ["LOCAL_WORLD_SIZE"])
    if local > gpus * config.parallel.ranks_per_gpu:
        raise ConfigError(
            f"--nproc-per-node: expected at most the {gpus} GPUs of this machine times parallel.ranks_per_gpu = "
            f"{config.parallel.ranks_per_gpu}, found {local}"
        )


def start(config: Config) -> Ranks:
    """Joins the process group: NCCL with one GPU a rank, or gloo on the CPU and where ranks share a GPU."""
    _end_with_the_launcher()
    shared = config.parallel.ranks_per_gpu
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) // shared)
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
        _megatron_on_cpu()
    backend = "nccl" if device.type == "cuda" else "gloo"
    if shared > 1:
        backend = "gloo"  # NCCL refuses two ranks on one GPU
        _gradients_one_by_one()
    torch.distributed.init_process_group(backend, timeout=TIMEOUT)
    return Ranks(torch.distributed.get_rank(), torch.distributed.get_world_size(), device)


def _gradients_one_by_one() -> None:
    """Megatron sums its buckets of gradients in one coalesced call, which gloo does not know for a GPU's tensors."""
    buffers = importlib.import_module("megatron.core.distributed.param_and_grad_buffer")
    vars(buffers)["_coalescing_manager"] = lambda *group, **async_ops: contextlib.nullcontext()


def peak_memory(device: torch.device) -> float:
    """MiB: the most the GPU's allocator held since the last reset, or the most this process was resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    import resource

    # KiB on Linux, bytes on macOS.
    unit = 1 if os.uname().sysname == "Darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20


def reset_peak_memory(device: torch.device) -> None:
    """Starts a run's measurement, without what an earlier run left in reference cycles."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def _end_with_the_launcher() -> None:
    """No rank outlives torchrun: Ctrl-C ends it at once, and a launcher that was killed is noticed.

    Python's own handler for SIGINT waits until the current collective returns, which it may never do.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    launcher = os.getppid()

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="launcher-watch").start()


class _CudaOnCpu(types.ModuleType):
    """torch.cuda as far as Megatron asks for a device to put a tensor on."""

    def current_device(self) -> torch.device:
        return torch.device("cpu")

    def current_stream(self) -> None:
        return None

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)


class _TorchOnCpu(types.ModuleType):
    """torch, save that a tensor asked for on "cuda" is made on the CPU."""

    cuda = _CudaOnCpu("torch.cuda")

    def __getattr__(self, name: str) -> Any:
        value = getattr(torch, name)
        if name not in ("tensor", "zeros"):
            return value

        def on_cpu(*args: Any, device: Any = None, **kwargs: Any) -> Any:
            return value(*args, device="cpu" if device == "cuda" else device, **kwargs)

        return on_cpu


MODULES_THAT_NAME_CUDA = (
    "distributed.param_and_grad_buffer",
    "models.common.embeddings.rotary_pos_embedding",
    "optimizer.clip_grads",
    "optimizer.optimizer",
    "pipeline_parallel.schedules",
    "utils",
)


def _megatron_on_cpu() -> None:
    for name in MODULES_THAT_NAME_CUDA:
        importlib.import_module(f"megatron.core.{name}").__dict__["torch"] = _TorchOnCpu("torch")
