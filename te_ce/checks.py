"""Checks of a call's tensors: a wrong one raises here, before any collective, the same on every rank."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from te_ce.collectives import FAULT_FIELDS, gather_faults
from te_ce.layout import may_share_memory, readable_in_place
from te_ce.problem import ShardProblem

_LOGITS_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_TARGET_DTYPES = (torch.int64, torch.int32)


def check_inputs(logits: object, target: object) -> None:
    """Refuse tensors that are no logits and targets of one batch.

    Raises:
        TypeError: not a tensor, or a dtype that is not served.
        ValueError: shapes or devices do not belong together.
    """
    for name, value in (("logits", logits), ("target", target)):
        if not isinstance(value, Tensor):
            raise TypeError(f"{name}: expected a torch.Tensor, got {type(value).__name__}")
        if is_traceable_wrapper_subclass(value):
            raise TypeError(
                f"{name}: expected a plain tensor, got {type(value).__name__}; pass this rank's local tensor"
            )
        if value.is_nested:
            raise ValueError(f"{name}: expected a dense tensor with storage, got a nested tensor")
    assert isinstance(logits, Tensor)
    assert isinstance(target, Tensor)
    if logits.dtype not in _LOGITS_DTYPES:
        raise TypeError(f"logits: expected float32, bfloat16, float16 or float64, got {_name(logits.dtype)}")
    if target.dtype not in _TARGET_DTYPES:
        raise TypeError(f"target: expected int64 or int32 class ids, got {_name(target.dtype)}")
    for name, tensor in (("logits", logits), ("target", target)):
        if tensor.layout != torch.strided or tensor.device.type == "meta":
            raise ValueError(f"{name}: expected a dense tensor with storage, got {tensor.layout} on {tensor.device}")
    if logits.ndim == 0:
        raise ValueError("logits: expected at least one dimension [.., columns], got a scalar")
    if target.shape != logits.shape[:-1]:
        raise ValueError(
            f"target: expected shape {tuple(logits.shape[:-1])}, the leading shape of logits {tuple(logits.shape)}, "
            f"got {tuple(target.shape)}"
        )
    if target.device != logits.device:
        raise ValueError(f"target: expected device {logits.device}, that of the logits, got {target.device}")


def check_inplace(inplace: object, logits: Tensor) -> None:
    """Refuse an `inplace` that is unknown, or that can't be right for these logits.

    Raises:
        TypeError, ValueError: not "auto", True or False.
        ValueError: True, and the rows share memory or the logits would have to be copied first.
    """
    if isinstance(inplace, bool):
        if not inplace:
            return
        if not readable_in_place(logits):
            raise ValueError(
                "inplace: expected logits that can be read in place for True (contiguous last dimension, no lazy "
                f'negation), got strides {logits.stride()}; call .contiguous() first, or use "auto"'
            )
        if may_share_memory(logits):
            raise ValueError(
                f"inplace: expected logits whose rows do not share memory for True, got shape {tuple(logits.shape)} "
                f'with strides {logits.stride()}; use "auto"'
            )
    elif not isinstance(inplace, str):
        raise TypeError(f'inplace: expected "auto", True or False, got {type(inplace).__name__}')
    elif inplace != "auto":
        raise ValueError(f'inplace: expected "auto", True or False, got {inplace!r}')


def raise_for_bad_targets(target: Tensor, problem: ShardProblem, group: ProcessGroup | None) -> None:
    """Raise on every rank if any rank has a target that is neither a class nor `ignore_index`.

    One all-gather of a fixed-size record, and a host synchronisation.

    Raises:
        IndexError: names the rank within the group, the row and the value.
    """
    flat = target.reshape(-1).long()
    bad = ((flat < 0) | (flat >= problem.classes)) & (flat != problem.ignore_index)
    record = torch.zeros(FAULT_FIELDS, dtype=torch.int64, device=target.device)
    if flat.numel():
        first = bad.to(torch.int8).argmax()
        record = torch.stack((bad.sum(), first, flat[first]))
    for rank, (count, row, value) in enumerate(gather_faults(record, group)):
        if count:
            raise IndexError(
                f"target: rank {rank} has {count} bad row(s), the first is row {row} with target {value}: expected "
                f"0 <= target < {problem.classes} or ignore_index={problem.ignore_index}"
            )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
