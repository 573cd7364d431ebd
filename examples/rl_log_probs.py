"""Policy gradients on a model whose vocabulary is sharded: log-probs and entropies by te_ce, checked against dense.

    torchrun --nproc-per-node 2 examples/rl_log_probs.py            # CPU or GPUs, whatever is there
    torchrun --nproc-per-node 2 examples/rl_log_probs.py --steps 100 --temperature 1.3

A policy writes a token after every prompt token and is paid 1 for the right one, the prompt token's successor. Each
rank holds its columns of the output layer; nobody needs all logits but to sample, and here to check. Every step: sample
at the temperature, then raise what was paid (PPO's clipped ratio) with an entropy bonus; log-probs and entropies come
from `vocab_parallel_log_probs` in one pass. Exits with 1 if a value is off or nothing was learned.
"""

from __future__ import annotations

import argparse
import os
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn

from te_ce import VocabShard, vocab_parallel_log_probs

VOCABULARY = 1003  # not a multiple of anything: the last rank holds fewer columns
HIDDEN = 64
TOLERANCE = 1e-5  # of float32 logits, which are rounded once on their way


class Policy(nn.Module):
    """Embedding and trunk, the same on every rank, and this rank's columns of the output layer."""

    def __init__(self, shard: VocabShard) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.trunk = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Tanh())
        whole = torch.randn(VOCABULARY, HIDDEN) * HIDDEN**-0.5  # drawn whole: the same model on any number of ranks
        self.head = nn.Parameter(whole[shard.start : shard.stop].clone())

    def forward(self, prompt: Tensor) -> Tensor:
        """Logits [.., V_local] of this rank after each token of `prompt` [..]."""
        hidden: Tensor = _SumOfGradients.apply(self.trunk(self.embedding(prompt)))
        return hidden @ self.head.T


class _SumOfGradients(torch.autograd.Function):
    """The hidden state as it is; its gradient summed over the ranks, each of which knows its columns' part."""

    @staticmethod
    def forward(ctx: object, hidden: Tensor) -> Tensor:
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad


def dense(logits: Tensor, shard: VocabShard) -> Tensor:
    """All ranks' logits side by side [.., V], in float64."""
    whole = logits.new_zeros((*logits.shape[:-1], shard.size), dtype=torch.float64)
    whole[..., shard.start : shard.stop] = logits.detach()
    dist.all_reduce(whole)
    return whole


def check(log_probs: Tensor, entropy: Tensor, logits: Tensor, actions: Tensor) -> float:
    """The largest error of float32 log-probs and entropies against those of dense float64 `logits`."""
    truth = logits.log_softmax(-1)
    of_actions = truth.gather(-1, actions[..., None])[..., 0]
    return max(
        (log_probs.detach() - of_actions).abs().max().item(),
        (entropy.detach() + (truth.exp() * truth).sum(-1)).abs().max().item(),
    )


def sample(logits: Tensor, prompt: Tensor) -> tuple[Tensor, Tensor]:
    """A token after each of `prompt` by dense `logits`, and what each is paid."""
    # On the CPU, whose generator all ranks have in the same state.
    actions = torch.multinomial(logits.softmax(-1).flatten(0, 1).cpu(), 1).view(prompt.shape).to(prompt.device)
    return actions, (actions == prompt + 1).float()


def train_step(
    policy: Policy, optimizer: torch.optim.Optimizer, shard: VocabShard, prompt: Tensor, scale: float
) -> tuple[float, float, float]:
    """Two epochs of clipped policy gradients on one batch; returns reward, entropy and the largest error."""
    with torch.no_grad():
        actions, reward = sample(dense(policy(prompt), shard) * scale, prompt)
    advantage = reward - reward.mean()
    before, worst, spread = None, 0.0, 0.0
    for _ in range(2):
        logits = policy(prompt)
        truth = dense(logits, shard) * scale
        log_probs, entropy = vocab_parallel_log_probs(
            logits, actions, group=dist.group.WORLD, shard=shard, scale=scale, entropy=True
        )
        del logits  # nobody else holds them: their gradient takes over their memory
        worst, spread = max(worst, check(log_probs, entropy, truth, actions)), entropy.mean().item()
        if before is None:
            before = log_probs.detach()
        ratio = (log_probs - before).exp()
        objective = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        optimizer.zero_grad()
        (-100 * (objective + 1e-4 * entropy).mean()).backward()
        optimizer.step()
    return reward.mean().item(), spread, worst


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--temperature", type=float, default=1.0)
    arguments = parser.parse_args(argv)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    torch.manual_seed(1)  # the same weights, prompts and samples on every rank
    shard = VocabShard.even(VOCABULARY, dist.group.WORLD)
    policy = Policy(shard).to(device)
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.02)
    rewards, worst = [], 0.0
    for step in range(arguments.steps):
        prompt = torch.randint(32, (16, 64)).to(device)
        reward, entropy, error = train_step(policy, optimizer, shard, prompt, 1.0 / arguments.temperature)
        rewards.append(reward)
        worst = max(worst, error)
        if dist.get_rank() == 0 and (step % 10 == 0 or step == arguments.steps - 1):
            print(f"step {step:4d}  reward {reward:.3f}  entropy {entropy:.3f}  largest error {worst:.1e}", flush=True)
    dist.destroy_process_group()
    return 0 if worst < TOLERANCE and rewards[-1] > rewards[0] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
