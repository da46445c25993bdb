"""Writes: what calls of a graph that Dynamo captured change in place: their first argument, or what `out` names.

PyTorch says so by the name of a function (`add_`) or an argument (`inplace=True`), Python by the operator (`+=`).
Names of Python's operators say nothing: that of `|` is `or_`.
"""

from __future__ import annotations

import operator

from torch import Tensor, fx, strided

OPERATORS = {
    operator.setitem,
    *(
        change
        for name, change in vars(operator).items()
        if name.startswith("__i") and f"__{name[3:]}" in vars(operator)
    ),
}
"""Python's operators that write: `x[i] = y`, and each whose name is `i` before that of another one (`iadd`, `add`)."""


def changes_first(node: fx.Node) -> bool:
    """Is the first argument changed in place?"""
    if getattr(node.target, "__module__", "") == operator.or_.__module__:
        return node.target in OPERATORS
    if node.kwargs.get("inplace") is True:
        return True
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    called = node.op in ("call_method", "call_function")
    return called and name.endswith("_") and not name.endswith("__")


def written_by(node: fx.Node) -> fx.Node | None:
    """What a call changes in place; None if that is nothing."""
    out = node.kwargs.get("out")
    written = out if isinstance(out, fx.Node) else node.args[0] if node.args and changes_first(node) else None
    return written if isinstance(written, fx.Node) else None


def memory_of(tensor: Tensor) -> int | None:
    """What tells tensors that share memory from others."""
    return tensor.untyped_storage()._cdata if tensor.layout is strided else None
