"""Lowers fx graphs to Programs: the two IRs, their semantics, and the rules for ATen operations.

Input: a functional graph of ATen calls (`lower.py`); output: a Program.  Kernels are built elsewhere,
but defined here.

    aten/       what happens to PyTorch's operations before: decompositions, corrections of its traces
    lower       visits the graph; `calls` adds eager's own calls
    rules/      the meaning of each operation, found in the `registry`; they work with a `builder` on a `value`
    checks/     what eager checks, and refuses
    ir/         the IRs `program` and `kernel`, over expressions (`expr`) of scalar operations (`scalar_ops`)
    indexing/   the algebra of indices
    algebra/    the algebra of expressions and Programs: `conditions`, `positions`, factors (`hoist`), `dead_code`
    interpret/  the semantics of both IRs, in torch; `random/`: random numbers
    verify/     whether they are well formed; `printer/`: both as text

Folders import one way: `ir` needs none of the others, `lower` needs nearly all.
"""
