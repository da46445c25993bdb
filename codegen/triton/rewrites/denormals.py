"""Decides whether the functions of a kernel may treat numbers below 2⁻¹²⁶ as 0.

A kernel that stores float32 keeps denormals in exponentials, logarithms and similar functions, as eager does, which
costs three more instructions for each.  They are invisible where every function is the exponential of an element minus
the maximum of its row, and only sums read it: one of their terms is the exponential of the maximum, which is 1.
"""

from __future__ import annotations

from fusion.lowering.ir.expr import Expr, Op, postorder
from fusion.lowering.ir.kernel import Fold, Kernel, Loop, statements, values_of
from fusion.lowering.ir.scalar_ops import COMPARISONS

_SIMPLE = COMPARISONS | {"add", "sub", "mul", "truediv", "neg", "where", "and", "or", "not"}
"""Operations that are single instructions, not library functions."""


def may_flush(kernel: Kernel) -> bool:
    """Return whether denormal arguments and results of functions are invisible in the results.

    True of attention that stores the maxima and sums of its rows for backward, false of a stored softmax.
    """
    loops = list(statements(kernel.body, Loop))
    if len(loops) != 1 or kernel.then is not None or kernel.beside:
        return False
    (loop,) = loops
    folds = [stmt for stmt in loop.body if isinstance(stmt, Fold)]
    maxima = [fold for fold in folds if fold.op == "max"]
    inside = [stmt for stmt in statements(kernel.body) if stmt in loop.body]
    outside = [stmt for stmt in statements(kernel.body) if stmt not in loop.body]
    other_reads = {value for fold in folds if fold.op not in ("sum", "dot") for value in values_of(fold)}
    if (
        len(folds) != len(loop.body)
        or any(_functions(*values_of(stmt)) for stmt in outside)
        or _functions(*other_reads)
    ):
        return False
    functions = {node for stmt in inside for node in _functions(*values_of(stmt))}
    return all(any(is_below(node, fold) for fold in maxima) for node in functions)


def _functions(*values: Expr) -> tuple[Op, ...]:
    """Return the function calls in these expressions."""
    return tuple(node for node in postorder(*values) if isinstance(node, Op) and node.name not in _SIMPLE)


def is_below(node: Op, top: Fold) -> bool:
    """Return whether `node` is exp(x - m), with x the operand or previous value of the maximum `top`, and m depending
    on `top`.
    """
    (distance,) = node.args if node.name == "exp" else (None,)
    if not isinstance(distance, Op) or distance.name != "sub" or distance.args[0] not in (top.args[0], top.before):
        return False
    return top.ref in postorder(distance.args[1])
