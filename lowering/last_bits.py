"""Which values may differ in the last bit from themselves, where they are computed twice.

Of a product and a sum a compiler for GPUs may make one operation, which rounds once.  Which of two products it takes
depends on who else needs them, and so on the kernel, or on the loop of a kernel.  Who compares such a value with what
was made of it (a row with its maximum) has to read it as it was computed there.
"""

from __future__ import annotations

from fusion.lowering.expr import Expr, Op, postorder

COMPARISONS = frozenset({"eq", "ne", "lt", "le", "gt", "ge"})


def may_differ(value: Expr) -> bool:
    """Is a product of floats added to something on the way to `value`?"""
    return any(
        isinstance(node, Op)
        and node.name in ("add", "sub")
        and node.dtype.is_floating_point
        and any(_is_product(arg) for arg in node.args)
        for node in postorder(value)
    )


def _is_product(value: Expr) -> bool:
    """Is this a product, or one that is negated?"""
    while isinstance(value, Op) and value.name == "neg":
        (value,) = value.args
    return isinstance(value, Op) and value.name == "mul"


def compared(*values: Expr) -> list[tuple[Expr, Expr]]:
    """The pairs of floats that are compared on the way to `values`."""
    found = [node.args for node in postorder(*values) if isinstance(node, Op) and node.name in COMPARISONS]
    return [(left, right) for left, right in found if left.dtype.is_floating_point]
