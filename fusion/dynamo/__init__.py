"""Passes over Dynamo's graph, before autograd is derived from it; `fusion/stages.py` has them in their order.

Input: the graph of a region, in which operations write to memory as the program does (`writes` says which); it is
changed in place:

    nested_regions   calls of marked regions become their operations
    shared_writes    refuses writes whose result eager does not define
    windows          keeps what lies between windows that are written
    kept_strides     inputs that are changed in place keep their strides
    constant_floats  floats that belong to the program become guarded constants
    autocast         casts that the trace would lose stand in the graph
    causal_hint      a mask is causal where the caller says so, without a look at its data
    unread_rows      rows that nobody reads are not computed

`tangent_strides` says how gradients of results will lie in memory; `untraceable` and `parts` run what cannot be traced
between parts that are compiled.
"""
