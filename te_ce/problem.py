"""The numbers that a loss on one shard depends on, resolved once per call and handed to every layer below.

Shape legend, used in every module: N rows (tokens), V classes, V_local columns of this rank, W ranks.
"""

from __future__ import annotations

import dataclasses
import functools

from torch import Tensor

from te_ce.options import LossOptions
from te_ce.shard import VocabShard

# Columns of a block of `reproducible_tp`: statistics are made of blocks of so many, and merged in their order.
REPRODUCIBLE_BLOCK = 4096

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
        smoothing_weight: a' of L = (1 - a') (lse - z_y) + a' (lse - mean z) + w lse^2; 0 without smoothing. With
            "others" it may exceed 1.
        parts: parts in which the columns of a row are read, each with statistics of its own. The same on every rank,
            whatever the width of its shard, and for any number of rows.
        block: columns of a part, counted from `start`, where the bits must not depend on the number of ranks; parts
            past the shard's last column are empty. 0: parts of any width.
        z_loss_weight: w.
        softcap: cap; None: no softcap.
        scale: of every logit after the softcap; 1 also where each row has a scale of its own.
        outputs: what is asked for besides the loss, in the order of `te_ce.outputs.OUTPUTS`.
    """

    start: int
    real_columns: int
    classes: int
    ignore_index: int
    smoothing_weight: float
    parts: int = 1
    block: int = 0
    z_loss_weight: float = 0.0
    softcap: float | None = None
    scale: float = 1.0
    outputs: tuple[str, ...] = ()

    @property
    def is_smoothed(self) -> bool:
        """Whether any mass is smoothed."""
        return self.smoothing_weight != 0.0

    @property
    def has_entropy(self) -> bool:
        """Whether the entropy is asked for, which takes t."""
        return "entropy" in self.outputs

    @property
    def has_predictions(self) -> bool:
        """Whether the argmax is asked for: also that of ignored rows, which are then read in forward."""
        return "predictions" in self.outputs

    @property
    def fields(self) -> int:
        """Statistics per row that the forward pass makes and exchanges: [fields, N], one contiguous run each.

        Of u, which is z / |scale|. In this order: max m, sum d of exp(|scale| (u - m)), target logit u_y; with
        smoothing s, the sum of (u - m), and the number of columns; for the entropy t, the sum of
        (u - m) exp(|scale| (u - m)); for predictions the argmax, an integer of as many bits as the others, the largest
        there is where there are no columns.
        """
        return 3 + 2 * self.is_smoothed + self.has_entropy + self.has_predictions

    @property
    def saved_fields(self) -> int:
        """What backward needs per row: m of u, d, and with the entropy t of z: |scale| times that of u."""
        return 2 + self.has_entropy

    @property
    def target_weight(self) -> float:
        """1 - a', in double: formed from an a' that was rounded to float32 it loses its digits as a' -> 1."""
        return 1.0 - self.smoothing_weight

    @property
    def class_weight(self) -> float:
        """a'/V, in double."""
        return self.smoothing_weight / self.classes

    def of_columns(self, columns: slice) -> ShardProblem:
        """The problem of some of the shard's columns, read apart from the others; the same object for the same ones."""
        return _problem_of_columns(self, columns.start, columns.stop)

    @classmethod
    def resolve(
        cls,
        options: LossOptions,
        shard: VocabShard,
        ranks: int = 1,
        outputs: tuple[str, ...] = (),
        equal_shards: bool = False,
    ) -> ShardProblem:
        """The problem that `options` and the `shard` of one of `ranks` ranks describe, all as wide if `equal_shards`.

        Raises:
            ValueError: `vocab_size` is more than the columns there are, smoothing has no other class to go to, or with
                `reproducible_tp` the shard ends inside a block.
        """
        return resolve_problem(options, shard, ranks, outputs, equal_shards)


@functools.lru_cache(maxsize=64)
def resolve_problem(
    options: LossOptions, shard: VocabShard, ranks: int, outputs: tuple[str, ...], equal_shards: bool
) -> ShardProblem:
    """See `ShardProblem.resolve`; kept, since a training run asks for the same one at every step."""
    classes = shard.size if options.vocab_size is None else options.vocab_size
    if classes > shard.size:
        raise ValueError(f"vocab_size: expected at most the {shard.size} columns of the vocabulary, got {classes}")
    assert not isinstance(options.scale, Tensor)
    return ShardProblem(
        start=shard.start,
        real_columns=max(0, min(shard.stop, classes) - shard.start),
        classes=classes,
        ignore_index=options.ignore_index,
        smoothing_weight=options.smoothing_weight(classes),
        parts=_blocks(shard, equal_shards) if options.reproducible_tp else _parts(-(-shard.size // ranks)),
        block=REPRODUCIBLE_BLOCK if options.reproducible_tp else 0,
        z_loss_weight=float(options.z_loss_weight),
        softcap=None if options.softcap is None else float(options.softcap),
        scale=float(options.scale),
        outputs=outputs,
    )


@functools.lru_cache(maxsize=1024)
def _problem_of_columns(problem: ShardProblem, start: int, stop: int) -> ShardProblem:
    """See `ShardProblem.of_columns`."""
    return dataclasses.replace(
        problem,
        start=problem.start + start,
        real_columns=max(0, min(stop, problem.real_columns) - start),
        parts=_parts(stop - start),
    )


def _parts(columns: int) -> int:
    """Parts of a row of so many columns a rank."""
    return 1 if columns <= WHOLE_COLUMNS else -(-2 * columns // WHOLE_COLUMNS)


def _blocks(shard: VocabShard, equal_shards: bool) -> int:
    """Blocks that every rank makes statistics of: as many as the widest shard can have, since all make as many."""
    for name, column in (("start", shard.start), ("stop", shard.stop)):
        if column % REPRODUCIBLE_BLOCK and column != shard.size:
            raise ValueError(
                f"reproducible_tp: expected shards that begin and end at multiples of {REPRODUCIBLE_BLOCK} columns, "
                f"got {name}={column}; pad the vocabulary, or pass shard=VocabShard(...) with such bounds"
            )
    return -(-(shard.width if equal_shards else shard.size) // REPRODUCIBLE_BLOCK)
