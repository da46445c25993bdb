"""Compiles kernels for CPU tensors: the C target writes plain C, built by the system's compiler.

Input: a Kernel; output: one C function, threads over its grid axes and SIMD lanes over the innermost, and a launcher
for it.  Contractions are computed tile by tile (`blocked`); alone, or with only element-wise neighbours, they stay
library calls, which take a bias along, unless the CPU was calibrated and the library is slower.  A product with a
vector is a reduction like others.

kernel → forms → plan → loops     all of them write C through `text`
               → plan → blocked   where there are products, running values
text   → frame → build, load, calls → launcher

`target.py` is the protocol of a target.  `forms.py` lists the ways to write a kernel; `loops/function.py` and
`blocked/function.py` are the paths of a kernel to its text; each other file decides one thing on them, and each package
says which things.  `build.py`, `load.py` and `calls.py` know objects and functions, but no kernels: a program that was
compiled before (`fusion/artifact/`) needs only these.
"""
