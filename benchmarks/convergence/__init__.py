"""Is a run with te_ce the same run? A GPT trained with Megatron's own loss and with te_ce's, from the same seed.

runs.py        the example, once per loss and seed, each in processes of its own
curves.py      what they left: curves, step times, memory; how far apart two runs are
report.py      a README with a table, and pictures of losses, differences and gradient norms
gradients.py   one batch's gradients, tensor by tensor: `torchrun ... -m benchmarks.convergence.gradients`
__main__.py    `python -m benchmarks.convergence`
"""
