"""Cross-entropy for language models whose vocabulary is sharded over tensor-parallel ranks."""

from te_ce.linear_loss import linear_cross_entropy
from te_ce.log_probs import vocab_parallel_log_probs
from te_ce.loss import vocab_parallel_cross_entropy
from te_ce.modules import LinearCrossEntropyLoss, VocabParallelCrossEntropyLoss
from te_ce.options import LossOptions
from te_ce.outputs import LossOutput
from te_ce.shard import VocabShard

__all__ = [
    "LinearCrossEntropyLoss",
    "LossOptions",
    "LossOutput",
    "VocabParallelCrossEntropyLoss",
    "VocabShard",
    "linear_cross_entropy",
    "vocab_parallel_cross_entropy",
    "vocab_parallel_log_probs",
]
