"""What a run shows: a progress bar and log lines on rank 0, a CSV with a row a step, and the curves as a PNG."""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

if TYPE_CHECKING:
    from gpt.config import Config
    from gpt.device import Ranks
    from gpt.train import History

COLUMNS = [
    "run",
    "step",
    "train_loss",
    "gradient_norm",
    "held_out_loss",
    "learning_rate",
    "tokens_per_second",
    "peak_memory_mib",
]


class Recorder:
    """Writes only on rank 0; on other ranks every call does nothing."""

    def __init__(self, folder: Path, active: bool) -> None:
        self.folder, self.active = folder, active
        self.run, self.steps = "", 0
        self.bar: Any = None
        if active:
            folder.mkdir(parents=True, exist_ok=True)
            self.file = (folder / "metrics.csv").open("w", newline="", encoding="utf-8")
            self.rows = csv.DictWriter(self.file, COLUMNS)
            self.rows.writeheader()

    def say(self, text: str) -> None:
        """One line, above the progress bar."""
        if self.active:
            tqdm.write(text)

    def begin(self, run: str, steps: int) -> None:
        self.run, self.steps = run, steps
        if self.active:
            # disable=None: no bar where the output is not a terminal; the log lines remain.
            self.bar = tqdm(total=steps, desc=run, unit="step", disable=None, dynamic_ncols=True, leave=False)

    def advance(self) -> None:
        if self.active:
            self.bar.update()

    def log(
        self,
        step: int,
        losses: list[float],
        norms: list[float | None],
        speed: float,
        peak: float,
        learning_rate: float,
    ) -> None:
        """The steps up to `step` that were not logged yet; speed in tokens/s, peak in MiB."""
        if not self.active:
            return
        first = step - len(losses) + 1
        for number, (loss, norm) in enumerate(zip(losses, norms, strict=True), start=first):
            self._row(step=number, train_loss=f"{loss:.9g}", gradient_norm="" if norm is None else f"{norm:.9g}")
        self._row(
            step=step,
            learning_rate=f"{learning_rate:.6g}",
            tokens_per_second=f"{speed:.0f}",
            peak_memory_mib=f"{peak:.1f}",
        )
        self.say(
            f"{self.run} step {step:4d}/{self.steps}  loss {losses[-1]:7.4f}  {speed:9,.0f} tokens/s  "
            f"peak {peak:8,.0f} MiB"
        )

    def held_out(self, step: int, loss: float) -> None:
        if self.active:
            self._row(step=step, held_out_loss=f"{loss:.9g}")
            self.say(f"{self.run} step {step:4d}/{self.steps}  held-out loss {loss:.4f}")

    def end(self) -> None:
        if self.active:
            self.bar.close()

    def close(self) -> None:
        if self.active:
            self.file.close()

    def _row(self, **values: Any) -> None:
        self.rows.writerow({"run": self.run, **values})
        self.file.flush()  # an interrupted run keeps what it measured


def heading(config: Config, ranks: Ranks, tp: int, vocab_size: int, padded: int) -> str:
    """One line that names what runs on what."""
    import megatron.core
    import torch

    device = torch.cuda.get_device_name(ranks.device) if ranks.device.type == "cuda" else "CPU"
    return (
        f"model: {config.model.num_layers} layers of {config.model.hidden_size}, {config.model.dtype}, vocabulary "
        f"{vocab_size} padded to {padded}; tensor parallel {tp} x data parallel {ranks.world_size // tp} on {device}; "
        f"megatron-core {megatron.core.__version__}, torch {torch.__version__}"
    )


def conclude(config: Config, runs: list[History], unigram_entropy: float, recorder: Recorder) -> int:
    """Draws the curves, says how the run ended, and returns the exit code: 1 if it missed check.below_unigram."""
    ours = runs[0]
    final = ours.held_out[-1][1]
    below = unigram_entropy - final
    claim = (
        f"held-out loss {final:.4f} is {abs(below):.4f} nats {'above' if below < 0 else 'below'} "
        f"the unigram entropy {unigram_entropy:.4f}"
    )
    lines = [claim] + ([comparison(runs)] if len(runs) == 3 else [])
    picture = recorder.folder / "loss.png"
    plot(runs, unigram_entropy, "\n".join(lines), picture)
    for line in [*lines, f"curves: {picture}, numbers: {recorder.folder / 'metrics.csv'}"]:
        recorder.say(line)
    asked = config.check.below_unigram
    if asked is None or below >= asked:  # a NaN loss fails
        return 0
    print(
        f"pretrain_gpt.py: error: check.below_unigram: expected at least {asked} nats, found {below:.4f}; "
        "train longer, or set check.below_unigram=null for a run that is meant to be short",
        file=sys.stderr,
    )
    return 1


def differences(a: History, b: History) -> list[float]:
    """The absolute difference of the training loss at each step, in nats."""
    return [abs(x - y) for x, y in zip(a.train, b.train, strict=True)]


def comparison(runs: list[History]) -> str:
    """`runs`: ours, Megatron's, and Megatron's again from the same seed."""
    ours, other, again = runs
    return (
        f"largest difference of the training loss over {len(ours.train)} steps: "
        f"{ours.name} and {other.name} {max(differences(ours, other)):.2e}, "
        f"{other.name} twice from the same seed {max(differences(other, again)):.2e}"
    )


def plot(runs: list[History], unigram_entropy: float, note: str, path: Path) -> None:
    """Training and held-out loss over the steps; below them, if runs were compared, their differences."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    compared = len(runs) == 3
    figure, axes = plt.subplots(
        2 if compared else 1, 1, figsize=(8, 7 if compared else 5), sharex=True, squeeze=False, layout="constrained"
    )
    losses = axes[0, 0]
    _plot_losses(losses, runs, unigram_entropy)
    losses.set_title(note, fontsize=8)
    if compared:
        _plot_differences(axes[1, 0], runs)
    axes[-1, 0].set_xlabel("step")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _plot_losses(axes: Any, runs: list[History], unigram_entropy: float) -> None:
    for number, run in enumerate(runs):
        # Each later curve is thinner, so that the one beneath it can still be seen.
        steps = range(1, len(run.train) + 1)
        (line,) = axes.plot(steps, run.train, linewidth=2.4 / (number + 1), alpha=0.7, label=f"{run.name}, training")
        at, held_out = zip(*run.held_out, strict=True)
        axes.plot(at, held_out, "os^"[number] + "-", color=line.get_color(), markeredgecolor="black", label="held out")
    axes.axhline(unigram_entropy, color="grey", linestyle=":", label=f"unigram entropy {unigram_entropy:.3f}")
    axes.set_ylabel("loss (nats per token)")
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)


def _plot_differences(axes: Any, runs: list[History]) -> None:
    ours, other, again = runs
    for a, b, label in (
        (ours, other, f"{ours.name} and {other.name}"),
        (other, again, f"{other.name} twice from the same seed"),
    ):
        values = differences(a, b)
        axes.plot(range(1, len(values) + 1), values, linewidth=1, label=label)
    axes.set_yscale("symlog", linthresh=1e-8)  # a difference of exactly 0 has its place
    axes.set_ylim(bottom=0)
    axes.set_ylabel("difference of the training loss")
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
