"""Evaluates sizes and conditions on them, which are text, without Python's `eval`.

Input: a text such as `2 <= s0 and s0 % 4 == 0`, and which of its parts are sizes; output: a function of the sizes.  A
text with anything but integers, sizes, comparisons and the arithmetic that PyTorch's printer writes is refused.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import torch

Size: TypeAlias = "int | torch.SymInt"

Number: TypeAlias = "int | float | torch.SymInt | torch.SymFloat"
"""A number, or whether a condition holds, for which symbolic sizes are guarded."""

Evaluated: TypeAlias = Callable[[Sequence[Size]], Number]
"""A function of sizes."""

Place: TypeAlias = Callable[[ast.expr], "int | None"]
"""Part of a text → the position of the size that it names; None if it names none."""

_ARITHMETIC: Mapping[type, Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_COMPARISONS: Mapping[type, Callable[[Number, Number], object]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_NEGATED: Callable[..., Number] = operator.neg
_CALLS: Mapping[str, Callable[..., Number]] = {
    "max": max,
    "min": min,
    "math.floor": math.floor,
    "math.ceil": math.ceil,
    "math.trunc": math.trunc,
    "torch.sym_float": torch.sym_float,
}


def evaluated(text: str, place: Place) -> Evaluated:
    """Return the function that computes the expression in `text`.

    Raises:
        ValueError: a part of it is not known.

    >>> rows = evaluated("max(1, s0 // 4)", named(["s0"]))
    >>> rows([3]), rows([9])
    (1, 2)
    """
    try:
        return _evaluated(ast.parse(text, mode="eval").body, place)
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError("it is no expression") from error


def named(names: Sequence[str]) -> Place:
    """Return the position of each size in a text that calls them by these names."""
    places = {name: position for position, name in enumerate(names)}
    return lambda node: places.get(node.id) if isinstance(node, ast.Name) else None


def _evaluated(node: ast.expr, place: Place) -> Evaluated:
    position = place(node)
    if position is not None:
        return operator.itemgetter(position)
    match node:
        case ast.Constant(value=int() as number):  # also True and False
            return lambda sizes: number
        case ast.BoolOp(op=op, values=operands):
            return _joined(op, [_evaluated(each, place) for each in operands])
        case ast.Call(func=function, args=operands, keywords=[]) if ast.unparse(function) in _CALLS:
            call, given = _CALLS[ast.unparse(function)], [_evaluated(each, place) for each in operands]
            return lambda sizes: call(*(each(sizes) for each in given))
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            inner = _evaluated(operand, place)
            return lambda sizes: not inner(sizes)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            inner = _evaluated(operand, place)
            return lambda sizes: _NEGATED(inner(sizes))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
            return _computed(_ARITHMETIC[type(op)], _evaluated(left, place), _evaluated(right, place))
        case ast.Compare(left=left, ops=ops, comparators=others) if all(type(each) in _COMPARISONS for each in ops):
            return _compared([_COMPARISONS[type(op)] for op in ops], [_evaluated(e, place) for e in (left, *others)])
    raise ValueError(f"{ast.unparse(node)} is not known")


def _joined(op: ast.boolop, operands: Sequence[Evaluated]) -> Evaluated:
    join = all if isinstance(op, ast.And) else any
    return lambda sizes: join(each(sizes) for each in operands)


def _computed(compute: Callable[[Number, Number], Number], left: Evaluated, right: Evaluated) -> Evaluated:
    return lambda sizes: compute(left(sizes), right(sizes))


def _compared(compares: Sequence[Callable[[Number, Number], object]], operands: Sequence[Evaluated]) -> Evaluated:
    def holds(sizes: Sequence[Size]) -> bool:
        values = [each(sizes) for each in operands]
        pairs = zip(compares, values[:-1], values[1:], strict=True)
        return all(compare(one, other) for compare, one, other in pairs)

    return holds


__all__ = ["Evaluated", "Number", "Place", "evaluated", "named"]
