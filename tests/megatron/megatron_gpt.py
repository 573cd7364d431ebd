"""A real GPTModel of megatron-core, small and on the CPU, the same code for every release from 0.10 to 0.19.

Local layer spec with torch norms and a core attention of plain torch (Megatron's own forks a CUDA random state):
nothing of Transformer Engine or Apex. 12 heads, so that 1, 2, 3 and 4 tensor-parallel ranks divide everything.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import warnings
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

with warnings.catch_warnings():  # Megatron's imports: deprecations in torch, missing Apex and Transformer Engine
    warnings.simplefilter("ignore")
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.transformer_config import TransformerConfig

    try:
        from megatron.core.transformer import torch_norm
    except ImportError:  # 0.10
        torch_norm = None

needs_mtp = pytest.mark.skipif(
    not hasattr(TransformerConfig, "mtp_num_layers"), reason="this release has no multi-token prediction"
)

# Megatron's deprecations, and what its parallelism calls of torch's.
QUIET = [
    pytest.mark.filterwarnings("ignore:::megatron"),
    pytest.mark.filterwarnings("ignore:.*_(into_tensor|scatter_tensor|base). is deprecated:FutureWarning"),
]

VOCAB = 96  # divided by 1, 2, 3 and 4
HIDDEN = 48
HEADS = 12


class PlainAttention(torch.nn.Module):
    """Causal attention on [s, b, heads, d]."""

    def __init__(self, **_: Any) -> None:
        super().__init__()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return mixed.permute(2, 0, 1, 3).reshape(query.shape[0], query.shape[1], -1)


@contextlib.contextmanager
def single_process():
    """A process group of one rank where there is none, with Megatron's groups in it."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with model_parallel(1):
            yield
    finally:
        dist.destroy_process_group()


def device() -> torch.device:
    """Where the process group's tensors live."""
    return torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")


@contextlib.contextmanager
def model_parallel(size: int, **sizes: Any):
    """Megatron's groups over the initialised process group, `size` ranks to a tensor-parallel group.

    Args:
        size: of the tensor-parallel groups.
        sizes: other arguments of Megatron's `initialize_model_parallel`.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=size, **sizes)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()


def make_config(tp: int = 1, **fields: Any):
    """A TransformerConfig; `cross_entropy_fusion_impl` is assigned where the release has no such field."""
    values = {
        "num_layers": 1,
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "tensor_model_parallel_size": tp,
        "use_cpu_initialization": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
        "persist_layer_norm": False,
        "pipeline_dtype": torch.float32,
    }
    if "mtp_num_layers" in fields:
        values["mtp_loss_scaling_factor"] = 0.1  # old releases have no default
    values.update(fields)
    known = {field.name for field in dataclasses.fields(TransformerConfig)}
    late = {name: values.pop(name) for name in list(values) if name not in known}
    assert late.keys() <= {"cross_entropy_fusion_impl"}, late
    config = TransformerConfig(**values)
    for name, value in late.items():
        setattr(config, name, value)
    return config


def make_model(
    tp: int = 1,
    tied: bool = False,
    parallel_output: bool = True,
    seed: int = 0,
    stage: dict[str, Any] | None = None,
    **fields: Any,
):
    """A GPTModel with the same weights for the same seed, whatever the loss; with heads for `mtp_num_layers` tokens.

    `stage` holds arguments of GPTModel that make it a pipeline stage.
    """
    torch.manual_seed(seed)
    with warnings.catch_warnings(), _norm_under_sequence_parallelism():
        warnings.simplefilter("ignore")
        spec = get_gpt_layer_local_spec()
        spec.submodules.self_attention.submodules.core_attention = PlainAttention
        config, heads = make_config(tp, **fields), {}
        if fields.get("mtp_num_layers"):
            heads["mtp_block_spec"] = gpt_layer_specs.get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False)
        model = GPTModel(
            config=config,
            transformer_layer_spec=spec,
            **heads,
            **(stage or {}),
            vocab_size=VOCAB,
            max_sequence_length=32,
            parallel_output=parallel_output,
            share_embeddings_and_output_weights=tied,
        )
    return enlarge(model).to(device())


def enlarge(model: Any) -> Any:
    """The model with a head large enough that the softmax is far from uniform."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "output_layer" in name or "word_embeddings" in name:
                parameter.mul_(10.0)
    return model


@contextlib.contextmanager
def _norm_under_sequence_parallelism():
    """Within: Megatron's wrapper gives the torch norm that it otherwise refuses to combine with it."""
    with pytest.MonkeyPatch.context() as patch:
        if torch_norm is not None:
            make = lambda cls, config, hidden_size, eps=1e-5, **_: torch.nn.LayerNorm(hidden_size, eps)  # noqa: E731
            patch.setattr(torch_norm.WrappedTorchNorm, "__new__", make)
        yield


@contextlib.contextmanager
def without_cuda():
    """Within: what Megatron asks of CUDA is answered on the CPU. Sequence parallelism and MTP heads need it."""
    with pytest.MonkeyPatch.context() as patch:
        if device().type == "cpu":
            patch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
            patch.setattr(torch.cuda, "current_stream", lambda *_: mock.MagicMock())
            patch.setattr(random.CudaRNGStatesTracker, "fork", lambda *_: contextlib.nullcontext())
        yield


@dataclasses.dataclass(frozen=True)
class Batch:
    """tokens, labels, mask: [b, s]; the labels are a slice, as in training, so that their row stride is s + 1."""

    tokens: Tensor
    labels: Tensor
    mask: Tensor


def make_batch(b: int, s: int, negative: tuple[int, ...] = (), seed: int = 1) -> Batch:
    """Random ids; every negative value given is put at one place, masked by 0."""
    generator = torch.Generator().manual_seed(seed)
    text = torch.randint(0, VOCAB, (b, s + 1), generator=generator)
    mask = torch.ones(b, s)
    for place, value in enumerate(negative):
        text[place % b, 1 + place // b] = value
        mask[place % b, place // b] = 0.0
    text = text.to(device())
    return Batch(text[:, :-1].clamp(min=0), text[:, 1:], mask.to(device()))


def forward(model: Any, batch: Batch, labels: Tensor | None, **arguments: Any) -> Tensor:
    """Loss [b, s], or with no labels the logits [b, s, V / TP]."""
    positions = torch.arange(batch.tokens.shape[1], device=batch.tokens.device).expand_as(batch.tokens)
    return model(batch.tokens, positions, None, labels=labels, **arguments)


def loss_and_grads(model: Any, batch: Batch, reduce, **arguments: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Per-token loss, and the gradient of every parameter after `reduce(loss, mask).backward()`."""
    model.zero_grad(set_to_none=True)
    loss = forward(model, batch, batch.labels, **arguments)
    reduce(loss, batch.mask).backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), grads


def dense_loss(model: Any, batch: Batch, group: Any = None) -> Tensor:
    """The loss in float64 from the shards put together; 0 where the label is negative."""
    with torch.no_grad():
        shard = forward(model, batch, None).contiguous()
    return dense_cross_entropy(shard if group is None else gather(shard, group, dim=-1), batch.labels)


def gather(shard: Tensor, group: Any, dim: int) -> Tensor:
    """Every rank's tensor, one after the other along `dim`."""
    shards = [torch.empty_like(shard) for _ in range(dist.get_world_size(group))]
    dist.all_gather(shards, shard.contiguous(), group=group)
    return torch.cat(shards, dim=dim)


def dense_cross_entropy(logits: Tensor, labels: Tensor, alpha: float = 0.0) -> Tensor:
    """Float64 loss of [.., V] logits, smoothing alpha / (V - 1) on every other class; 0 where the label is negative."""
    log_probs = logits.double().log_softmax(-1)
    v = logits.shape[-1]
    one_hot = F.one_hot(labels.clamp(min=0), v).double()
    weights = one_hot * (1 - alpha) + (1 - one_hot) * alpha / max(v - 1, 1)
    return -(weights * log_probs).sum(-1) * (labels >= 0)


def mean(loss: Tensor, mask: Tensor) -> Tensor:
    return loss.mean()


def masked_sum(loss: Tensor, mask: Tensor) -> Tensor:
    return (loss * mask).sum()


# Losses that are wrong on purpose, by what they break: a check that lets one of them pass checks nothing.
class _ZeroOffTarget(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, target, offset):
        ctx.save_for_backward(target)
        ctx.offset = offset
        return logits.view_as(logits)

    @staticmethod
    def backward(ctx, grad):
        (target,) = ctx.saved_tensors
        columns = torch.arange(grad.shape[-1], device=grad.device) + ctx.offset
        return grad * (columns == target.unsqueeze(-1)), None, None


def broken_losses(real) -> dict[str, Any]:
    """te_ce's loss, each with one fault, by name."""

    def shifted(logits, target, **kw):
        return real(logits, torch.where(target >= 0, (target + 1) % VOCAB, target), **kw)

    def zeroed(logits, target, group=None, **kw):
        offset = (group.rank() if group is not None else 0) * logits.shape[-1]
        return real(_ZeroOffTarget.apply(logits, target, offset), target, group=group, **kw)

    def doubled(logits, target, **kw):
        return 2 * real(logits, target, **kw)

    def transposed(logits, target, **kw):
        loss = real(logits, target, **kw)
        return loss.t().contiguous().view(loss.shape)

    return {f.__name__: functools.wraps(real)(f) for f in (shifted, zeroed, doubled, transposed)}
