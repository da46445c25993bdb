"""Products: a contraction as lines of Triton, on the matrix units or without them.

`contract` is the product itself; its operands come through pointers, or through tensor memory (`descriptors`), two of
them as one where they share the other side (`stacked`).  `place` numbers the blocks of the result, and `matrix_units`
says what a device multiplies.  Which programs compute a product is a form (`forms`).
"""
