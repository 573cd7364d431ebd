"""Inputs of the numeric tests: one factor at a time around a plain case, then a few pairs."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from te_ce import LossOptions


@dataclasses.dataclass(frozen=True)
class Case:
    """Logits drawn at `scale` around `offset`, targets with some ignored rows, any upstream gradient.

    Attributes:
        widths: columns of each shard.
        confident: rows whose target has this probability, approximately; None for random targets.
    """

    name: str
    rows: tuple[int, ...] = (2, 5)
    widths: tuple[int, ...] = (96,)
    dtype: torch.dtype = torch.float32
    target_dtype: torch.dtype = torch.int64
    scale: float = 3.0
    offset: float = 0.0
    confident: float | None = None
    options: LossOptions = dataclasses.field(default_factory=LossOptions)

    def __str__(self) -> str:
        return self.name

    @property
    def is_smoothed_shard(self) -> bool:
        """Whether smoothing over a shard differs from smoothing over the vocabulary."""
        return self.options.label_smoothing > 0 and sum(width > 0 for width in self.widths) > 1

    def draw(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Logits [rows, sum of widths], target [rows], gradient of the loss [rows]; the same on every call."""
        random = torch.Generator().manual_seed(20)
        columns = sum(self.widths)
        classes = columns if self.options.vocab_size is None else self.options.vocab_size
        logits = torch.randn(*self.rows, columns, generator=random) * self.scale + self.offset
        target = torch.randint(classes, self.rows, generator=random)
        if self.confident is not None:
            rest = logits.scatter(-1, target[..., None], -torch.inf)[..., :classes].logsumexp(-1)
            raised = rest + torch.tensor(self.confident / (1 - self.confident)).log()
            logits.scatter_(-1, target[..., None], raised[..., None])
        ignored = torch.rand(self.rows, generator=random) < 0.2
        ignored.view(-1)[0] = False
        target[ignored] = self.options.ignore_index
        g = torch.randn(self.rows, generator=random)
        return (
            logits.to(self.dtype).to(device),
            target.to(self.target_dtype).to(device),
            g.to(device),
        )


_UNIFORM = LossOptions(label_smoothing=0.1)
_OTHERS = LossOptions(label_smoothing=0.1, smoothing="others")

CASES = [
    Case("plain"),
    Case("bfloat16", dtype=torch.bfloat16),
    Case("float16", dtype=torch.float16),
    Case("int32_targets", target_dtype=torch.int32),
    Case("no_leading_dims", rows=()),
    Case("three_leading_dims", rows=(2, 2, 3)),
    # More than one statistics block (4096) and gradient tile (2048), the last one ragged.
    Case("two_blocks", rows=(3,), widths=(5000,)),
    Case("two_blocks_smoothed", rows=(3,), widths=(5000,), options=_UNIFORM),
    Case("odd_vocabulary_bf16", rows=(3,), widths=(4097,), dtype=torch.bfloat16, options=_OTHERS),
    Case("one_below_a_block", rows=(3,), widths=(127,)),
    Case("one_above_a_block", rows=(3,), widths=(129,)),
    Case("two_classes", rows=(4,), widths=(2,)),
    Case("uniform", options=_UNIFORM),
    Case("others", options=_OTHERS),
    Case("heavy_smoothing", options=LossOptions(label_smoothing=0.9)),
    Case("tp2", widths=(48, 48)),
    Case("tp2_uniform", widths=(48, 48), options=_UNIFORM),
    Case("tp2_others_bf16", widths=(48, 48), dtype=torch.bfloat16, options=_OTHERS),
    Case("tp2_float16", widths=(48, 48), dtype=torch.float16),
    Case("tp3_uneven_others", widths=(50, 7, 39), options=_OTHERS),
    Case("tp3_uneven_uniform", widths=(50, 7, 39), options=_UNIFORM),
    Case("tp4_empty_shards", widths=(40, 0, 56, 0), options=_UNIFORM),
    Case("tp4_one_column_each", widths=(1, 1, 1, 1), options=_OTHERS),
    Case("padding", widths=(96,), options=LossOptions(vocab_size=90)),
    Case(
        "padding_bf16_smoothed", widths=(96,), dtype=torch.bfloat16, options=dataclasses.replace(_OTHERS, vocab_size=90)
    ),
    Case("tp2_padding_smoothed", widths=(48, 48), options=dataclasses.replace(_UNIFORM, vocab_size=61)),
    # The last rank holds padding only.
    Case("tp3_padding_rank", widths=(32, 32, 32), options=dataclasses.replace(_OTHERS, vocab_size=64)),
    Case("ignored_class_id", options=LossOptions(ignore_index=3)),
    Case("ignored_class_id_smoothed", options=LossOptions(ignore_index=3, label_smoothing=0.1)),
    Case("offset_1e4", offset=1e4),
    Case("offset_1e4_smoothed_tp2", widths=(48, 48), offset=1e4, options=_UNIFORM),
    Case("wide_range", scale=40.0),
    # The max falls in the first, a middle or the last block: the running max rises and the lanes are rescaled.
    Case("rising_max", rows=(6,), widths=(9000,), scale=15.0, options=_UNIFORM),
    Case("confident_0.9_bf16", confident=0.9, dtype=torch.bfloat16),
    Case("confident_0.99_bf16", confident=0.99, dtype=torch.bfloat16),
    Case("confident_0.999_bf16", confident=0.999, dtype=torch.bfloat16),
    Case("confident_0.999_float16", confident=0.999, dtype=torch.float16),
    Case("confident_0.999_tp2", confident=0.999, widths=(48, 48)),
]
