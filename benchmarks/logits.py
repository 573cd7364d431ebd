"""The loss on given logits, one process: `python -m benchmarks.logits [--shapes 8192x128256 ...] [--out DIR]`.

Every provider's loss and gradient are checked against float64, then it is timed: forward without gradients, backward,
both. Options that change the problem are measured beside the plain one, by whoever supports them.
"""

from __future__ import annotations

import argparse
import sys

import torch
import torch.distributed as dist

from benchmarks.arguments import add_arguments
from benchmarks.compare import Setting, ceilings, run
from benchmarks.measure import Stopwatch
from benchmarks.providers import LOADERS
from benchmarks.results import Row

# Vocabularies of common models at 8192 rows, two of them odd; rows at one vocabulary; one where launches dominate.
VOCABULARIES = [16000, 32000, 50257, 64128, 128256, 151936, 256000]
ROWS = [1024, 2048, 4096, 16384]
GPU_SHAPES = [*(f"8192x{columns}" for columns in VOCABULARIES), *(f"{rows}x128256" for rows in ROWS), "2048x16000"]
CPU_SHAPES = ["256x8192"]


def main(command: list[str] | None = None) -> list[Row]:
    """Run the command line; the rows are also returned."""
    command = sys.argv[1:] if command is None else command
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(prog="benchmarks.logits", description=__doc__.splitlines()[0])
    add_arguments(parser, GPU_SHAPES if on_gpu else CPU_SHAPES, 20, list(LOADERS))
    arguments = parser.parse_args(command)
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    setting = Setting("logits", Stopwatch(device, arguments.runs), ceilings(device))
    started_here = not dist.is_initialized()
    try:
        return run(arguments, command, setting)
    finally:
        # Megatron's provider may have made a process group.
        if started_here and dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
