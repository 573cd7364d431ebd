"""Which columns of the vocabulary this rank holds.

Shards are contiguous and in rank order; they may be uneven and empty. `size` counts every column of the group,
padding included; how many of them are classes is `LossOptions.vocab_size`.
"""

from __future__ import annotations

import dataclasses
import functools

from torch.distributed import ProcessGroup

from te_ce.groups import Group, group_rank, group_size, resolve_group


@dataclasses.dataclass(frozen=True)
class VocabShard:
    """Columns [start, stop) of a vocabulary of `size` columns.

    Args:
        start: first column of this rank, counted over the whole group.
        stop: one past the last column of this rank; equal to `start` where the shard is empty.
        size: columns of the whole group, padding included.

    Raises:
        TypeError: a field is not an int.
        ValueError: not 0 <= start <= stop <= size, or size is 0 or no 64-bit integer.
    """

    start: int
    stop: int
    size: int

    def __post_init__(self) -> None:
        for name in ("start", "stop", "size"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"VocabShard.{name}: expected an int, got {type(value).__name__}")
        if not (0 <= self.start <= self.stop <= self.size and 1 <= self.size < 2**63):
            raise ValueError(
                "VocabShard: expected 0 <= start <= stop <= size and 1 <= size < 2**63, "
                f"got start={self.start}, stop={self.stop}, size={self.size}"
            )

    @property
    def width(self) -> int:
        """Columns that this rank holds."""
        return self.stop - self.start

    @classmethod
    def even(cls, size: int, group: Group = None) -> VocabShard:
        """This rank's part when `size` columns are split as `torch.chunk` splits them.

        Every rank holds ceil(size / ranks) columns but the last ones, which hold fewer or none.

        Raises:
            TypeError, ValueError: `group` is not a group, or this process is not one of its ranks.
        """
        ranks_of = resolve_group(group)
        ranks, rank = group_size(ranks_of), group_rank(ranks_of)
        width = -(-size // ranks)
        start = min(rank * width, size)
        return cls(start, min(start + width, size), size)


def resolve_shard(shard: VocabShard | None, width: int, group: ProcessGroup | None) -> VocabShard:
    """The shard of a call, checked against the `width` of this rank's logits.

    None declares equal shards: every rank holds `width` columns.

    Raises:
        TypeError: `shard` is not a VocabShard.
        ValueError: the declared width is not that of the logits, or the shard can't be this rank's part of the
            whole (the first rank starts at 0, the last one stops at `size`).
    """
    ranks, rank = group_size(group), group_rank(group)
    if shard is None:
        if width == 0:
            raise ValueError(
                "logits: expected at least 1 column, got 0; declare an empty shard with shard=VocabShard(...)"
            )
        return _equal_shard(rank, ranks, width)
    if not isinstance(shard, VocabShard):
        raise TypeError(f"shard: expected a VocabShard or None, got {type(shard).__name__}")
    if shard.width != width:
        raise ValueError(
            f"shard: expected logits with stop - start = {shard.width} columns, got logits with {width} columns "
            f"(the whole vocabulary has {shard.size}); pass this rank's columns only, or the shard they belong to"
        )
    if rank == 0 and shard.start != 0:
        raise ValueError(f"shard: expected the first rank of the group to start at 0, got start={shard.start}")
    if rank == ranks - 1 and shard.stop != shard.size:
        raise ValueError(
            f"shard: expected the last of {ranks} rank(s) to stop at size={shard.size}, got stop={shard.stop}; "
            "pass the group that holds the other columns"
        )
    return shard


@functools.lru_cache(maxsize=64)
def _equal_shard(rank: int, ranks: int, width: int) -> VocabShard:
    return VocabShard(rank * width, (rank + 1) * width, ranks * width)
