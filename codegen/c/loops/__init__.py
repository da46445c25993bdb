"""Writes the loops of kernels without products and running values.

The grid as loops over blocks and threads (`grid`), loop-carried values (`folds`, `prefixes`), transposed loads
(`tiles`), and float16 numbers that are converted in blocks (`halves`).
"""
