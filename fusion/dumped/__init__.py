"""Dumped files that run: what they import, and what writes them.

kernel_files   the file of a kernel: source, inputs, reference; written by a dump, read by itself and by `override`
inputs         the tensors that a file makes, in the ranges that `ranges` finds
checks         the results of a launch against the evaluator in float64
running        what the file of a kernel does when it is run
"""

from fusion.dumped.running import run_kernel

__all__ = ["run_kernel"]
