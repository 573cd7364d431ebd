"""Checked calls: the ranks tell each other what they are about to do, and a fault of one is an error of all.

Unchecked, ranks that disagree wait for each other for ever or merge statistics that do not belong together.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from te_ce import environment
from te_ce.collectives import gather_records
from te_ce.groups import group_size
from te_ce.problem import ShardProblem
from te_ce.record import TEXT_BYTES, Record, decode, describe_error, encode


def raise_for_faults(
    target: Tensor, row_scale: Tensor | None, record: Record, problem: ShardProblem, group: ProcessGroup | None
) -> None:
    """Raise on every rank of `group` if any rank has a fault or two of them disagree.

    One all-gather of RECORD_BYTES a rank, none for `group=None`, and a host synchronisation.

    Args:
        target: [..] of this rank.
        row_scale: [..] float32 of this rank, or None.
        record: of this rank's call, but for the values of these two.

    Raises:
        RuntimeError: a rank could not make the call; names it and its error.
        ValueError: the ranks disagree; names the argument and every rank's value. Or a row's scale is 0, infinite or
            NaN.
        IndexError: a rank has a bad target; names the rank within the group, the row and the value.
    """
    record = _with_values(record, target, row_scale, problem)
    if group is None:
        judge([record], problem)
    else:
        judge([decode(each) for each in gather_records(encode(record), group, target.device)], problem)


def tell_other_ranks(
    error: Exception, logits: object, group: ProcessGroup | None, options: object, fields: Mapping[str, Any]
) -> None:
    """Let the other ranks of a checked call know that this one raises `error` and will not take part.

    They wait in `raise_for_faults`. Nothing to do where the call is not checked, or there is no group to tell.

    Args:
        logits, options, fields: arguments of the call, as they came; any of them may be the wrong one.
    """
    if group is None or group_size(group) == 1:
        return
    asked_for = getattr(options, "check_targets", False) is True or fields.get("check_targets") is True
    if asked_for or environment.check_targets_may_be_requested():
        gather_records(encode(describe_error(error)), group, logits.device if isinstance(logits, Tensor) else None)


def judge(records: Sequence[Record], problem: ShardProblem) -> None:
    """Raise for the first fault in the records of all ranks: the same error on every rank, but for one that failed.

    Raises:
        RuntimeError, ValueError, IndexError: see `raise_for_faults`.
    """
    for rank, record in enumerate(records):
        if record.failed:
            raise RuntimeError(f"group: expected every rank to compute the loss, but rank {rank} raised {record.text}")
    _raise_for_facts(records)
    _raise_for_shards(records)
    for rank, record in enumerate(records):
        if record.bad_rows:
            raise IndexError(
                f"target: rank {rank} has {record.bad_rows} bad row(s), the first is row {record.row} with target "
                f"{record.value}: expected 0 <= target < {problem.classes} or ignore_index={problem.ignore_index}"
            )
        if record.bad_scales:
            raise ValueError(
                f"scale: rank {rank} has {record.bad_scales} row(s) whose scale is 0, infinite or NaN, the first is "
                f"row {record.scale_row}: expected finite numbers other than 0"
            )
    for name in ("target", "scale"):
        checksums = [getattr(record, f"{name}_checksum") for record in records]
        if len(set(checksums)) > 1:
            raise ValueError(
                f"{name}: expected the same values on every rank of the group, got some that differ, with checksums "
                f"{_by_rank(checksums)}"
            )


def _with_values(record: Record, target: Tensor, row_scale: Tensor | None, problem: ShardProblem) -> Record:
    """`record` with what is to be known of the values: which are wrong, and a checksum of all."""
    if target.numel() == 0:
        return record
    flat = target.reshape(-1).long()
    is_ignored = flat == problem.ignore_index
    bad = ((flat < 0) | (flat >= problem.classes)) & ~is_ignored
    first = bad.to(torch.int8).argmax()
    numbers = [bad.sum(), first, flat[first], _checksum(flat)]
    names = ["bad_rows", "row", "value", "target_checksum"]
    if row_scale is not None:
        scale = row_scale.reshape(-1)
        bad_scale = (~scale.isfinite() | (scale == 0.0)) & ~is_ignored
        numbers += [bad_scale.sum(), bad_scale.to(torch.int8).argmax(), _checksum(scale.view(torch.int32).long())]
        names += ["bad_scales", "scale_row", "scale_checksum"]
    values = dict(zip(names, torch.stack(numbers).tolist(), strict=True))
    return dataclasses.replace(record, **values)


def _checksum(values: Tensor) -> Tensor:
    """A sum of int64 [N], modulo 2^64, that also tells their order: each times an odd number made of its place."""
    place = torch.arange(1, values.numel() + 1, device=values.device) * 0x1E3779B97F4A7C15
    return (values * (((place ^ (place >> 29)) * 0x3F58476D1CE4E5B9) | 1)).sum()


def _raise_for_facts(records: Sequence[Record]) -> None:
    if len({record.checksum for record in records}) == 1:
        return
    stated = [record.facts for record in records]
    # Names in the order of the ranks, not of a set: every rank must come upon the same one first.
    for name in dict.fromkeys(name for facts in stated for name in facts):
        values = [facts.get(name, "nothing") for facts in stated]
        if len(set(values)) > 1:
            raise ValueError(f"{name}: expected the same on every rank of the group, got {_by_rank(values)}")
    raise ValueError(
        "options: expected the same on every rank of the group, got some that differ past the first "
        f"{TEXT_BYTES} bytes of their description"
    )


def _raise_for_shards(records: Sequence[Record]) -> None:
    if len({record.size for record in records}) > 1:
        if not any(record.declared for record in records):
            raise ValueError(
                "logits: expected as many columns on every rank of the group, as no shard is declared, got "
                f"{_by_rank([record.stop - record.start for record in records])}; declare uneven shards with "
                "shard=VocabShard(...)"
            )
        raise ValueError(
            "shard: expected the same size on every rank of the group (without a shard: columns x ranks), got "
            f"{_by_rank([record.size for record in records])}"
        )
    stop = 0
    for record in records:
        if record.start != stop:
            raise ValueError(
                "shard: expected shards that follow each other in the order of the ranks of the group, got "
                f"{_by_rank([f'[{each.start}, {each.stop})' for each in records])}"
            )
        stop = record.stop


def _by_rank(values: Sequence[object]) -> str:
    return ", ".join(f"{value} on rank {rank}" for rank, value in enumerate(values))
