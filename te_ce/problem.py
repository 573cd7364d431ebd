"""The numbers that a loss on one shard depends on, resolved once per call and handed to every layer below.

Shape legend, used in every module: N rows (tokens), V classes, V_local columns of this rank, W ranks.
"""

from __future__ import annotations

import dataclasses
import functools

from te_ce.options import LossOptions
from te_ce.shard import VocabShard

# Fields of a row's statistics, in the order in which a shard stores them: [fields, N], one contiguous run each.
# max m, sum d of exp(z - m), target logit z_y; with smoothing also s, the sum of (z - m), and the number of columns.
PLAIN_FIELDS = 3
SMOOTHING_FIELDS = 5

# Where a rank holds more columns than this, a row's statistics are made in parts of about half as many, so that few
# rows still keep the device busy.
WHOLE_COLUMNS = 65536


# Found by identity, not by value: `resolve` gives the same object for the same arguments.
@dataclasses.dataclass(frozen=True, eq=False)
class ShardProblem:
    """What turns a shard's logits into its part of the loss.

    Attributes:
        start: global id of the shard's first column.
        real_columns: how many of the shard's first columns are classes; the others are padding.
        classes: V, the number of classes of the whole vocabulary.
        ignore_index: target of an ignored row.
        smoothing_weight: a' of L = (1 - a') (lse - z_y) + a' (lse - mean z); 0 without smoothing. With "others" it
            may exceed 1.
        parts: parts in which the columns of a row are read, each with statistics of its own. The same on every rank,
            whatever the width of its shard, and for any number of rows.
    """

    start: int
    real_columns: int
    classes: int
    ignore_index: int
    smoothing_weight: float
    parts: int = 1

    @property
    def is_smoothed(self) -> bool:
        """Whether any mass is smoothed."""
        return self.smoothing_weight != 0.0

    @property
    def fields(self) -> int:
        """Statistics per row that the forward pass makes and exchanges."""
        return SMOOTHING_FIELDS if self.is_smoothed else PLAIN_FIELDS

    @property
    def target_weight(self) -> float:
        """1 - a', in double: formed from an a' that was rounded to float32 it loses its digits as a' -> 1."""
        return 1.0 - self.smoothing_weight

    @property
    def class_weight(self) -> float:
        """a'/V, in double."""
        return self.smoothing_weight / self.classes

    @classmethod
    def resolve(cls, options: LossOptions, shard: VocabShard, ranks: int = 1) -> ShardProblem:
        """The problem that `options` and the `shard` of one of `ranks` ranks describe.

        Raises:
            ValueError: `vocab_size` is more than the columns there are, or smoothing has no other class to go to.
        """
        return resolve_problem(options, shard, ranks)


@functools.lru_cache(maxsize=64)
def resolve_problem(options: LossOptions, shard: VocabShard, ranks: int) -> ShardProblem:
    """See `ShardProblem.resolve`; kept, since a training run asks for the same one at every step."""
    classes = shard.size if options.vocab_size is None else options.vocab_size
    if classes > shard.size:
        raise ValueError(f"vocab_size: expected at most the {shard.size} columns of the vocabulary, got {classes}")
    return ShardProblem(
        start=shard.start,
        real_columns=max(0, min(shard.stop, classes) - shard.start),
        classes=classes,
        ignore_index=options.ignore_index,
        smoothing_weight=options.smoothing_weight(classes),
        parts=_parts(-(-shard.size // ranks)),
    )


def _parts(columns: int) -> int:
    """Parts of a row of so many columns a rank."""
    return 1 if columns <= WHOLE_COLUMNS else -(-2 * columns // WHOLE_COLUMNS)
