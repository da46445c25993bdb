"""Adapts PyTorch's operations before their rules see them: decomposes composite ones, and corrects traces.

decompositions    the composite operations that are decomposed, with the function that decomposes each
attention         scaled dot-product attention, forward and backward
foreach           operations on lists of tensors
without_library   decompositions of library calls, for programs that run without a library
mistraced         shapes, strides and aliasing that PyTorch traces wrongly
host              0-d CPU tensors that kernels of another device take as scalars
"""
