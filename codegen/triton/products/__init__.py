"""Emits contractions as lines of Triton, on the matrix units or without them.

`contract` emits the product; its operands come through pointers, or through tensor memory (`descriptors`), two of them
as one where the other operand is the same (`stacked`).  `block_order` assigns blocks of the result to programs.  The
programs of a product are a form (`forms`).
"""
