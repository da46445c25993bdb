"""Transforms a schedule's kernels to save launches, memory and precision.

A kernel continues where another one ends (`chain`), or where a tile of it ends (`last_block`); independent ones run
side by side (`pack`); means are accumulated relative to an element (`shift_means`); finally, results are written to the
memory of a tensor of the caller (`updates`) or of an operand (`reuse`).  `launch` puts two kernels under one list of
parameters.
"""
