"""The example, once per loss and seed, each run in processes of its own and in a folder of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

_CHECKOUT = Path(__file__).resolve().parents[2]
_SCRIPT = _CHECKOUT / "examples" / "pretrain_gpt.py"
ABOUT = "run.json"


class Run(NamedTuple):
    """A training run: the loss by the name that the example knows it by, and the seed of weights and data order."""

    loss: str
    seed: int
    again: bool = False

    @property
    def name(self) -> str:
        """As folder and label."""
        return f"{self.loss} {self.seed}" + (" again" if self.again else "")


def planned(losses: Sequence[str], seed: int, other_seed: int | None) -> list[Run]:
    """Every loss from one seed; the first one again from that seed and, for the spread of seeds, from another."""
    runs = [Run(loss, seed) for loss in losses]
    return runs if other_seed is None else [*runs, Run(losses[0], seed, again=True), Run(losses[0], other_seed)]


def execute(runs: list[Run], folder: Path, ranks: int, at_once: int, overrides: list[str]) -> None:
    """Train every run, `at_once` of them at a time; what a run printed is in its folder.

    Raises:
        RuntimeError: a run failed; the others are ended.
    """
    waiting, running = list(runs), dict[Run, subprocess.Popen[bytes]]()
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                run = waiting.pop(0)
                running[run] = _start(run, folder / run.name.replace(" ", "_"), ranks, overrides)
            for run, process in list(running.items()):
                if process.poll() is None:
                    continue
                del running[run]
                _finish(run, folder / run.name.replace(" ", "_"), process.returncode)
            time.sleep(0.2)
    finally:
        for process in running.values():
            process.terminate()


def _start(run: Run, folder: Path, ranks: int, overrides: list[str]) -> subprocess.Popen[bytes]:
    folder.mkdir(parents=True, exist_ok=True)
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    settings = [
        f"loss.implementation={run.loss}",
        f"train.seed={run.seed}",
        f"output.dir={json.dumps(str(folder))}",
        "check.below_unigram=null",
    ]
    command = [*launcher, str(_SCRIPT), *settings, *overrides]
    shown = ["torchrun", *launcher[2:], "examples/pretrain_gpt.py", *overrides, *settings[:2]]
    (folder / ABOUT).write_text(json.dumps({**run._asdict(), "ranks": ranks, "command": " ".join(shown)}))
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(_CHECKOUT), **os.environ}
    with (folder / "log.txt").open("wb") as log:
        return subprocess.Popen([sys.executable, *command], stdout=log, stderr=subprocess.STDOUT, env=environment)


def _finish(run: Run, folder: Path, code: int) -> None:
    """What the run said of itself in its heading goes to what is known of it."""
    log = (folder / "log.txt").read_text()
    if code:
        raise RuntimeError(f"{run.name}: ended with {code}: {log[-2000:]}")
    about = json.loads((folder / ABOUT).read_text())
    about["model"] = next((line for line in log.splitlines() if line.startswith("model: ")), "model: ?")
    (folder / ABOUT).write_text(json.dumps(about, indent=1))
