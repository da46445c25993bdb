"""Lowers fx graphs to Programs: the two IRs, their semantics, and the rules for ATen operations.

Input: a functional graph of ATen calls (`lower.py`); output: a Program.  Kernels are built by the scheduler,
but defined here.

    aten/       changes to ATen operations before their rules: decompositions, corrections of traces
    lower       visits the graph; `calls` adds eager's own calls
    rules/      the meaning of each operation, listed in the `registry`; rules create nodes by a `builder` and a `value`
    checks/     eager's checks and refusals
    ir/         the IRs `program` and `kernel`, over expressions (`expr`) of scalar operations (`scalar_ops`)
    indexing/   the algebra of indices
    algebra/    the algebra of expressions and Programs: `conditions`, `positions`, factors (`hoist`), `dead_code`
    interpret/  the semantics of both IRs, in torch; `random/`: random numbers
    verify/     checks that both are well formed; `printer/`: prints both as text

Folders import one way: `ir` needs none of the others, `lower` needs nearly all.
"""
