"""Finds the tensors that calls of a graph captured by Dynamo change in place: the first argument, or `out`.

PyTorch marks a mutation by the name of a function (`add_`) or an argument (`inplace=True`), Python by the operator
(`+=`). Names of Python's operators are no indication: the name of `|` is `or_`. Operations of ATen, of which exported
programs consist, declare mutations in their schemas.
"""

from __future__ import annotations

import operator

from torch import Tensor, fx, strided
from torch._ops import OpOverload

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
    if isinstance(node.target, OpOverload):
        first = node.target._schema.arguments[:1]
        return any(argument.alias_info is not None and argument.alias_info.is_write for argument in first)
    name, called = name_of(node), node.op in ("call_method", "call_function")
    return called and name.endswith("_") and not name.endswith("__")


def name_of(node: fx.Node) -> str:
    """Return the name of a node's callee, without its overload; empty if it has none."""
    target = node.target.overloadpacket if isinstance(node.target, OpOverload) else node.target
    return target if isinstance(target, str) else str(getattr(target, "__name__", ""))


def written_by(node: fx.Node) -> fx.Node | None:
    """Return the node that a call changes in place, or None."""
    out = node.kwargs.get("out")
    written = out if isinstance(out, fx.Node) else node.args[0] if node.args and changes_first(node) else None
    return written if isinstance(written, fx.Node) else None


def written_memories(graph: fx.Graph) -> frozenset[int | None]:
    """Return the memory that calls of a graph write to, whole or through views."""
    written = (part for node in graph.nodes for part in (written_by(node), *_written_together(node)))
    values = (part.meta.get("example_value", part.meta.get("val")) for part in written if part is not None)
    return frozenset(memory_of(value) for value in values if isinstance(value, Tensor))


def _written_together(node: fx.Node) -> list[fx.Node]:
    """Return the tensors of a list that a call changes in place (`torch._foreach_add_`)."""
    first = node.args[0] if node.args and changes_first(node) else ()
    return [part for part in first if isinstance(part, fx.Node)] if isinstance(first, (list, tuple)) else []


def memory_of(tensor: Tensor) -> int | None:
    """Return an identifier of a tensor's storage."""
    return tensor.untyped_storage()._cdata if tensor.layout is strided else None
