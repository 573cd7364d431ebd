"""Every implementation of the loss behind one interface, each imported only if it is there.

A provider is loaded by name; what cannot be imported is listed with the reason. Megatron is loaded first and with
Transformer Engine hidden from it: it changes behaviour when it sees that package, and breaks when it sees a part of it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.metadata
import inspect
import sys
import tempfile
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from benchmarks.problem import IGNORE_INDEX, Case

# (logits [N, V_local], target [N]) -> loss [N], or its sum where the provider says so.
Loss = Callable[[Tensor, Tensor], Tensor]
Make = Callable[[Case, ProcessGroup | None], Loss]


@dataclasses.dataclass(frozen=True)
class Provider:
    """One implementation.

    Args:
        make: the loss for a case, and for the vocab-parallel group or None.
        overwrites: when the logits' storage is written: "never", "backward", "forward", or a condition.
        supports: options of a case, by name, and "tp".
        sums: the loss is a scalar, the sum over the rows.
        no_graph: why forward and backward cannot be captured in a CUDA graph; empty where they can.
    """

    name: str
    make: Make
    version: str
    overwrites: str = "never"
    supports: frozenset[str] = frozenset()
    sums: bool = False
    no_graph: str = ""

    def lacks(self, case: Case, group: ProcessGroup | None) -> list[str]:
        """What the case asks for and this provider does not have."""
        needed = [*case.options, *(["tp"] if group else [])]
        return [name for name in needed if name not in self.supports]


def _te_ce(name: str, inplace: bool) -> Provider:
    from te_ce import LossOptions, vocab_parallel_cross_entropy

    def make(case: Case, group: ProcessGroup | None) -> Loss:
        options = LossOptions(
            label_smoothing=case.label_smoothing, vocab_size=case.classes if case.padding else None, reduction="none"
        )
        return functools.partial(vocab_parallel_cross_entropy, group=group, inplace=inplace, options=options)

    overwrites = "backward" if inplace else "never"
    every = frozenset({"label_smoothing", "ignored", "padding", "tp"})
    return Provider(name, make, version_of("te-ce"), overwrites, every)


def _torch(name: str, compiled: bool) -> Provider:
    def make(case: Case, group: ProcessGroup | None) -> Loss:
        classes, label_smoothing = case.classes, case.label_smoothing

        def loss(logits: Tensor, target: Tensor) -> Tensor:
            x = logits[:, :classes].float() if case.padding else logits.float()
            return F.cross_entropy(
                x, target, reduction="none", ignore_index=IGNORE_INDEX, label_smoothing=label_smoothing
            )

        return torch.compile(loss, dynamic=False) if compiled else loss

    return Provider(name, make, str(torch.__version__), supports=frozenset({"label_smoothing", "ignored", "padding"}))


def _megatron(name: str, fused: bool) -> Provider:
    with _hidden("transformer_engine"):
        from megatron.core import parallel_state
        from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy
        from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy

    ensure_process_group()
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=dist.get_world_size(), create_gloo_process_groups=False
        )
    tp_group = parallel_state.get_tensor_model_parallel_group()

    def make(case: Case, group: ProcessGroup | None) -> Loss:
        if fused:
            return functools.partial(fused_vocab_parallel_cross_entropy, tp_group=tp_group)
        # Its alpha goes to the classes other than the target: this one makes it alpha/V for every class.
        alpha = case.label_smoothing * (case.classes - 1) / case.classes
        arguments = {"label_smoothing": alpha}
        # Older releases look the group up themselves.
        if "tp_group" in inspect.signature(vocab_parallel_cross_entropy).parameters:
            arguments["tp_group"] = tp_group
        return functools.partial(vocab_parallel_cross_entropy, **arguments)

    supports = frozenset({"tp"} if fused else {"tp", "label_smoothing"})
    return Provider(name, make, version_of("megatron-core"), "forward (float32)", supports)


def _transformer_engine(name: str, overwrite: bool) -> Provider:
    import transformer_engine
    from transformer_engine.pytorch.cross_entropy import parallel_cross_entropy

    # Releases without the keyword keep their one way of working.
    keywords = {"overwrite_input": True} if overwrite else {}

    def make(case: Case, group: ProcessGroup | None) -> Loss:
        def loss(logits: Tensor, target: Tensor) -> Tensor:
            rows = parallel_cross_entropy(
                logits[None],
                target[None],
                label_smoothing=case.label_smoothing,
                dist_process_group=group,
                ignore_idx=IGNORE_INDEX,
                **keywords,
            )
            return rows.view(-1)

        return loss

    version = getattr(transformer_engine, "__version__", None) or version_of("transformer-engine")
    supports = frozenset({"label_smoothing", "ignored", "tp"})
    return Provider(name, make, version, "backward" if overwrite else "never", supports)


def _liger(name: str) -> Provider:
    from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction

    def make(case: Case, group: ProcessGroup | None) -> Loss:
        def loss(logits: Tensor, target: Tensor) -> Tensor:
            # The sum over rows is its fastest form: a gradient per row costs it another pass and another buffer.
            outputs = LigerCrossEntropyFunction.apply(
                logits, target, None, IGNORE_INDEX, 0.0, case.label_smoothing, "sum", None, False
            )
            return outputs[0]

        return loss

    supports = frozenset({"label_smoothing", "ignored"})
    no_graph = "the host waits for the number of rows"
    return Provider(name, make, version_of("liger-kernel"), "forward", supports, sums=True, no_graph=no_graph)


def _liger_vocab_parallel(name: str) -> Provider:
    from liger_kernel.ops.vocab_parallel_cross_entropy import LigerVocabParallelCEFunction

    def make(case: Case, group: ProcessGroup | None) -> Loss:
        def loss(logits: Tensor, target: Tensor) -> Tensor:
            rows = LigerVocabParallelCEFunction.apply(
                logits[None], target[None], group, IGNORE_INDEX, case.label_smoothing, "pytorch", "global"
            )
            return rows.view(-1)

        return loss

    supports = frozenset({"label_smoothing", "ignored", "tp"})
    return Provider(name, make, version_of("liger-kernel"), supports=supports)


def _quack(name: str, overwrite: bool) -> Provider:
    from quack.cross_entropy import cross_entropy

    def make(case: Case, group: ProcessGroup | None) -> Loss:
        return functools.partial(cross_entropy, ignore_index=IGNORE_INDEX, reduction="none", inplace_backward=overwrite)

    overwrites = "backward" if overwrite else "never"
    return Provider(name, make, version_of("quack-kernels"), overwrites, frozenset({"ignored"}))


# In the order of the tables.
LOADERS: dict[str, Callable[[str], Provider]] = {
    "te_ce": functools.partial(_te_ce, inplace=True),
    "te_ce, new buffer": functools.partial(_te_ce, inplace=False),
    "torch eager": functools.partial(_torch, compiled=False),
    "torch.compile": functools.partial(_torch, compiled=True),
    "Megatron fused": functools.partial(_megatron, fused=True),
    "Megatron unfused": functools.partial(_megatron, fused=False),
    "Transformer Engine": functools.partial(_transformer_engine, overwrite=False),
    "Transformer Engine, overwrite": functools.partial(_transformer_engine, overwrite=True),
    "Liger": _liger,
    "Liger vocab-parallel": _liger_vocab_parallel,
    "quack": functools.partial(_quack, overwrite=False),
    "quack, overwrite": functools.partial(_quack, overwrite=True),
}


def load(names: list[str]) -> tuple[dict[str, Provider], dict[str, str]]:
    """Providers by name, and why the others are missing."""
    found: dict[str, Provider] = {}
    missing: dict[str, str] = {}
    for name in sorted(names, key=lambda name: not name.startswith("Megatron")):
        try:
            found[name] = LOADERS[name](name)
        except Exception as error:  # a broken installation may raise anything
            missing[name] = f"{type(error).__name__}: {error}"
    return found, missing


def forget_compiled() -> None:
    """Make torch.compile start anew: no shape is compiled as a dynamic one because others came before it."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


@contextlib.contextmanager
def _hidden(package: str) -> Iterator[None]:
    """Within, importing `package` fails as if it were not installed."""

    def parts() -> list[str]:
        return [name for name in sys.modules if name == package or name.startswith(package + ".")]

    kept = {name: sys.modules.pop(name) for name in parts()}
    sys.modules[package] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        for name in parts():
            del sys.modules[name]
        sys.modules.update(kept)


def ensure_process_group() -> None:
    """A group of one rank where torchrun made none: some reduce over their group also then."""
    if not dist.is_initialized():
        store = f"file://{tempfile.mkdtemp()}/store"
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, init_method=store, rank=0, world_size=1)


def version_of(distribution: str) -> str:
    """Of an installed package."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed, on the path"
