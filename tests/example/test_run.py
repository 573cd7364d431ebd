"""The example as its user starts it: it trains with te_ce, tells a mistake in one line, and leaves no rank behind."""

from __future__ import annotations

import contextlib
import csv
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
SCRIPT = str(CHECKOUT / "examples" / "pretrain_gpt.py")
TINY = [
    "data.vocab_size=600",
    "model.hidden_size=32",
    "model.ffn_hidden_size=64",
    "model.seq_length=32",
    "model.num_layers=1",
    "train.eval_batches=1",
    "train.log_interval=1",
    "check.below_unigram=null",
]
pytestmark = pytest.mark.timeout(240)


class Launch:
    """torchrun with two ranks of the example, in its own process group as in a terminal."""

    def __init__(self, out: Path, *arguments: str) -> None:
        self.out = out
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", SCRIPT]
        command += [*arguments, f"output.dir={out}"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(CHECKOUT), "CUDA_VISIBLE_DEVICES": ""}
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
            start_new_session=True,
        )

    def finish(self) -> tuple[int, str]:
        output, _ = self.process.communicate(timeout=200)
        return self.process.returncode, output

    def ranks(self) -> list[int]:
        """The ranks that live, whoever their parent is now: found by their output folder, the launcher left out."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                arguments = (folder / "cmdline").read_bytes().split(b"\0")
                state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if f"output.dir={self.out}".encode() in arguments and int(folder.name) != self.process.pid and state != "Z":
                found.append(int(folder.name))
        return found

    def wait_for(self, text: str) -> None:
        assert self.process.stdout is not None
        seen = ""
        for line in self.process.stdout:
            seen += line
            if text in line:
                return
        pytest.fail(f"ended before '{text}':\n{seen}")


@pytest.fixture
def launch(tmp_path: Path, small_text: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator:
    started: list[Launch] = []

    def start(*arguments: str) -> Launch:
        cache = tmp_path_factory.getbasetemp() / "example-cache"
        started.append(Launch(tmp_path / "out", f"data.path={small_text}", f"data.cache={cache}", *TINY, *arguments))
        return started[-1]

    yield start
    for one in started:
        for pid in [*one.ranks(), one.process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        one.process.communicate()


def served(output: str) -> int:
    """Losses that te_ce's torch implementation served in rank 0, as megatron_patch.status() tells."""
    found = re.search(r"losses served in this process: .*\btorch (\d+)", output)
    assert found, output
    return int(found[1])


def largest_differences(output: str) -> tuple[float, float]:
    found = re.search(r"te_ce\w* and native (\S+), native twice from the same seed (\S+)", output)
    assert found, output
    return float(found[1]), float(found[2])


@pytest.mark.parametrize("ours", ["te_ce", "te_ce_linear"])
def test_trains_with_te_ce_and_agrees_with_megatron(launch, ours: str) -> None:
    running = launch(
        f"loss.implementation={ours}",
        "train.steps=12",
        "optimizer.warmup_steps=2",
        "optimizer.lr=0.01",
        "train.eval_interval=6",
        "--compare",
        "native",
    )
    code, output = running.finish()
    assert code == 0, output
    assert "Warning" not in output
    # 12 training passes and two evaluations of one pass each.
    assert served(output) == 14
    rows = list(csv.DictReader((running.out / "metrics.csv").read_text().splitlines()))
    for name in (ours, "native", "native again"):
        losses = [float(row["train_loss"]) for row in rows if row["run"] == name and row["train_loss"]]
        assert len(losses) == 12
        assert losses[-1] < losses[0] - 0.5
        assert [row["step"] for row in rows if row["run"] == name and row["held_out_loss"]] == ["6", "12"]
    difference, noise = largest_differences(output)
    assert noise == 0.0
    assert difference < 1e-4
    assert (running.out / "loss.png").stat().st_size > 10_000
    assert running.ranks() == []


def test_options_reach_the_loss_and_a_missed_claim_is_an_error(launch) -> None:
    running = launch(
        *("train.steps=8", "optimizer.warmup_steps=0", "optimizer.lr=0.01"),
        *("loss.options.label_smoothing=0.2", "check.below_unigram=9", "--compare", "native"),
    )
    code, output = running.finish()
    assert code == 1
    assert re.search(r"exitcode\s*: 1 ", output)
    assert output.count("pretrain_gpt.py: error: check.below_unigram: expected at least 9.0 nats, found ") == 1
    difference, _ = largest_differences(output)
    # Ten times what the test above allows: smoothing changes the reported loss once the model has learned.
    assert difference > 1e-3


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("model.num_attention_heads=3", "model.num_attention_heads: expected a multiple of the tensor-parallel size 2"),
        ("loss.options.label_smoothing=2", "loss.options: "),
        # Found by rank 0 alone, while the other one waits for it.
        ("data.vocab_size=300000", "data.vocab_size: expected at most the "),
    ],
)
def test_mistake_is_told_in_one_line_and_ends_all_ranks(launch, argument: str, message: str) -> None:
    running = launch(argument)
    code, output = running.finish()
    assert code == 1  # torchrun's own; that of the rank is in its summary
    assert re.search(r"exitcode\s*: 2 ", output)
    lines = [line for line in output.splitlines() if "pretrain_gpt.py: error:" in line]
    assert len(lines) == 1
    assert message in lines[0]
    assert 'pretrain_gpt.py", line' not in output
    assert running.ranks() == []


def test_without_torchrun_it_says_how_to_start() -> None:
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == (
        "pretrain_gpt.py: error: expected a start by torchrun --nproc-per-node N examples/pretrain_gpt.py ..., "
        "found none\n"
    )


@pytest.mark.parametrize("how", ["ctrl-c", "terminate the launcher", "kill one rank", "kill the launcher"])
def test_interruption_leaves_no_rank(launch, how: str) -> None:
    running = launch("train.steps=100000", "loss.implementation=native")
    running.wait_for("step   10/")
    ranks = running.ranks()
    assert len(ranks) == 2
    if how == "ctrl-c":
        os.killpg(running.process.pid, signal.SIGINT)
    elif how == "terminate the launcher":
        running.process.terminate()
    elif how == "kill one rank":
        os.kill(max(ranks), signal.SIGKILL)
    else:
        running.process.kill()
    running.process.communicate(timeout=60)
    assert running.process.returncode != 0
    until = time.monotonic() + 30
    while running.ranks() and time.monotonic() < until:
        time.sleep(0.2)
    assert running.ranks() == []
    assert (running.out / "metrics.csv").stat().st_size > 0  # what was measured is kept
