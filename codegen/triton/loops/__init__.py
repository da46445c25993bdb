"""Determines which blocks of a loop have to run at all.

Both modules read the condition of the loop: `skips` derives bounds from indices alone, `lookup` from tensors that the
condition reads.
"""
