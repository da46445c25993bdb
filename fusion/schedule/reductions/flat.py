"""Flattens the reduced axes that the operands of a reduction walk as one.

    sum over n, h, w of x[n, c, h, w]      becomes      sum over r of x[r // HW, c, r // W % H, r % W]

With channels last, batch, height and width of an image are one axis in memory: cut as one, it has parts enough where
neither of the three has.  Input: a reduction; output: an equal one, the same object where no operand allows it.
"""

from __future__ import annotations

from dataclasses import replace

import sympy

from fusion.lowering.expr import Expr, Load, index_of, postorder
from fusion.lowering.indexing import coefficient, flatten, over_symbol, substitute_all
from fusion.lowering.program import Axis, Program, Reduce, axis_sizes
from fusion.schedule.iteration.axes import merge, order_by_stride


def flattened(program: Program, node: Reduce) -> Reduce:
    """`node` over fewer axes, where neighbours in memory are neighbours for all that it reads."""
    if len(node.over) < 2:
        return node
    offsets = _offsets(program, node)
    if offsets is None:
        return node
    axes, parts = merge(order_by_stride(node.over, offsets), offsets)
    if not parts:
        return node
    names = {axis.symbol: over_symbol(k) for k, axis in enumerate(axes)}
    over = tuple(Axis(names[axis.symbol], axis.size) for axis in axes)
    sizes = {axis.symbol: axis.size for axis in (*node.axes, *over)}
    change = names | {symbol: part.xreplace(names) for symbol, part in parts.items()}
    made = replace(node, over=over, args=tuple(substitute_all(node.args, change, sizes)))
    after = _offsets(program, made)
    plain = after is not None and all(coefficient(offset, axis.symbol) is not None for offset in after for axis in over)
    return made if plain else node


def _offsets(program: Program, node: Reduce) -> list[sympy.Expr] | None:
    """Where a reduction reads, and the positions that it computes with; None where data say where it reads."""
    sizes = axis_sizes(node)
    found: list[sympy.Expr] = []
    for part in postorder(*node.args):
        if not isinstance(part, Load):
            found.extend(index_of(part))
            continue
        offset = flatten(part.index, program.buffers[part.buffer].strides, sizes)
        if isinstance(offset, Expr):
            return None
        found.append(offset)
    return found


__all__ = ["flattened"]
