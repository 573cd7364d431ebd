"""The losses as `nn.Module`s, for models that are put together of modules."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable
from typing import Any, Self

from torch import Tensor, nn

from te_ce.autograd import Inplace
from te_ce.checks import check_inplace_mode
from te_ce.groups import Group, resolve_group
from te_ce.linear.chunks import Keep, check_keep
from te_ce.linear_loss import linear_cross_entropy
from te_ce.loss import vocab_parallel_cross_entropy
from te_ce.options import LossOptions, resolve_options
from te_ce.outputs import LossOutput, resolve_outputs
from te_ce.shard import VocabShard


class _LossModule(nn.Module):
    """What both losses are given once: where the vocabulary lies, options and outputs."""

    def __init__(
        self,
        group: Group,
        options: LossOptions | None,
        shard: VocabShard | None,
        outputs: Iterable[str],
        loss_options: dict[str, Any],
    ) -> None:
        super().__init__()
        self.options, row_scale = resolve_options(options, loss_options)
        if row_scale is not None:
            raise ValueError(
                "scale: expected a number, got a tensor; pass the scale of each row to the call: loss(..., scale=...)"
            )
        resolve_group(group)
        if shard is not None and not isinstance(shard, VocabShard):
            raise TypeError(f"shard: expected a VocabShard or None, got {type(shard).__name__}")
        self.group, self.shard = group, shard
        self.outputs = resolve_outputs(outputs)

    def _keywords(self, scale: Tensor | None) -> dict[str, Any]:
        """Keywords of the call that both losses have."""
        options = self.options
        if scale is not None:
            if options.scale != 1.0:
                raise ValueError(f"scale: expected None, as the options have the scale {options.scale}, got a tensor")
            options = dataclasses.replace(options, scale=scale)
        return {"group": self.group, "options": options, "shard": self.shard, "outputs": self.outputs}

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A copy in the same group, which can't be copied: a copied model computes with the same ranks."""
        clone = type(self).__new__(type(self))
        memo[id(self)] = clone
        memo[id(self.group)] = self.group
        clone.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return clone

    def _more_settings(self) -> dict[str, object]:
        """What else is not at its default, by name."""
        return {}

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
        parts += [f"{name}={value}" for name, value in self._more_settings().items()]
        return ", ".join(parts)


class VocabParallelCrossEntropyLoss(_LossModule):
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
        super().__init__(group, options, shard, outputs, loss_options)
        check_inplace_mode(inplace)
        self.inplace = inplace

    def forward(self, logits: Tensor, target: Tensor, scale: Tensor | None = None) -> Tensor | LossOutput:
        """The loss of [.., V_local] logits and [..] targets; with outputs a `LossOutput`.

        Args:
            scale: float32 [..], the scale of each row, where the options have none.

        Raises:
            ValueError: `scale` is given, and the options have a scale too.
        """
        result: Tensor | LossOutput = vocab_parallel_cross_entropy(
            logits, target, inplace=self.inplace, **self._keywords(scale)
        )
        return result

    def _more_settings(self) -> dict[str, object]:
        return {} if self.inplace == "auto" else {"inplace": self.inplace}


class LinearCrossEntropyLoss(_LossModule):
    """`te_ce.linear_cross_entropy` with everything but the tensors given once; the weight is not the module's own.

    Args:
        group, sequence_parallel, keep, options, shard, outputs, loss_options: see `te_ce.linear_cross_entropy`; checked
            here.

    Raises:
        TypeError, ValueError: an argument is wrong.
        ValueError: `scale` is a tensor: it is as long as one batch, so it is an argument of the call.
    """

    def __init__(
        self,
        *,
        group: Group = None,
        sequence_parallel: bool = False,
        keep: Keep = "recompute",
        options: LossOptions | None = None,
        shard: VocabShard | None = None,
        outputs: Iterable[str] = (),
        **loss_options: Any,
    ) -> None:
        super().__init__(group, options, shard, outputs, loss_options)
        check_keep(keep)
        if not isinstance(sequence_parallel, bool):
            raise TypeError(f"sequence_parallel: expected a bool, got {type(sequence_parallel).__name__}")
        self.sequence_parallel, self.keep = sequence_parallel, keep

    def forward(
        self,
        hidden: Tensor,
        weight: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        token_weights: Tensor | None = None,
        scale: Tensor | None = None,
    ) -> Tensor | LossOutput:
        """The loss of [.., H] hidden states, [V_local, H] weight and [..] targets; with outputs a `LossOutput`.

        Args:
            bias: [V_local].
            token_weights: [..], see `te_ce.linear_cross_entropy`.
            scale: float32 [..], the scale of each row, where the options have none.

        Raises:
            ValueError: `scale` is given, and the options have a scale too.
        """
        result: Tensor | LossOutput = linear_cross_entropy(
            hidden,
            weight,
            target,
            bias=bias,
            token_weights=token_weights,
            sequence_parallel=self.sequence_parallel,
            keep=self.keep,
            **self._keywords(scale),
        )
        return result

    def _more_settings(self) -> dict[str, object]:
        more: dict[str, object] = {"sequence_parallel": True} if self.sequence_parallel else {}
        return more if self.keep == "recompute" else {**more, "keep": self.keep}
