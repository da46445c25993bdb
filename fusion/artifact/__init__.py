"""Saves a compiled program as one file, which another process loads without compiling anything.

    save    capture → ahead → record → container     PyTorch exports the program, this compiler compiles its graph, and
                                                     the spliced module is recorded as steps over registers
    load    container → steps → loaded               in a process that needs neither Dynamo nor sympy nor a C compiler

`capture`, `move_device` (another device), `ahead`, `record`, `signature`, `kernels` and `save` know the compiler.  The
modules that `load` imports know no IR: `container` and `weights` define the format of the file, `values` and `trees`
the format of arguments, `functions` lists the functions that steps may call, and `arguments` checks a call.
"""
