"""Determines which blocks of a loop have to run.

Both modules read the condition of the loop: `skips` derives bounds from indices alone, `lookup` from tensors that the
condition reads.
"""
