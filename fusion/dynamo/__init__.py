"""Rewrites Dynamo's graph before autograd is derived from it; `fusion/stages.py` lists the passes in order.

Input: the graph of a region, in which operations write to memory as the program does (`writes` finds these); it is
changed in place:

    nested_regions   inlines calls of marked regions
    shared_writes    refuses writes whose result eager does not define
    windows          keeps the elements between windows that are written
    kept_strides     keeps the strides of inputs that are changed in place
    constant_floats  makes floats that belong to the program guarded constants
    autocast         adds casts that the trace would lose
    causal_hint      trusts the caller's `is_causal` hint without comparing the mask's data
    unread_rows      skips the computation of rows that are not read

`untraceable` and `eager_parts` run operations that cannot be traced between compiled parts.
"""
