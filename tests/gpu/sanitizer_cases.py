"""Every kernel once, on shapes and addresses where an access may go wrong, for NVIDIA's compute-sanitizer.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 9 \\
        python -m tests.gpu.sanitizer_cases

and with racecheck, initcheck and synccheck. Without torch's caching every tensor is an allocation of its own: rows that
end with it, rows that begin at odd addresses, rows with gaps between them. Values are checked elsewhere; here the loss
must be finite, so that what ran was the loss.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from te_ce import LossOptions, linear_cross_entropy, vocab_parallel_cross_entropy
from te_ce.counters import served
from te_ce.outputs import OUTPUTS
from tests.conftest import make_subject
from tests.support.whole import WHOLE_CASES, run_whole

_DTYPES = (torch.bfloat16, torch.float32, torch.float16)
# One column, rows that are no multiple of 16 bytes, a block and its neighbours, several blocks, several parts of a row.
_COLUMNS = (1, 2, 7, 127, 1000, 2049, 4097, 50_257, 128_256)
_LAYOUTS = ("end of the allocation", "odd address", "gaps", "every other row")
_RICH = LossOptions(label_smoothing=0.1, z_loss_weight=0.01, softcap=20.0, scale=0.7)


def laid_out(layout: str, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """[rows, columns] at the end of its memory, behind one element, with gaps, or in every other row."""
    x = torch.randn(rows, columns, device="cuda").to(dtype)
    if layout == "odd address":
        memory = torch.empty(rows * columns + 1, dtype=dtype, device="cuda")
        return memory[1:].view(rows, columns).copy_(x)
    if layout == "gaps":
        return torch.empty(rows, columns + 3, dtype=dtype, device="cuda")[:, :columns].copy_(x)
    if layout == "every other row":
        return torch.empty(2 * rows, columns, dtype=dtype, device="cuda")[::2].copy_(x)
    return x


def on_logits() -> int:
    """Forward and backward of the loss on logits; returns how many."""
    count = 0
    for columns, dtype, layout in itertools.product(_COLUMNS, _DTYPES, _LAYOUTS):
        options, outputs = ((_RICH, OUTPUTS), (LossOptions(), ()))[count % 2]
        logits = laid_out(layout, 3, columns, dtype).requires_grad_()
        target = torch.tensor([columns - 1, -100, 0], device="cuda")
        result: Any = vocab_parallel_cross_entropy(logits, target, options=options, outputs=outputs)
        loss = result.loss if outputs else result
        loss.sum().backward()
        assert bool(loss.isfinite().all())
        count += 1
    return count


def in_place() -> int:
    """The gradient in the logits' own memory; returns how many."""
    count = 0
    for columns, layout in itertools.product(_COLUMNS, _LAYOUTS):
        logits = laid_out(layout, 3, columns, torch.bfloat16).requires_grad_()
        target = torch.tensor([columns - 1, -100, 0], device="cuda")
        vocab_parallel_cross_entropy(logits, target, inplace=True).sum().backward()
        count += 1
    return count


def sharded() -> int:
    """Shards of any width, empty ones included, merged; returns how many cases."""
    subject = make_subject("triton-cuda")
    for case in WHOLE_CASES:
        run_whole(subject, case.draw(subject.device), case.widths(4))
    return len(WHOLE_CASES)


def fused() -> int:
    """The linear loss, kept and cut in every way; returns how many."""
    count = 0
    for dtype, keep, columns in itertools.product(_DTYPES, ("recompute", 0.5, 1.0, None), (1, 300, 1003)):
        hidden = torch.randn(5, 24, device="cuda").to(dtype).requires_grad_()
        weight = torch.randn(columns, 24, device="cuda").to(dtype).requires_grad_()
        target = torch.tensor([columns - 1, -100, 0, 0, 0], device="cuda")
        how: dict[str, Any] = {"keep": keep}
        if keep is None:
            how = {"token_weights": torch.rand(5, device="cuda"), "reduction": "sum"}
        loss = linear_cross_entropy(hidden, weight, target, **how)
        loss.sum().backward()
        assert bool(loss.isfinite().all())
        count += 1
    return count


def main() -> None:
    """All of it; says how many calls there were, none of which the twin served."""
    torch.manual_seed(0)
    counts = {run.__name__: run() for run in (on_logits, in_place, sharded, fused)}
    torch.cuda.synchronize()
    assert served()["torch"] == 0
    assert served()["triton"] == sum(counts.values()) - counts["sharded"]
    print("calls:", ", ".join(f"{name} {count}" for name, count in counts.items()))


if __name__ == "__main__":
    main()
