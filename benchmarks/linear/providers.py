"""Every implementation of the fused linear + loss behind one interface, each imported only if it is there.

Peers are looked for on the path, as they come from their wheels; what cannot be imported is listed with the reason.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from benchmarks.linear.chunked import TOKENS, chunked_linear_cross_entropy
from benchmarks.providers import ensure_process_group, version_of

# (hidden [N, H], weight [V, H], target [N]) -> the mean over the rows; or the loss of every row.
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
# The same and token weights w [N] -> sum(w L).
Weighted = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

IGNORE_INDEX = -100
# Of a gradient in the 2-norm: logits, their gradient and the result rounded to 16 bits come to about 2^-8.
_BOUND = 2.0**-6
# Gradients that are accumulated in 16 bits, one rounding for every chunk or block.
_COARSE_BOUND = 2.0**-3
# Small entries are left out on purpose; it still refuses a gradient that is doubled, or of the targets alone.
_FILTERED_BOUND = 0.5


@dataclasses.dataclass(frozen=True)
class Provider:
    """One implementation.

    Args:
        mean: what is timed, forward and backward.
        weighted: the loss with a weight for every token, where it has one; checked, not timed.
        bound: relative errors of gradients up to which it counts as right.
    """

    name: str
    version: str
    mean: Loss
    weighted: Weighted | None
    bound: float = _BOUND


class NeedsCuda(RuntimeError):
    """Kernels for GPUs alone."""

    def __init__(self) -> None:
        super().__init__("runs on CUDA devices alone")


def _of_rows(rows: Loss) -> Weighted:
    return lambda hidden, weight, target, token_weights: (rows(hidden, weight, target) * token_weights).sum()


def _te_ce(name: str, keep: str | float) -> Provider:
    from te_ce import linear_cross_entropy

    call: Callable[..., Tensor] = functools.partial(linear_cross_entropy, keep=keep)
    mean, rows = functools.partial(call, reduction="mean"), functools.partial(call, reduction="none")
    return Provider(name, version_of("te-ce"), mean, _of_rows(rows))


def _te_ce_token_weights(name: str) -> Provider:
    from te_ce import linear_cross_entropy

    def mean(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        token_weights = torch.ones(target.shape, device=target.device)
        return linear_cross_entropy(hidden, weight, target, token_weights=token_weights, reduction="mean")

    def weighted(hidden: Tensor, weight: Tensor, target: Tensor, token_weights: Tensor) -> Tensor:
        return linear_cross_entropy(hidden, weight, target, token_weights=token_weights, reduction="sum")

    return Provider(name, version_of("te-ce"), mean, weighted)


def _torch(name: str, compiled: bool) -> Provider:
    def loss(hidden: Tensor, weight: Tensor, target: Tensor, reduction: str) -> Tensor:
        return F.cross_entropy(F.linear(hidden, weight).float(), target, reduction=reduction)

    call = torch.compile(loss, dynamic=False) if compiled else loss
    mean, rows = functools.partial(call, reduction="mean"), functools.partial(call, reduction="none")
    return Provider(name, str(torch.__version__), mean, _of_rows(rows))


def _chunked(name: str) -> Provider:
    def mean(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return chunked_linear_cross_entropy(hidden, weight, target).mean()

    weighted = _of_rows(chunked_linear_cross_entropy)
    return Provider(name, str(torch.__version__), mean, weighted, _COARSE_BOUND)


def _liger(name: str, accum_dtype: torch.dtype | None) -> Provider:
    _needs_cuda()
    # From its own module: the package may hand out another back end's function.
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    def loss(hidden: Tensor, weight: Tensor, target: Tensor, reduction: str) -> Tensor:
        arguments = (None, None, IGNORE_INDEX, 0.0, 0.0, reduction, None, False, accum_dtype)
        first: Tensor = LigerFusedLinearCrossEntropyFunction.apply(hidden, weight, target, *arguments)[0]
        return first

    mean, rows = functools.partial(loss, reduction="mean"), functools.partial(loss, reduction="none")
    bound = _COARSE_BOUND if accum_dtype is None else _BOUND
    return Provider(name, version_of("liger-kernel"), mean, _of_rows(rows), bound)


def _liger_chunked(name: str) -> Provider:
    _needs_cuda()
    # What its vocab-parallel function falls back to; here with a group of one rank.
    from liger_kernel.ops import fused_linear_scaled_cross_entropy as module

    ensure_process_group()
    function = module._TensorParallelFusedLinearPPOFallbackFunction

    def rows(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        loss: Tensor = function.apply(hidden, weight, target, 1.0, IGNORE_INDEX, False, dist.group.WORLD)
        return loss

    def mean(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return rows(hidden, weight, target).mean()

    return Provider(name, version_of("liger-kernel"), mean, _of_rows(rows), _COARSE_BOUND)


def _cut_cross_entropy(name: str, exact: bool) -> Provider:
    _needs_cuda()
    import cut_cross_entropy

    # Releases without this name are exact with filter_eps=None, with sums in 16 bits.
    names = {each.name for each in cut_cross_entropy.LinearCrossEntropyImpl}
    exactly: dict[str, Any] = {"impl": "cce_exact"} if "CCE_EXACT" in names else {"filter_eps": None}
    call = functools.partial(cut_cross_entropy.linear_cross_entropy, **(exactly if exact else {"impl": "cce"}))
    mean, rows = functools.partial(call, reduction="mean"), functools.partial(call, reduction="none")
    found = getattr(cut_cross_entropy, "__version__", None) or version_of("cut-cross-entropy")
    return Provider(name, found, mean, _of_rows(rows), _COARSE_BOUND if exact else _FILTERED_BOUND)


# Tokens: its default.
_QUACK_CHUNK = 4096


def _quack(name: str, use_scaled_exp: bool | None) -> Provider:
    _needs_cuda()
    from quack.linear_cross_entropy import chunked_linear_cross_entropy as quack_chunked

    def mean(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        # A chunk of as many tokens as there are features is ambiguous to its GEMM, which refuses it.
        chunk = 2048 if hidden.shape[-1] == _QUACK_CHUNK else _QUACK_CHUNK
        loss: Tensor = quack_chunked(
            hidden, weight, target, reduction="mean", use_scaled_exp=use_scaled_exp, chunk_size=chunk
        )
        return loss

    # Its gradients are made in forward, of the sum or the mean.
    return Provider(name, version_of("quack-kernels"), mean, None)


def _verl(name: str) -> Provider:
    _needs_cuda()
    # Its packages import a whole trainer when they are initialised; the kernels need nothing of it.
    _without_initialisation(["verl", "verl.utils", "verl.utils.kernel"])
    from verl.utils.kernel.linear_cross_entropy import LinearCrossEntropy

    def loss(hidden: Tensor, weight: Tensor, target: Tensor, reduction: str) -> Tensor:
        log_probs: Tensor = LinearCrossEntropy.apply(hidden, weight, target, 1.0, reduction, None)[0]
        return -log_probs

    mean, rows = functools.partial(loss, reduction="mean"), functools.partial(loss, reduction="none")
    return Provider(name, version_of("verl"), mean, _of_rows(rows))


RECOMPUTE, KEEP_ALL, TOKEN_WEIGHTS = "te_ce recompute", "te_ce keep=1.0", "te_ce token_weights"
# Names of the providers that keep more and more, in this order.
KEEPS = [RECOMPUTE, "te_ce keep=0.25", "te_ce keep=0.5", "te_ce keep=0.75", KEEP_ALL]
TORCH, CHUNKED = "torch, logits kept", f"chunked torch, {TOKENS} tokens"
LIGER_CHUNKED = f"Liger's own fallback, {TOKENS} tokens"
QUACK, VERL, CCE = "quack chunked", "verl", "CCE, filtered"

# In the order of the tables.
LOADERS: dict[str, Callable[[str], Provider]] = {
    RECOMPUTE: functools.partial(_te_ce, keep="recompute"),
    **{name: functools.partial(_te_ce, keep=float(name.partition("=")[2])) for name in KEEPS[1:]},
    TOKEN_WEIGHTS: _te_ce_token_weights,
    TORCH: functools.partial(_torch, compiled=False),
    "torch.compile": functools.partial(_torch, compiled=True),
    CHUNKED: _chunked,
    "Liger FLCE": functools.partial(_liger, accum_dtype=None),
    "Liger FLCE, float32 dW": functools.partial(_liger, accum_dtype=torch.float32),
    LIGER_CHUNKED: _liger_chunked,
    CCE: functools.partial(_cut_cross_entropy, exact=False),
    "CCE, exact": functools.partial(_cut_cross_entropy, exact=True),
    QUACK: functools.partial(_quack, use_scaled_exp=None),
    "quack chunked, plain GEMMs": functools.partial(_quack, use_scaled_exp=False),
    VERL: _verl,
}
# Minutes of compiling or tuning for every shape: measured only when they are named.
SLOW_TO_START = frozenset({"torch.compile", "quack chunked, plain GEMMs"})


def load(names: Iterable[str]) -> tuple[dict[str, Provider], dict[str, tuple[str, str]]]:
    """Providers by name; and of the others status and reason."""
    found: dict[str, Provider] = {}
    absent: dict[str, tuple[str, str]] = {}
    for name in names:
        try:
            found[name] = LOADERS[name](name)
        except NeedsCuda as error:
            absent[name] = ("skipped", str(error))
        except Exception as error:  # a broken installation may raise anything
            absent[name] = ("missing", f"{type(error).__name__}: {error}")
    return found, absent


def _needs_cuda() -> None:
    if not torch.cuda.is_available():
        raise NeedsCuda


def _without_initialisation(packages: list[str]) -> None:
    """Make packages, each before its parts, importable as bare folders: their __init__.py is never run."""
    for name in packages:
        if name in sys.modules:
            continue
        spec = importlib.util.find_spec(name)
        if spec is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        sys.modules[name] = importlib.util.module_from_spec(spec)
