"""A rank that fails alone in the loss of a real GPTModel, and what can be done after it."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

import megatron_patch
from te_ce import LossOptions
from te_ce.counters import served
from tests.faults.launch import ROOT, TIMEOUT_S
from tests.faults.ranks import Rank, observe

sys.path.insert(0, str(ROOT / "tests" / "megatron"))

import megatron_gpt as gpt
from megatron.core import parallel_state
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.tensor_parallel.layers import ColumnParallelLinear

HOLDERS = (LanguageModule, ColumnParallelLinear)


def own_objects() -> list[dict[str, object]]:
    """What the classes that the patch changes hold."""
    return [dict(vars(holder)) for holder in HOLDERS]


def are_same(before: list[dict[str, object]], now: list[dict[str, object]]) -> bool:
    """Whether these are the same attributes, and the very same objects."""
    return all(
        old.keys() == new.keys() and all(old[name] is new[name] for name in old)
        for old, new in zip(before, now, strict=True)
    )


def ask(model: Any, implementation: str) -> Any:
    """The model, whose configuration now asks for this loss."""
    model.config.cross_entropy_loss_fusion, model.config.cross_entropy_fusion_impl = True, implementation
    return model


@contextlib.contextmanager
def _model_parallel(ranks: int) -> Iterator[None]:
    """Megatron's groups, which have a timeout of their own: half an hour, if nothing is said."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parallel_state.initialize_model_parallel(ranks, distributed_timeout_minutes=TIMEOUT_S / 60)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()


def fails_alone(me: Rank, checked: bool, implementation: str) -> dict[str, Any]:
    """The last rank has labels of another length. Then: revert, and another group with the patch applied again."""
    me.init()
    before, batch = own_objects(), gpt.make_batch(2, 8)
    options = LossOptions(check_targets=checked)
    with _model_parallel(me.ranks):
        megatron_patch.apply(options=options)
        was_patched = not are_same(before, own_objects())
        model = ask(gpt.make_model(me.ranks), implementation)
        kept = {name: each.detach().clone() for name, each in model.named_parameters()}
        right = gpt.forward(model, batch, batch.labels).sum()
        labels = batch.labels[:, 1:] if me.is_odd else batch.labels
        seen = observe(lambda: gpt.forward(model, batch, labels))
        seen["parameters_kept"] = all(torch.equal(each, kept[name]) for name, each in model.named_parameters())
        seen["loss_before"] = float(right)
        del right
        megatron_patch.revert()
        seen["reverted"] = was_patched and are_same(before, own_objects())
    me.meet("failed")
    dist.destroy_process_group()
    me.init("another store")
    with _model_parallel(me.ranks), megatron_patch.patched(options=options):
        model, count = ask(gpt.make_model(me.ranks), implementation), sum(served().values())
        loss = gpt.forward(model, batch, batch.labels)
        dense = gpt.dense_loss(model, batch, parallel_state.get_tensor_model_parallel_group())
        seen["served"] = sum(served().values()) - count
        seen["wrong_after"] = float((loss.detach().double() - dense).abs().max())
        seen["loss_after"] = float(loss.sum())
    return seen


def differ_in_their_path(me: Rank) -> dict[str, Any]:
    """The last rank has a hook on its output layer, and computes the loss on logits. Three forwards, the last alike."""
    me.init()
    batch = gpt.make_batch(2, 8)
    with _model_parallel(me.ranks), megatron_patch.patched():
        model = ask(gpt.make_model(me.ranks), "te_ce_linear")
        hook = model.output_layer.register_forward_hook(lambda *_: None)
        if not me.is_odd:
            hook.remove()
        seen = [observe(lambda: gpt.forward(model, batch, batch.labels)) for _ in range(2)]
        hook.remove()
        return {"different": seen, "alike": observe(lambda: gpt.forward(model, batch, batch.labels))}
