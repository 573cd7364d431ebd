"""Stand-ins for CUDA under which `megatron.training` trains on a CPU over gloo: for tests only.

Megatron's training program takes a GPU for granted: it asks torch.cuda for devices, streams, memory and random states,
and names "cuda" where it makes tensors; its schedules do so, too. `install()`, before Megatron is imported, has all of
it answered on the CPU for good, `installed()` within a `with`. Nothing that computes is replaced.
"""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.utils.data
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")
_FOR_GOOD: list[Any] = []  # contexts that are never left


class _Quiet:
    """A stream or an event with nothing to wait for."""

    cuda_stream = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __enter__(self) -> _Quiet:
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: Any) -> float:
        return 0.0

    def record_event(self, *_: Any) -> _Quiet:
        return _Quiet()

    def _nothing(self, *_: Any, **__: Any) -> None:
        pass

    record = wait = wait_stream = wait_event = synchronize = _nothing


def _nothing(*_: Any, **__: Any) -> None:
    pass


def _answer(value: Any) -> Any:
    """A function of its own each time: dynamo's rules do not take one under two names."""
    return lambda *_, **__: value


class _CudaMeansCpu(TorchFunctionMode):
    """device="cuda" makes a CPU tensor, and `type()` calls it torch.cuda's, which Megatron's optimizer looks for."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if "cuda" in str(kwargs.get("device")):
            kwargs["device"] = CPU
        if name == "to":
            args = tuple(CPU if _names_cuda(each) else each for each in args)
        if name == "pin_memory":
            return args[0]
        if name != "type":
            return func(*args, **kwargs)
        if len(args) > 1 and isinstance(args[1], str):
            args = (args[0], args[1].replace("torch.cuda.", "torch."), *args[2:])
        result = func(*args, **kwargs)
        if isinstance(result, str) and "cuda" not in result:
            return result.replace("torch.", "torch.cuda.")
        return result


def _names_cuda(value: Any) -> bool:
    return isinstance(value, (str, torch.device)) and "cuda" in str(value)


def install() -> None:
    """Answer Megatron's questions about CUDA on the CPU, in this process, for good."""
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # dynamo asks the CUDA runtime
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # Megatron insists, with tensor parallelism
    _FOR_GOOD.append(installed())
    _FOR_GOOD[-1].__enter__()


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """Within: Megatron's questions about CUDA are answered on the CPU."""
    with contextlib.ExitStack() as stack:
        for name, answer in _answers().items():
            stack.enter_context(mock.patch.object(torch.cuda, name, answer))
        for holder, name, replacement in _methods():
            stack.enter_context(mock.patch.object(holder, name, replacement, create=True))
        stack.enter_context(_CudaMeansCpu())
        yield


def _answers() -> dict[str, Any]:
    """What torch.cuda's functions return."""
    device = SimpleNamespace(major=9, minor=0, name="CPU", total_memory=1 << 34, multi_processor_count=1)
    answers: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: 8,
        "current_device": lambda: CPU,
        "get_device_properties": lambda *_: device,
        "get_device_capability": lambda *_: (9, 0),
        "get_device_name": lambda *_: "CPU",
        "current_stream": _Quiet,
        "default_stream": _Quiet,
        "Stream": _Quiet,
        "Event": _Quiet,
        "stream": lambda *_: contextlib.nullcontext(),
        "is_current_stream_capturing": lambda: False,
        "memory_stats": lambda *_, **__: defaultdict(int),
        "mem_get_info": lambda *_: (1 << 33, 1 << 34),
        "get_rng_state": lambda *_, **__: torch.get_rng_state(),
        "set_rng_state": lambda state, *_, **__: torch.set_rng_state(state),
        "nvtx": SimpleNamespace(
            range_push=_answer(None),
            range_pop=_answer(None),
            mark=_answer(None),
            range=lambda *_, **__: contextlib.nullcontext(),
        ),
    }
    quiet = ["set_device", "synchronize", "empty_cache", "set_stream", "reset_peak_memory_stats", "ipc_collect"]
    quiet += ["manual_seed", "manual_seed_all"]
    answers |= {name: _answer(None) for name in quiet}
    sizes = ["memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"]
    answers |= {name: _answer(0) for name in sizes}
    return answers


def _methods() -> list[tuple[Any, str, Any]]:
    original = torch.utils.data.DataLoader.__init__

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **{**kwargs, "pin_memory": False})

    return [
        (torch.cuda.random, "get_rng_state", lambda *_, **__: torch.get_rng_state()),
        (torch.cuda.random, "set_rng_state", lambda state, *_, **__: torch.set_rng_state(state)),
        (torch.Tensor, "cuda", lambda self, *_, **__: self),
        (torch.nn.Module, "cuda", lambda self, *_, **__: self),
        (torch.optim.Optimizer, "_accelerator_graph_capture_health_check", _nothing),
        (torch.utils.data.DataLoader, "__init__", __init__),
    ]


def patch_megatron() -> None:
    """What Megatron itself cannot do here: fork a CUDA random state."""
    from megatron.core.tensor_parallel import random

    random.CudaRNGStatesTracker.fork = lambda *_, **__: contextlib.nullcontext()
