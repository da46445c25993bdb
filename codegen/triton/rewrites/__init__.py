"""Rewrites a kernel, loop or expression in the IR, so that a GPU computes the same faster.

Each module is one rule, such as sums of products instead of contractions with few rows, unpacked or grouped loops over
quantised weights, exponentials and sigmoids with fewer operations where results are rounded.  Nothing here depends on
blocks, or on text.
"""
