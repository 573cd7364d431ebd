"""Inputs of the tests of the whole loss: every option alone, then pairs, all with every output and random gradients.

Each is cut for one, two and four ranks: uneven shards, an empty one, and where there is padding a rank with nothing
else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from te_ce import LossOptions, VocabShard
from te_ce.outputs import OUTPUTS, OutputGrads
from te_ce.problem import ShardProblem
from tests.support.bounds import check_gradient, check_predictions, check_value
from tests.support.dense import dense
from tests.support.subject import Subject


class Drawn(NamedTuple):
    """Logits [.., columns], target [..], options with the scale of each row, if any, and upstream gradients [..]."""

    logits: Tensor
    target: Tensor
    options: LossOptions
    grads: OutputGrads

    @property
    def row_scale(self) -> Tensor | None:
        return self.options.scale if isinstance(self.options.scale, Tensor) else None


@dataclasses.dataclass(frozen=True)
class WholeCase:
    """Logits drawn at `spread` around `offset`, some rows ignored.

    Attributes:
        has_row_scale: every row gets a scale of its own, of either sign.
        confident: rows whose target has this probability, approximately; None for random targets.
        is_masked: a third of the columns are -inf in every row, but not the target's.
    """

    name: str
    options: LossOptions = dataclasses.field(default_factory=LossOptions)
    has_row_scale: bool = False
    rows: tuple[int, ...] = (2, 2)
    columns: int = 96
    dtype: torch.dtype = torch.float32
    spread: float = 3.0
    offset: float = 0.0
    confident: float | None = None
    is_masked: bool = False

    def __str__(self) -> str:
        return self.name

    def widths(self, ranks: int) -> tuple[int, ...]:
        """Uneven shards for 1, 2, 3 or 4 ranks; the second of more than two is empty."""
        n = self.columns
        first, third = n * 5 // 12, n * 11 // 32
        return {1: (n,), 2: (n - first, first), 3: (first, 0, n - first), 4: (first, 0, third, n - first - third)}[
            ranks
        ]

    def draw(self, device: torch.device) -> Drawn:
        """The same on every call."""
        random = torch.Generator().manual_seed(21)
        classes = self.columns if self.options.vocab_size is None else self.options.vocab_size
        x = torch.randn(*self.rows, self.columns, generator=random) * self.spread + self.offset
        target = torch.randint(classes, self.rows, generator=random)
        if self.is_masked:
            hidden = torch.rand(x.shape, generator=random) < 0.33
            x[hidden.scatter(-1, target[..., None], False)] = -torch.inf
        options = self.options
        if self.has_row_scale:
            scale = torch.rand(self.rows, generator=random) + 0.5
            scale.view(-1)[::3] *= 1 if self.is_masked else -1
            options = dataclasses.replace(options, scale=scale.to(device))
        if self.confident is not None:
            factor = float(self.options.scale)  # type: ignore[arg-type]
            rest = (factor * x).scatter(-1, target[..., None], -torch.inf)[..., :classes].logsumexp(-1)
            raised = rest + torch.tensor(self.confident / (1 - self.confident)).log()
            x.scatter_(-1, target[..., None], raised[..., None] / factor)
        ignored = torch.rand(self.rows, generator=random) < 0.2
        ignored.view(-1)[:2] = torch.tensor([False, True])
        target[ignored] = self.options.ignore_index
        grads = OutputGrads(*(torch.randn(self.rows, generator=random).to(device) for _ in OutputGrads._fields))
        return Drawn(x.to(self.dtype).to(device), target.to(device), options, grads)


class Result(NamedTuple):
    """What one rank got: loss and outputs [..] by name, and the gradient of its columns."""

    values: dict[str, Tensor]
    grad: Tensor


def run_whole(
    subject: Subject,
    drawn: Drawn,
    widths: Sequence[int],
    outputs: tuple[str, ...] = OUTPUTS,
    *,
    equal_shards: bool = False,
) -> list[Result]:
    """Logits cut into shards of `widths`, as that many ranks would compute them; outputs in any subset.

    Args:
        equal_shards: as where no shard is declared.
    """
    logits, target, options, grads = drawn
    plain = options if drawn.row_scale is None else dataclasses.replace(options, scale=1.0)
    starts = [sum(widths[:rank]) for rank in range(len(widths))]
    shards = [VocabShard(start, start + width, sum(widths)) for start, width in zip(starts, widths, strict=True)]
    problems = [ShardProblem.resolve(plain, shard, len(shards), outputs, equal_shards) for shard in shards]
    parts = [logits[..., shard.start : shard.stop].contiguous() for shard in shards]
    backend = subject.backend
    gathered = torch.cat(
        [
            backend.row_statistics(part, target, each, drawn.row_scale)
            for part, each in zip(parts, problems, strict=True)
        ]
    )
    results = []
    for part, problem in zip(parts, problems, strict=True):
        loss, saved, others = backend.merge_statistics(gathered, target, problem, drawn.row_scale)
        out = torch.full_like(part, torch.nan)
        backend.logits_gradient(part, target, grads, saved, out, problem, drawn.row_scale)
        results.append(Result({"loss": loss, **dict(zip(outputs, others, strict=True))}, out))
    return results


def check_whole(subject: Subject, drawn: Drawn, results: Sequence[Result]) -> None:
    """Values of every rank within the bounds and bit-identical; the gradient of all shards within its bound."""
    logits, target, options, grads = drawn
    truth = dense(logits, target, options, grads)
    for result in results:
        for name, value in result.values.items():
            assert value.shape == target.shape, name
            assert torch.equal(value, results[0].values[name]) or value.isnan().any(), f"{name}: ranks disagree"
            if name == "predictions":
                check_predictions(value, truth, options)
            else:
                assert value.dtype == torch.promote_types(logits.dtype, torch.float32), name
                check_value(name, value, truth, target, options)
    grad = torch.cat([result.grad for result in results], -1)
    check_gradient(grad, truth, logits, target, options, grads, subject.allowed_ulps(logits.dtype))


_SCALED = LossOptions(scale=0.7)
_CAPPED = LossOptions(softcap=2.0)
_Z_LOSS = LossOptions(z_loss_weight=0.05)
_UNIFORM = LossOptions(label_smoothing=0.1)
_OTHERS = LossOptions(label_smoothing=0.1, smoothing="others")
_PADDED = LossOptions(vocab_size=61)
_ALL = LossOptions(
    scale=1.25, softcap=4.0, z_loss_weight=0.02, label_smoothing=0.1, smoothing="others", vocab_size=61, ignore_index=3
)
_BF16, _FP16 = torch.bfloat16, torch.float16
_with = dataclasses.replace

WHOLE_CASES = [
    # Each option alone.
    WholeCase("plain"),
    WholeCase("plain_bf16", dtype=_BF16),
    WholeCase("plain_fp16", dtype=_FP16),
    WholeCase("no_leading_dims", rows=(2,), columns=5),
    WholeCase("one_column_or_two_each", columns=6, options=_OTHERS),
    WholeCase("scale_power_of_two", LossOptions(scale=0.5)),
    WholeCase("scale", _SCALED),
    WholeCase("scale_negative_bf16", LossOptions(scale=-1.5), dtype=_BF16),
    WholeCase("row_scale", has_row_scale=True),
    WholeCase("softcap", _CAPPED),
    WholeCase("softcap_wide_bf16", LossOptions(softcap=30.0), dtype=_BF16, spread=20.0),
    WholeCase("softcap_steep", LossOptions(softcap=0.5), spread=1.0),
    WholeCase("z_loss", _Z_LOSS),
    WholeCase("z_loss_heavy", LossOptions(z_loss_weight=2.0), offset=10.0),
    WholeCase("uniform", _UNIFORM),
    WholeCase("others", _OTHERS),
    WholeCase("padded", _PADDED),
    WholeCase("masked", is_masked=True),
    WholeCase("ignored_class_id", LossOptions(ignore_index=3)),
    WholeCase("confident_0.9", confident=0.9),
    WholeCase("confident_0.999_bf16", confident=0.999, dtype=_BF16),
    WholeCase("confident_1", confident=1 - 1e-6),
    WholeCase("offset_1e4", offset=1e4),
    WholeCase("wide_range", spread=40.0),
    WholeCase("two_blocks", rows=(3,), columns=5000),
    # Pairs.
    WholeCase("scale_softcap", _with(_CAPPED, scale=0.7)),
    WholeCase("scale_z_loss", _with(_Z_LOSS, scale=0.7)),
    WholeCase("scale_uniform_fp16", _with(_UNIFORM, scale=-0.7), dtype=_FP16),
    WholeCase("scale_negative_padded", _with(_PADDED, scale=-2.0), offset=9.0),
    WholeCase("scale_masked", LossOptions(scale=2.0), is_masked=True),
    WholeCase("scale_confident", LossOptions(scale=2.0), confident=0.99),
    WholeCase("row_scale_softcap", _CAPPED, has_row_scale=True),
    WholeCase("row_scale_z_loss", _Z_LOSS, has_row_scale=True),
    WholeCase("row_scale_others_bf16", _OTHERS, has_row_scale=True, dtype=_BF16),
    WholeCase("row_scale_masked_padded", _PADDED, has_row_scale=True, is_masked=True),
    WholeCase("softcap_z_loss_fp16", _with(_CAPPED, z_loss_weight=0.05), dtype=_FP16),
    WholeCase("softcap_others", _with(_CAPPED, label_smoothing=0.1, smoothing="others")),
    WholeCase("softcap_padded", _with(_PADDED, softcap=40.0), offset=-50.0),
    WholeCase("softcap_masked_uniform", _with(_UNIFORM, softcap=2.0), is_masked=True),
    WholeCase("z_loss_others", _with(_OTHERS, z_loss_weight=0.05)),
    WholeCase("z_loss_uniform_bf16", _with(_UNIFORM, z_loss_weight=0.05), dtype=_BF16),
    WholeCase("z_loss_masked_padded", _with(_PADDED, z_loss_weight=0.05), is_masked=True),
    WholeCase("z_loss_confident_bf16", _Z_LOSS, confident=0.99, dtype=_BF16),
    WholeCase("uniform_masked", _UNIFORM, is_masked=True),
    WholeCase("heavy_others_padded", LossOptions(label_smoothing=0.9, smoothing="others", vocab_size=61)),
    # All of them.
    WholeCase("all", _ALL),
    WholeCase("all_bf16", _ALL, dtype=_BF16),
    WholeCase("all_fp16_row_scale", _ALL, has_row_scale=True, dtype=_FP16),
    WholeCase("all_two_blocks", _with(_ALL, vocab_size=4700), rows=(3,), columns=5000, has_row_scale=True),
]


def case_named(name: str) -> WholeCase:
    """One of them."""
    return next(case for case in WHOLE_CASES if case.name == name)
