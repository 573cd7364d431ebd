"""Tests that only a CUDA device can answer: not collected without one, so that none is ever reported as skipped."""

from __future__ import annotations

import torch

collect_ignore_glob = [] if torch.cuda.is_available() else ["test_*.py"]
