"""Builds a shared library that runs a program without Python.

    sizes.py     text of sizes and conditions in C
    program.py   the text of a program: tables, and the function that launches its kernels
    library.py   compiles these, the kernels and the code that runs them, and links them

`fusion.h` is the interface of every library; `program.h` declares the interface between the text of a program and the
code that runs it (`model.c`, `run.c`, `layouts.c`, `weights.c`).
"""
