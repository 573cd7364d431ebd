"""Ranks as plain processes: each runs one scenario, and whatever becomes of it is collected.

No launcher that would end the others when one dies: what the survivors do is what is looked at.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
# Of the process groups; and of the whole run, after which a rank that still runs has hung.
TIMEOUT_S = 10.0
WALL_S = 60.0
# How much later than its timeout a rank may report: two cores shared by all ranks and by other tests.
SLACK_S = 6.0
REPORT = "report: "


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of one rank.

    Attributes:
        status: its exit status, negative for a signal; None: it hung, and was killed.
        seen: what it reported; empty where it did not come to that.
        log: the end of everything it wrote.
    """

    status: int | None
    seen: dict[str, Any]
    log: str


def run_ranks(scenario: str, ranks: int = 2, wall_s: float = WALL_S, **options: object) -> list[Outcome]:
    """The outcome of every rank of a scenario, in rank order.

    Args:
        scenario: module of this folder and function in it, as in "scenarios.hangs".
        wall_s: when to give up on those that still run.
        options: keywords of the function, as JSON can hold them.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        logs = [folder / f"log{rank}" for rank in range(ranks)]
        processes = [_start(scenario, rank, ranks, folder, logs[rank], options) for rank in range(ranks)]
        deadline = time.monotonic() + wall_s
        try:
            statuses = [_status(process, deadline) for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        return [_outcome(status, log.read_text(errors="replace")) for status, log in zip(statuses, logs, strict=True)]


def _start(
    scenario: str, rank: int, ranks: int, folder: Path, log: Path, options: dict[str, object]
) -> subprocess.Popen[bytes]:
    dropped = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TE_CE_CHECK_TARGETS")
    environment = {name: value for name, value in os.environ.items() if name not in dropped}
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment |= {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PYTHONWARNINGS": "ignore",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [sys.executable, "-m", "tests.faults.one_rank", scenario, str(rank), str(ranks), str(folder)]
    with log.open("wb") as file:
        return subprocess.Popen(
            [*command, json.dumps(options)], cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT
        )


def _status(process: subprocess.Popen[bytes], deadline: float) -> int | None:
    try:
        return process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return None


def _outcome(status: int | None, log: str) -> Outcome:
    reports = [line.removeprefix(REPORT) for line in log.splitlines() if line.startswith(REPORT)]
    return Outcome(status, json.loads(reports[-1]) if reports else {}, log[-3000:])
