"""Are the tests worth anything? Each of these faults, put into a copy of the code, must make one of them fail.

faults.py    the faults: a text in a file, what it becomes, and where a test is to notice
run.py       a copy with one of them, and its tests
__main__.py  all of them, and docs/mutation.md: python -m tests.mutation
"""
