"""gradient_accumulation_fusion: the weight's gradient goes where Megatron's layer puts it, and everything it says."""

from __future__ import annotations

import megatron_gpt as gpt
import pytest
import torch
from fused_head import ask, check_grads, fused_accumulation, heads, main_grads

import megatron_patch
from megatron_patch import linear
from megatron_patch.main_grad import MainGradient

pytestmark = [pytest.mark.usefixtures("world"), pytest.mark.filterwarnings("ignore:::megatron")]


def batches():
    return [gpt.make_batch(2, 8, (-100,), seed=seed) for seed in (1, 2)]


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_as_megatrons_layer(tied):
    """Two micro-batches; tied: the embedding's gradient comes on top, in the same parameter."""
    megatron_patch.apply(strict=True)
    model = gpt.make_model(tied=tied)
    with fused_accumulation(model):
        expected = main_grads(model, batches(), gpt.masked_sum)
        found = main_grads(ask(model), batches(), gpt.masked_sum)
    weight = model.embedding.word_embeddings.weight if tied else model.output_layer.weight
    assert weight.grad_added_to_main_grad
    assert heads() == {"fused": 2}
    check_grads(found, expected)


@gpt.needs_mtp
def test_with_multi_token_prediction():
    """Several heads add to one main_grad in one backward."""
    megatron_patch.apply(strict=True)
    model, batch = gpt.make_model(tied=True, mtp_num_layers=1), gpt.make_batch(2, 8)
    with fused_accumulation(model):
        expected = main_grads(model, [batch], gpt.mean, loss_mask=batch.mask)
        found = main_grads(ask(model), [batch], gpt.mean, loss_mask=batch.mask)
    assert heads() == {"fused": 2}
    check_grads(found, expected)


@pytest.mark.parametrize("fusion", [False, True], ids=["by the hook", "by the layer"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_megatrons_ddp(tied, fusion):
    """Its own hooks, buffers and overlapped reduction, over two micro-batches."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    def grads(implementation):
        model = gpt.make_model(tied=tied)
        settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=True)
        with fused_accumulation(model) if fusion else gpt.without_cuda():
            wrapped = DistributedDataParallel(model.config, settings, model)
            wrapped.zero_grad_buffer()
            implementation(model)
            first, second = batches()
            with wrapped.no_sync():
                gpt.masked_sum(gpt.forward(wrapped, first, first.labels), first.mask).backward()
            gpt.masked_sum(gpt.forward(wrapped, second, second.labels), second.mask).backward()
            wrapped.finish_grad_sync()
        return {name: parameter.main_grad.clone() for name, parameter in model.named_parameters()}

    megatron_patch.apply(strict=True)
    expected = grads(lambda model: None)
    check_grads(grads(ask), expected)
    assert heads() == {"fused": 2}


def test_logits_looked_into():
    """Then Megatron's own layer accumulates, once."""
    megatron_patch.apply()
    model = gpt.make_model()
    with fused_accumulation(model):
        expected = main_grads(model, batches(), gpt.masked_sum)
        real = type(model).compute_language_model_loss
        model.compute_language_model_loss = lambda y, x: [x.max(), real(model, y, x)][1]
        found = main_grads(ask(model), batches(), gpt.masked_sum)
    check_grads(found, expected)


def test_bfloat16_accumulates_in_float32():
    megatron_patch.apply(strict=True)
    model = gpt.make_model().bfloat16()
    with fused_accumulation(model):
        expected = main_grads(model, batches(), gpt.masked_sum)
        found = main_grads(ask(model), batches(), gpt.masked_sum)
    grad = found["output_layer.weight"]
    assert grad.dtype == torch.float32
    assert not torch.equal(grad, grad.bfloat16().float())  # not rounded on the way
    # The gradient of the logits is rounded to bfloat16, there and here: 2^-8 of its entries, over 32 tokens.
    check_grads({"weight": grad}, {"weight": expected["output_layer.weight"]}, bound=2.0**-7)


def test_frozen_weight_and_evaluation():
    megatron_patch.apply(strict=True)
    model, batch = ask(gpt.make_model()), gpt.make_batch(2, 8)
    with fused_accumulation(model):
        with torch.no_grad():
            gpt.forward(model, batch, batch.labels)  # no main_grad, none needed
        model.output_layer.weight.requires_grad_(False)
        found = main_grads(model, [batch], gpt.mean)
    assert not found["output_layer.weight"].any()
    assert found["embedding.word_embeddings.weight"].any()
    assert not model.output_layer.weight.grad_added_to_main_grad


def test_no_main_grad_at_all():
    megatron_patch.apply()
    model, batch = ask(gpt.make_model()), gpt.make_batch(2, 8)
    with fused_accumulation(model), pytest.raises(RuntimeError, match="expected the output layer's weight to have"):
        gpt.forward(model, batch, batch.labels).mean().backward()


def test_main_grad_is_that_of_the_forward(monkeypatch):
    """Megatron captures it there (from 0.13 on), and puts it back on the parameter in backward."""
    megatron_patch.apply()
    model, batch = ask(gpt.make_model()), gpt.make_batch(2, 8)
    weight = model.output_layer.weight
    weight.main_grad = buffer = torch.zeros_like(weight)
    with fused_accumulation(model):
        loss = gpt.forward(model, batch, batch.labels).mean()
        del weight.main_grad
        loss.backward()
    assert weight.main_grad is buffer
    assert buffer.any()
    assert weight.grad is None  # nobody asked for one: no grad_added_to_main_grad


@pytest.mark.parametrize("fault", ["nothing added", "flag forgotten", "dirty zeros", "no gradient"])
def test_the_checks_reject_a_wrong_contract(monkeypatch, fault):
    class Broken(MainGradient):
        def add(self, rows, grad_logits, hidden):
            if fault != "nothing added":
                super().add(rows, grad_logits, hidden)

        def result(self):
            result = super().result()
            if fault == "flag forgotten":
                self._weight.grad_added_to_main_grad = False
                return torch.ones_like(self._weight)
            if fault == "dirty zeros":
                return torch.ones_like(self._weight)
            return None if fault == "no gradient" else result

    monkeypatch.setattr(linear, "MainGradient", Broken)
    with pytest.raises(AssertionError):
        test_as_megatrons_layer(tied=fault == "dirty zeros")


# The gradient by itself.


def pieces(dtype, v=10, n=6, h=4):
    torch.manual_seed(0)
    return torch.nn.Parameter(torch.randn(v, h).to(dtype)), torch.randn(n, v).to(dtype), torch.randn(n, h).to(dtype)


@pytest.mark.parametrize(
    ("dtype", "main", "bound"),
    [
        (torch.float32, torch.float32, 1e-5),
        (torch.bfloat16, torch.float32, 1e-5),
        (torch.float16, torch.float32, 1e-5),
        (torch.bfloat16, torch.bfloat16, 0.1),
        (torch.float32, torch.bfloat16, 0.1),
    ],
)
def test_rows_are_added(dtype, main, bound):
    weight, grad_logits, hidden = pieces(dtype)
    weight.main_grad = torch.ones_like(weight, dtype=main)
    gradient = MainGradient(weight, None)
    gradient.add(slice(4, 8), grad_logits[:, 4:8], hidden)
    gradient.add(slice(0, 4), grad_logits[:, 0:4], hidden)
    expected = 1 + grad_logits.double().t() @ hidden.double()
    expected[8:] = 1.0  # rows that were not added
    torch.testing.assert_close(weight.main_grad.double(), expected, rtol=0, atol=bound)


def test_what_autograd_gets(monkeypatch):
    monkeypatch.setattr(torch, "empty_like", lambda like: torch.full_like(like, torch.nan))
    weight, _, _ = pieces(torch.bfloat16)
    weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
    assert MainGradient(weight, None).result() is None
    assert not hasattr(weight, "grad_added_to_main_grad")
    weight.grad_added_to_main_grad = False
    result = MainGradient(weight, None).result()
    assert (result.shape, result.dtype) == (weight.shape, weight.dtype)
    assert weight.grad_added_to_main_grad
    weight.zero_out_wgrad = True
    assert not MainGradient(weight, None).result().any()


def test_other_main_grads_are_refused():
    weight, _, _ = pieces(torch.float32)
    with pytest.raises(RuntimeError, match="to have a main_grad, found none"):
        MainGradient(weight, None)
    with pytest.raises(RuntimeError, match=r"expected float32, float16 or bfloat16.*got torch.float64"):
        MainGradient(weight, torch.zeros_like(weight, dtype=torch.float64))
