"""Compile the kernels for GPUs that this machine need not have.

The real launchers run on CPU tensors of the wanted layout, with two things replaced: Triton's driver by one that names
the target, and the kernel by its `warmup`, which compiles without launching. Block shapes, warps, options and the
specialisation of every argument (alignment of pointers and strides, arguments kept general) are thus those that a
launch on the GPU gets; nothing of the launchers is repeated here.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from te_ce.kernels import launch, launch_gradient
from te_ce.outputs import OutputGrads
from te_ce.problem import ShardProblem

STATISTICS = "row_statistics_kernel"
ROW_LOSS = "row_loss_kernel"
MERGE = "merge_statistics_kernel"
GRADIENT = "logits_gradient_kernel"
KERNELS = (STATISTICS, ROW_LOSS, MERGE, GRADIENT)


class Case(NamedTuple):
    """What a kernel is compiled for: one of two ranks, which holds `columns` columns.

    Attributes:
        arch: compute capability, 90 for sm_90.
        folded: rows lie as [s, b] with the target and the upstream gradient transposed, so that they fold into two
            dimensions; otherwise into one.
        padding: how many of the columns are no classes.
        outputs: what is asked for besides the loss; all that are differentiable get a gradient.
        row_scale: each row has a scale of its own; otherwise all have `scale`.
    """

    arch: int = 90
    dtype: torch.dtype = torch.bfloat16
    columns: int = 64128
    smoothing: bool = False
    folded: bool = False
    padding: int = 0
    outputs: tuple[str, ...] = ()
    z_loss: bool = False
    softcap: float | None = None
    scale: float = 1.0
    row_scale: bool = False

    @property
    def has_edges(self) -> bool:
        """Whether rows begin or end inside a vector of 16 bytes."""
        return self.columns * self.dtype.itemsize % 16 != 0

    def __str__(self) -> str:
        parts = [f"sm_{self.arch}", str(self.dtype).removeprefix("torch."), str(self.columns)]
        flags = ("smoothing", "folded", "padding", "z_loss", "softcap", "row_scale")
        parts += [flag for flag in flags if getattr(self, flag)]
        return "-".join([*parts, *self.outputs] + ["scale"] * (self.scale != 1.0))


class Compiled(NamedTuple):
    """A compiled kernel: its code at three levels, and how its launcher asked for it.

    Attributes:
        keywords: what the launcher passed by keyword: constants, warps, compile options.
        options: what Triton compiled with.
    """

    name: str
    ttir: str
    ptx: str
    cubin: bytes
    keywords: dict[str, Any]
    options: dict[str, Any]

    @property
    def threads(self) -> int:
        """Threads of a program."""
        return 32 * int(self.options["num_warps"])


class Target:
    """A Triton driver as far as compiling needs one. The architecture stands for the device, under which Triton keeps
    what it compiled: no real device has such an index."""

    def __init__(self, arch: int) -> None:
        self.arch = arch

    def get_current_device(self) -> int:
        return self.arch

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)


class Warmup:
    """Stands where a launcher looks for its kernel; compiles it instead of launching it."""

    def __init__(self, kernel: triton.JITFunction) -> None:
        self.kernel = kernel
        self.results: list[Compiled] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def compile_only(*arguments: Any, **keywords: Any) -> None:
            built = self.kernel.warmup(*arguments, grid=grid, **keywords)
            asm, options = built.asm, built.metadata._asdict()
            self.results.append(
                Compiled(built.metadata.name, asm["ttir"], asm["ptx"], asm["cubin"], dict(keywords), options)
            )

        return compile_only


def _at_a_line(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros that begin at a multiple of 128 bytes, as all memory that CUDA gives does."""
    storage = torch.zeros(math.prod(shape) + 128, dtype=dtype)
    return storage[-storage.data_ptr() % 128 // dtype.itemsize :][: math.prod(shape)].view(shape)


def _launch(name: str, case: Case) -> None:
    """Call the launcher of the kernel `name` as the loss would."""
    s, b = 8, 2
    problem = ShardProblem(
        start=case.columns,
        real_columns=case.columns - case.padding,
        classes=2 * case.columns - case.padding,
        ignore_index=-100,
        smoothing_weight=0.1 if case.smoothing else 0.0,
        z_loss_weight=1e-3 if case.z_loss else 0.0,
        softcap=case.softcap,
        scale=case.scale,
        outputs=case.outputs,
    )
    logits = _at_a_line((s, b, case.columns), case.dtype)
    target = torch.zeros((b, s), dtype=torch.int64).t() if case.folded else torch.zeros((s, b), dtype=torch.int64)
    if name == STATISTICS:
        launch.row_statistics(logits, target, problem)
    elif name == ROW_LOSS:
        launch.row_loss(logits, target, problem)
    elif name == MERGE:
        launch.merge_statistics(torch.zeros((2, problem.fields, s * b)), target, problem)
    else:
        of_row = torch.zeros_like(target, dtype=torch.float32)
        others = (of_row if name in case.outputs else None for name in ("log_probs", "entropy", "lse"))
        saved = torch.zeros((problem.saved_fields, s * b))
        row_scale = of_row if case.row_scale else None
        launch_gradient.logits_gradient(logits, target, OutputGrads(of_row, *others), saved, logits, problem, row_scale)


def compile_kernel(name: str, case: Case, kernel: triton.JITFunction | None = None) -> Compiled:
    """Compile what the launcher of `name` asks for in this case; `kernel` takes the place of the shipped one."""
    launcher = launch_gradient if name == GRADIENT else launch
    warmup = Warmup(kernel or getattr(launcher, name))
    with (
        mock.patch.object(launcher, name, warmup),
        # set_active has no inverse on a machine without a GPU.
        mock.patch.object(driver, "_active", Target(case.arch)),
        mock.patch.object(launch_gradient, "architecture", return_value=case.arch),
    ):
        _launch(name, case)
    if len(warmup.results) != 1:
        raise AssertionError(
            f"{name}, {case}: expected its launcher to launch it once, got {len(warmup.results)} times"
        )
    return warmup.results[0]


@functools.cache
def shipped(name: str, case: Case) -> Compiled:
    """The kernel as it is shipped; compiled once per process."""
    return compile_kernel(name, case)
