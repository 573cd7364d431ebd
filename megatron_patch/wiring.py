"""`LanguageModule.compute_language_model_loss`, served by te_ce when the model's configuration asks for it.

    labels [b, s] -> view [s, b]     negative labels become `ignore_index` (Megatron masks such rows after the loss,
                                     and 0 times NaN would survive a mask)
    logits [s, b, V / TP]            as they are: no copy, no cast
    loss   [s, b] -> [b, s]          float32, contiguous, as Megatron returns it

The method is the seam that every model of every release goes through, models already built and multi-token
prediction heads included. Where the configuration asks for nothing, the original method runs, untouched.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_patch.config import asks_for_te_ce, asks_for_transformer_engine
from te_ce import LossOptions, vocab_parallel_cross_entropy


@dataclasses.dataclass(eq=False)
class Application:
    """One application of the patch, shared by all of its replacements.

    Args:
        options: what te_ce is called with.
        replace_native: whether Megatron's own entry points are replaced too.
        replace_te: whether a configuration that asks for Transformer Engine's loss is served, too.
        said: the functions whose lifted checks are in the log.
        active: False from `revert()` on. Replacements that somebody still holds then behave as the originals.
    """

    options: LossOptions
    replace_native: bool
    replace_te: bool = False
    said: set[str] = dataclasses.field(default_factory=set)
    active: bool = True


def make_method(original: Callable[..., Tensor], application: Application) -> Callable[..., Tensor]:
    """The replacement for `compute_language_model_loss(self, labels, logits)`."""

    @functools.wraps(original)
    def compute_language_model_loss(self: Any, labels: Tensor, logits: Tensor) -> Tensor:
        if application.active and _is_ours(self, logits, application):
            return language_model_loss(self, labels, logits, application.options)
        return original(self, labels, logits)

    return compute_language_model_loss


def _is_ours(model: Any, logits: Tensor, application: Application) -> bool:
    if asks_for_te_ce(model.config):
        return True
    if asks_for_transformer_engine(model.config):
        return application.replace_te
    # Megatron's own entry points cannot tell gathered logits from a shard; here the model is at hand to tell.
    return application.replace_native and is_gathered(model, logits, tensor_parallel_group(model))


def language_model_loss(model: Any, labels: Tensor, logits: Tensor, options: LossOptions) -> Tensor:
    """Per-token loss of a Megatron language model.

    Args:
        model: the LanguageModule; gives the tensor-parallel group and the width of the output layer.
        labels: [b, s] int64 or int32, any strides, not written to. Negative: loss and gradient 0.
        logits: [s, b, V / TP] of this rank, or [s, b, V] where the model gathers its output.
        options: te_ce's, with reduction "none".

    Returns:
        [b, s] float32, contiguous.

    Raises:
        ValueError: the width of `logits` is neither that of a shard nor of the vocabulary; or te_ce's own.
        IndexError: a label at or past V, with `check_targets`; without, that row's loss and gradient are NaN.

    Collectives: te_ce's one over the tensor-parallel group in forward; none where the logits are gathered.
    """
    group = tensor_parallel_group(model)
    if is_gathered(model, logits, group):
        group = None
    target = ignore_negative(labels.transpose(0, 1), options)
    loss = vocab_parallel_cross_entropy(logits, target, group=group, options=options, inplace="auto")
    return loss.transpose(0, 1).contiguous()


def ignore_negative(labels: Tensor, options: LossOptions) -> Tensor:
    """`labels` with every negative one replaced by `options.ignore_index`: a new tensor, no host synchronisation."""
    return labels.masked_fill(labels < 0, options.ignore_index)


def tensor_parallel_group(model: Any) -> ProcessGroup | None:
    """The model's own tensor-parallel group, else Megatron's global one; None for a single process.

    The attribute has moved: `pg_collection.tp` from 0.15, `model_comm_pgs.tp` in 0.14, the global group before.

    Raises:
        ValueError: the configuration is tensor-parallel but there is no group.
    """
    for holder in (getattr(model, "pg_collection", None), getattr(model, "model_comm_pgs", None)):
        group: ProcessGroup | None = getattr(holder, "tp", None)
        if group is not None:
            return group
    group = getattr(model, "tp_group", None)
    if group is None:
        group = global_group()
    size = getattr(model.config, "tensor_model_parallel_size", 1)
    if group is None and size > 1:
        raise ValueError(
            f"tensor_model_parallel_size is {size}, but the model and megatron.core.parallel_state hold no "
            "tensor-parallel group; call initialize_model_parallel() first"
        )
    return group


def global_group() -> ProcessGroup | None:
    """Megatron's global tensor-parallel group; None where it was not initialised."""
    from megatron.core import parallel_state

    group: ProcessGroup | None = parallel_state.get_tensor_model_parallel_group(check_initialized=False)
    return group


def is_gathered(model: Any, logits: Tensor, group: ProcessGroup | None) -> bool:
    """Whether `logits` hold the whole vocabulary although the group shards it.

    Told by the width, which also shows `runtime_gather_output`, an argument that no attribute records. Taking
    gathered logits for a shard would count every class TP times: a loss too high by log(TP).

    Raises:
        ValueError: the width is known, and is neither that of a shard nor of the whole vocabulary.
    """
    if group is None or group.size() == 1:
        return False
    shard, full = _output_widths(model, group.size())
    width = logits.shape[-1]
    if full is None or width == shard:
        return False
    if width == full:
        return True
    raise ValueError(
        f"logits: expected {shard} columns (this rank's shard) or {full} (gathered), the widths of the model's output "
        f"layer, got {width}"
    )


def _output_widths(model: Any, ranks: int) -> tuple[int | None, int | None]:
    # T5 keeps its output layer in the head. Adapters may wrap the layer and hide its sizes: then the model's own.
    for owner in (model, getattr(model, "lm_head", None)):
        layer = getattr(owner, "output_layer", None)
        shard, full = getattr(layer, "output_size_per_partition", None), getattr(layer, "output_size", None)
        if isinstance(shard, int) and isinstance(full, int):
            return shard, full
    full = getattr(model, "vocab_size", None)
    return (full // ranks, full) if isinstance(full, int) and full % ranks == 0 else (None, None)
