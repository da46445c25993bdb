"""Emits scalar expressions over tiles as lines of Triton.

`scalar_code` writes one operation and `indices` one index; `points` computes the indices and masks of a block; `values`
emits full expressions, each computed once and as far out of the loops as possible, in the scopes of `scopes`.
`bit_fields` (bits of bytes) and `interleaved` (every other element) process several elements at a time; `widths` finds
the integers that 32 bits hold.
"""
