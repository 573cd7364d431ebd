"""No option given to `apply` gets lost on the way to the loss: two values, two results, both those of the reference."""

from __future__ import annotations

import inspect

import megatron_gpt as gpt
import pytest
import torch
from megatron.core import parallel_state
from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy as fused
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy as unfused

import megatron_patch
from te_ce import LossOptions
from tests.support.bounds import check_gradient, check_value
from tests.support.dense import dense

pytestmark = [pytest.mark.usefixtures("world"), pytest.mark.filterwarnings("ignore:::megatron")]

TWO_VALUES = {
    "ignore_index": ({"ignore_index": 3}, {"ignore_index": 5}),
    "label_smoothing": ({"label_smoothing": 0.1}, {"label_smoothing": 0.2}),
    "smoothing": ({"label_smoothing": 0.3}, {"label_smoothing": 0.3, "smoothing": "others"}),
    "z_loss_weight": ({"z_loss_weight": 0.01}, {"z_loss_weight": 0.02}),
    "softcap": ({"softcap": 2.0}, {"softcap": 3.0}),
    "scale": ({"scale": 0.5}, {"scale": -0.75}),
    "vocab_size": ({"vocab_size": gpt.VOCAB - 7}, {"vocab_size": gpt.VOCAB - 8}),
}


def inputs():
    torch.manual_seed(3)
    target = torch.randint(0, gpt.VOCAB - 8, (5, 2))
    target[0] = torch.tensor([3, 5])
    return torch.randn(5, 2, gpt.VOCAB) * 3, target


@pytest.mark.parametrize("call", [unfused, fused], ids=["unfused", "fused"])
@pytest.mark.parametrize("name", TWO_VALUES)
def test_two_values_through_megatrons_functions(name, call):
    logits, target = inputs()
    takes_group = "tp_group" in inspect.signature(call).parameters
    group = {"tp_group": parallel_state.get_tensor_model_parallel_group()} if takes_group else {}
    results = []
    for fields in TWO_VALUES[name]:
        options = LossOptions(**fields)
        leaf = logits.clone().requires_grad_()
        with megatron_patch.patched(replace_native=True, options=options):
            loss = call(leaf, target, **group)
        loss.sum().backward()
        truth = dense(logits, target, options, torch.ones(5, 2))
        check_value("loss", loss, truth, target, options)
        check_gradient(leaf.grad, truth, logits, target, options, torch.ones(5, 2), 0.5)
        results.append((loss.detach(), leaf.grad))
    assert not any(torch.equal(old, new) for old, new in zip(*results, strict=True))


@pytest.mark.parametrize("name", TWO_VALUES)
def test_two_values_through_the_model(asking, name):
    model, batch = asking(gpt.make_model()), gpt.make_batch(2, 8, (-100,))
    batch.labels.clamp_(max=gpt.VOCAB - 9)
    batch.labels[1, :2] = torch.tensor([3, 5])
    losses = []
    for fields in TWO_VALUES[name]:
        options = LossOptions(**fields)
        with megatron_patch.patched(options=options):
            loss, _ = gpt.loss_and_grads(model, batch, gpt.mean)
            logits = gpt.forward(model, batch, None)
        labels = batch.labels.masked_fill(batch.labels < 0, options.ignore_index)
        check_value("loss", loss, dense(logits, labels, options, torch.ones(2, 8)), labels, options)
        losses.append(loss)
    assert not torch.equal(*losses)


def test_a_scale_of_each_row_is_refused():
    with pytest.raises(ValueError, match=r"options\.scale: expected a number, got a tensor"):
        megatron_patch.apply(options=LossOptions(scale=torch.ones(10)))
    assert not megatron_patch.status().applied
