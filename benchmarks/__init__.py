"""Measurements of the loss against its alternatives, on the same device in the same run.

measure     stopwatches, bandwidths, memory, host time
problem     logits, targets and upstream gradients of one shape, and their float64 truth
providers   every implementation behind one interface
results     the columns of results.csv, and tables made of them
arguments   the command line that two commands share
compare     one provider on one problem: check, then time; and the loop over all of them
logits      command: one process
tp          command: vocabulary over the ranks of torchrun
linear      command: the fused linear + loss; a package of its own
options     command: what every option and output costs
plots       command: results.csv -> PNG
report      command: results.csv -> README.md
tune        command: the times behind the block shapes
"""
