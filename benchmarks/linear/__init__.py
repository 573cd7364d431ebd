"""Measurements of the fused linear + loss against its alternatives and against the GEMMs it cannot do without.

problem     hidden states, weight, targets; loss and gradients in float64
floors      three and four GEMMs of the same sizes, through the device's own library
providers   every implementation behind one interface
chunked     the baseline in plain torch that walks over 512 tokens at a time
trial       one provider on one problem: checked, memory measured, then ready to be timed
rounds      everybody timed in turn, round by round, and ratios within rounds
results     the columns of results.csv, and tables made of them
verdict     the ratios that are promised, beside those that were measured
command     command: `python -m benchmarks.linear`
report      results.csv -> README.md and pictures; called by benchmarks.report
"""
