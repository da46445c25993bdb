"""Decides whether the functions of a kernel may treat numbers below 2⁻¹²⁶ as 0.

A kernel that stores float32 keeps denormals in exponentials, logarithms and similar functions, as eager does, which
costs three more instructions for each.  They are invisible in

- a sum of exponentials of elements minus the maximum of their row: one of its terms is the exponential of the maximum,
  which is 1;
- the logarithm of such a sum, which is 1 at least;
- what is stored in 16 bits, as in a kernel that stores nothing else.
"""

from __future__ import annotations

from fusion.lowering.ir.expr import Const, Expr, Op, postorder
from fusion.lowering.ir.kernel import Fold, Kernel, Loop, Stmt, Store, statements, values_of
from fusion.lowering.ir.scalar_ops import COMPARISONS, HALVES

_SIMPLE = COMPARISONS | {"add", "sub", "mul", "truediv", "neg", "where", "and", "or", "not"}
"""Operations that are single instructions, not library functions."""


def may_flush(kernel: Kernel) -> bool:
    """Return whether there are functions whose denormal arguments and results are invisible in the results.

    True of attention that stores the maxima and sums of its rows for backward, and of a loss in float32 with a gradient
    in 16 bits; false of a stored softmax.
    """
    if kernel.then is not None or kernel.beside:
        return False
    folds = list(statements(kernel.body, Fold))
    maxima = [fold for fold in folds if fold.op == "max"]
    sums = {fold.ref for fold in folds if any(_sums_below(fold, top) for top in maxima)}

    def is_invisible(stmt: Stmt, node: Op) -> bool:
        if isinstance(stmt, Store) and kernel.param(stmt.param).dtype in HALVES:
            return True
        if isinstance(stmt, Fold) and stmt.op in ("sum", "dot"):
            return any(is_below(node, top) for top in maxima)
        return isinstance(stmt, Store) and node.name == "log" and _chosen(node.args[0]) in sums

    own = [stmt for stmt in statements(kernel.body) if not isinstance(stmt, Loop)]
    functions = [(stmt, node) for stmt in own for node in _functions(*values_of(stmt))]
    return bool(functions) and all(is_invisible(stmt, node) for stmt, node in functions)


def _sums_below(fold: Fold, top: Fold) -> bool:
    """Return whether a fold is the sum of exp(x - m) over the elements x of which m is the maximum."""
    (value, *others) = fold.args
    return fold.op == "sum" and not others and fold.over == top.over and isinstance(value, Op) and is_below(value, top)


def _chosen(value: Expr) -> Expr:
    """Return the value that a choice against a constant leaves, or the value itself."""
    while isinstance(value, Op) and value.name == "where" and isinstance(value.args[1], Const):
        value = value.args[2]
    return value


def _functions(*values: Expr) -> tuple[Op, ...]:
    """Return the calls of functions of floats in these expressions."""
    calls = (node for node in postorder(*values) if isinstance(node, Op) and node.name not in _SIMPLE)
    return tuple(node for node in calls if any(each.dtype.is_floating_point for each in (node, *node.args)))


def is_below(node: Op, top: Fold) -> bool:
    """Return whether `node` is exp(x - m), with x the operand or previous value of the maximum `top`, and m depending
    on `top`.
    """
    (distance,) = node.args if node.name == "exp" else (None,)
    if not isinstance(distance, Op) or distance.name != "sub" or distance.args[0] not in (top.args[0], top.before):
        return False
    return top.ref in postorder(distance.args[1])
