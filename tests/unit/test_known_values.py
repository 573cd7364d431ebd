"""Losses and gradients with values worked out by hand or in float64, one for each way a loss was once wrong."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from te_ce import LossOptions, VocabShard
from te_ce.problem import ShardProblem
from tests.support.subject import Subject


@pytest.mark.parametrize(
    ("smoothing", "expected"),
    [("others", [3.542936, 2.805376, 1.811026]), ("uniform", [3.561686, 2.812072, 1.802098])],
)
@pytest.mark.parametrize("widths", [(8,), (4, 4), (3, 0, 5)], ids=str)
def test_smoothing_counts_the_whole_vocabulary(
    subject: Subject, smoothing: str, expected: list[float], widths: tuple[int, ...]
) -> None:
    logits = ((torch.arange(24.0, device=subject.device).view(3, 8) * 7) % 11) / 4
    target = torch.tensor([0, 5, 7], device=subject.device)
    options = LossOptions(label_smoothing=0.1, smoothing=smoothing)
    losses, grad = subject.run_shards(logits, target, torch.ones(3, device=subject.device), options, widths)
    for loss in losses:
        torch.testing.assert_close(loss.cpu(), torch.tensor(expected), atol=1e-6, rtol=0)
    alpha = 0.1
    q = torch.full((3, 8), alpha / (7 if smoothing == "others" else 8))
    q[range(3), target.cpu()] = 1 - alpha if smoothing == "others" else 1 - alpha + alpha / 8
    torch.testing.assert_close(grad.cpu(), logits.cpu().softmax(-1) - q, atol=1e-6, rtol=0)


def test_ranks_without_the_target_get_their_softmax(subject: Subject) -> None:
    logits = torch.arange(1.0, 9.0, device=subject.device)[None]
    target = torch.tensor([1], device=subject.device)
    _, grad = subject.run_shards(logits, target, torch.ones(1, device=subject.device), LossOptions(), (4, 4))
    expected = torch.tensor([0.0315, 0.0856, 0.2326, 0.6323])
    torch.testing.assert_close(grad[0, 4:].cpu(), expected, atol=1e-4, rtol=0)
    onehot = torch.eye(8)[1]
    torch.testing.assert_close(grad[0].cpu(), logits[0].cpu().softmax(-1) - onehot, atol=1e-6, rtol=0)


@pytest.mark.parametrize(("start", "target"), [(0, 8), (8, 7), (8, 16)])
def test_the_neighbour_of_a_shard_is_not_its_own(subject: Subject, start: int, target: int) -> None:
    # What lies beside the shard's columns is larger than they are.
    beside = torch.full((3, 24), 50.0, device=subject.device)
    beside[:, 8:16] = torch.arange(8.0)
    problem = ShardProblem.resolve(LossOptions(), VocabShard(start, start + 8, 24), 3)
    targets = torch.full((3,), target, device=subject.device)
    statistics = subject.backend.row_statistics(beside[:, 8:16], targets, problem)
    assert (statistics[:, 2] == -torch.inf).all()


@pytest.mark.parametrize(("p", "logit"), [(0.998999, 13.8125)])
def test_true_class_is_rounded_once(subject: Subject, p: float, logit: float) -> None:
    logits = torch.zeros(1, 1000, dtype=torch.bfloat16, device=subject.device)
    logits[0, 17] = logit
    target = torch.tensor([17], device=subject.device)
    _, grad = subject.run_shards(logits, target, torch.ones(1, device=subject.device), LossOptions(), (1000,))
    # -1.001e-3, whose neighbours in bfloat16 are 3.8e-6 away.
    assert abs(grad[0, 17].item() - (p - 1)) < 4e-6


def test_smoothed_true_class_is_rounded_once(subject: Subject) -> None:
    logits = torch.zeros(1, 16, dtype=torch.bfloat16, device=subject.device)
    logits[0, 5] = 4.90625
    target = torch.tensor([5], device=subject.device)
    options = LossOptions(label_smoothing=0.1, smoothing="others")
    _, grad = subject.run_shards(logits, target, torch.ones(1, device=subject.device), options, (16,))
    expected = torch.full((16,), -5.849e-6)
    expected[5] = 8.7736e-5
    torch.testing.assert_close(grad[0].float().cpu(), expected, rtol=2.0**-7, atol=0)


def test_bfloat16_and_the_same_values_in_float32_agree(subject: Subject) -> None:
    random = torch.Generator().manual_seed(1)
    logits = torch.randn(4, 64000, generator=random).bfloat16().to(subject.device)
    target = torch.randint(64000, (4,), generator=random).to(subject.device)
    low, high = subject.loss(logits, target), subject.loss(logits.float(), target)
    torch.testing.assert_close(low, high, rtol=1e-6, atol=0)


@pytest.mark.parametrize("widths", [(3,), (1, 1, 1)], ids=str)
@pytest.mark.parametrize(("offset", "expected"), [(1e4, 0.241311), (1e6, 0.241311), (1e8, 1.098612)])
def test_common_offsets_cost_no_precision(
    subject: Subject, offset: float, expected: float, widths: tuple[int, ...]
) -> None:
    # At 1e8 float32 holds the three logits as equal.
    logits = torch.tensor([[2.0, -1.0, 0.5]], device=subject.device) + offset
    target = torch.tensor([0], device=subject.device)
    losses, _ = subject.run_shards(logits, target, torch.ones(1, device=subject.device), LossOptions(), widths)
    for loss in losses:
        assert abs(loss.item() - expected) < 1e-6


@pytest.mark.parametrize("alpha", [0.0, 0.1])
def test_an_exact_offset_changes_nothing(subject: Subject, alpha: float) -> None:
    random = torch.Generator().manual_seed(3)
    logits = (torch.randn(4, 500, generator=random) * 4096).round() / 1024
    target = torch.randint(500, (4,), generator=random).to(subject.device)
    logits = logits.to(subject.device)
    plain = subject.loss(logits, target, label_smoothing=alpha)
    moved = subject.loss(logits + 1e4, target, label_smoothing=alpha)
    torch.testing.assert_close(plain, moved, rtol=0, atol=1e-5)


def test_float16_sums_are_made_in_float32(subject: Subject) -> None:
    device = subject.device
    flat = torch.full((1, 32768), 3.0, dtype=torch.float16, device=device)
    loss = subject.loss(flat, torch.tensor([7], device=device), label_smoothing=0.1)
    assert abs(loss.item() - math.log(32768)) < 5e-6
    tail = torch.full((1, 201), -18.0, dtype=torch.float16, device=device)
    tail[0, 0] = 0.0
    loss = subject.loss(tail, torch.tensor([0], device=device))
    assert abs(loss.item() - math.log1p(200 * math.exp(-18))) < 4e-7


def test_float16_mean_of_many_rows_does_not_overflow(subject: Subject) -> None:
    rows = 70_000 if "interpreter" not in subject.name else 100
    logits = torch.zeros(rows, 2, dtype=torch.float16, device=subject.device)
    logits[:, 0] = math.log(math.e - 1)
    target = torch.ones(rows, dtype=torch.int64, device=subject.device)
    mean = subject.loss(logits, target, reduction="mean")
    assert abs(mean.item() - 1.0) < 1e-3
    total = subject.loss(logits, target, reduction="sum")
    assert abs(total.item() - rows * mean.item()) < rows * 1e-5


@pytest.mark.parametrize("value", [-30.0, 30.0, -1e4])
@pytest.mark.parametrize("columns", [1, 2, 3, 17, 127, 129, 130, 1000, 4095, 4097])
def test_lanes_past_the_last_column_take_no_part(subject: Subject, columns: int, value: float) -> None:
    logits = torch.full((2, columns), value, device=subject.device)
    target = torch.tensor([0, columns - 1], device=subject.device)
    losses, grad = subject.run_shards(
        logits, target, torch.ones(2, device=subject.device), LossOptions(), (columns // 3, columns - columns // 3)
    )
    for loss in losses:
        torch.testing.assert_close(loss.cpu(), torch.full((2,), math.log(columns)), atol=2e-6, rtol=0)
    assert grad.sum(-1).abs().max() < 2e-5


def test_padding_columns_take_no_part_whatever_they_hold(subject: Subject) -> None:
    # Rows that begin at multiples of 16 bytes with and without padding: others may differ in the last bit.
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(5)).to(subject.device)
    target = torch.tensor([0, 27, 15], device=subject.device)
    plain = subject.loss(logits[:, :28].contiguous(), target)
    for filler in (torch.nan, torch.inf, -torch.inf, 1e30):
        padded = logits.clone()
        padded[:, 28:] = filler
        padded.requires_grad_()
        loss = subject.loss(padded, target, vocab_size=28)
        torch.testing.assert_close(loss, plain, rtol=0, atol=0)
        loss.sum().backward()
        assert (padded.grad[:, 28:] == 0).all()
        assert padded.grad.isfinite().all()


def test_classifier_gradients_match_float64(subject: Subject) -> None:
    random = torch.Generator().manual_seed(8)
    hidden = torch.randn(64, 128, generator=random).bfloat16()
    weight = (torch.randn(32, 128, generator=random) / 11).bfloat16()
    target = torch.randint(32, (64,), generator=random)
    logits = (hidden @ weight.T).to(subject.device).requires_grad_()
    subject.loss(logits, target.to(subject.device), reduction="mean").backward()
    x = logits.detach().cpu().double().requires_grad_()
    F.cross_entropy(x, target).backward()
    assert logits.grad is not None
    # One rounding: half a unit in the last place, a whole one where the interpreter truncates.
    tolerance = 2.0**-8 if subject.allowed_ulps(torch.bfloat16) == 0.5 else 2.0**-7
    torch.testing.assert_close(logits.grad.cpu().double(), x.grad, rtol=tolerance * 1.01, atol=1e-9)


# The 1 of the max beside many small equal terms: rounding at 1 loses them all to the same side.
@pytest.mark.parametrize(
    ("columns", "below"), [(300, 10.2303), (3000, 10.2987), (64_000, 12.0), (128_000, 12.0), (128_000, 15.0)]
)
@pytest.mark.parametrize("place", [0, 77, -1])
def test_confident_rows_keep_the_bound(subject: Subject, columns: int, below: float, place: int) -> None:
    logits = torch.full((1, columns), -below, device=subject.device)
    logits[0, place] = 0.0
    target = torch.tensor([place % columns], device=subject.device)
    exact = math.log1p((columns - 1) * math.exp(logits[0, place - 1].double().item()))
    for alpha in (0.0, 0.1):
        expected = exact + alpha * (columns - 1) / columns * -logits[0, place - 1].double().item()
        loss = subject.loss(logits, target, label_smoothing=alpha)
        assert abs(loss.item() - expected) <= 4e-7 * max(1.0, expected)


@pytest.mark.parametrize("near", [1e-4, 0.1, 0.7])
def test_two_large_terms_keep_the_bound(subject: Subject, near: float) -> None:
    logits = torch.full((1, 128_000), -12.0, device=subject.device)
    logits[0, 5], logits[0, 70_000] = 0.0, -near
    x = logits.double()
    expected = torch.logsumexp(x, -1).item()
    loss = subject.loss(logits, torch.tensor([5], device=subject.device))
    assert abs(loss.item() - expected) <= 4e-7 * max(1.0, expected)


# A max that rises by the same little with every block, and then a peak: rescaling adds up its own rounding, and the
# many equal terms share theirs. The interpreter does not fuse a product with the sum that follows it.
@pytest.mark.parametrize("rise", [0.0, 1e-3, 0.3, 2.0, 30.0])
@pytest.mark.parametrize("below", [5.6, 11.1, 11.9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rising_rows_keep_the_bound(subject: Subject, dtype: torch.dtype, below: float, rise: float) -> None:
    columns = 60_000
    logits = torch.linspace(-below - rise, -below, columns).to(dtype)[None].to(subject.device)
    logits[0, -7] = 0.0
    x = logits.double()
    loss = subject.loss(logits, torch.tensor([columns - 7], device=subject.device))
    expected = torch.logsumexp(x, -1).item()
    assert abs(loss.item() - expected) <= 4e-7 * max(1.0, expected)


@pytest.mark.parametrize("alpha", [0.9, 0.999, 0.99999])
def test_the_target_keeps_its_weight_as_smoothing_nears_1(subject: Subject, alpha: float) -> None:
    columns = 5000
    logits = torch.zeros(1, columns, device=subject.device)
    logits[0, 3] = -6e4
    logits.requires_grad_()
    target = torch.tensor([3], device=subject.device)
    loss = subject.loss(logits, target, label_smoothing=alpha)
    x = logits.detach().cpu().double().requires_grad_()
    expected = F.cross_entropy(x, target.cpu(), label_smoothing=alpha, reduction="none")
    assert abs(loss.item() - expected.item()) <= 4e-7 * expected.item()
    loss.backward()
    expected.backward()
    assert abs(logits.grad[0, 3].item() - x.grad[0, 3].item()) <= 2e-6 * (alpha / columns + (1 - alpha))
