"""One rank of a scenario: `python -m tests.faults.one_rank MODULE.FUNCTION RANK RANKS FOLDER OPTIONS`.

What the function returns is written as one line of JSON.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from tests.faults.launch import REPORT
from tests.faults.ranks import Rank


def main() -> None:
    """Run it, and leave the group as a program should: gloo's threads may abort a process that just ends."""
    scenario, rank, ranks, folder, options = sys.argv[1:]
    torch.set_num_threads(1)
    module, _, name = scenario.partition(".")
    function = getattr(importlib.import_module(f"tests.faults.{module}"), name)
    seen = function(Rank(int(rank), int(ranks), Path(folder)), **json.loads(options))
    print(REPORT + json.dumps(seen), flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
