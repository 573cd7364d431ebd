"""The loss as an `nn.Module`, for models that are put together of modules."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from te_ce.autograd import Inplace
from te_ce.checks import check_inplace_mode
from te_ce.groups import Group, resolve_group
from te_ce.loss import vocab_parallel_cross_entropy
from te_ce.options import LossOptions, resolve_options
from te_ce.outputs import LossOutput, resolve_outputs
from te_ce.shard import VocabShard


class VocabParallelCrossEntropyLoss(nn.Module):
    """`te_ce.vocab_parallel_cross_entropy` with everything but the tensors given once.

    Args:
        group, options, shard, outputs, inplace, loss_options: see `te_ce.vocab_parallel_cross_entropy`; checked here.

    Raises:
        TypeError, ValueError: an argument is wrong.
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
        resolve_group(group)
        check_inplace_mode(inplace)
        if shard is not None and not isinstance(shard, VocabShard):
            raise TypeError(f"shard: expected a VocabShard or None, got {type(shard).__name__}")
        self.group, self.shard, self.inplace = group, shard, inplace
        self.outputs = resolve_outputs(outputs)

    def forward(self, logits: Tensor, target: Tensor, scale: Tensor | None = None) -> Tensor | LossOutput:
        """The loss of [.., V_local] logits and [..] targets; with outputs a `LossOutput`.

        Args:
            scale: float32 [..], the scale of each row, where the options have none.

        Raises:
            ValueError: `scale` is given, and the options have a scale too.
        """
        options = self.options
        if scale is not None:
            if options.scale != 1.0:
                raise ValueError(f"scale: expected None, as the options have the scale {options.scale}, got a tensor")
            options = dataclasses.replace(options, scale=scale)
        return vocab_parallel_cross_entropy(
            logits,
            target,
            group=self.group,
            options=options,
            shard=self.shard,
            outputs=self.outputs,
            inplace=self.inplace,
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> VocabParallelCrossEntropyLoss:
        """A copy in the same group, which can't be copied: a copied model computes with the same ranks."""
        clone = type(self).__new__(type(self))
        memo[id(self)] = clone
        memo[id(self.group)] = self.group
        clone.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return clone

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
