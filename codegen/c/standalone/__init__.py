"""Builds a shared library that runs a program without Python.

    sizes.py     writes sizes and conditions in C
    program.py   writes a program in C: tables, and the function that launches its kernels
    library.py   compiles the program, its kernels and the runtime, and links them

`fusion.h` is the interface of every library; `program.h` declares the interface between the generated program
and the runtime (`model.c`, `run.c`, `layouts.c`, `weights.c`).
"""
