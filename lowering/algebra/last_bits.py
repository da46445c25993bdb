"""Finds values that may differ in the last bit when they are computed twice.

A GPU compiler may fuse a product and a sum into one operation (FMA), which rounds once.  Which of two products it fuses
depends on the other users of both, and so on the kernel, or on the loop within it.  A comparison of such a value with a
result derived from it (a row with its maximum) has to read both from the same computation.
"""

from __future__ import annotations

from fusion.lowering.ir.expr import Cast, Expr, Op, postorder
from fusion.lowering.ir.scalar_ops import COMPARISONS

_TO_INTEGERS = {"floor", "ceil", "trunc", "round", "floordiv", "truncdiv", "remainder", "fmod"}


def may_differ(value: Expr) -> bool:
    """Return whether a product of floats is added to another value on the way to `value`."""
    return any(
        isinstance(node, Op)
        and node.name in ("add", "sub")
        and node.dtype.is_floating_point
        and any(_is_product(arg) for arg in node.args)
        for node in postorder(value)
    )


def _is_product(value: Expr) -> bool:
    """Return whether this is a product, or a negated one."""
    while isinstance(value, Op) and value.name == "neg":
        (value,) = value.args
    return isinstance(value, Op) and value.name == "mul"


def compared(*values: Expr) -> list[tuple[Expr, Expr]]:
    """Return the pairs of floats that are compared on the way to `values`."""
    pairs = [node.args for node in postorder(*values) if isinstance(node, Op) and node.name in COMPARISONS]
    return [(left, right) for left, right in pairs if left.dtype.is_floating_point]


def to_integers(*values: Expr) -> bool:
    """Return whether a float is rounded to an integer in these expressions, so that its last bits may be visible."""
    for node in postorder(*values):
        if isinstance(node, Op) and node.name in _TO_INTEGERS and node.dtype.is_floating_point:
            return True
        if isinstance(node, Cast) and node.arg.dtype.is_floating_point and not node.dtype.is_floating_point:
            return True
    return False
