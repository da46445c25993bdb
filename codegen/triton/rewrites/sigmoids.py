"""Sigmoids: 1 + tanh(x) and 1 + erf(x) as one function each.

What enters is a body whose results are rounded so much that the last bits of these cannot be seen; what leaves is an
equal one that takes fewer operations for each element of a tile, and that does not cancel where x is far below 0:

    1 + tanh(x)        →  s  with  s = 2 / (1 + exp2(-2 · log₂e · x))
    1 - tanh(x)²       →  s · (2 - s)
    ½ · y · (2 / d)    →  y / d
    1 + erf(x)         →  erfc(-x)

These are identities of the functions, of any operand and in any program: tanh(x) = 2 / (1 + exp(-2x)) - 1, with its
complement 1 - tanh² = (1 + tanh)·(1 - tanh) = s·(2 - s), erfc(x) = 1 - erf(x) with erf odd, and the associativity of a
product with a quotient.  (GELU is ½·x·(1 + erf(x/√2)), or that with tanh; a logistic function is ½·(1 + tanh(x/2)).)

Only where nothing else needs the tanh or erf: by itself tanh is wanted to the last bits near 0 as well.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from fusion.lowering.expr import Const, Expr, Op, const, postorder, rewrite
from fusion.lowering.kernel import Stmt, Store, statements, values_of

_ONE, _TWO = const(1.0, torch.float32), const(2.0, torch.float32)


def as_sigmoids(body: Sequence[Stmt]) -> tuple[Stmt, ...]:
    """`body` with the sums in what it stores rewritten; the same statements where there are none."""
    every = list(postorder(*(value for stmt in statements(body) for value in values_of(stmt))))
    uses = Counter(child for node in every for child in node.children())
    known = _Bent(every, uses)

    def rule(node: Expr) -> Expr | None:
        if not isinstance(node, Op) or node.name not in ("add", "sub", "mul") or node.dtype is not torch.float32:
            return None
        first, second = node.args
        if node.name == "mul":
            return known.divided(first, second) or known.divided(second, first)
        if (bent := known.squared(node)) is not None:
            sigmoid = known.sigmoid(bent)
            return Op("mul", (sigmoid, Op("sub", (_TWO, sigmoid), torch.float32)), torch.float32)
        if (bent := known.summed(node)) is None:
            return None
        if bent.name == "tanh":
            return known.sigmoid(bent)
        return Op("erfc", (_times(bent.args[0], -1.0),), torch.float32)

    def rebuilt(stmt: Stmt) -> Stmt:
        if not isinstance(stmt, Store):
            return stmt
        (value,) = rewrite([stmt.value], rule)
        return stmt if value is stmt.value else replace(stmt, value=value)

    return tuple(rebuilt(stmt) for stmt in body)


class _Bent:
    """The tanh and erf of a body of which only 1 + f, or of a tanh 1 - f², is wanted."""

    def __init__(self, every: Sequence[Expr], uses: Counter[Expr]) -> None:
        self._uses = uses
        self._free = {bent for bent, count in Counter(self._wanted(every)).items() if count == uses[bent]}
        self._several = {bent for bent in self._free if uses[bent] > 1}
        self._kept: set[Expr] = set()

    def _wanted(self, every: Sequence[Expr]) -> Iterator[Expr]:
        """Each tanh or erf, once for each of its uses that can be rewritten."""
        for node in every:
            if isinstance(node, Op) and node.dtype is torch.float32:
                if (bent := _summed(node)) is not None:
                    yield bent
                if (bent := _squared(node)) is not None and self._uses[node.args[1]] == 1:
                    yield from (bent, bent)

    def summed(self, node: Op) -> Op | None:
        """`f` of a node 1 + f that may be rewritten."""
        return bent if (bent := _summed(node)) in self._free else None

    def squared(self, node: Op) -> Op | None:
        """`f` of a node 1 - f² that may be rewritten."""
        return bent if (bent := _squared(node)) in self._free else None

    def sigmoid(self, bent: Op) -> Expr:
        """1 + tanh as a quotient, one node however often it is asked for."""
        power = Op("exp2", (_times(bent.args[0], -2.0 / math.log(2.0)),), torch.float32)
        made = Op("truediv", (_TWO, Op("add", (power, _ONE), torch.float32)), torch.float32)
        if bent in self._several:
            self._kept.add(made)
        return made

    def divided(self, factor: Expr, sigmoid: Expr) -> Expr | None:
        """A product with 2 / d as a quotient, where the other factor holds a constant that takes in the 2."""
        if not (isinstance(sigmoid, Op) and sigmoid.name == "truediv" and sigmoid.args[0] is _TWO):
            return None
        if sigmoid in self._kept:
            return None
        if not (isinstance(factor, Op) and factor.name == "mul" and any(isinstance(arg, Const) for arg in factor.args)):
            return None
        return Op("truediv", (_times(factor, 2.0), sigmoid.args[1]), torch.float32)


def _summed(node: Op) -> Op | None:
    """`f` where `node` is 1 + f, of a tanh or erf."""
    if node.name != "add":
        return None
    first, second = node.args
    bent, one = (first, second) if isinstance(second, Const) else (second, first)
    if isinstance(one, Const) and one.value == 1.0 and isinstance(bent, Op) and bent.name in ("tanh", "erf"):
        return bent
    return None


def _squared(node: Op) -> Op | None:
    """`f` where `node` is 1 - f · f, of a tanh."""
    if node.name != "sub":
        return None
    one, square = node.args
    if not (isinstance(one, Const) and one.value == 1.0 and isinstance(square, Op) and square.name == "mul"):
        return None
    bent, same = square.args
    return bent if bent is same and isinstance(bent, Op) and bent.name == "tanh" else None


def _times(expr: Expr, factor: float) -> Expr:
    """`expr · factor`, with the constants joined."""
    if isinstance(expr, Op) and expr.name == "mul":
        for this, other in (expr.args, expr.args[::-1]):
            if isinstance(this, Const):
                joined = float(this.value) * factor
                return other if joined == 1.0 else Op("mul", (other, const(joined, torch.float32)), torch.float32)
    return Op("mul", (expr, const(factor, torch.float32)), torch.float32)
