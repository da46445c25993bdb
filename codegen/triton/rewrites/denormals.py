"""Denormals: whether the functions of a kernel may take numbers below 2⁻¹²⁶ for 0.

A kernel that stores float32 keeps denormals in exponentials, logarithms and their like, as eager does, which costs
three more instructions for each.  They cannot be seen where every function is the exponential of the distance to the
maximum of its row, which only sums take in: these have the exponential of the maximum, which is 1, among their
summands.
"""

from __future__ import annotations

from fusion.lowering.expr import Expr, Op, postorder
from fusion.lowering.kernel import Fold, Kernel, Loop, statements, values_of

_PLAIN = frozenset(
    ("add", "sub", "mul", "truediv", "neg", "where", "and", "or", "not", "eq", "ne", "lt", "le", "gt", "ge")
)
"""Operations that are no functions of a library."""


def may_flush(kernel: Kernel) -> bool:
    """Are denormals that functions take or give never seen?

    Attention that stores the maxima and sums of its rows for backward is such a kernel; a stored softmax is not.
    """
    loops = list(statements(kernel.body, Loop))
    if len(loops) != 1 or kernel.then is not None or kernel.beside:
        return False
    (loop,) = loops
    folds = [stmt for stmt in loop.body if isinstance(stmt, Fold)]
    maxima = [fold for fold in folds if fold.op == "max"]
    inside = [stmt for stmt in statements(kernel.body) if stmt in loop.body]
    outside = [stmt for stmt in statements(kernel.body) if stmt not in loop.body]
    taken = {value for fold in folds if fold.op not in ("sum", "dot") for value in values_of(fold)}
    if len(folds) != len(loop.body) or any(_functions(*values_of(stmt)) for stmt in outside) or _functions(*taken):
        return False
    found = {node for stmt in inside for node in _functions(*values_of(stmt))}
    return all(any(is_below(node, fold) for fold in maxima) for node in found)


def _functions(*values: Expr) -> tuple[Op, ...]:
    """The calls of functions in these expressions."""
    return tuple(node for node in postorder(*values) if isinstance(node, Op) and node.name not in _PLAIN)


def is_below(node: Op, top: Fold) -> bool:
    """Is this the exponential of how far what a maximum is taken of, or the maximum so far, lies below it?"""
    (distance,) = node.args if node.name == "exp" else (None,)
    if not isinstance(distance, Op) or distance.name != "sub" or distance.args[0] not in (top.args[0], top.before):
        return False
    return top.ref in postorder(distance.args[1])
