"""The loss as an `nn.Module`, for models that are put together of modules."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from te_ce.autograd import Inplace
from te_ce.groups import Group
from te_ce.loss import vocab_parallel_cross_entropy
from te_ce.options import LossOptions, resolve_options
from te_ce.outputs import LossOutput, resolve_outputs
from te_ce.shard import VocabShard


class VocabParallelCrossEntropyLoss(nn.Module):
    """`te_ce.vocab_parallel_cross_entropy` with everything but the tensors given once.

    Args:
        group, options, shard, outputs, inplace, loss_options: see `te_ce.vocab_parallel_cross_entropy`; checked here.

    Raises:
        TypeError, ValueError: an option or output is wrong.
        ValueError: `scale` is a tensor: it is as long as one batch, so it is an argument of the call.
    """

    def __init__(
        self,
        *,
        group: Group = None,
        options: LossOptions | None = None,
        shard: VocabShard | None = None,
        outputs: Iterable[str] = (),
        inplace: Inplace = "auto",
        **loss_options: Any,
    ) -> None:
        super().__init__()
        self.options, row_scale = resolve_options(options, loss_options)
        if row_scale is not None:
            raise ValueError(
                "scale: expected a number, got a tensor; pass the scale of each row to the call: loss(logits, target, "
                "scale=...)"
            )
        self.group, self.shard, self.inplace = group, shard, inplace
        self.outputs = resolve_outputs(outputs)

    def forward(self, logits: Tensor, target: Tensor, scale: Tensor | None = None) -> Tensor | LossOutput:
        """The loss of [.., V_local] logits and [..] targets; with outputs a `LossOutput`.

        Args:
            scale: float32 [..], the scale of each row, in place of that of the options.
        """
        options = self.options if scale is None else dataclasses.replace(self.options, scale=scale)
        return vocab_parallel_cross_entropy(
            logits,
            target,
            group=self.group,
            options=options,
            shard=self.shard,
            outputs=self.outputs,
            inplace=self.inplace,
        )

    def extra_repr(self) -> str:
        """What differs from the defaults."""
        parts = [
            f"{field.name}={getattr(self.options, field.name)!r}"
            for field in dataclasses.fields(self.options)
            if getattr(self.options, field.name) != field.default
        ]
        if self.group is not None:
            parts.append(f"ranks={self.group.size()}")
        if self.shard is not None:
            parts.append(f"shard={self.shard}")
        if self.outputs:
            parts.append(f"outputs={self.outputs}")
        if self.inplace != "auto":
            parts.append(f"inplace={self.inplace}")
        return ", ".join(parts)
