"""Cross-entropy for language models whose vocabulary is sharded over tensor-parallel ranks."""

from te_ce.loss import vocab_parallel_cross_entropy
from te_ce.options import LossOptions
from te_ce.shard import VocabShard

__all__ = ["LossOptions", "VocabShard", "vocab_parallel_cross_entropy"]
