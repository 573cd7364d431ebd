"""The policy-gradient example: values against dense ones on two ranks, and an exit code that can fail."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def _run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return subprocess.run(
        [*command, "examples/rl_log_probs.py", *arguments],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )


@pytest.mark.parametrize("temperature", ["1.0", "1.3"])
def test_it_learns_and_agrees_with_dense_values(temperature: str) -> None:
    done = _run("--steps", "11", "--temperature", temperature)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = re.findall(r"step +(\d+)  reward ([\d.]+)  entropy ([\d.]+)  largest error ([\d.e-]+)", done.stdout)
    assert [int(step) for step, *_ in lines] == [0, 10]
    assert float(lines[-1][1]) > float(lines[0][1]) + 0.05
    assert 0 < float(lines[-1][3]) < 1e-5


def test_nothing_learned_is_a_failure() -> None:
    done = _run("--steps", "1")
    assert done.returncode != 0
    assert "step    0" in done.stdout
