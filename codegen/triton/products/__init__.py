"""Products: a contraction as lines of Triton, on the matrix units or without them.

`contract` is the product itself; its operands come through pointers, or through tensor memory (`descriptors`), two of
them as one where they share the other side (`stacked`).  `place` numbers the blocks of the result, `finish` ends one
in parts, and `matrix_units` says what an architecture multiplies.

Of programs whose warps do different things (`ahead.py`) the parts are here: what they have in common (`groups`), what
they move (`boxes`), which kernels have that form (`chained`), in which order they walk (`order`, `turns`).
"""
