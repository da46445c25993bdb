"""Special numbers: what becomes of 0 and of NaN in an elementwise call of an ATen graph.

Input: an fx node; its lowered form (`facts.py`) is evaluated at a 0 by the meaning of its scalar operations, or
followed from a NaN by the column `of_nan` of `lowering/scalar_ops.py`.  Calls with folds are left alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Literal, TypeAlias

import torch
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes

from fusion.joint.factors import is_tensor, root, value_of
from fusion.joint.facts import given, place_of, value_of_call, without_units
from fusion.lowering.expr import Cast, Const, Expr, Load, Op, loads, make_cast, postorder, rewrite
from fusion.lowering.scalar_ops import SCALAR_OPS
from fusion.lowering.value import Value, axis_bounds, reshape

Known: TypeAlias = Literal["nan"] | bool | None
"""What is known of an element: that it is NaN, or true, or false, or nothing."""


READ_THROUGH = 2
"""How many calls a condition is followed back: |x| = ∞ is two, a comparison and an absolute value."""


def is_zero_of_zero(node: fx.Node, source: fx.Node) -> bool:
    """Is `source` the one tensor of an elementwise call, and the result 0 wherever its element is 0?"""
    value = value_of_call(node)
    if value is None or node.all_input_nodes != [source]:
        return False
    with _disable_current_modes():  # a graph is traced with tensors that hold no numbers
        return _at_zero(without_units(value.expr, value.shape), place_of(source, value.shape)) == 0


def _at_zero(result: Expr, place: Expr | None) -> float | None:
    """The number that an expression is where the element at `place` is 0; None if it needs anything else."""
    known: dict[Expr, torch.Tensor] = {}
    for expr in postorder(result):
        if expr is place:
            known[expr] = torch.zeros((), dtype=expr.dtype)
        elif isinstance(expr, Const):
            known[expr] = torch.tensor(expr.value, dtype=expr.dtype)
        elif isinstance(expr, Cast):
            known[expr] = known[expr.arg].to(expr.dtype)
        elif isinstance(expr, Op):
            known[expr] = SCALAR_OPS[expr.name].meaning(*(known[arg] for arg in expr.args))
        else:
            return None
    return float(known[result])


def spreading(node: fx.Node) -> list[fx.Node]:
    """The operands of an elementwise call where one of which is NaN, its result is NaN, too.

    Conditions are read through: `where(x < 0, 1, x)` is NaN where x is, as no comparison with NaN is true.
    """
    value = value_of_call(node)
    if value is None:
        return []
    result = _read(value, node, 0).expr
    operands: list[fx.Node] = []
    for arg in node.all_input_nodes:
        place = place_of(arg, value.shape) if is_tensor(arg) else None
        if place is not None and value_of(arg).dtype.is_floating_point:
            element = next(loads(_read(replace(value, expr=place), node, 0).expr))
            if _of_nan(result, element) == "nan":
                operands.append(arg)
    return operands


def _read(value: Value, node: fx.Node, depth: int) -> Value:
    """A value over the operands of `node` as one over their roots, with conditions as what they compare."""
    tensors = {arg.name: _rooted(arg, depth) for arg in node.all_input_nodes if is_tensor(arg)}

    def rule(expr: Expr) -> Expr | None:
        if isinstance(expr, Load) and expr.mask is None:
            return tensors[expr.buffer].at(expr.index, axis_bounds(value.shape))
        return None

    (expr,) = rewrite([without_units(value.expr, value.shape)], rule)
    return replace(value, expr=expr)


def _rooted(node: fx.Node, depth: int) -> Value:
    """A tensor as its root, or, of a condition and what leads to it, as what makes it."""
    if depth < READ_THROUGH and (depth or value_of(node).dtype is torch.bool):
        value = value_of_call(node)
        if value is not None:
            return _read(value, node, depth + 1)
    tensor, source = given(node), given(root(node))
    return replace(tensor, expr=make_cast(reshape(source, tensor.shape).expr, tensor.dtype))


def _of_nan(result: Expr, element: Expr) -> Known:
    """What is known of an expression where `element` is NaN."""
    known: dict[Expr, Known] = {}
    for expr in postorder(result):
        below = [known[child] for child in expr.children()]
        if expr is element:
            known[expr] = "nan"
        elif isinstance(expr, Const):
            known[expr] = expr.value if isinstance(expr.value, bool) else None
        elif isinstance(expr, Cast):
            floats = expr.dtype.is_floating_point and expr.arg.dtype.is_floating_point
            known[expr] = below[0] if floats else None
        elif isinstance(expr, Op):
            known[expr] = _of_known(expr, below)
        else:
            known[expr] = None
    return known[result]


def _of_known(operation: Op, args: Sequence[Known]) -> Known:
    row = SCALAR_OPS[operation.name]
    if operation.name == "where":
        chosen = {args[1] if on else args[2] for on in ((True, False) if args[0] is None else (args[0],))}
        return chosen.pop() if len(chosen) == 1 else None
    if "nan" in args:
        return row.of_nan
    if operation.dtype is not torch.bool or any(arg.dtype is not torch.bool for arg in operation.args):
        return None
    cases = product(*((True, False) if arg is None else (arg is True,) for arg in args))
    with _disable_current_modes():
        results = {bool(row.meaning(*map(torch.tensor, case))) for case in cases}
    return results.pop() if len(results) == 1 else None
