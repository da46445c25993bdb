"""From fx graphs to Programs: the two IRs, what they mean, and the rules for ATen operations.

Input: a functional graph of ATen calls (`lower.py`); output: a Program.  Kernels are made elsewhere, but what they are
is said here.

    the IRs       `program` and `kernel`, over expressions (`expr`) of scalar operations (`scalar_ops`)
    meaning       `interpret`, in torch (`evaluate`, `folds`); `verify`: what is well formed; `printer`: how it reads
    lowering      `lower` walks the graph, `calls` makes what eager calls, `rules` work with a `builder` on a `value`;
                  `decompositions` and `foreach` say what is taken apart before
    algebra       of indices (`indexing`, `division`), `sizes`, `conditions`, `positions`, and factors (`hoist`)
    what differs  from plain arithmetic in eager: `checks`, `host`, `overflow`, `seeded` and `philox`, `attention`

Questions that several packages ask of a graph or a kernel: `made_again`, `prefixes`, `updates`.
"""
