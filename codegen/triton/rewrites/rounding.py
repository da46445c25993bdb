"""Determines where the last bits of values are invisible, since results are rounded, in a kernel or by its readers.

Input: a kernel; output: yes or no, or the expressions of which that is true.  There divisions, roots and exponentials
use the fast forms of the hardware, whose error is two units in the last place of float32.
"""

from __future__ import annotations

from collections.abc import Sequence

from fusion.lowering.algebra.last_bits import to_integers
from fusion.lowering.ir.expr import Expr, postorder
from fusion.lowering.ir.kernel import Fold, Kernel, Param, Stmt, Store, statements, values_of
from fusion.lowering.ir.scalar_ops import HALVES


def is_rounded(kernel: Kernel) -> bool:
    """Return whether every result is a 16-bit float, is read only to compute such, or is computed from products of
    these, with no float rounded to an integer on the way.
    """
    stmts = list(statements(kernel.body))
    dots = [stmt for stmt in stmts if isinstance(stmt, Fold) and stmt.op == "dot"]
    products = bool(dots) and all(arg.dtype in HALVES for dot in dots for arg in dot.args)
    if not products and not all(_rounds(param) for param in kernel.params if param.written):
        return False
    return not to_integers(*(value for stmt in stmts for value in values_of(stmt)))


def rounded_parts(kernel: Kernel, body: Sequence[Stmt]) -> frozenset[Expr]:
    """Return the expressions in the body of a kernel that contribute only to 16-bit floats, stored here or later.

    For a kernel that also stores a sum in float32, such as a loss along with the gradients of its logits.
    """
    rounded: list[Expr] = []
    others: list[Expr] = []
    for stmt in statements(body):
        values = list(values_of(stmt))
        if isinstance(stmt, Store) and _rounds(kernel.param(stmt.param)) and not to_integers(stmt.value):
            rounded.append(values.pop(0))
        others += values
    return frozenset(postorder(*rounded)) - frozenset(postorder(*others))


def _rounds(param: Param) -> bool:
    """Return whether the stored values are rounded to 16 bits, there or by their readers."""
    return param.dtype in HALVES or param.rounded_later
