"""Unrolls a reduction over the few points of a window into a map of all of them.

    max over r of x[2 i + r], r < 3      becomes      max(max(x[2 i], x[2 i + 1]), x[2 i + 2])

`Program → Program`.  Windows overlap, so no axis of their operands belongs to their rows, and a tile that holds them
gains nothing: each thread folds its own windows in registers, neighbours share loads in the cache, and a map fuses with
its neighbours as any other does.  A fold of one number is such a window, whatever it reads.

Unchanged: windows beyond the target's limit, windows that lanes would compute slowly (`_is_slow_in_lanes`), and
reductions of full rows, which other readers of the rows can share.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import reduce

import sympy
import torch

from fusion.codegen.target import Capabilities
from fusion.lowering.algebra.dead_code import eliminate_dead_code
from fusion.lowering.algebra.positions import simplify_all
from fusion.lowering.indexing import Sizes, substitute_all
from fusion.lowering.ir.expr import Expr, Load, Op, const, loads, make_op, postorder
from fusion.lowering.ir.program import Map, Node, Program, Reduce
from fusion.lowering.ir.scalar_ops import FoldName, ScalarName, joined_by

UNROLLED: frozenset[FoldName] = frozenset({"sum", "max", "min", "any", "all"})
"""The folds of values that are unrolled."""
RANKED: dict[FoldName, tuple[ScalarName, ScalarName]] = {"argmax": ("maximum", "gt"), "argmin": ("minimum", "lt")}
"""Fold of positions → the operation on two values, and the comparison by which one is taken."""


def unroll_windows(program: Program, capabilities: Capabilities) -> Program:
    """Replace reductions of small windows by maps; the same object when there are none.

    >>> from fusion.inspect.examples import TARGET, show_program
    >>> from torch import empty
    >>> show_program(lambda p: unroll_windows(p, TARGET.capabilities), lambda x: x.unfold(0, 2, 1).amax(-1), empty(5))
      input x: f32[5]
    - amax: f32[4] = max(i0:4 over r0:2) x[i0 + r0]
    + amax: f32[4] = map(i0:4) maximum(x[i0], x[i0 + 1])
      return amax
    """
    nodes: tuple[Node, ...] = tuple(
        _unrolled(node) if isinstance(node, Reduce) and _is_window(program, node, capabilities) else node
        for node in program.nodes
    )
    if nodes == program.nodes:
        return program
    return eliminate_dead_code(program.edited(nodes))  # the position of a single point does not depend on values


def _is_window(program: Program, node: Reduce, capabilities: Capabilities) -> bool:
    """Return whether a reduction has one point, or few and reads along an axis of its results."""
    points = sympy.Mul(*(axis.size for axis in node.over))
    if not points.is_Integer or not 0 < points <= capabilities.window_limit or node.args[-1].dtype is not node.dtype:
        return False
    if node.op not in UNROLLED and node.op not in RANKED:
        return False
    if points == 1:
        return True
    if capabilities.windows_in_lanes and _is_slow_in_lanes(program, node):
        return False
    own, over = ({axis.symbol for axis in axes} for axes in (node.axes, node.over))
    read = (index for part in postorder(*node.args) if isinstance(part, Load) for index in part.index)
    return any(not isinstance(index, Expr) and own & index.free_symbols and over & index.free_symbols for index in read)


def _is_slow_in_lanes(program: Program, node: Reduce) -> bool:
    """Return whether lanes along the contiguous axis would test each element of a window, or gather it from several
    rows at a distance from their neighbours' (see `codegen.c.target.LONGEST_WINDOW`).
    """
    over = {axis.symbol for axis in node.over if axis.size != 1}
    for load in loads(*node.args):
        if load.mask is not None:
            return True
        places = zip(load.index, program.buffers[load.buffer].strides, strict=True)
        contiguous = [index for index, stride in places if stride == 1 and not isinstance(index, Expr)]
        if len(over) > 1 and any(over & index.free_symbols for index in contiguous):
            return True
    return False


def _unrolled(node: Reduce) -> Map:
    sizes = {axis.symbol: axis.size for axis in node.axes}
    points = itertools.product(*(range(int(axis.size)) for axis in node.over))
    values = [
        _at(node.args, {axis.symbol: sympy.Integer(k) for axis, k in zip(node.over, point, strict=True)}, sizes)
        for point in points
    ]
    if node.op in RANKED:
        return Map(node.out, node.axes, reduce(_ranked(node.op), values)[1])
    if node.op == "sum":  # the first term is 0, not -0
        values.insert(0, (const(0, node.dtype),))
    name = joined_by(node.op)
    return Map(node.out, node.axes, reduce(lambda a, b: (Op(name, (a[0], b[0]), node.dtype),), values)[0])


def _at(args: Sequence[Expr], point: Mapping[sympy.Symbol, sympy.Expr], sizes: Sizes) -> tuple[Expr, ...]:
    """Return the operands at one point of the window, with conditions that hold there simplified."""
    return tuple(simplify_all(substitute_all(args, point, sizes), sizes))


def _ranked(name: FoldName) -> Callable[[tuple[Expr, ...], tuple[Expr, ...]], tuple[Expr, ...]]:
    """Return a function that chooses one of two values with positions: NaN wins, then the lowest position."""
    operation, before = RANKED[name]

    def pick(one: tuple[Expr, ...], other: tuple[Expr, ...]) -> tuple[Expr, ...]:
        (best, place), (value, at) = one, other
        better, same = _boolean(before, value, best), _boolean("eq", value, best)
        if value.dtype.is_floating_point:
            unknown, known = (_boolean("isnan", each) for each in (value, best))
            better = _boolean("or", better, _boolean("and", unknown, _boolean("not", known)))
            same = _boolean("or", same, _boolean("and", unknown, known))
        taken = _boolean("or", better, _boolean("and", same, _boolean("lt", at, place)))
        return Op(operation, (best, value), value.dtype), make_op("where", taken, at, place)

    return pick


def _boolean(name: ScalarName, *args: Expr) -> Expr:
    return Op(name, args, torch.bool)


__all__ = ["unroll_windows"]
