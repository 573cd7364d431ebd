"""A layer of its own, and the logits that it defers."""

from __future__ import annotations

import weakref

import torch
import torch.nn.functional as F

from megatron_patch.deferred import Origin

S, B, H, V = 5, 2, 4, 7


class Case:
    """A layer of its own, the logits that it defers, and how often they were made."""

    def __init__(self, bias=False, frozen=False):
        torch.manual_seed(0)
        self.input = torch.randn(S, B, H, requires_grad=True)
        self.weight = torch.randn(V, H, requires_grad=not frozen)
        self.bias = torch.randn(V, requires_grad=True) if bias else None
        self.hidden = self.input * 1.0  # not a leaf, as in a model
        self.made, self.largest, self.siblings = 0, 0, weakref.WeakSet()
        self.logits = Origin(None, self.compute, self.hidden, self.weight, self.bias, (S, B, V), self.siblings).defer()

    def compute(self, hidden=None):
        self.made += 1
        logits = F.linear(self.hidden if hidden is None else hidden, self.weight, self.bias)
        self.largest = max(self.largest, logits.numel())
        return logits

    def grads(self, loss):
        leaves = [leaf for leaf in (self.input, self.weight, self.bias) if leaf is not None and leaf.requires_grad]
        return torch.autograd.grad(loss, leaves)
