"""`python -m benchmarks.linear`."""

from benchmarks.linear.command import main

main()
