"""Replaces a sum with one non-zero term (a one-hot sum) by that term.

    Σ_r where(r == e, a, 0) · c  =  where(0 ≤ e < size, a, 0) · c      with e, a and c the same for all r

`Program → Program`.  The sum over a one-hot row (the gradient of a loss, of a gather) costs a loop over the row, and
would materialise it where nothing else needs it.  Only sums over one axis, and terms derived from the one-hot value by
conversions, signs, factors and divisors without r.  An infinite c gives an infinity where zeros times it gave NaN.
"""

from __future__ import annotations

import sympy
import torch

from fusion.lowering.ir.expr import Cast, Const, Expr, IndexValue, Op, const, free_axes, make_cast, make_op
from fusion.lowering.ir.program import Map, Program, Reduce


def select_terms(program: Program) -> Program:
    """Replace sums of one term by maps; the same object if there are none.

    >>> from fusion.inspect.examples import lowered, show_program
    >>> from torch import empty, zeros
    >>> from fusion.schedule.rewrites.inline import inline_cheap_maps
    >>> def f(i, w):
    ...     return zeros(3, 7).scatter(1, i[:, None], w[:, None]).sum(-1)
    >>> show_program(select_terms, inline_cheap_maps(lowered(f, empty(3, dtype=int), empty(3))))
      input i: i64[3]
      input w: f32[3]
    - sum_1: f32[3] = sum(i0:3 over r0:7) where(checked(i[i0], 0, 6, 101) == index(r0), w[i0], 0.0)
    +   %1 = checked(i[i0], 0, 6, 101)
    + sum_1: f32[3] = map(i0:3) where((%1 >= 0) & (%1 < index(7)), w[i0], 0.0)
      return sum_1
    """
    return program.edited(_selected(node) if isinstance(node, Reduce) else node for node in program.nodes)


def _selected(node: Reduce) -> Map | Reduce:
    if node.op != "sum" or len(node.over) != 1 or len(node.args) != 1:
        return node
    (axis,) = node.over
    term = _term(node.args[0], axis.symbol, axis.size)
    return node if term is None else Map(node.out, node.axes, make_cast(term, node.dtype))


def _term(expr: Expr, axis: sympy.Symbol, size: sympy.Expr) -> Expr | None:
    """Return the one term of the sum of `expr` over `axis`; None if there may be more."""
    if axis not in free_axes(expr):
        return None
    if isinstance(expr, Cast) and expr.dtype.is_floating_point and expr.arg.dtype.is_floating_point:
        inner = _term(expr.arg, axis, size)
        return None if inner is None else make_cast(inner, expr.dtype, implicit=expr.implicit)
    if not isinstance(expr, Op):
        return None
    if expr.name == "where":
        return _chosen(expr, axis, size)
    if expr.name == "neg":
        inner = _term(expr.args[0], axis, size)
        return None if inner is None else expr.rebuild((inner,))
    if expr.name not in ("mul", "truediv") or not expr.dtype.is_floating_point:
        return None
    for position, other in ((0, 1), (1, 0)) if expr.name == "mul" else ((0, 1),):
        if axis in free_axes(expr.args[other]):
            continue
        inner = _term(expr.args[position], axis, size)
        if inner is not None:
            pair = (inner, expr.args[1]) if position == 0 else (expr.args[0], inner)
            return expr.rebuild(pair)
    return None


def _chosen(expr: Op, axis: sympy.Symbol, size: sympy.Expr) -> Expr | None:
    """Return the term of `where(axis == e, a, 0)`, if e is a position on the axis."""
    condition, value, other = expr.args
    if not (isinstance(condition, Op) and condition.name == "eq" and isinstance(other, Const) and other.value == 0):
        return None
    for index, element in (condition.args, condition.args[::-1]):
        if not isinstance(index, IndexValue) or index.index != axis or element.dtype is not torch.int64:
            continue
        if axis in free_axes(element, value):
            return None
        inside = [make_op("ge", element, const(0, torch.int64))]
        inside.append(make_op("lt", element, IndexValue(sympy.sympify(size))))
        return Op("where", (make_op("and", *inside), value, other), expr.dtype)
    return None
