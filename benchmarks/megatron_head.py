"""What the choice of the loss costs a Megatron GPT: `python -m benchmarks.megatron_head [--shape 8192x4096x128256]`.

One transformer layer and an untied head of that size, one process, bfloat16 on a GPU. For every loss: time and peak
memory of a step (forward with labels, mean, backward) above the parameters, gradients included, and how far loss and
gradients are from those of Megatron's own unfused loss.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import sys
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import megatron_patch
from benchmarks.linear.problem import Shape
from benchmarks.measure import Stopwatch, on_gpu, peak_extra_bytes

with warnings.catch_warnings():  # Megatron's imports: missing Apex and Transformer Engine
    warnings.simplefilter("ignore")
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer.transformer_config import TransformerConfig

UNFUSED = "Megatron, unfused"
# The fields of the configuration that choose the loss.
LOSSES: dict[str, dict[str, Any]] = {
    UNFUSED: {},
    "Megatron, fused": {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "native"},
    "te_ce": {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "te_ce"},
    "te_ce_linear": {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "te_ce_linear"},
}
# Of the loss, and in the 2-norm of a gradient, relative: losses round differently on their way, to 16 bits on a GPU.
BOUND = 1e-2
MIB = 1 << 20


class _Attention(torch.nn.Module):
    """Causal attention [s, b, heads, d] by torch; Megatron's own core needs Transformer Engine or Apex to be fast."""

    def __init__(self, **_: Any) -> None:
        super().__init__()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return mixed.permute(2, 0, 1, 3).flatten(2)


class Result(NamedTuple):
    """One loss's step; nothing measured but the loss on a CPU's memory."""

    milliseconds: float
    extra_mib: float | None
    loss: float
    error: float  # the larger of those of the loss and the gradients, relative
    served: int


@contextlib.contextmanager
def single_process() -> Iterator[None]:
    """Megatron's groups of one rank."""
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        parallel_state.initialize_model_parallel()
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def build(shape: Shape, loss_fields: dict[str, Any], device: torch.device) -> torch.nn.Module:
    """The same weights for every loss."""
    torch.manual_seed(0)
    is_gpu = on_gpu(device)
    dtype = torch.bfloat16 if is_gpu else torch.float32
    if is_gpu:
        model_parallel_cuda_manual_seed(0)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=shape.hidden,
        num_attention_heads=max(1, shape.hidden // 128),
        hidden_dropout=0.0,
        attention_dropout=0.0,
        add_bias_linear=False,
        use_cpu_initialization=not is_gpu,
        bf16=is_gpu,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        **loss_fields,
    )
    spec = get_gpt_layer_local_spec()
    spec.submodules.self_attention.submodules.core_attention = _Attention
    model: torch.nn.Module = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=shape.columns,
        max_sequence_length=shape.rows,
        position_embedding_type="learned_absolute",
        share_embeddings_and_output_weights=False,
    )
    # Megatron leaves some parameters in float32.
    return model.to(device=device, dtype=dtype)


class Step:
    """Forward with labels, mean, backward; gradients are made anew."""

    def __init__(self, model: torch.nn.Module, shape: Shape, device: torch.device) -> None:
        self.model = model
        random = torch.Generator().manual_seed(1)
        self._tokens, self._labels = torch.randint(shape.columns, (2, 1, shape.rows), generator=random).to(device)
        self._positions = torch.arange(shape.rows, device=device)[None]

    def __call__(self, _: object = None) -> Tensor:
        self.model.zero_grad(set_to_none=True)
        loss: Tensor = self.model(self._tokens, self._positions, None, labels=self._labels).float().mean()
        loss.backward()
        return loss.detach()

    def gradients(self) -> list[Tensor]:
        """Of all parameters, on the host, so that they do not count."""
        return [p.grad.detach().cpu() for p in self.model.parameters() if p.grad is not None]


def measure(shape: Shape, runs: int, device: torch.device) -> dict[str, Result]:
    """Every loss in turn, compared with the first."""
    results: dict[str, Result] = {}
    expected: list[Tensor] = []
    for name, fields in LOSSES.items():
        step = Step(build(shape, fields, device), shape, device)
        before = sum(megatron_patch.status().served.values())
        loss = float(step())
        served = sum(megatron_patch.status().served.values()) - before
        gradients = step.gradients()
        expected = expected or gradients
        first = results.get(UNFUSED)
        errors = [0.0 if first is None else abs(loss - first.loss) / abs(first.loss)]
        errors += [float((a - b).norm() / b.norm()) for a, b in zip(gradients, expected, strict=True)]
        assert max(errors) <= BOUND, f"{name}: off by {max(errors):.1e} from Megatron's own loss, more than {BOUND}"
        extra = None
        if on_gpu(device):
            step.model.zero_grad(set_to_none=True)
            extra = peak_extra_bytes(step, gc.collect) / MIB
        milliseconds = Stopwatch(device, runs).sustained_ms(step)
        results[name] = Result(milliseconds, extra, loss, max(errors), served)
        del step, gradients
        gc.collect()
    return results


def main(command: list[str] | None = None) -> dict[str, Result]:
    """Prints a table, and returns what is in it."""
    parser = argparse.ArgumentParser(prog="benchmarks.megatron_head", description=(__doc__ or "").splitlines()[0])
    found_gpu = torch.cuda.is_available()
    default = Shape.parse("8192x4096x128256" if found_gpu else "32x64x512")
    parser.add_argument("--shape", type=Shape.parse, default=default, metavar="TOKENSxHxV")
    parser.add_argument("--runs", type=int, default=12 if found_gpu else 1)
    arguments = parser.parse_args(command)
    device = torch.device("cuda", torch.cuda.current_device()) if found_gpu else torch.device("cpu")
    shape = arguments.shape
    with single_process(), megatron_patch.patched():
        results = measure(shape, arguments.runs, device)
    element = 2 if found_gpu else 4
    name = torch.cuda.get_device_name() if found_gpu else "CPU"
    print(f"# {name}, torch {torch.__version__}, {shape}, logits {shape.rows * shape.columns * element / MIB:.0f} MiB")
    print(f"{'loss':20} {'ms':>9} {'extra MiB':>10} {'error':>9} {'by te_ce':>9}")
    for loss, each in results.items():
        extra = "-" if each.extra_mib is None else f"{each.extra_mib:.0f}"
        print(f"{loss:20} {each.milliseconds:9.2f} {extra:>10} {each.error:9.1e} {each.served:9}")
    return results


if __name__ == "__main__":
    main(sys.argv[1:])
