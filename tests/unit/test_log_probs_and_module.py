"""The entry for reinforcement learning and the module, and both loss and outputs under torch's own contexts."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from te_ce import LossOptions, LossOutput, VocabParallelCrossEntropyLoss, VocabShard, vocab_parallel_log_probs
from te_ce.outputs import OUTPUTS, OutputGrads
from tests.support.bounds import check_gradient, check_value
from tests.support.dense import dense
from tests.support.subject import Subject

_OPTIONS = LossOptions(scale=1.25, softcap=4.0, vocab_size=10)


def _inputs(subject: Subject, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(23)
    logits = (torch.randn(2, 3, 12, generator=random) * 2).to(dtype).to(subject.device)
    return logits, torch.tensor([[0, 1, -100], [9, 4, 4]], device=subject.device)


def _log_probs(subject: Subject, *arguments: Tensor, **keywords: Any) -> Any:
    with subject.serving():
        return vocab_parallel_log_probs(*arguments, **keywords)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("used", ["log_probs", "entropy", "log_probs+entropy"])
def test_log_probs_and_entropy_match_float64(subject: Subject, dtype: torch.dtype, used: str) -> None:
    logits, target = _inputs(subject, dtype)
    leaf = logits.clone().requires_grad_()
    log_probs, entropy = _log_probs(subject, leaf, target, entropy=True, options=_OPTIONS)
    random = torch.Generator().manual_seed(1)
    given = {name: torch.randn(2, 3, generator=random).to(subject.device) for name in used.split("+")}
    values = {"log_probs": log_probs, "entropy": entropy}
    torch.autograd.backward([values[name] for name in given], list(given.values()))
    grads = OutputGrads(None, **given)
    truth = dense(logits, target, _OPTIONS, grads)
    for name, value in values.items():
        assert value.dtype == torch.float32
        assert value.shape == target.shape
        assert value[0, 2] == 0
        check_value(name, value, truth, target, _OPTIONS)
    check_gradient(leaf.grad, truth, logits, target, _OPTIONS, grads, subject.allowed_ulps(dtype))
    assert torch.equal(log_probs, _log_probs(subject, logits, target, options=_OPTIONS))


def test_log_probs_are_those_of_the_loss(subject: Subject) -> None:
    logits, target = _inputs(subject)
    log_probs, entropy = _log_probs(subject, logits, target, entropy=True)
    got = subject.loss(logits, target, outputs=OUTPUTS)
    assert torch.equal(log_probs, got.log_probs)
    assert torch.equal(entropy, got.entropy)
    assert torch.equal(log_probs, -got.loss)
    assert (log_probs <= 0).all()
    assert (entropy >= 0).all()


def test_a_policy_gradient_step(subject: Subject) -> None:
    """Ratio to an old policy, advantages, an entropy bonus: the gradient of the whole expression."""
    logits, target = _inputs(subject)
    random = torch.Generator().manual_seed(2)
    old, advantage = torch.randn(2, 2, 3, generator=random).to(subject.device) * 0.1
    old = old + _log_probs(subject, logits, target)

    def objective(log_probs: Tensor, entropy: Tensor) -> Tensor:
        ratio = (log_probs - old.to(log_probs)).exp()
        gain = torch.minimum(ratio * advantage, ratio.clamp(0.9, 1.1) * advantage)
        return -(gain + 0.01 * entropy)[target != -100].mean()

    leaf = logits.clone().requires_grad_()
    objective(*_log_probs(subject, leaf, target, entropy=True)).backward()
    x = logits.double().requires_grad_()
    log_p = x.log_softmax(-1)
    chosen = log_p.gather(-1, target.clamp(min=0)[..., None])[..., 0]
    objective(chosen, -(log_p.exp() * log_p).sum(-1)).backward()
    torch.testing.assert_close(leaf.grad.double(), x.grad, atol=3e-7, rtol=1e-5)


@pytest.mark.parametrize("entropy", [1, "yes", None])
def test_entropy_is_yes_or_no(subject: Subject, entropy: object) -> None:
    with pytest.raises(TypeError, match="entropy: expected a bool"):
        vocab_parallel_log_probs(*_inputs(subject), entropy=entropy)  # type: ignore[call-overload]


def test_module_shows_what_differs_from_the_defaults() -> None:
    assert repr(VocabParallelCrossEntropyLoss()) == "VocabParallelCrossEntropyLoss()"
    module = VocabParallelCrossEntropyLoss(
        softcap=30.0,
        scale=0.5,
        smoothing="others",
        label_smoothing=0.1,
        shard=VocabShard(0, 4, 8),
        outputs={"entropy", "log_probs"},
        inplace=False,
    )
    assert module.extra_repr() == (
        "label_smoothing=0.1, smoothing='others', softcap=30.0, scale=0.5, shard=VocabShard(start=0, stop=4, size=8), "
        "outputs=('log_probs', 'entropy'), inplace=False"
    )
    assert list(module.parameters()) == []
    assert module.state_dict() == {}


def test_module_is_the_function(subject: Subject) -> None:
    logits, target = _inputs(subject)
    fields = {"label_smoothing": 0.1, "z_loss_weight": 0.1, "scale": 0.5, "vocab_size": 10}
    for module in (
        VocabParallelCrossEntropyLoss(**fields, outputs=OUTPUTS),
        VocabParallelCrossEntropyLoss(options=LossOptions(**fields), outputs=OUTPUTS),  # type: ignore[arg-type]
        copy.deepcopy(VocabParallelCrossEntropyLoss(**fields, outputs=iter(OUTPUTS))),
        pickle.loads(pickle.dumps(VocabParallelCrossEntropyLoss(**fields, outputs=OUTPUTS))),
    ):
        with subject.serving():
            got = [module(logits, target), module(logits, target)]
        expected = subject.loss(logits, target, outputs=OUTPUTS, **fields)
        for each in got:
            assert type(each) is LossOutput
            assert all(torch.equal(a, b) for a, b in zip(each, expected, strict=True))


def test_module_takes_a_scale_of_each_row(subject: Subject) -> None:
    logits, target = _inputs(subject)
    module = VocabParallelCrossEntropyLoss(softcap=3.0)
    scale = torch.rand(2, 3).to(subject.device) + 0.5
    with subject.serving():
        assert torch.equal(module(logits, target, scale), subject.loss(logits, target, softcap=3.0, scale=scale))
        assert torch.equal(module(logits, target), subject.loss(logits, target, softcap=3.0))
    for keywords in ({"scale": scale}, {"options": LossOptions(scale=scale)}):
        with pytest.raises(ValueError, match="scale: expected a number, got a tensor; pass the scale of each row"):
            VocabParallelCrossEntropyLoss(**keywords)


def test_module_checks_when_it_is_made() -> None:
    with pytest.raises(ValueError, match="label_smoothing"):
        VocabParallelCrossEntropyLoss(label_smoothing=1.0)
    with pytest.raises(ValueError, match=r"outputs: .*'entropies'"):
        VocabParallelCrossEntropyLoss(outputs=["entropies"])


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"inplace": "x"}, ValueError, "inplace: expected .* got 'x'"),
        ({"inplace": None}, TypeError, "inplace: expected .* got NoneType"),
        ({"group": 3}, TypeError, "group: expected .* got int"),
        ({"shard": (0, 4, 4)}, TypeError, "shard: expected a VocabShard or None, got tuple"),
    ],
)
def test_module_checks_its_place_too(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        VocabParallelCrossEntropyLoss(**arguments)


def test_module_has_one_scale() -> None:
    loss = VocabParallelCrossEntropyLoss(scale=0.5)
    with pytest.raises(ValueError, match=r"scale: expected None, as the options have the scale 0.5, got a tensor"):
        loss(torch.zeros(2, 4), torch.tensor([1, 2]), torch.ones(2))


def test_module_can_be_copied() -> None:
    loss = VocabParallelCrossEntropyLoss(softcap=3.0, outputs=("lse",)).eval()
    loss.group = _NeverCopied()  # type: ignore[assignment]
    clone = copy.deepcopy(torch.nn.ModuleList([loss]))[0]
    assert clone is not loss
    assert clone.group is loss.group
    assert (clone.options, clone.outputs, clone.training) == (loss.options, ("lse",), False)


class _NeverCopied:
    """As a process group."""

    def __deepcopy__(self, memo: object) -> None:
        raise TypeError("cannot be copied")


def test_log_probs_take_no_outputs() -> None:
    with pytest.raises(TypeError, match="unexpected keyword 'outputs': log-probs are returned"):
        vocab_parallel_log_probs(torch.zeros(2, 4), torch.tensor([1, 2]), outputs=("lse",))


def test_module_overwrites_dropped_logits(subject: Subject) -> None:
    leaf = _inputs(subject)[0].requires_grad_()
    logits = leaf * 1.0
    addresses = [logits.data_ptr()]
    logits.register_hook(lambda grad: addresses.append(grad.data_ptr()))
    module = VocabParallelCrossEntropyLoss(outputs=["entropy"])
    target = _inputs(subject)[1]
    with subject.serving():
        got = module(logits, target)
    subject.let_go()
    del logits
    (got.loss.sum() + got.entropy.sum()).backward()
    assert addresses[0] == addresses[1]


class _Head(nn.Module):
    """A linear layer and everything that the loss gives of its logits."""

    def __init__(self, subject: Subject) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 12).to(subject.device)
        self.subject = subject

    def forward(self, hidden: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        got = self.subject.loss(self.linear(hidden), target, outputs=OUTPUTS, options=_OPTIONS)
        return got.loss, got.log_probs, got.entropy


def _total(values: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    loss, log_probs, entropy = values
    return (loss + 0.3 * log_probs - 0.1 * entropy).sum()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed(subject: Subject, use_reentrant: bool) -> None:
    head, target = _Head(subject), _inputs(subject)[1]
    hidden = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(6)).to(subject.device).requires_grad_()
    results = []
    for run in (head, lambda *arguments: checkpoint(head, *arguments, use_reentrant=use_reentrant)):
        head.zero_grad()
        hidden.grad = None
        values = run(hidden, target)
        _total(values).backward()
        results.append((*(value.detach() for value in values), hidden.grad, head.linear.weight.grad))
    assert all(torch.equal(plain, other) for plain, other in zip(*results, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(subject: Subject, dtype: torch.dtype) -> None:
    head, target = _Head(subject), _inputs(subject)[1]
    hidden = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(6)).to(subject.device)
    with torch.autocast(subject.device.type, dtype=dtype):
        logits = head.linear(hidden)
        values = head(hidden, target)
        inside = subject.loss(logits, target, outputs=OUTPUTS, options=_OPTIONS)
    assert logits.dtype == dtype
    outside = subject.loss(logits, target, outputs=OUTPUTS, options=_OPTIONS)
    assert all(value.dtype == torch.float32 for value in values)
    assert all(torch.equal(a, b) for a, b in zip(inside, outside, strict=True))
    assert torch.equal(values[2], outside.entropy)
    _total(values).backward()
    assert head.linear.weight.grad.dtype == torch.float32
    assert head.linear.weight.grad.isfinite().all()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(subject: Subject, mode: Any) -> None:
    logits, target = _inputs(subject)
    expected = subject.loss(logits.requires_grad_(), target, outputs=OUTPUTS, options=_OPTIONS)
    with mode():
        got = subject.loss(logits, target, outputs=OUTPUTS, options=_OPTIONS)
        log_probs = _log_probs(subject, logits, target, options=_OPTIONS)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    assert torch.equal(log_probs, got.log_probs)
    assert not any(value.requires_grad for value in got)
