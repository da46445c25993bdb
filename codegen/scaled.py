"""Recognises kernels that multiply tensors in place by one number, and so need not run where that number is 1.

    x[i] = x[i] * s      becomes      if s == 1: return;  x[i] = x[i] * s

1 is the neutral element of multiplication, exactly: x · 1 is x for every float, including infinities, NaN and -0.0.  So
a kernel that stores only such products, each into its own factor, leaves memory as it is.  Gradients that are computed
ahead of their loss are scaled by the gradient of the loss, which is 1 unless the loss was scaled: only the start of a
launch then remains of reading and writing the gradients.

Input: the statements of a kernel that is alone in its launch; output: that number, or None where anything else is
stored, or a product is rounded to a narrower type than its memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fusion.lowering.ir.expr import Cast, Expr, Load, Op, free_axes, loads
from fusion.lowering.ir.kernel import Kernel, Stmt, Store, stored


def factor_in_place(kernel: Kernel, body: Sequence[Stmt]) -> Expr | None:
    """Return the number by which everything that a kernel writes is multiplied in place; None if there is none.

    Args:
        body: the statements of the kernel, over its axes or over a generator's own.
    """
    factors = {_factor_of(stmt) for stmt in body}
    number = factors.pop() if len(factors) == 1 else None
    return None if number is None or any(load.buffer in stored(kernel) for load in loads(number)) else number


def _factor_of(stmt: Stmt) -> Expr | None:
    if not isinstance(stmt, Store) or stmt.axes is not None:
        return None
    product = unconverted(stmt.value)
    if not (isinstance(product, Op) and product.name == "mul" and product.dtype.is_floating_point):
        return None
    for element, number in (product.args, product.args[::-1]):
        load = unconverted(element)
        if not isinstance(load, Load) or (load.buffer, load.index, load.mask) != (stmt.param, (stmt.offset,), None):
            continue
        exact = stmt.value.dtype is load.dtype and torch.promote_types(load.dtype, product.dtype) is product.dtype
        return number if exact and not free_axes(number) and any(loads(number)) else None
    return None


def unconverted(value: Expr) -> Expr:
    """Return the operand of a conversion, or the value itself."""
    return value.arg if isinstance(value, Cast) else value
