"""Rewrites: a kernel, loop or expression as an equal one that a GPU computes faster, still in the IR.

Each module is one such rule: what is multiplied and summed instead of contracted, what is unpacked or grouped where it
is walked, which exponentials and sigmoids take fewer operations once nobody can see their last bits.  Nothing here
knows blocks, or text.
"""
