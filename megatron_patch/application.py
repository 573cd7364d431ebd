"""One application of the patch: what it was asked for, and what it has said and counted since."""

from __future__ import annotations

import dataclasses
import weakref
from collections import Counter

from torch.distributed import ProcessGroup

from te_ce import LossOptions
from te_ce.linear.chunks import Keep


@dataclasses.dataclass(eq=False)
class Application:
    """One application of the patch, shared by all of its replacements.

    Args:
        options: what te_ce is called with; Megatron's command line may add to what `apply()` was given.
        replace_native: whether Megatron's own entry points are replaced too.
        replace_te: whether a configuration that asks for Transformer Engine's loss is served, too.
        strict: whether a fused linear loss that cannot be had is an error instead of a line in the log.
        keep: of the fused linear loss, as `te_ce.linear_cross_entropy` takes it; likewise.
        said: what is in the log already: checks lifted, paths of the fused linear loss.
        heads: losses asked for as "te_ce_linear", by the path that served them ("fused", "on logits").
        reasons: why some of them were served on logits.
        agreed: the tensor-parallel groups whose ranks take the same path, as long as they live.
        speaks: whether this process is the one of its pipeline stage that logs.
        active: False from `revert()` on. Replacements that somebody still holds then behave as the originals.
    """

    options: LossOptions
    replace_native: bool
    replace_te: bool = False
    strict: bool = False
    keep: Keep = "recompute"
    said: set[str] = dataclasses.field(default_factory=set)
    heads: Counter[str] = dataclasses.field(default_factory=Counter)
    reasons: list[str] = dataclasses.field(default_factory=list)
    agreed: weakref.WeakSet[ProcessGroup] = dataclasses.field(default_factory=weakref.WeakSet)
    speaks: bool = False
    active: bool = True
