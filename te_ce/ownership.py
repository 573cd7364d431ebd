"""May the gradient take over the logits' storage? Only when nobody else can still see it.

A tensor saved for backward is seen by somebody else when a variable, a view, a detached alias, another node of the
graph or the bare storage object is still held, or when the graph is retained. Four reference counts, read inside
backward, tell each of these from the sole owner:

    storage use count, Python references of the storage object, tensor use count, Python references of the tensor.

What the sole owner shows depends on the versions of Python and torch, so it is measured once, on a small CPU tensor,
and trusted only where the same measurement tells apart every other case. Wherever the answer is in doubt it is no:
one more buffer, never a wrong value. So it is while a debugger, or torch's compiler after some graph breaks, evaluates
the interpreter's frames: calls then hold one reference more, which cannot be told from an owner.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor


class OwnerCounts(NamedTuple):
    """Reference counts of a saved tensor, as its backward sees them."""

    storage: int
    storage_references: int
    tensor: int
    tensor_references: int

    def within(self, other: OwnerCounts) -> bool:
        """Whether no count exceeds that of `other`."""
        return all(mine <= theirs for mine, theirs in zip(self, other, strict=True))


# The most that a sole owner was ever seen to show (Python 3.11 and 3.12); a calibration above it is not believed.
_HIGHEST_BELIEVED = OwnerCounts(storage=2, storage_references=3, tensor=2, tensor_references=4)


def owner_counts(tensor: Tensor) -> OwnerCounts | None:
    """Counts of `tensor`; None where they can't tell: memory that is not torch's own, or another torch.

    Memory of numpy, DLPack, a mapped file or another process has owners that no count of torch's shows. It is not
    resizable, or shared.

    Call it straight from `backward`, with the local variable that `ctx.saved_tensors` was unpacked into: the calling
    frames are part of the count.
    """
    try:
        storage = tensor.untyped_storage()
        if not storage.resizable() or (tensor.device.type == "cpu" and tensor.is_shared()):
            return None
        return OwnerCounts(
            torch._C._storage_Use_Count(storage._cdata),
            sys.getrefcount(storage),
            tensor._use_count(),  # type: ignore[attr-defined]
            sys.getrefcount(tensor),
        )
    except (AttributeError, RuntimeError):
        return None


def is_sole_owner(counts: OwnerCounts | None) -> bool:
    """Whether the running backward is the only one that can see the tensor with these `counts`, now and later."""
    calibrated = _calibration.result
    if counts is None or calibrated is None:
        return False
    try:
        graph_is_kept = torch._C._autograd._get_current_graph_task_keep_graph()
    except (AttributeError, RuntimeError):
        return False
    return not graph_is_kept and counts.within(calibrated)


def prepare(tensor: Tensor) -> None:
    """Calibrate, the first time that it can be done: in a forward pass, outside backward and graph capture."""
    if _calibration.done or torch._C._current_graph_task_id() != -1:
        return
    if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    _calibration.run()


class _Calibration:
    """The sole owner's counts, or None where they don't tell it from the other cases."""

    def __init__(self) -> None:
        self.done = False
        self.result: OwnerCounts | None = None
        self._lock = threading.Lock()

    def run(self) -> None:
        with self._lock:
            if self.done:
                return
            # A thread of its own has none of the caller's saved-tensor hooks, modes or inference mode.
            thread = threading.Thread(target=self._measure, name="te_ce ownership calibration")
            thread.start()
            thread.join()
            self.done = True

    def _measure(self) -> None:
        try:
            sole = _counts_in_backward(_drop)
            others = [_counts_in_backward(keep) for keep in _OTHER_OWNERS]
        except Exception:  # whatever fails in these private counters, the answer is: not available
            return
        if sole is None or not sole.within(_HIGHEST_BELIEVED):
            return
        if all(counts is not None and not counts.within(sole) for counts in others):
            self.result = sole


_calibration = _Calibration()


class _Probe(torch.autograd.Function):
    """Saves its input as the loss saves the logits, and records what backward sees of it."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, seen: list[OwnerCounts | None]) -> Tensor:
        ctx.save_for_backward(tensor)
        ctx.seen = seen
        return tensor.sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (tensor,) = ctx.saved_tensors
        ctx.seen.append(owner_counts(tensor))
        return torch.zeros_like(tensor), None


def _counts_in_backward(keep: Callable[[Tensor], object]) -> OwnerCounts | None:
    seen: list[OwnerCounts | None] = []
    tensor = torch.ones(2, requires_grad=True) * 2
    kept = keep(tensor)
    total = _Probe.apply(tensor, seen)
    del tensor
    total.backward()
    del kept
    return seen[0]


def _drop(tensor: Tensor) -> None:
    """Keep nothing: the case in which the storage may be taken over."""


# What somebody else may keep of the tensor; each must show.
_OTHER_OWNERS: tuple[Callable[[Tensor], object], ...] = (
    lambda tensor: tensor,
    lambda tensor: tensor.view(2),
    lambda tensor: tensor.detach(),
    lambda tensor: tensor.untyped_storage(),
    lambda tensor: tensor.sin().sum(),
    lambda tensor: _Probe.apply(tensor, []),
)
