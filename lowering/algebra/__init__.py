"""Simplifies expressions, indices and Programs into equal ones, and derives facts from their form.

    positions            integers computed from indices alone, and comparisons that their bounds decide
    exact_floats         positions that are computed in floating point without rounding
    conditions           bools, and expressions under conditions known to hold
    implied_conditions   conditions that the enclosing selections decide
    hoist                factors that do not vary along a summed axis
    dead_code            nodes and buffers whose values are not read
    last_bits            values that may differ in the last bit when they are computed twice

The algebra of `//` and `%` has a folder of its own (`lowering/indexing/`).
"""
