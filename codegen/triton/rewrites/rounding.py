"""Rounding: whether the results of a kernel are rounded so much that the last bits of intermediate values are
invisible.

Input: a kernel; output: yes or no, or the expressions of which that is true.  There divisions, roots and exponentials
use the fast forms of the hardware, whose error is two units in the last place of float32.
"""

from __future__ import annotations

from collections.abc import Sequence

from fusion.lowering.expr import Cast, Expr, Op, postorder
from fusion.lowering.kernel import Fold, Kernel, Stmt, Store, statements, values_of
from fusion.lowering.scalar_ops import HALVES

_TO_INTEGERS = {"floor", "ceil", "trunc", "round", "floordiv", "truncdiv", "remainder", "fmod"}


def is_rounded(kernel: Kernel) -> bool:
    """Is every result a 16-bit float, or computed from products of these, with no float rounded to an integer on the
    way?
    """
    stmts = list(statements(kernel.body))
    dots = [stmt for stmt in stmts if isinstance(stmt, Fold) and stmt.op == "dot"]
    products = bool(dots) and all(arg.dtype in HALVES for dot in dots for arg in dot.args)
    if not products and not all(param.dtype in HALVES for param in kernel.params if param.written):
        return False
    return not _to_integers(*(value for stmt in stmts for value in values_of(stmt)))


def rounded_parts(body: Sequence[Stmt]) -> frozenset[Expr]:
    """Return the expressions that contribute only to stored 16-bit floats.

    For a kernel that also stores a sum in float32, such as a loss along with the gradients of its logits.
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
    """Is a float rounded to an integer in these expressions?"""
    for node in postorder(*values):
        if isinstance(node, Op) and node.name in _TO_INTEGERS and node.dtype.is_floating_point:
            return True
        if isinstance(node, Cast) and node.arg.dtype.is_floating_point and not node.dtype.is_floating_point:
            return True
    return False
