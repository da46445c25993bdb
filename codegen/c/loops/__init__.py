"""Loops: the lines of kernels without products and running values.

The grid as loops over blocks and threads (`grid`), what is carried through a loop (`folds`, `prefixes`), and loads that
are brought in turned (`tiles`).
"""
