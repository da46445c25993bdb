"""Sigmoids: 1 + tanh(x) and 1 + erf(x), the factors of GELU, as one function each.

What enters is a body whose results are rounded so much that the last bits of these cannot be seen; what leaves is an
equal one that takes fewer operations for each element of a tile, and that does not cancel where x is far below 0:

    1 + tanh(x)        →  2 / (1 + exp2(-2 · log₂e · x))
    ½ · y · (2 / d)    →  y / d
    1 + erf(x)         →  erfc(-x)

Only where nothing else needs the tanh or erf, as its own derivative does.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import torch

from lowering.expr import Const, Expr, Op, const, postorder, rewrite
from lowering.kernel import Stmt, Store, statements, values_of

_TWO = const(2.0, torch.float32)


def as_sigmoids(body: Sequence[Stmt]) -> tuple[Stmt, ...]:
    """`body` with the sums in what it stores rewritten; the same statements where there are none."""
    every = list(postorder(*(value for stmt in statements(body) for value in values_of(stmt))))
    uses = Counter(child for node in every for child in node.children())

    def rule(node: Expr) -> Expr | None:
        if not isinstance(node, Op) or node.name not in ("add", "mul") or node.dtype is not torch.float32:
            return None
        first, second = node.args
        if node.name == "mul":
            return _divided(first, second) or _divided(second, first)
        bent, one = (first, second) if isinstance(second, Const) else (second, first)
        if not (isinstance(one, Const) and one.value == 1.0 and isinstance(bent, Op) and uses[bent] == 1):
            return None
        if bent.name == "tanh":
            power = Op("exp2", (_times(bent.args[0], -2.0 / math.log(2.0)),), torch.float32)
            return Op("truediv", (_TWO, Op("add", (power, one), torch.float32)), torch.float32)
        return Op("erfc", (_times(bent.args[0], -1.0),), torch.float32) if bent.name == "erf" else None

    def rebuilt(stmt: Stmt) -> Stmt:
        if not isinstance(stmt, Store):
            return stmt
        (value,) = rewrite([stmt.value], rule)
        return stmt if value is stmt.value else replace(stmt, value=value)

    return tuple(rebuilt(stmt) for stmt in body)


def _divided(factor: Expr, sigmoid: Expr) -> Expr | None:
    """A product with 2 / d as a quotient, where the other factor holds a constant that takes in the 2."""
    if not (isinstance(sigmoid, Op) and sigmoid.name == "truediv" and sigmoid.args[0] is _TWO):
        return None
    if not (isinstance(factor, Op) and factor.name == "mul" and any(isinstance(arg, Const) for arg in factor.args)):
        return None
    return Op("truediv", (_times(factor, 2.0), sigmoid.args[1]), torch.float32)


def _times(expr: Expr, factor: float) -> Expr:
    """`expr · factor`, with the constants joined."""
    if isinstance(expr, Op) and expr.name == "mul":
        for this, other in (expr.args, expr.args[::-1]):
            if isinstance(this, Const):
                joined = float(this.value) * factor
                return other if joined == 1.0 else Op("mul", (other, const(joined, torch.float32)), torch.float32)
    return Op("mul", (expr, const(factor, torch.float32)), torch.float32)
