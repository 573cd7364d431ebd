"""What every option and output costs beside the plain loss: `python -m benchmarks.options [--shape 8192x128256]`.

Each variant is checked against float64 on a few rows, then forward and backward are timed on the device: loss and all
differentiable outputs that the variant asks for get a gradient, and the logits are overwritten.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.arguments import rows_and_columns
from benchmarks.measure import Stopwatch, bandwidth, restore
from te_ce import LossOutput, vocab_parallel_cross_entropy
from te_ce.outputs import OUTPUTS

PER_ROW = "per row"
DIFFERENTIABLE = ("loss", "log_probs", "entropy", "lse")
CHECKED_ROWS = 16
# Of loss and outputs relative to max(1, |truth|), and of the gradient in the 2-norm (16 bits round at 2^-9).
VALUE_BOUND, GRADIENT_BOUND = 1e-5, 4e-3


class Variant(NamedTuple):
    """Outputs and options of a call; a scale of `PER_ROW` is a tensor."""

    name: str
    outputs: tuple[str, ...] = ()
    options: dict[str, Any] = {}  # noqa: RUF012 - never changed

    def arguments(self, n_rows: int, device: torch.device) -> dict[str, Any]:
        """Keywords of the loss."""
        options = dict(self.options)
        if options.get("scale") == PER_ROW:
            options["scale"] = torch.linspace(0.5, 2.0, n_rows, device=device)
        return {"outputs": self.outputs, **options}


VARIANTS = [
    Variant("plain"),
    *(Variant(name, (name,)) for name in OUTPUTS),
    Variant("all outputs", OUTPUTS),
    Variant("label smoothing", (), {"label_smoothing": 0.1}),
    Variant("z-loss", (), {"z_loss_weight": 1e-4}),
    Variant("softcap", (), {"softcap": 30.0}),
    Variant("scale", (), {"scale": 0.7}),
    Variant("scale per row", (), {"scale": PER_ROW}),
    Variant("reproducible_tp", (), {"reproducible_tp": True}),
    Variant("all outputs, smoothing, z-loss", OUTPUTS, {"label_smoothing": 0.1, "z_loss_weight": 1e-4}),
]


def call(variant: Variant, logits: Tensor, target: Tensor) -> LossOutput:
    """The loss and outputs, as an object also where the loss is alone."""
    keywords = variant.arguments(target.numel(), target.device)
    result = vocab_parallel_cross_entropy(logits, target, inplace=True, **keywords)
    return result if isinstance(result, LossOutput) else LossOutput(result)


def gradients(result: LossOutput) -> list[Tensor]:
    """What in `result` can be differentiated."""
    return [value for name in DIFFERENTIABLE if (value := getattr(result, name)) is not None]


def backward(result: LossOutput, upstream: Tensor) -> None:
    """One backward from all that can be differentiated, each with its multiple of `upstream`."""
    values = gradients(result)
    torch.autograd.backward(values, [upstream * (number + 1) for number in range(len(values))])


def check(variant: Variant, logits: Tensor, target: Tensor) -> None:
    """AssertionError unless values and gradient of the first rows are those of the float64 twin."""
    logits, target = logits[:CHECKED_ROWS], target[:CHECKED_ROWS]
    upstream = torch.rand(target.shape, device=target.device) + 0.5
    results = []
    for x in (logits.clone().requires_grad_(), logits.double().requires_grad_()):
        result = call(variant, x, target)
        backward(result, upstream)
        results.append((result, x.grad))
    (got, grad), (truth, true_grad) = results
    for name in ("loss", *variant.outputs):
        value, expected = getattr(got, name).detach().double(), getattr(truth, name).detach().double()
        error = ((value - expected).abs() / expected.abs().clamp(min=1.0)).max()
        assert error <= VALUE_BOUND, f"{variant.name}: {name} is off by {error:.1e}, more than {VALUE_BOUND}"
    assert grad is not None
    assert true_grad is not None
    error = (grad.double() - true_grad).norm() / true_grad.norm()
    assert error <= GRADIENT_BOUND, f"{variant.name}: the gradient is off by {error:.1e}, more than {GRADIENT_BOUND}"


def time(variant: Variant, pristine: Tensor, target: Tensor, watch: Stopwatch) -> float:
    """Milliseconds of forward and backward on the device."""
    logits, upstream = pristine.clone().requires_grad_(), torch.rand(target.shape, device=target.device) + 0.5

    def prepare() -> None:
        logits.grad = None
        restore(logits, pristine)

    return watch.device_ms(lambda _: backward(call(variant, logits, target), upstream), prepare).median


def main(command: list[str] | None = None) -> dict[str, float]:
    """Check and time; prints a table, and returns the times relative to the plain loss."""
    parser = argparse.ArgumentParser(prog="benchmarks.options", description=(__doc__ or "").splitlines()[0])
    on_gpu = torch.cuda.is_available()
    parser.add_argument(
        "--shape",
        type=rows_and_columns,
        default=rows_and_columns("8192x128256" if on_gpu else "64x4096"),
        metavar="NxV",
    )
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="variants beside the plain one")
    parser.add_argument("--runs", type=int, default=20)
    arguments = parser.parse_args(command)
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    (rows, columns), dtype = arguments.shape, getattr(torch, arguments.dtype)
    pristine = torch.empty(rows, columns, dtype=dtype, device=device).normal_()
    target = torch.randint(columns, (rows,), device=device)
    watch = Stopwatch(device, arguments.runs)
    floor = 3 * pristine.numel() * pristine.element_size() / bandwidth(device).copy * 1e3
    name = torch.cuda.get_device_name() if on_gpu else "CPU"
    print(f"# {name}, torch {torch.__version__}, {rows} x {columns} {arguments.dtype}, three passes {floor:.3f} ms")
    chosen = [each for each in VARIANTS if not arguments.only or each.name in ("plain", *arguments.only)]
    ratios, plain = {}, 0.0
    for variant in chosen:
        check(variant, pristine, target)
        milliseconds = time(variant, pristine, target, watch)
        plain = plain or milliseconds
        ratios[variant.name] = milliseconds / plain
        print(f"{variant.name:32} {milliseconds:8.4f} ms  {milliseconds / plain:6.3f} x plain", flush=True)
    return ratios


if __name__ == "__main__":
    main(sys.argv[1:])
