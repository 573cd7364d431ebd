"""Checks of a call's tensors: a wrong one raises here, before any collective, the same on every rank."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from te_ce.layout import may_share_memory, readable_in_place

_LOGITS_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_TARGET_DTYPES = (torch.int64, torch.int32)


def check_inputs(logits: object, target: object) -> None:
    """Refuse tensors that are no logits and targets of one batch.

    Raises:
        TypeError: not a tensor, or a dtype that is not served.
        ValueError: shapes or devices do not belong together.
    """
    logits, target = plain_tensor("logits", logits), plain_tensor("target", target)
    check_dtypes("logits", logits, target)
    for name, tensor in (("logits", logits), ("target", target)):
        check_storage(name, tensor)
    if logits.ndim == 0:
        raise ValueError("logits: expected at least one dimension [.., columns], got a scalar")
    if target.shape != logits.shape[:-1]:
        raise ValueError(
            f"target: expected shape {tuple(logits.shape[:-1])}, the leading shape of logits {tuple(logits.shape)}, "
            f"got {tuple(target.shape)}"
        )
    if target.device != logits.device:
        raise ValueError(f"target: expected device {logits.device}, that of the logits, got {target.device}")


def plain_tensor(name: str, value: object) -> Tensor:
    """`value`, which is a plain tensor.

    Raises:
        TypeError: not a tensor, or a subclass that holds others.
        ValueError: nested.
    """
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(value).__name__}")
    if is_traceable_wrapper_subclass(value):
        raise TypeError(f"{name}: expected a plain tensor, got {type(value).__name__}; pass this rank's local tensor")
    if value.is_nested:
        raise ValueError(f"{name}: expected a dense tensor with storage, got a nested tensor")
    return value


def check_dtypes(name: str, tensor: Tensor, target: Tensor) -> None:
    """Refuse dtypes that are not served; `name` is that of `tensor`, which has the dtype of the logits.

    Raises:
        TypeError: one of them.
    """
    if tensor.dtype not in _LOGITS_DTYPES:
        raise TypeError(f"{name}: expected float32, bfloat16, float16 or float64, got {dtype_name(tensor.dtype)}")
    if target.dtype not in _TARGET_DTYPES:
        raise TypeError(f"target: expected int64 or int32 class ids, got {dtype_name(target.dtype)}")


def check_storage(name: str, tensor: Tensor) -> None:
    """Refuse a tensor without elements in strided memory.

    Raises:
        ValueError: sparse, or on the meta device.
    """
    if tensor.layout != torch.strided or tensor.device.type == "meta":
        raise ValueError(
            f"{name}: expected a dense tensor with storage, got shape {tuple(tensor.shape)}, {tensor.layout} on "
            f"{tensor.device}"
        )


def check_row_scale(scale: Tensor | None, target: Tensor) -> None:
    """Refuse a scale per row that is not one factor for every target.

    Raises:
        ValueError: another shape or device than the target's.
    """
    if scale is None:
        return
    if scale.shape != target.shape or scale.device != target.device:
        raise ValueError(
            f"scale: expected shape {tuple(target.shape)} on {target.device}, as the target has, "
            f"got {tuple(scale.shape)} on {scale.device}"
        )


def check_inplace(inplace: object, logits: Tensor) -> None:
    """Refuse an `inplace` that is unknown, or that can't be right for these logits.

    Raises:
        TypeError, ValueError: not "auto", True or False.
        ValueError: True, and the rows share memory or the logits would have to be copied first.
    """
    check_inplace_mode(inplace)
    if inplace is not True:
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


def check_inplace_mode(inplace: object) -> None:
    """Refuse an `inplace` that is unknown, whatever the logits are.

    Raises:
        TypeError, ValueError: not "auto", True or False.
    """
    if isinstance(inplace, bool):
        return
    if not isinstance(inplace, str):
        raise TypeError(f'inplace: expected "auto", True or False, got {type(inplace).__name__}')
    if inplace != "auto":
        raise ValueError(f'inplace: expected "auto", True or False, got {inplace!r}')


def dtype_name(dtype: torch.dtype) -> str:
    """As in `bfloat16`."""
    return str(dtype).removeprefix("torch.")
