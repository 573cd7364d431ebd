"""Transformer Engine's `parallel_cross_entropy`, by te_ce: same signature, same results, another import.

    from te_ce.transformer_engine import parallel_cross_entropy

Arguments, errors, results and saved state are those of the release in `SIGNATURE_OF`. This file holds what differs
from te_ce's own function: which inputs are refused, the shapes, and what the deprecated arguments do.

Not as the original, on purpose:
- a target that is neither a class nor `ignore_idx` makes its row NaN, in loss and gradient; the original gives an
  infinite loss and the gradient of a row that has no target;
- a target of the transposed shape, [s, b] to logits [b, s, V_local], is refused; the original takes it row by row, for
  the wrong tokens;
- a row that begins with a block or a shard of nothing but -inf is like any other; the original makes it NaN;
- the smoothed part is taken relative to the row's max; the original's loses its digits at large logits.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from te_ce import environment
from te_ce.groups import group_size
from te_ce.loss import _eager_loss, _eager_loss_outside_the_graph, vocab_parallel_cross_entropy
from te_ce.overwriting import OverwritingCrossEntropy

SIGNATURE_OF = "2.20.2"
"""The release of Transformer Engine whose signature and semantics these are."""


def parallel_cross_entropy(
    inp: Tensor,
    target: Tensor,
    label_smoothing: float = 0.0,
    reduce_loss: bool = False,
    dist_process_group: ProcessGroup | None = None,
    ignore_idx: int = -100,
    is_cg_capturable: bool = False,
    *,
    overwrite_input: bool = False,
    _input: Tensor | None = None,
) -> Tensor:
    """Cross-entropy of [b, s, V_local] or [s, b, V_local] logits whose columns are sharded over a group.

    With V = V_local x ranks, z the logits of a row, y its target, a = `label_smoothing`:
        L = (1 - a) (lse - z_y) + a (lse - mean z),  lse = log sum exp z,  0 in ignored rows

    Args:
        inp: float32 or bfloat16 logits, any strides; on the CPU only where there is no CUDA or the environment asks.
        target: int64 global ids, one for each row of `inp`: of its leading shape, or flat.
        label_smoothing: a in [0, 1]; a/V of the mass to every class.
        reduce_loss: return the mean over the rows that are not ignored; 0 where there are none.
        dist_process_group: the ranks, in the order of their shards, which are equally wide. None: one rank.
        ignore_idx: rows with this target have loss 0 and gradient 0.
        is_cg_capturable: without effect, and a FutureWarning: the loss can always be captured in a CUDA graph.
        overwrite_input: backward writes the gradient over `inp`, which must be contiguous: no copy. An autograd node
            that still needs `inp` then raises. Breaks the graph of torch.compile. False: forward copies `inp`, which
            the caller may change as soon as the call returns, and backward overwrites the copy.
        _input: deprecated name of `inp`, which it replaces, with a FutureWarning.

    Returns:
        float32, [b, s] or [s, b] as `inp` has it; with `reduce_loss` of shape [1]. The same bits on every rank.

    Raises:
        TypeError, ValueError: an argument is wrong; before any collective.
        RuntimeError: a second backward through the same loss; its logits are gone.
        IndexError: a target is neither a class nor `ignore_idx`, and TE_CE_CHECK_TARGETS=1.

    Collectives: one all-gather of 12 bytes a row (20 with smoothing) in forward; none in backward.
    """
    if _input is not None:
        _warn("_input is deprecated: pass the logits as inp")
        inp = _input
    if is_cg_capturable:
        _warn("is_cg_capturable is deprecated, without effect: the loss can always be captured in a CUDA graph")
    _check(inp, target, label_smoothing, overwrite_input)
    _check_group(dist_process_group)
    options = _options(label_smoothing, ignore_idx, inp.shape[-1], dist_process_group)
    loss = _row_loss(inp, target.reshape(inp.shape[:-1]), dist_process_group, overwrite_input, options)
    return loss.sum() / (target != ignore_idx).sum().clamp(min=1).view(1) if reduce_loss else loss


def _row_loss(
    inp: Tensor, target: Tensor, group: ProcessGroup | None, overwrite_input: bool, options: dict[str, Any]
) -> Tensor:
    overwrites = inp.requires_grad and torch.is_grad_enabled()
    if overwrites and not overwrite_input:
        inp = inp.clone(memory_format=torch.contiguous_format)
    if torch.compiler.is_compiling() and not overwrite_input:
        loss = vocab_parallel_cross_entropy(inp, target, group=group, inplace=False, **options)
    else:
        eager_loss = _eager_loss_outside_the_graph if torch.compiler.is_compiling() else _eager_loss
        loss = eager_loss(inp, target, group, None, None, (), overwrites, options, OverwritingCrossEntropy)
    assert isinstance(loss, Tensor)  # no other outputs were asked for
    return loss


def _options(label_smoothing: float, ignore_idx: int, columns: int, group: ProcessGroup | None) -> dict[str, Any]:
    """Fields of te_ce's options; a smoothing of 1, which they do not know as such, is all of the mass on the mean."""
    smoothing = "uniform"
    if label_smoothing == 1.0:
        classes = columns * group_size(group)
        # alpha V / (V - 1) = 1. Of one class the loss is 0 with any smoothing.
        smoothing, label_smoothing = ("others", (classes - 1) / classes) if classes > 1 else (smoothing, 0.0)
    return {"ignore_index": ignore_idx, "label_smoothing": label_smoothing, "smoothing": smoothing}


def _check(inp: Tensor, target: Tensor, label_smoothing: float, overwrite_input: bool) -> None:
    """What the original refuses, refused."""
    for name, value in (("inp", inp), ("target", target)):
        if not isinstance(value, Tensor):
            raise TypeError(f"{name}: expected a torch.Tensor, got {type(value).__name__}")
    if inp.ndim != 3:
        raise ValueError(f"inp: expected a 3D tensor [b, s, V_local] or [s, b, V_local], got shape {tuple(inp.shape)}")
    if not inp.numel():
        raise ValueError(f"inp: expected no dimension of size 0, got shape {tuple(inp.shape)}")
    if inp.dtype not in (torch.bfloat16, torch.float32):
        raise TypeError(f"inp: expected BF16 or FP32 logits, got {inp.dtype}; te_ce's own function takes more dtypes")
    if not inp.is_cuda and _belongs_on_cuda():
        raise ValueError(f"inp: expected a CUDA tensor, got {inp.device}; move it, or set TE_CE_BACKEND=torch")
    if target.device != inp.device:
        raise ValueError(f"target: expected device {inp.device}, that of inp, got {target.device}")
    if target.dtype != torch.int64:
        raise TypeError(f"target: expected torch.int64 ids, got {target.dtype}; call .long() first")
    b, s, _ = inp.shape
    if target.numel() != b * s:
        raise ValueError(f"target: expected one target id for each of the {b * s} rows of inp, got {target.numel()}")
    if target.shape == (s, b) and s != b and 1 not in (s, b):
        raise ValueError(
            f"target: expected shape {(b, s)}, the leading one of inp, got {(s, b)}; transpose one of them"
        )
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing: expected a number in [0, 1], got {label_smoothing}")
    if overwrite_input and not inp.is_contiguous():
        raise ValueError(
            f"overwrite_input: expected a contiguous inp for True, got strides {inp.stride()}; call .contiguous() first"
        )


def _check_group(group: object) -> None:
    if group is not None and not isinstance(group, (ProcessGroup, DeviceMesh)):
        raise TypeError(
            f"dist_process_group: expected a torch.distributed.ProcessGroup or None, got {type(group).__name__}"
        )


def _belongs_on_cuda() -> bool:
    """Whether logits on the CPU are most likely a mistake: there is a GPU, and nothing asks for the CPU."""
    asks_for_cpu = environment.requested_backend() == "torch" or environment.interpreter_requested()
    return torch.cuda.is_available() and not asks_for_cpu


def _warn(message: str) -> None:
    warnings.warn(f"parallel_cross_entropy: {message}", FutureWarning, stacklevel=3)
