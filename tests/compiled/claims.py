"""Claims about the code that Triton made of a kernel: widths of its memory accesses, 64-bit row offsets, no atomics.

What the kernel asks for is read from its TTIR (Triton's first level, still one operation per `tl.load`), what it got
from the PTX. So the claims need no list of the kernel's loads, and go on holding when one is added.
"""

from __future__ import annotations

import math
import re
from collections import Counter

from tests.compiled.build import Compiled

# (ld or st, bytes of one access of one thread) -> how many stand in the code.
Accesses = Counter[tuple[str, int]]

_WIDE = 16  # bytes: the widest access that every architecture has

_TTIR_ACCESS = re.compile(r"\btt\.(load|store) .*?: (?:tensor<([\dx]+)x)?!tt\.ptr<[a-z]+(\d+)>")
_PTX_ACCESS = re.compile(r"\b(ld|st)((?:[.:]+\w+)*)\.[bfsu](\d+)\b")
_PTX_ATOMIC = re.compile(r"\b(?:atom|red|multimem)\.[\w.:]+")


def wanted_accesses(compiled: Compiled) -> Accesses:
    """The accesses of a thread if every block is moved 16 bytes at a time; one access per scalar, and per vector that
    has no more elements than there are threads (edges, rows of a merge)."""
    wanted: Accesses = Counter()
    for operation, shape, bits in _TTIR_ACCESS.findall(compiled.ttir):
        elements = math.prod(map(int, shape.split("x"))) if shape else 0
        kind, size = {"load": "ld", "store": "st"}[operation], int(bits) // 8
        if not elements:
            wanted[kind, size] += 1
            continue
        per_thread = elements * size // compiled.threads
        if per_thread % _WIDE == 0 and per_thread:
            wanted[kind, _WIDE] += per_thread // _WIDE
        elif elements <= compiled.threads:
            wanted[kind, size] += 1
        else:
            raise ValueError(f"{compiled.name}: a thread has {per_thread} bytes of a block, no multiple of {_WIDE}")
    return wanted


def found_accesses(compiled: Compiled) -> Accesses:
    """The accesses to global memory in the PTX; one of 32 bytes counts as two of 16."""
    found: Accesses = Counter()
    for kind, modifiers, bits in _PTX_ACCESS.findall(compiled.ptx):
        if ".global" not in modifiers:
            continue
        vector = re.search(r"\.v(\d+)", modifiers)
        size = int(bits) // 8 * (int(vector[1]) if vector else 1)
        found[kind, min(size, _WIDE)] += max(1, size // _WIDE)
    return found


def check_wide_accesses(compiled: Compiled) -> None:
    """AssertionError unless all loads and stores of blocks are of 16 bytes, and nothing narrower is left but the
    kernel's scalars, one access each."""
    wanted, found = wanted_accesses(compiled), found_accesses(compiled)
    if not any(size == _WIDE for _, size in wanted):
        raise ValueError(f"{compiled.name}: expected blocks in its TTIR, found none")
    if wanted != found:
        raise AssertionError(
            f"{compiled.name}: expected the accesses {dict(wanted)} (kind, bytes: count), found {dict(found)} in the "
            "PTX; a mask whose bound isn't a multiple of 16 bytes makes them narrow"
        )


def check_no_atomics(compiled: Compiled) -> None:
    """AssertionError if the order of concurrent additions could change the result."""
    found = sorted(set(_PTX_ATOMIC.findall(compiled.ptx)))
    if found:
        raise AssertionError(f"{compiled.name}: expected no atomics, found {found}; sum in a fixed order")


def check_row_offsets(compiled: Compiled) -> None:
    """AssertionError unless every product with a stride is 64-bit, and every stride of an outer row dimension is used.

    A 32-bit product of a row and its stride overflows at 2^31 elements.
    """
    signature = compiled.ttir[compiled.ttir.index("tt.func public") :].split("\n", 1)[0]
    strides = {name: name for name in re.findall(r"%(\w*stride\w*):", signature)}
    multiplied = set()
    # In order of definition: a stride of another width, or splatted, is still that stride.
    for line in compiled.ttir.splitlines():
        if copied := re.match(r"\s*%(\S+) = (?:arith\.(?:extsi|trunci)|tt\.splat) %(\w+) :", line):
            if copied[2] in strides:
                strides[copied[1]] = strides[copied[2]]
        elif product := re.match(r"\s*%\S+ = arith\.muli %(\w+), %(\w+)\b.*? : (?:tensor<\d+x)?(i\d+)", line):
            factors = {strides[name] for name in product.groups()[:2] if name in strides}
            if factors and product[3] != "i64":
                raise AssertionError(
                    f"{compiled.name}: expected 64-bit row offsets, found a product of {sorted(factors)} in "
                    f"{product[3]}; make the row tl.int64 first"
                )
            multiplied |= factors
    # A tensor that the kernel is compiled without leaves its strides behind.
    pointers = set(re.findall(r"%(\w+)_ptr:", signature))
    there = {name for name in strides.values() if name.partition("_stride")[0] in pointers}
    unused = {name for name in there if name.endswith("_outer")} - multiplied
    if unused or not multiplied:
        raise AssertionError(f"{compiled.name}: expected products with every stride, found none with {sorted(unused)}")


def check_fp_fusion(compiled: Compiled, expected: bool) -> None:
    """AssertionError unless contraction of a * b + c was asked for explicitly, and happened exactly if expected."""
    asked = compiled.keywords.get("enable_fp_fusion")
    if asked is not expected or compiled.options["enable_fp_fusion"] is not expected:
        raise AssertionError(
            f"{compiled.name}: expected enable_fp_fusion={expected} from the launcher, got {asked}, compiled with "
            f"{compiled.options['enable_fp_fusion']}; pass COMPILE_OPTIONS"
        )
    # Without .ftz: that is the code of exp and log in Nvidia's library, the same either way.
    fused = "fma.rn.f32" in compiled.ptx
    if fused is not expected and not (fused and "math.fma" in compiled.ttir):
        raise AssertionError(f"{compiled.name}: expected fma.rn.f32 in the PTX: {expected}, found: {fused}")
