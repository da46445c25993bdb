"""Rounding: are the results of a kernel rounded so much that the last bits of what leads to them cannot be seen?

What enters is a kernel; what leaves is yes or no.  Where it is yes, the quick forms of the hardware are used for
divisions, roots and exponentials, which are off by two units in the last place of float32.
"""

from __future__ import annotations

from lowering.expr import Cast, Op, postorder
from lowering.kernel import Fold, Kernel, statements, values_of
from lowering.scalar_ops import HALVES

_TO_INTEGERS = {"floor", "ceil", "trunc", "round", "floordiv", "truncdiv", "remainder", "fmod"}


def is_rounded(kernel: Kernel) -> bool:
    """Is every result a 16-bit float, or made of products of these, with nothing rounded to an integer on the way?"""
    stmts = list(statements(kernel.body))
    dots = [stmt for stmt in stmts if isinstance(stmt, Fold) and stmt.op == "dot"]
    products = bool(dots) and all(arg.dtype in HALVES for dot in dots for arg in dot.args)
    if not products and not all(param.dtype in HALVES for param in kernel.params if param.written):
        return False
    for node in postorder(*(value for stmt in stmts for value in values_of(stmt))):
        if isinstance(node, Op) and node.name in _TO_INTEGERS and node.dtype.is_floating_point:
            return False
        if isinstance(node, Cast) and node.arg.dtype.is_floating_point and not node.dtype.is_floating_point:
            return False
    return True
