"""What the tests of `te_ce_linear` share: how to ask for it, what gradients must equal, main_grad, broken variants."""

from __future__ import annotations

import contextlib
import types
from typing import Any

import megatron_gpt as gpt
import pytest
import torch
from megatron.core.tensor_parallel import layers
from torch import Tensor

import megatron_patch


def ask(model: Any) -> Any:
    """The model, built whenever, whose configuration now asks for the fused linear loss."""
    model.config.cross_entropy_loss_fusion = True
    model.config.cross_entropy_fusion_impl = "te_ce_linear"
    return model


def heads() -> dict[str, int]:
    """How many losses each path has served since the patch was applied."""
    return megatron_patch.status().heads


def check_grads(grads: dict[str, Tensor], expected: dict[str, Tensor], bound: float = 2e-6) -> None:
    """Equal to `bound` of the largest entry of each parameter's gradient: float32 rounding of the head and a layer."""
    assert grads.keys() == expected.keys()
    for name, grad in grads.items():
        torch.testing.assert_close(grad, expected[name], rtol=0, atol=bound * float(expected[name].abs().max()))


@contextlib.contextmanager
def fused_accumulation(model: Any):
    """Within: the output layer adds its weight's gradient to `main_grad` itself, by a stand-in for Apex's extension."""

    def accumulate(total_input: Tensor, grad_output: Tensor, main_grad: Tensor) -> None:
        main_grad.add_(grad_output.t().to(main_grad.dtype) @ total_input.to(main_grad.dtype))

    extension = types.SimpleNamespace(wgrad_gemm_accum_fp32=accumulate, wgrad_gemm_accum_fp16=accumulate)
    with gpt.without_cuda(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(layers, "fused_weight_gradient_mlp_cuda", extension, raising=False)
        patch.setattr(model.output_layer, "gradient_accumulation_fusion", True)
        yield


def main_grads(
    model: Any, batches: list[gpt.Batch], reduce, dtype=torch.float32, **arguments: Any
) -> dict[str, Tensor]:
    """`main_grad` of every parameter after forward and backward of all batches, as Megatron's DDP fills it."""
    for parameter in model.parameters():
        parameter.main_grad = torch.zeros_like(parameter, dtype=dtype)
        parameter.grad, parameter.grad_added_to_main_grad = None, False
    for batch in batches:
        reduce(gpt.forward(model, batch, batch.labels, **arguments), batch.mask).backward()
        for parameter in model.parameters():
            # Its hook wants some gradient to be there (overlap_grad_reduce).
            assert parameter.grad is not None or not parameter.requires_grad
            if not parameter.grad_added_to_main_grad or getattr(parameter, "zero_out_wgrad", False):
                parameter.main_grad.add_(0.0 if parameter.grad is None else parameter.grad)
            parameter.grad = None
    return {name: parameter.main_grad for name, parameter in model.named_parameters()}


def broken_linear_losses(real, ranks: int = 1) -> dict[str, Any]:
    """te_ce's fused linear loss, each with one fault, by name."""

    def shifted(gradient, tensors, arguments, options):
        target = tensors.target
        target = torch.where(target >= 0, (target + 1) % gpt.VOCAB, target)
        return real(gradient, tensors._replace(target=target), arguments, options)

    def without_weight_gradient(gradient, tensors, arguments, options):
        return real(gradient, tensors._replace(weight=tensors.weight.detach()), arguments, options)

    def without_hidden_gradient(gradient, tensors, arguments, options):
        return real(gradient, tensors._replace(hidden=tensors.hidden.detach()), arguments, options)

    def doubled(gradient, tensors, arguments, options):
        return 2 * real(gradient, tensors, arguments, options)

    def one_rank(gradient, tensors, arguments, options):
        return real(gradient, tensors, arguments._replace(group=None), options)

    faults = (shifted, without_weight_gradient, without_hidden_gradient, doubled)
    return {f.__name__: f for f in (*faults, *((one_rank,) if ranks > 1 else ()))}
