"""Compiles kernels for CPU tensors: the C target writes plain C, built by the system's compiler.

Input: a Kernel; output: one C function, threads over its grid axes and SIMD lanes over the innermost, and a launcher
for it.  Contractions are computed tile by tile (`blocked`); alone, or with only element-wise neighbours, they stay
library calls, with their bias, unless the CPU was calibrated and the library is slower.  A product with a vector is
an ordinary reduction.

kernel → forms → plan → loops     every one of them writes C through `text`
               → plan → blocked   kernels with products or running values
text   → frame → build, load, calls → launcher

`target.py` is the protocol of a target.  `forms.py` lists the ways to write a kernel; `loops/function.py` and
`blocked/function.py` are the paths of a kernel to its text; each other file makes one decision on them, which the
docstring of its package names.  `build.py`, `load.py` and `calls.py` know objects and functions, but no kernels: a
program that was compiled before (`fusion/artifact/`) needs only these.
"""
