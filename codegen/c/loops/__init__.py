"""Writes the loops of kernels without products and running values.

The grid as loops over blocks and threads (`grid`), loop-carried values (`folds`, `prefixes`), transposed loads
(`transposed_loads`), and float16 numbers that are converted in blocks (`float16_blocks`).
"""
