"""Writes: which calls of a graph that Dynamo captured change their first argument in place.

PyTorch says so by the name of a function (`add_`) or an argument (`inplace=True`), Python by the operator (`+=`).
Names of Python's operators say nothing: that of `|` is `or_`.
"""

from __future__ import annotations

import operator

from torch import fx

OPERATORS = frozenset(
    (
        *(operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv, operator.imod),
        *(operator.ipow, operator.iand, operator.ior, operator.ixor, operator.ilshift, operator.irshift),
        operator.setitem,
    )
)


def changes_first(node: fx.Node) -> bool:
    """Is the first argument changed in place?"""
    if getattr(node.target, "__module__", "") == operator.or_.__module__:
        return node.target in OPERATORS
    if node.kwargs.get("inplace") is True:
        return True
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    called = node.op in ("call_method", "call_function")
    return called and name.endswith("_") and not name.endswith("__")
