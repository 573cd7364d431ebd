"""Checks of the linear loss's tensors: a wrong one raises here, before any collective, the same on every rank."""

from __future__ import annotations

import torch
from torch import Tensor

from te_ce.checks import check_dtypes, check_storage, dtype_name, plain_tensor
from te_ce.shard import VocabShard


def check_linear_inputs(hidden: object, weight: object, bias: object, target: object, sharded_over: int) -> None:
    """Refuse tensors that are no hidden states, weight, bias and targets of one layer and one batch.

    Args:
        sharded_over: ranks over which the first dimension of `hidden` is sharded; 1: it is not.

    Raises:
        TypeError: not a tensor, a dtype that is not served, or dtypes that differ.
        ValueError: shapes or devices do not belong together.
    """
    hidden, weight, target = (
        plain_tensor("hidden", hidden),
        plain_tensor("weight", weight),
        plain_tensor("target", target),
    )
    tensors = {"hidden": hidden, "weight": weight, "target": target}
    if bias is not None:
        tensors["bias"] = plain_tensor("bias", bias)
    check_dtypes("hidden", hidden, target)
    for name, tensor in tensors.items():
        check_storage(name, tensor)
        if tensor.device != hidden.device:
            raise ValueError(f"{name}: expected device {hidden.device}, that of hidden, got {tensor.device}")
        if name in ("weight", "bias") and tensor.dtype != hidden.dtype:
            raise TypeError(
                f"{name}: expected {dtype_name(hidden.dtype)}, the dtype of hidden, got {dtype_name(tensor.dtype)}; "
                "convert one of them, or call under torch.autocast"
            )
    if hidden.ndim == 0:
        raise ValueError("hidden: expected at least one dimension [.., H], got a scalar")
    if hidden.shape[-1] == 0:
        raise ValueError(f"hidden: expected at least 1 feature, got shape {tuple(hidden.shape)}")
    if weight.ndim != 2 or weight.shape[1] != hidden.shape[-1]:
        raise ValueError(
            f"weight: expected shape [V_local, {hidden.shape[-1]}], as hidden has {hidden.shape[-1]} features, "
            f"got {tuple(weight.shape)}"
        )
    if bias is not None and tensors["bias"].shape != weight.shape[:1]:
        raise ValueError(
            f"bias: expected shape ({weight.shape[0]},), one per row of weight, got {tuple(tensors['bias'].shape)}"
        )
    _check_rows(hidden, target, sharded_over)


def _check_rows(hidden: Tensor, target: Tensor, sharded_over: int) -> None:
    if sharded_over == 1:
        if target.shape != hidden.shape[:-1]:
            raise ValueError(
                f"target: expected shape {tuple(hidden.shape[:-1])}, the leading shape of hidden "
                f"{tuple(hidden.shape)}, got {tuple(target.shape)}"
            )
        return
    if hidden.ndim < 2:
        raise ValueError(
            f"hidden: expected at least two dimensions [s / {sharded_over}, .., H] with sequence_parallel, "
            f"got {tuple(hidden.shape)}"
        )
    whole = (hidden.shape[0] * sharded_over, *hidden.shape[1:-1])
    if target.shape != whole:
        raise ValueError(
            f"target: expected shape {whole}, that of the whole sequence, {sharded_over} times the first dimension of "
            f"hidden {tuple(hidden.shape)} with sequence_parallel, got {tuple(target.shape)}"
        )


def check_width(weight: Tensor, shard: VocabShard | None) -> None:
    """Refuse a weight that has other rows than this rank's part of the vocabulary, as one that is not gathered yet has.

    Raises:
        ValueError: it has no row and no shard is declared, or not as many as the shard has columns.
    """
    if shard is None and weight.shape[0] == 0:
        raise ValueError(
            f"weight: expected at least 1 row, got shape {tuple(weight.shape)}; gather a weight that is sharded over "
            "data-parallel ranks first; declare an empty shard of the vocabulary with shard=VocabShard(...)"
        )
    if isinstance(shard, VocabShard) and shard.width != weight.shape[0]:
        raise ValueError(
            f"weight: expected stop - start = {shard.width} rows, as {shard} declares, got shape {tuple(weight.shape)}"
        )


def check_token_weights(weights: object, target: Tensor, reduction: str) -> None:
    """Refuse weights that are not one number for every target, or that are there for no scalar.

    Raises:
        TypeError: not a tensor of bools or floats.
        ValueError: another shape or device than the target's, they require a gradient, or `reduction` is "none".
    """
    weights = plain_tensor("token_weights", weights)
    check_storage("token_weights", weights)
    if weights.dtype != torch.bool and not weights.is_floating_point():
        raise TypeError(f"token_weights: expected bools or floats, got {dtype_name(weights.dtype)}")
    if weights.shape != target.shape or weights.device != target.device:
        raise ValueError(
            f"token_weights: expected shape {tuple(target.shape)} on {target.device}, as the target has, "
            f"got {tuple(weights.shape)} on {weights.device}"
        )
    if weights.requires_grad:
        raise ValueError(
            "token_weights: expected a tensor without requires_grad, as no gradient flows to it; detach() it"
        )
    if reduction == "none":
        raise ValueError(
            'reduction: expected "sum" or "mean" with token_weights, whose result is a scalar, got "none"; without '
            "token_weights multiply the losses yourself"
        )
