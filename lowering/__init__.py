"""Lowers fx graphs to Programs: the two IRs, their semantics, and the rules for ATen operations.

Input: a functional graph of ATen calls (`lower.py`); output: a Program.  Kernels are built elsewhere,
but defined here.

    the IRs       `program` and `kernel`, over expressions (`expr`) of scalar operations (`scalar_ops`)
    semantics     `interpret`, in torch (`evaluate`, `folds`); `verify`: well-formedness; `printer`: as text
    lowering      `lower` visits the graph, `calls` adds eager's own calls, `rules` work with a `builder` on a `value`;
                  `decompositions` and `foreach` list the operations that are decomposed before
    algebra       of indices (`indexing`, `division`), `sizes`, `conditions`, `positions`, and factors (`hoist`)
    eager only    differences from plain arithmetic: `checks`, `host`, `overflow`, `seeded` and `philox`, `attention`

Queries on graphs and kernels that several packages share: `recomputed`, `prefixes`.
"""
