"""The launcher: patch Megatron, then run a training script as if Python had been called on it.

    python -m megatron_patch [--replace-native] [--replace-te] [--strict] SCRIPT.py [arguments of the script]
    torchrun ... -m megatron_patch [the same]
    python -m megatron_patch status

`runpy.run_path` would do most of it, but takes the script out of `sys.modules` when it ends, which breaks its
exit handlers, and makes `sys.argv[0]` and `__file__` the same string, which for a direct run they are not.
"""

from __future__ import annotations

import argparse
import builtins
import importlib.machinery
import os
import sys
from types import ModuleType

from megatron_patch import PatchError, apply, patched, status
from megatron_patch.patch import sum_up


def main(arguments: list[str]) -> int:
    """Run the command line; returns the exit status, or raises what the script raises."""
    parser = argparse.ArgumentParser(
        prog="python -m megatron_patch",
        description="Run a Megatron training script with te_ce's loss available to it.",
    )
    parser.add_argument("--replace-native", action="store_true", help="serve Megatron's own losses too")
    parser.add_argument("--replace-te", action="store_true", help='serve cross_entropy_fusion_impl="te" too')
    parser.add_argument("--strict", action="store_true", help="refuse a Megatron release that is not known")
    parser.add_argument(
        "script", metavar="SCRIPT.py | status", help="script to run, or status: can Megatron be patched"
    )
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the script")
    options = parser.parse_args(arguments)
    if options.script == "status":
        if options.arguments:
            parser.error(f"status takes no arguments, got {' '.join(options.arguments)}")
        return _print_status(options.strict)
    if not os.path.isfile(options.script):
        parser.error(f"expected a script to run or the word status, but there is no file {options.script!r}")
    _find_modules_of(options.script)
    try:
        apply(replace_native=options.replace_native, replace_te=options.replace_te, strict=options.strict)
    except PatchError as error:
        return _fail(error)
    try:
        _run_script(options.script, options.arguments)
    finally:
        sum_up()
    return 0


def _print_status(strict: bool) -> int:
    # A fresh process has nothing to report; what can be shown is whether everything could be replaced here.
    try:
        with patched(replace_native=True, replace_te=True, strict=strict):
            print(status())
    except PatchError as error:
        return _fail(error)
    print("This process only tried the patch. In training, print megatron_patch.status() to see what it serves.")
    return 0


def _fail(error: PatchError) -> int:
    print(f"megatron_patch: error: {error}", file=sys.stderr)
    return 1


def _find_modules_of(script: str) -> None:
    """The script's folder in front of the module search path: what is replaced may lie there (megatron.training)."""
    if not getattr(sys.flags, "safe_path", False):  # under -P Python itself puts no folder in front
        sys.path[0] = os.path.dirname(os.path.realpath(script))


def _run_script(script: str, arguments: list[str]) -> None:
    path = os.path.abspath(script)
    loader = importlib.machinery.SourceFileLoader("__main__", path)
    code = loader.source_to_code(loader.get_data(path), path)
    module = ModuleType("__main__")
    vars(module).update(
        __file__=path, __loader__=loader, __package__=None, __cached__=None, __spec__=None, __builtins__=builtins
    )
    sys.modules["__main__"] = module  # for good: pickle, multiprocessing and exit handlers look the script up there
    sys.argv[:] = [script, *arguments]
    exec(code, vars(module))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
