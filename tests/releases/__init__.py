"""The plugin against published releases of megatron-core: `python -m tests.releases [VERSION ...]`.

wheels.py    the releases, fetched once into .cache/megatron
rows.py      the rows of the support matrix: which tests speak for what
run.py       the tests of one release, in fresh processes that find it first on their path
matrix.py    the table of outcomes, and the one in README.md
result.json  of the last run over all releases, of which README.md's table is made
"""
