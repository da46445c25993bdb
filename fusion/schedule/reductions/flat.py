"""Flattens the reduced axes that are one axis in the memory of a reduction's operands.

    sum over n, h, w of x[n, c, h, w]      becomes      sum over r of x[r // HW, c, r // W % H, r % W]

With channels last, batch, height and width of an image are one axis in memory: split as one, it has enough parts where
none of the three has.  Input: a reduction; output: an equal one, the same object where no operand allows it.
"""

from __future__ import annotations

from dataclasses import replace

import sympy

from fusion.lowering.indexing import coefficient, flatten, over_symbol, substitute_all
from fusion.lowering.ir.expr import Expr, Load, index_of, postorder
from fusion.lowering.ir.program import Axis, Program, Reduce, axis_sizes
from fusion.schedule.iteration.axes import merge, order_by_stride


def flattened(program: Program, node: Reduce) -> Reduce:
    """Merge reduced axes of `node` that are neighbours in memory for all its operands."""
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
    merged = replace(node, over=over, args=tuple(substitute_all(node.args, change, sizes)))
    after = _offsets(program, merged)
    affine = after is not None and all(
        coefficient(offset, axis.symbol) is not None for offset in after for axis in over
    )
    return merged if affine else node


def _offsets(program: Program, node: Reduce) -> list[sympy.Expr] | None:
    """Return the offsets that a reduction reads, and the positions it computes with; None if an offset is loaded."""
    sizes = axis_sizes(node)
    offsets: list[sympy.Expr] = []
    for part in postorder(*node.args):
        if not isinstance(part, Load):
            offsets.extend(index_of(part))
            continue
        offset = flatten(part.index, program.buffers[part.buffer].strides, sizes)
        if isinstance(offset, Expr):
            return None
        offsets.append(offset)
    return offsets


__all__ = ["flattened"]
