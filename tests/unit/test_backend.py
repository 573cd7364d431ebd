"""Which implementation serves a call, that it says so, and that nothing falls back."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

from te_ce import counters, vocab_parallel_cross_entropy
from te_ce.backend import Backend, choose_backend
from tests.support.subject import Subject

_TARGET = torch.zeros(3, dtype=torch.int64)


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """The name of the backend chosen for CPU logits; the kernels themselves are not imported."""
    nothing = Backend("triton", *[None] * 6)  # type: ignore[arg-type]
    monkeypatch.setattr("te_ce.backend._triton_backend", lambda: nothing)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    return lambda dtype=torch.float32: choose_backend(torch.zeros(3, 8, dtype=dtype)).name


def test_cpu_tensors_go_to_the_twin(chosen: Callable[..., str]) -> None:
    assert chosen() == "torch"


def test_the_interpreter_serves_cpu_tensors(chosen: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert chosen() == "triton"
    assert chosen(torch.float64) == "torch"


def test_the_environment_overrides(chosen: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("TE_CE_BACKEND", "torch")
    assert chosen() == "torch"
    monkeypatch.setenv("TE_CE_BACKEND", "triton")
    assert chosen() == "triton"
    with pytest.raises(ValueError, match=r"TE_CE_BACKEND=triton: .* got float64"):
        chosen(torch.float64)
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ValueError, match="TE_CE_BACKEND=triton: expected CUDA logits, or TRITON_INTERPRET=1"):
        chosen()


def test_losses_are_counted_by_implementation(subject: Subject) -> None:
    before = counters.served()
    subject.loss(torch.zeros(3, 8, device=subject.device), _TARGET.to(subject.device))
    after = counters.served()
    grown = {name: after[name] - before[name] for name in after}
    assert grown == {"triton": 0, "torch": 0} | {subject.backend.name: 1}


def test_counting_starts_again() -> None:
    vocab_parallel_cross_entropy(torch.zeros(3, 8), _TARGET)
    counters.reset()
    assert counters.served() == {"triton": 0, "torch": 0}


def test_a_failing_kernel_raises(monkeypatch: pytest.MonkeyPatch, subject: Subject) -> None:
    def fail(*args: object) -> torch.Tensor:
        raise RuntimeError("out of resources")

    broken = subject.backend._replace(row_loss=fail)
    monkeypatch.setattr("te_ce.call.choose_backend", lambda logits: broken)
    monkeypatch.setattr("te_ce.call._resolved", {})
    before = counters.served()
    with pytest.raises(RuntimeError, match="out of resources"):
        vocab_parallel_cross_entropy(torch.zeros(3, 8, device=subject.device), _TARGET.to(subject.device))
    assert counters.served() == before


_WITHOUT_TRITON = """
import sys, torch
{setup}
from te_ce import vocab_parallel_cross_entropy
assert vocab_parallel_cross_entropy(torch.zeros(3, 8), torch.zeros(3, dtype=torch.int64)).shape == (3,)
try:
    import te_ce.kernels
except RuntimeError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("setup", "message"),
    [
        ("sys.modules['triton'] = None", "needs Triton >= 3.6, which is not installed: pip install 'triton>=3.6'"),
        (
            "import triton; triton.__version__ = '2.1.0'",
            "needs Triton >= 3.6, found 2.1.0",
        ),
    ],
    ids=["missing", "too_old"],
)
def test_without_a_usable_triton(setup: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    script = _WITHOUT_TRITON.format(setup=setup)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert message in done.stdout, done.stderr[-2000:]


def test_importing_has_no_side_effect() -> None:
    script = "import sys, te_ce; print([m for m in ('triton', 'torch._dynamo', 'megatron') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # the compiler's own look
@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
@pytest.mark.parametrize("inplace", ["auto", True])
def test_compiled_code_sees_the_logits_as_they_were(subject: Subject, compiler: str, inplace: object) -> None:
    target = torch.tensor([1, 2, 3, 4], device=subject.device)

    def head(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = x * 1.0
        loss = vocab_parallel_cross_entropy(logits, target, inplace=inplace)  # type: ignore[arg-type]
        return loss.sum() + 0.0 * logits.sum(), logits.sum()

    values = torch.randn(4, 8, generator=torch.Generator().manual_seed(0)).to(subject.device)
    results = []
    with subject.serving():
        for function in (head, torch.compile(head, backend=compiler)):
            x = values.clone().requires_grad_()
            loss, total = function(x)
            loss.backward()
            results.append((loss.detach(), total.detach(), x.grad))
    torch._dynamo.reset()
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(eager, compiled, rtol=0, atol=0)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_no_gradient_is_asked_for(subject: Subject, context: type) -> None:
    logits = torch.randn(3, 8, generator=torch.Generator().manual_seed(0)).to(subject.device)
    target = _TARGET.to(subject.device)
    plain = subject.loss(logits.clone().requires_grad_(), target)
    with context():
        loss = subject.loss(logits, target)
    assert torch.equal(loss, plain.detach())
    assert not loss.requires_grad


def test_float64_is_served_in_float64() -> None:
    logits = torch.randn(3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    target = torch.tensor([1, -100, 7])
    assert vocab_parallel_cross_entropy(logits, target).dtype == torch.float64
    for alpha in (0.0, 0.1):
        assert torch.autograd.gradcheck(
            lambda x, a=alpha: vocab_parallel_cross_entropy(x, target, label_smoothing=a, inplace=False), (logits,)
        )
