"""The loss on given logits, one process: `python -m benchmarks.logits [--shapes 8192x128256 ...] [--dtype bfloat16]`.

Each provider's loss and gradient are checked against float64 before it is timed. Passes over the logits counted as
useful: forward one read; forward and backward three (read; read and write).
"""

from __future__ import annotations

import argparse
import platform
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.measure import copy_bandwidth, peak_extra_bytes, time_ms
from te_ce import vocab_parallel_cross_entropy

Loss = Callable[[Tensor, Tensor], Tensor]


def _eager(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), target, reduction="none")


def providers() -> dict[str, Loss]:
    """Loss per row of [N, V] logits, by name; te_ce overwrites them in backward, as in a model that drops them."""
    return {
        "te_ce": lambda logits, target: vocab_parallel_cross_entropy(logits, target, inplace=True),
        "te_ce (new buffer)": lambda logits, target: vocab_parallel_cross_entropy(logits, target, inplace=False),
        "torch eager": _eager,
        "torch.compile": torch.compile(_eager),
    }


def check(name: str, loss: Loss, logits: Tensor, target: Tensor) -> None:
    """Refuse to time a wrong answer: loss and gradient of the first rows against float64."""
    x = logits[:4].detach().clone().requires_grad_()
    (got := loss(x, target[:4])).sum().backward()
    truth_x = logits[:4].double().requires_grad_()
    (truth := F.cross_entropy(truth_x, target[:4], reduction="none")).sum().backward()
    torch.testing.assert_close(got.double(), truth.detach(), rtol=1e-5, atol=1e-5, msg=f"{name}: wrong loss")
    assert x.grad is not None
    assert truth_x.grad is not None
    torch.testing.assert_close(x.grad.double(), truth_x.grad, rtol=2.0**-6, atol=1e-6, msg=f"{name}: wrong gradient")


def measure(name: str, loss: Loss, logits: Tensor, target: Tensor, ceiling: float, runs: int) -> str:
    """One table row: milliseconds forward and forward + backward, share of the copy bandwidth, extra memory."""
    device, size = logits.device, logits.numel() * logits.element_size()
    leaf = logits.detach().requires_grad_()

    def forward() -> None:
        with torch.no_grad():
            loss(logits, target)

    def both() -> None:
        loss(leaf, target).sum().backward()
        leaf.grad = None

    read, full = time_ms(forward, device, runs), time_ms(both, device, runs)
    share = 3 * size / full.median * 1e3 / ceiling
    extra = f"{peak_extra_bytes(both) / size:9.3f}" if device.type == "cuda" else "        -"
    return f"{name:20} {read.median:9.3f} {full.median:9.3f} [{full.low:.3f}, {full.high:.3f}] {share:7.0%} {extra}"


def main() -> None:
    """Print one table per shape."""
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(prog="benchmarks.logits", description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", default=["8192x128256", "8192x32000"] if on_gpu else ["256x8192"])
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--providers", nargs="+", default=list(providers()), choices=list(providers()))
    parser.add_argument("--runs", type=int, default=30)
    options = parser.parse_args()
    device = torch.device("cuda" if on_gpu else "cpu")
    name = torch.cuda.get_device_name() if on_gpu else platform.processor() or platform.machine()
    ceiling = copy_bandwidth(device, 2.0 if on_gpu else 0.25)
    print(f"{name}, torch {torch.__version__}, {options.dtype}; copy {ceiling / 1e9:.0f} GB/s")
    for shape in options.shapes:
        rows, columns = map(int, shape.split("x"))
        logits = torch.empty(rows, columns, dtype=getattr(torch, options.dtype), device=device)
        target = torch.randint(columns, (rows,), device=device)
        print(f"\n{shape:20} {'fwd ms':>9} {'f+b ms':>9} [20%, 80%] of copy  extra/logits")
        for provider in options.providers:
            # In place turns logits into gradients: fresh ones for every provider.
            logits.normal_()
            check(provider, providers()[provider], logits, target)
            print(measure(provider, providers()[provider], logits, target, ceiling, options.runs), flush=True)


if __name__ == "__main__":
    main()
