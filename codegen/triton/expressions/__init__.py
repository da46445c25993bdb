"""Expressions: a scalar expression over tiles as lines of Triton.

`spell` writes one operation and `indices` one index; `points` says which points a block covers; `values` makes lines of
whole expressions, each computed once and as far out of the loops as it can be, in the scopes of `scopes`.  What is
quicker done for several elements at a time is in `fields` (bits of bytes) and `interleaved` (every other element);
`widths` says which integers 32 bits hold.
"""
