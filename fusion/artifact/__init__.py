"""Artifacts: a compiled program as one file, which another process loads without compiling anything.

    save    capture → ahead → record → container     PyTorch exports the program, this compiler compiles its graph, and
                                                     the spliced module is recorded as a list of steps
    load    container → program → steps              in a process without Dynamo, sympy and a C compiler

`manifest.py` and `values.py` define the form of the file; whatever `load.py` imports knows no IR.
"""
