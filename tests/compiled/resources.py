"""What a compiled kernel takes of the GPU, read from its cubin with the cuobjdump that Triton bundles.

Triton's own count of spills is made when a kernel is loaded, which needs a device.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from typing import NamedTuple

from triton import knobs

from tests.compiled.build import Compiled


class Usage(NamedTuple):
    """Registers per thread, and the bytes of stack and local memory per thread: where spilled registers go."""

    registers: int
    stack: int
    local: int


def _cuobjdump(cubin: bytes, option: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run(
            [knobs.nvidia.cuobjdump.path, option, file.name], capture_output=True, text=True, check=False
        )
    if done.returncode:
        raise RuntimeError(f"cuobjdump {option}: expected exit status 0, got {done.returncode}: {done.stderr.strip()}")
    return done.stdout


def resource_usage(compiled: Compiled) -> Usage:
    """What ptxas allotted to the kernel."""
    text = _cuobjdump(compiled.cubin, "-res-usage")
    found = re.findall(rf"Function {compiled.name}:\s+REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", text)
    if len(found) != 1:
        raise RuntimeError(f"cuobjdump -res-usage: expected one line for {compiled.name}, got {text!r}")
    return Usage(*map(int, found[0]))


def _instructions(compiled: Compiled) -> list[tuple[int, str]]:
    """Addresses and texts of the machine instructions."""
    line = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?);", re.MULTILINE)
    code = [(int(address, 16), text) for address, text in line.findall(_cuobjdump(compiled.cubin, "-sass"))]
    if not any("EXIT" in text for _, text in code):
        raise RuntimeError(f"cuobjdump -sass: expected the instructions of {compiled.name}, found no EXIT among them")
    return code


def local_accesses_in_loops(compiled: Compiled) -> list[str]:
    """Machine instructions inside a loop (from the target of a backward branch up to the branch) that touch local
    memory: a spill that costs time on every block."""
    code = _instructions(compiled)
    branches = [(address, re.search(r"\bBRA\b.*\b0x([0-9a-f]+)", text)) for address, text in code]
    loops = [(int(jump[1], 16), address) for address, jump in branches if jump and int(jump[1], 16) < address]
    return [
        text
        for address, text in code
        if re.search(r"\b(LDL|STL)\b", text) and any(first <= address <= last for first, last in loops)
    ]


def check_no_spills(compiled: Compiled, *, outside_loops: int = 0) -> None:
    """AssertionError if registers were spilled.

    Args:
        outside_loops: bytes of stack that are tolerated where no instruction of a loop touches them.
    """
    usage = resource_usage(compiled)
    remedy = "take a smaller block or more warps"
    if usage.stack > outside_loops or usage.local:
        raise AssertionError(
            f"{compiled.name}: expected at most {outside_loops} bytes of stack and no local memory, got {usage}; "
            f"{remedy}"
        )
    if usage.stack and (inside := local_accesses_in_loops(compiled)):
        raise AssertionError(f"{compiled.name}: expected no spills inside a loop, found {inside}; {remedy}")


def check_registers(compiled: Compiled, programs: int) -> None:
    """AssertionError unless the register file of a multiprocessor (65,536 of them) holds `programs` programs.

    A warp's registers are allotted in units of 256, which is 8 per thread.
    """
    limit = 65536 // (programs * compiled.threads) // 8 * 8
    usage = resource_usage(compiled)
    if usage.registers > limit:
        raise AssertionError(
            f"{compiled.name}: expected at most {limit} registers a thread, so that {programs} programs fit on a "
            f"multiprocessor, got {usage.registers}; take a smaller block"
        )


def check_spills_are_rare(compiled: Compiled, elements: int, stack: int) -> None:
    """AssertionError unless tiles of the gradient without target and padding, whose code comes last, spill nothing.

    Args:
        elements: of a tile, a thread: so many exponentials does that code have.
        stack: bytes that are tolerated of the other tiles.
    """
    usage = resource_usage(compiled)
    code = [text for _, text in _instructions(compiled)]
    last = max((at for at, text in enumerate(code) if re.search(r"\b(LDL|STL)\b", text)), default=-1)
    clean = sum("MUFU.EX2" in text for text in code[last + 1 :])
    if usage.stack > stack or usage.local or clean < elements:
        raise AssertionError(
            f"{compiled.name}: expected at most {stack} bytes of stack, and {elements} exponentials after the last "
            f"access to it, got {usage} and {clean}; take more registers"
        )
