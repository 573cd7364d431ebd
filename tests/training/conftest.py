"""Runs of Megatron's own training program on this CPU, each in processes of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.releases.wheels import CHECKOUT, RELEASE, fetch

HERE = Path(__file__).parent
MODEL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 2 --global-batch-size 4 --lr 1e-3 --tokenizer-type NullTokenizer --vocab-size 1000 "
    "--transformer-impl local --no-persist-layer-norm --no-gradient-accumulation-fusion --no-masked-softmax-fusion "
    "--distributed-backend gloo --log-interval 1 --eval-iters 1 --eval-interval 4 --seed 1234"
)


_IMPORTS = "from tests.support import cpu_cuda; cpu_cuda.install(); import megatron.training"


class Run(NamedTuple):
    """What a training run printed.

    Attributes:
        losses: of every iteration that was run: every "NAME loss", and "grad norm".
        evaluated: the losses of validation and test at the end.
        text: all of it.
    """

    losses: dict[int, dict[str, float]]
    evaluated: list[float]
    text: str

    @property
    def served(self) -> list[int]:
        """Losses served, by every process that says so."""
        return [int(count) for count in re.findall(r"losses served in this process: triton 0, torch (\d+)", self.text)]


Train = Callable[..., Run]


@pytest.fixture(scope="session")
def release() -> Path:
    """Folder of a megatron-core with a training program: that of $TE_CE_RELEASE, else one that runs on this Python."""
    given = os.environ.get(RELEASE)
    folder = Path(given) if given else fetch("0.19.2" if sys.version_info >= (3, 12) else "0.17.1")
    if not (folder / "megatron" / "training").is_dir():
        pytest.skip("this release has no training program")
    command = [sys.executable, "-W", "ignore", "-c", _IMPORTS]
    done = subprocess.run(command, env=_environment(folder), capture_output=True, text=True, check=False)
    if done.returncode and given is not None and sys.version_info < (3, 12):
        pytest.skip("this release's training program needs Python 3.12")
    assert done.returncode == 0, f"megatron.training does not import: {done.stderr[-2000:]}"
    return folder


@pytest.fixture(scope="session")
def train(release: Path) -> Train:
    """`train("te_ce", "--more arguments", ranks=2)`; without a loss, Megatron alone, unpatched."""

    def run(loss: str | None, more: str = "", ranks: int = 2, iterations: int = 4, data: str = "--mock-data") -> Run:
        chosen = f"--cross-entropy-loss-fusion --cross-entropy-fusion-impl {loss}" if loss else ""
        script = [str(HERE / "run_on_cpu.py"), *([] if loss else ["--plain"]), "examples/megatron_pretrain.py"]
        arguments = f"{MODEL} {data} --train-iters {iterations} {chosen} {more}".split()
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        done = subprocess.run(
            [sys.executable, *launcher, *script, *arguments],
            cwd=CHECKOUT,
            env=_environment(release),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=200,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-4000:]
        return _read(done.stdout)

    return run


@pytest.fixture(scope="session")
def plain(train: Train) -> Train:
    """Megatron alone, each configuration once in a session."""
    known: dict[Any, Run] = {}

    def run(more: str = "", **how: Any) -> Run:
        key = (more, *sorted(how.items()))
        if key not in known:
            known[key] = train(None, more, **how)
        return known[key]

    return run


def _environment(folder: Path) -> dict[str, str]:
    ours = {
        "PYTHONPATH": os.pathsep.join([str(folder), str(CHECKOUT)]),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONWARNINGS": "ignore",
        "NCCL_ALGO": "Ring",  # deterministic mode wants to see it
    }
    drop = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TRITON_INTERPRET")
    return {name: value for name, value in os.environ.items() if name not in drop} | ours


def _read(text: str) -> Run:
    losses = {}
    for number, line in re.findall(r"iteration +(\d+)/ +\d+ \|(.*)", text):
        found = re.findall(r"(\w+ loss|grad norm): ([\d.E+-]+)", line)
        losses[int(number)] = {name: float(value) for name, value in found}
    evaluated = re.findall(r"(?:validation|test) set \| lm loss value: ([\d.E+-]+)", text)
    return Run(losses, [float(value) for value in evaluated], text)
