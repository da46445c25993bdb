"""Loops: the lines of kernels without products and running values.

The grid as loops over blocks and threads (`grid`), what is carried through a loop (`folds`, `prefixes`), loads that are
brought in turned (`tiles`), and numbers of float16 that are converted in blocks (`halves`).
"""
