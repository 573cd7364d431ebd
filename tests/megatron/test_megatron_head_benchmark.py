"""The benchmark of Megatron's head, on a CPU: every loss runs, agrees, and is served by who it says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_every_loss_in_turn() -> None:
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.megatron_head", "--shape", "16x32x96"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr[-2000:]
    served = {line[:20].strip(): int(line.split()[-1]) for line in done.stdout.splitlines()[-4:]}
    assert served == {"Megatron, unfused": 0, "Megatron, fused": 0, "te_ce": 1, "te_ce_linear": 1}
