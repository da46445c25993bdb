"""Evaluates AOTAutograd's guards on sizes, which are text, without Python's `eval`.

Input: a text such as `L['t0'] <= 8 and L['t0'] % 2 == 0`, and the sizes that it calls t0, t1, …; output: whether it
holds.  Symbolic sizes are guarded by being compared.  A text with anything but integers, sizes, comparisons and the
arithmetic that PyTorch's printer writes is refused.
"""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fusion.graph_cache.form import Unwritten

_ARITHMETIC: Mapping[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_COMPARISONS: Mapping[type, Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_CALLS: Mapping[str, Callable[..., Any]] = {
    "max": max,
    "min": min,
    "math.floor": math.floor,
    "math.ceil": math.ceil,
    "math.trunc": math.trunc,
    "torch.sym_float": torch.sym_float,
}

_SIZE = re.compile(r"L\['t(\d+)'\]")


def parsed(text: str) -> ast.expr:
    """Parse a guard.

    Raises:
        Unwritten: a part of it is not known.

    >>> holds(parsed("2 <= L['t0'] and L['t0'] * L['t1'] % 4 == 0"), [6, 2])
    True
    """
    try:
        expression = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise Unwritten("a guard that is no expression") from error
    pending = [expression]
    while pending:
        pending += _parts(pending.pop())
    return expression


def holds(guard: ast.expr, sizes: Sequence[int | torch.SymInt]) -> bool:
    """Return whether a guard that was parsed holds for `sizes`."""
    return bool(_value(guard, sizes))


def _parts(node: ast.expr) -> Sequence[ast.expr]:
    """Return the operands of an expression.

    Raises:
        Unwritten: it is not known.
    """
    match node:
        case ast.Constant(value=int()):  # also True and False
            return ()
        case ast.Subscript() if _SIZE.fullmatch(ast.unparse(node)):
            return ()
        case ast.BoolOp(values=operands) | ast.Call(args=operands, keywords=[]) if _is_known(node):
            return operands
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            return (operand,)
        case ast.BinOp(left=left, right=right) if type(node.op) in _ARITHMETIC:
            return left, right
        case ast.Compare(left=left, comparators=others) if all(type(each) in _COMPARISONS for each in node.ops):
            return left, *others
    raise Unwritten(f"a guard with {ast.unparse(node)}")


def _is_known(node: ast.BoolOp | ast.Call) -> bool:
    return isinstance(node, ast.BoolOp) or ast.unparse(node.func) in _CALLS


def _value(node: ast.expr, sizes: Sequence[int | torch.SymInt]) -> Any:
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Subscript():
            return sizes[int(ast.unparse(node)[len("L['t") : -len("']")])]
        case ast.BoolOp(op=ast.And(), values=operands):
            return all(_value(each, sizes) for each in operands)
        case ast.BoolOp(values=operands):
            return any(_value(each, sizes) for each in operands)
        case ast.Call(func=function, args=operands):
            return _CALLS[ast.unparse(function)](*(_value(each, sizes) for each in operands))
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return not _value(operand, sizes)
        case ast.UnaryOp(operand=operand):
            return -_value(operand, sizes)
        case ast.BinOp(left=left, right=right):
            return _ARITHMETIC[type(node.op)](_value(left, sizes), _value(right, sizes))
        case ast.Compare(left=left, ops=ops, comparators=others):
            values = [_value(each, sizes) for each in (left, *others)]
            pairs = zip(ops, values[:-1], values[1:], strict=True)
            return all(_COMPARISONS[type(op)](one, other) for op, one, other in pairs)
    raise AssertionError("it was parsed")


__all__ = ["holds", "parsed"]
