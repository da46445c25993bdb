"""Rounding: are the results of a kernel rounded so much that the last bits of what leads to them cannot be seen?

What enters is a kernel; what leaves is yes or no, or of which of its expressions that is so.  There the quick forms of
the hardware are used for divisions, roots and exponentials, which are off by two units in the last place of float32.
"""

from __future__ import annotations

from collections.abc import Sequence

from fusion.lowering.expr import Cast, Expr, Op, postorder
from fusion.lowering.kernel import Fold, Kernel, Stmt, Store, statements, values_of
from fusion.lowering.scalar_ops import HALVES

_TO_INTEGERS = {"floor", "ceil", "trunc", "round", "floordiv", "truncdiv", "remainder", "fmod"}


def is_rounded(kernel: Kernel) -> bool:
    """Is every result a 16-bit float, or made of products of these, with nothing rounded to an integer on the way?"""
    stmts = list(statements(kernel.body))
    dots = [stmt for stmt in stmts if isinstance(stmt, Fold) and stmt.op == "dot"]
    products = bool(dots) and all(arg.dtype in HALVES for dot in dots for arg in dot.args)
    if not products and not all(param.dtype in HALVES for param in kernel.params if param.written):
        return False
    return not _to_integers(*(value for stmt in stmts for value in values_of(stmt)))


def rounded_parts(body: Sequence[Stmt]) -> frozenset[Expr]:
    """The expressions that lead to nothing but 16-bit floats that are stored.

    Of a kernel that also gives a sum in float32, such as a loss beside the gradients of its logits.
    """
    rounded: list[Expr] = []
    others: list[Expr] = []
    for stmt in statements(body):
        values = list(values_of(stmt))
        if isinstance(stmt, Store) and stmt.value.dtype in HALVES and not _to_integers(stmt.value):
            rounded.append(values.pop(0))
        others += values
    return frozenset(postorder(*rounded)) - frozenset(postorder(*others))


def _to_integers(*values: Expr) -> bool:
    """Is a float rounded to an integer on the way to these?"""
    for node in postorder(*values):
        if isinstance(node, Op) and node.name in _TO_INTEGERS and node.dtype.is_floating_point:
            return True
        if isinstance(node, Cast) and node.arg.dtype.is_floating_point and not node.dtype.is_floating_point:
            return True
    return False
