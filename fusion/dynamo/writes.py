"""Finds the tensors that calls of a graph captured by Dynamo change in place: the first argument, or `out`.

PyTorch marks a mutation by the name of a function (`add_`) or an argument (`inplace=True`), Python by the operator
(`+=`). Names of Python's operators are no indication: that of `|` is `or_`.
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
"""Python's operators that write: `x[i] = y`, and those named `i` plus the name of another one (`iadd`, `add`)."""


def changes_first(node: fx.Node) -> bool:
    """Return whether the first argument is changed in place."""
    if getattr(node.target, "__module__", "") == operator.or_.__module__:
        return node.target in OPERATORS
    if node.kwargs.get("inplace") is True:
        return True
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    called = node.op in ("call_method", "call_function")
    return called and name.endswith("_") and not name.endswith("__")


def written_by(node: fx.Node) -> fx.Node | None:
    """Return the node that a call changes in place, or None."""
    out = node.kwargs.get("out")
    written = out if isinstance(out, fx.Node) else node.args[0] if node.args and changes_first(node) else None
    return written if isinstance(written, fx.Node) else None


def memory_of(tensor: Tensor) -> int | None:
    """Return an identifier of a tensor's storage."""
    return tensor.untyped_storage()._cdata if tensor.layout is strided else None
