"""The loss under inputs that nobody wrote down: hypothesis draws them, float64 judges them.

values.py      logits, targets and upstream gradients of one example, from a seed and the names of their kinds
strategies.py  what hypothesis draws
layouts.py     strides of logits, targets and gradients
upstream.py    which gradients come back, and the backward from them
judge.py       float64 bounds, where what is stored may overflow and several gradients add up
shards.py      property: rows cut into shards of any widths
calls.py       property: one call of the public function, any layout, in any graph
linear.py      property: the linear loss, cut and kept in any way
ranks.py       property: real ranks; the first one draws for all
tally.py       how many examples there were, and of what
__main__.py    long runs: python -m tests.fuzz

The short runs are in tests/unit/test_fuzz.py and tests/distributed/test_fuzz.py.
"""
