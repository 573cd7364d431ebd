"""`torchrun ... run_on_cpu.py ARGUMENTS`: `python -m megatron_patch ARGUMENTS` where there is no GPU; for tests only.

The first argument "--plain" runs the script without the patch.
"""

from __future__ import annotations

import runpy
import sys

from tests.support import cpu_cuda

if __name__ == "__main__":
    cpu_cuda.install()
    cpu_cuda.patch_megatron()
    arguments = sys.argv[1:]
    if arguments[0] == "--plain":
        sys.argv[:] = arguments[1:]
        runpy.run_path(arguments[1], run_name="__main__")
    else:
        from megatron_patch.__main__ import main

        sys.exit(main(arguments))
