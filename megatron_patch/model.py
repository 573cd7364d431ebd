"""What te_ce has to know of a Megatron model: its labels, its tensor-parallel group, the widths of its logits."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup

from te_ce import LossOptions


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
