"""Adapts PyTorch's operations before their rules see them: decomposes composite ones, and corrects traces.

decompositions    the composite operations that are decomposed, and by which function
attention         scaled dot-product attention, forward and backward
foreach           operations on lists of tensors
without_library   operations that are the library's otherwise, for programs that have no library
mistraced         shapes, strides and aliasing that PyTorch traces wrongly
host              0-d tensors on the CPU that kernels of another device take as numbers
"""
