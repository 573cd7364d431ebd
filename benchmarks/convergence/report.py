"""A README of the runs in a folder, with a table and pictures of losses, differences and gradient norms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks.convergence.curves import WINDOW, Curve, Distance, distance, is_within, read, smoothed
from benchmarks.convergence.gradients import RESULT, table
from benchmarks.plots import save
from benchmarks.results import as_markdown

_LEGEND = f"""\
Differences are from the first run of the table, in nats a token: of the training loss averaged over {WINDOW} steps (the
largest, and at the end), and of the held-out loss at the end; of the gradient's norm (before clipping, averaged
likewise) the largest relative one. A run of the same loss from another seed has other weights and another order of the
data: its distance is the spread that a choice of the seed makes, and "within" says that a run is no further away. Step
time: tokens of a step over the median speed.
"""
_COLUMNS = ["run", "loss", "held out", "largest", "at the end", "held-out", "norm", "ms a step", "MiB", "within"]


def write(folder: Path, reference: str) -> Path:
    """Write folder/README.md of the runs in `folder`, compared with the loss named `reference`."""
    curves = _first(read(folder), reference)
    base, others = curves[0], curves[1:]
    spread = next((distance(c, base) for c in others if _is_other_seed(c, base)), None)
    rows = [_row(curve, None if curve is base else distance(curve, base), spread, base) for curve in curves]
    _draw(folder / "curves.png", curves)
    shared = "Ranks share a GPU over gloo here, and several runs share it: the times say nothing of the losses."
    parts = [
        "# Is a run with te_ce the same run?",
        shared if "ranks_per_gpu" in base.command else "",
        f"- {base.model}\n- `{base.command}`, and with the other losses and seeds",
        as_markdown([list(row.values()) for row in rows], _COLUMNS),
        _LEGEND,
        "![losses, differences and gradient norms](curves.png)",
    ]
    if (folder / RESULT).exists():
        parts += ["## Gradients of one batch, tensor by tensor", table(folder / RESULT)]
    path = folder / "README.md"
    path.write_text("\n\n".join(part.strip() for part in parts if part) + "\n")
    return path


def _first(curves: list[Curve], reference: str) -> list[Curve]:
    """The runs of `reference` from the first seed in front."""
    own = [curve for curve in curves if curve.run.loss == reference and not curve.run.again]
    if not own:
        raise ValueError(f"expected a run of {reference}, found {', '.join(curve.run.name for curve in curves)}")
    base = min(own, key=lambda curve: curve.run.seed)
    return [base, *(curve for curve in curves if curve is not base)]


def _is_other_seed(curve: Curve, base: Curve) -> bool:
    return curve.run.loss == base.run.loss and curve.run.seed != base.run.seed


def _row(curve: Curve, apart: Distance | None, spread: Distance | None, base: Curve) -> dict[str, str]:
    last = smoothed(curve.train)[-1]
    row = dict.fromkeys(_COLUMNS, "")
    row |= {"run": curve.run.name, "loss": f"{last:.4f}", "held out": f"{curve.held_out[-1][1]:.4f}"}
    tokens = _tokens_per_step(curve)
    row |= {"ms a step": f"{tokens / curve.speed * 1e3:.1f}" if tokens else "", "MiB": f"{curve.peak_mib:.0f}"}
    if apart is not None:
        by = (apart.largest, apart.last, apart.held_out, apart.norms)
        row |= dict(zip(_COLUMNS[3:7], (f"{value:.1e}" for value in by), strict=True))
        if spread is not None and curve.run.seed == base.run.seed:
            row["within"] = "yes" if is_within(apart, spread) else "NO"
    return row


def _tokens_per_step(curve: Curve) -> int:
    """Global batch times sequence length, as the command has them."""
    values = dict(word.split("=", 1) for word in curve.command.split() if "=" in word)
    try:
        return int(values["train.global_batch_size"]) * int(values["model.seq_length"])
    except KeyError:
        return 0


def _draw(path: Path, curves: list[Curve]) -> None:
    figure = Figure(figsize=(9, 10), layout="constrained")
    losses, differences, norms = figure.subplots(3, 1, sharex=True)
    base = curves[0]
    for number, curve in enumerate(curves):
        width = 3.0 / (number + 1) ** 0.7  # each later curve is thinner, so that the one beneath it can still be seen
        steps = range(1, len(curve.train) + 1)
        losses.plot(steps, curve.train, linewidth=width, alpha=0.7, label=curve.run.name)
        if curve.norms:
            norms.plot(steps, curve.norms, linewidth=width, alpha=0.7)
        if curve is not base:
            apart = [abs(x - y) for x, y in zip(smoothed(curve.train), smoothed(base.train), strict=True)]
            differences.plot(range(len(steps) - len(apart) + 1, len(steps) + 1), apart, color=f"C{number}")
    _label(losses, "training loss, nats a token")
    losses.legend(fontsize=8)
    _label(differences, f"difference from {base.run.name}, mean of {WINDOW} steps")
    differences.set_yscale("symlog", linthresh=1e-4)
    _label(norms, "norm of the gradient")
    norms.set_yscale("log")
    norms.set_xlabel("step")
    save(path, figure)


def _label(axes: Any, text: str) -> None:
    axes.set_ylabel(text)
    axes.grid(alpha=0.3)
