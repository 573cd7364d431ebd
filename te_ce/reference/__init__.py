"""The plain-torch twin of the kernels: the readable definition of the loss, the CPU path, and the tests' subject.

Same functions, same arguments as `te_ce.kernels.launch`. Statistics and loss are float32, or float64 for float64
logits. Rows are taken in slices, so that a float32 copy of all logits never exists.

With z the logits after softcap and scale, statistics are of u = z / |scale|: cap tanh(x / cap), or x, with the sign of
the scale. Only differences of u are multiplied: z would be rounded before its max is subtracted.

Every difference is relative to the row's max, never through a rounded lse: three equal logits of 1e8 have loss
log 3, and (m + log d) - z_y in float32 would make it 0.
"""

from te_ce.reference.gradient import logits_gradient
from te_ce.reference.merge import combine_statistics, merge_statistics, row_loss
from te_ce.reference.scaling import scaled_copy
from te_ce.reference.statistics import row_statistics

__all__ = ["combine_statistics", "logits_gradient", "merge_statistics", "row_loss", "row_statistics", "scaled_copy"]
