"""Chooses numbers for the bounds that a kernel's conditions read from memory, such that these bounds always hold.

Inputs drawn for a kernel, to time it or to check it, cannot be the folds of a mask that is drawn as well.  With
these numbers the outer bounds leave nothing out and the inner ones are empty, so that every point asks the condition.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import sympy

from fusion.lowering.expr import Expr, Load, Op, postorder
from fusion.lowering.kernel import Kernel, Loop, statements
from fusion.lowering.sizes import size_value


def open_bounds(kernel: Kernel, sizes: Mapping[sympy.Symbol, int]) -> dict[str, int]:
    """Return the parameters that hold bounds of a condition, with such a number for each.

    Args:
        sizes: a value for each size symbol of the kernel.
    """
    bounds: dict[str, int] = {}
    for part in kernel.launched:
        lengths = part.axis_sizes()
        for loop in statements(part.body, Loop):
            last = max((size_value(lengths[axis], sizes) for axis in loop.axes), default=0)
            for node in postorder(*([] if loop.where is None else [loop.where])):
                if isinstance(node, Op) and node.name == "bounded":
                    bounds.update(dict(_first_and_end(node.args[1], 0, last)))
                    bounds.update(dict(_first_and_end(node.args[2], last, 0)))
    return bounds


def _first_and_end(condition: Expr, first: int, end: int) -> Iterator[tuple[str, int]]:
    """Yield the buffers that `first <= point < end` reads, with these numbers."""
    for node in postorder(condition):
        if isinstance(node, Op) and node.name in ("ge", "lt") and isinstance(bound := node.args[1], Load):
            yield bound.buffer, first if node.name == "ge" else end
