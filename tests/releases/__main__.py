"""`python -m tests.releases [VERSION ...] [--path DIR]`: the matrix, and exit status 1 unless all is well.

Without arguments every release, whose result then goes to result.json, docs/releases.md and README.md. With `--path`, a
tree of Megatron-LM that is unpacked there, of whatever version, which is how an unpublished one is tried.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

from tests.releases import matrix
from tests.releases.run import Unusable, check
from tests.releases.wheels import RELEASES, fetch


def main(command: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.releases", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("versions", nargs="*", metavar="VERSION", help=f"default: {' '.join(RELEASES)}")
    parser.add_argument("--path", type=Path, help="a folder that holds `megatron`, instead")
    arguments = parser.parse_args(command)
    found: matrix.Matrix = {}
    broken = []
    if arguments.path is not None:
        jobs = {_version(arguments.path): arguments.path}
    else:
        jobs = dict.fromkeys(arguments.versions or RELEASES)
    for version, path in jobs.items():
        started = time.perf_counter()
        try:
            found[version] = check(version, fetch(version) if path is None else path.resolve())
        except (Unusable, subprocess.CalledProcessError) as error:
            broken.append(f"{version}: {error}")
        print(f"megatron-core {version}: {time.perf_counter() - started:.0f} s", flush=True)
    if found:
        print(f"\n{matrix.table(found)}\n")
    broken += matrix.failures(found)
    if len(found) == len(RELEASES):
        broken += matrix.unseen(found)
    for line in broken:
        print(f"error: {line}", file=sys.stderr)
    if not broken and tuple(found) == RELEASES:
        matrix.save(found)
        matrix.write(found)
    return 1 if broken or not found else 0


def _version(folder: Path) -> str:
    """As the tree says it; in a process of its own."""
    command = [sys.executable, "-W", "ignore", "-c", "import megatron.core as m; print(m.__version__)"]
    environment = {"PYTHONPATH": str(folder.resolve()), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return done.stdout.split()[-1]


if __name__ == "__main__":
    sys.exit(main())
