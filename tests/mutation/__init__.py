"""Are the tests worth anything? Each of these faults, put into a copy of the code, must make one of them fail.

fault.py        what a fault is
of_kernels.py   faults of the Triton kernels
of_twin.py      of the plain-torch twin
of_autograd.py  of the autograd nodes, ownership, communication, reduction and checks
of_linear.py    of the linear loss
of_megatron.py  of the plugin
faults.py       all of them
run.py          a copy with one fault, and its tests; the tests of all of them without any
__main__.py     the command, the table, and docs/mutation.md: python -m tests.mutation
"""
