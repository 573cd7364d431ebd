"""One process group for all per-rank tests: `torchrun --nproc-per-node N -m pytest tests/distributed`."""

from __future__ import annotations

import datetime
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1] / "megatron"))  # megatron_gpt.py and fused_head.py

# Ranks that disagree are two or more, and so are those of a mesh that one is left out of.
_OF_RANKS = ["test_agreement.py", "test_linear_checked.py", "test_megatron_linear_tp.py", "test_mesh.py"]
collect_ignore = _OF_RANKS if os.environ.get("WORLD_SIZE", "1") == "1" else []
# NCCL's collectives can be captured, gloo's cannot.
if not torch.cuda.is_available():
    collect_ignore.append("test_graphs.py")


@pytest.fixture(scope="session")
def tp_group():
    """The world group: NCCL where there are GPUs, else gloo. A rank that waits in vain fails after a minute."""
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=60))
    if torch.cuda.is_available():
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def reverted() -> Iterator[None]:
    """Megatron's own objects after every test, the failed ones included."""
    yield
    if "megatron_patch" in sys.modules:
        sys.modules["megatron_patch"].revert()
