"""Determines the effect of 0 and of NaN in an elementwise call of an ATen graph.

Input: an fx node; its lowered form (`facts.py`) is evaluated at 0 by the meaning of its scalar operations, or NaN is
propagated by the column `of_nan` of `lowering/ir/scalar_ops.py`.  Calls with folds give negative answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Literal, TypeAlias

import torch
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes
from typing_extensions import assert_never

from fusion.joint.factors import is_tensor, root, value_of
from fusion.joint.facts import operand_value, place_of, value_of_call, without_units
from fusion.lowering.ir.expr import (
    Cast,
    Const,
    Expr,
    IndexValue,
    Load,
    Op,
    Random,
    TileRef,
    concrete,
    loads,
    make_cast,
    postorder,
    rewrite,
)
from fusion.lowering.ir.scalar_ops import SCALAR_OPS
from fusion.lowering.value import Value, axis_bounds, reshape

Known: TypeAlias = Literal["nan"] | bool | None
"""Knowledge of an element: that it is NaN, or true, or false; None for nothing."""


READ_THROUGH = 2
"""How many calls behind a condition are examined: |x| = ∞ is two, a comparison and an absolute value."""


def is_zero_of_zero(node: fx.Node, source: fx.Node) -> bool:
    """Return whether `source` is the one tensor of an elementwise call whose result is 0 wherever its element is 0."""
    value = value_of_call(node)
    if value is None or node.all_input_nodes != [source]:
        return False
    with _disable_current_modes():  # tracing uses tensors without data
        return _at_zero(without_units(value.expr, value.shape), place_of(source, value.shape)) == 0


def _at_zero(result: Expr, element_at: Expr | None) -> float | None:
    """Evaluate an expression with 0 for the element at `element_at`; None if it depends on anything else."""
    known: dict[Expr, torch.Tensor] = {}
    for expr in postorder(result):
        if expr is element_at:
            known[expr] = torch.zeros((), dtype=expr.dtype)
            continue
        match concrete(expr):
            case Const(value=value, dtype=dtype):
                known[expr] = torch.tensor(value, dtype=dtype)
            case Cast(arg=arg, dtype=dtype):
                known[expr] = known[arg].to(dtype)
            case Op(name=name, args=args):
                known[expr] = SCALAR_OPS[name].meaning(*(known[arg] for arg in args))
            case Load() | IndexValue() | Random() | TileRef():
                return None
            case unknown:
                assert_never(unknown)
    return float(known[result])


def spreading(node: fx.Node) -> list[fx.Node]:
    """Return the operands of an elementwise call whose NaNs make its result NaN.

    Conditions are examined: `where(x < 0, 1, x)` is NaN where x is, as comparisons with NaN are false.
    """
    value = value_of_call(node)
    if value is None:
        return []
    result = _read(value, node, 0).expr
    operands: list[fx.Node] = []
    for arg in node.all_input_nodes:
        element_at = place_of(arg, value.shape) if is_tensor(arg) else None
        if element_at is not None and value_of(arg).dtype.is_floating_point:
            element = next(loads(_read(replace(value, expr=element_at), node, 0).expr))
            if _of_nan(result, element) == "nan":
                operands.append(arg)
    return operands


def _read(value: Value, node: fx.Node, depth: int) -> Value:
    """Express a value over the roots of `node`'s operands, and conditions over the compared values."""
    tensors = {arg.name: _rooted(arg, depth) for arg in node.all_input_nodes if is_tensor(arg)}

    def rule(expr: Expr) -> Expr | None:
        if isinstance(expr, Load) and expr.mask is None:
            return tensors[expr.buffer].at(expr.index, axis_bounds(value.shape))
        return None

    (expr,) = rewrite([without_units(value.expr, value.shape)], rule)
    return replace(value, expr=expr)


def _rooted(node: fx.Node, depth: int) -> Value:
    """Express a tensor by its root, or a condition, and its operands, by their definition."""
    if depth < READ_THROUGH and (depth or value_of(node).dtype is torch.bool):
        value = value_of_call(node)
        if value is not None:
            return _read(value, node, depth + 1)
    tensor, source = operand_value(node), operand_value(root(node))
    return replace(tensor, expr=make_cast(reshape(source, tensor.shape).expr, tensor.dtype))


def _of_nan(result: Expr, element: Expr) -> Known:
    """Return the value of an expression where `element` is NaN, as far as it is known."""
    known: dict[Expr, Known] = {}
    for expr in postorder(result):
        below = [known[child] for child in expr.children()]
        if expr is element:
            known[expr] = "nan"
            continue
        match concrete(expr):
            case Const(value=value):
                known[expr] = value if isinstance(value, bool) else None
            case Cast(arg=arg, dtype=dtype):
                floats = dtype.is_floating_point and arg.dtype.is_floating_point
                known[expr] = below[0] if floats else None
            case Op() as operation:
                known[expr] = _of_known(operation, below)
            case Load() | IndexValue() | Random() | TileRef():
                known[expr] = None
            case unknown:
                assert_never(unknown)
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
