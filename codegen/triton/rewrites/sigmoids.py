"""Rewrites 1 + tanh(x) and 1 + erf(x) as one function each.

Input: a body whose results are rounded so much that the last bits of these functions are invisible; output: an equal
one with fewer operations for each element of a tile, and without cancellation where x is far below 0:

    1 + tanh(x)        →  s  with  s = 2 / (1 + exp2(-2 · log₂e · x))
    1 - tanh(x)²       →  s · (2 - s)
    ½ · y · (2 / d)    →  y / d
    1 + erf(x)         →  erfc(-x)

These are identities of the functions, for any operand and in any program: tanh(x) = 2 / (1 + exp(-2x)) - 1, with its
complement 1 - tanh² = (1 + tanh)·(1 - tanh) = s·(2 - s), erfc(x) = 1 - erf(x) with erf odd, and the associativity of a
product with a quotient.  (GELU is ½·x·(1 + erf(x/√2)), or the same with tanh; a logistic function is ½·(1 +
tanh(x/2)).)

Applied only where nothing else needs the tanh or erf: tanh itself is needed to the last bits near 0.  Of folds,
only in products whose operand is rounded to 16 bits, and in sums, in kernels that just store the results of their
folds: a difference between such a result and an operand would magnify the error of the fast erfc.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from fusion.codegen.triton.rewrites.absolute_errors import squared
from fusion.lowering.ir.expr import Cast, Const, Expr, Op, TileRef, const, postorder, rewrite
from fusion.lowering.ir.kernel import Fold, Stmt, Store, map_statements, statements, values_of, with_values
from fusion.lowering.ir.scalar_ops import HALVES

_ONE, _TWO = const(1.0, torch.float32), const(2.0, torch.float32)


def as_sigmoids(body: Sequence[Stmt]) -> tuple[Stmt, ...]:
    """Return `body` with such sums rewritten in stored and folded values; the same statements where there are none."""
    every = list(postorder(*(value for stmt in statements(body) for value in values_of(stmt))))
    uses = Counter(child for node in every for child in node.children())
    calls = _Calls(every, uses)

    def rule(node: Expr) -> Expr | None:
        if not isinstance(node, Op) or node.name not in ("add", "sub", "mul") or node.dtype is not torch.float32:
            return None
        first, second = node.args
        if node.name == "mul":
            return calls.divided(first, second) or calls.divided(second, first)
        if (call := calls.squared(node)) is not None:
            sigmoid = calls.sigmoid(call)
            return Op("mul", (sigmoid, Op("sub", (_TWO, sigmoid), torch.float32)), torch.float32)
        if (call := calls.summed(node)) is None:
            return None
        if call.name == "tanh":
            return calls.sigmoid(call)
        return Op("erfc", (_times(call.args[0], -1.0),), torch.float32)

    in_folds = _only_stored(body)

    def rebuilt(stmt: Stmt) -> Stmt:
        if isinstance(stmt, Fold) and stmt.op == "sum" and in_folds:
            return with_values(stmt, rewrite(values_of(stmt), rule))
        if isinstance(stmt, Fold) and stmt.op == "dot":
            operands = [rewrite([arg], rule)[0] if _rounds(arg) else arg for arg in stmt.args]
            return replace(stmt, args=tuple(operands)) if operands != list(stmt.args) else stmt
        if not isinstance(stmt, Store):
            return stmt
        (value,) = rewrite([stmt.value], rule)
        return stmt if value is stmt.value else replace(stmt, value=value)

    return map_statements(body, rebuilt)


def _rounds(value: Expr) -> bool:
    """Return whether a value is rounded to 16 bits last."""
    return isinstance(value, Cast) and value.dtype in HALVES


def _only_stored(body: Sequence[Stmt]) -> bool:
    """Return whether the results of folds are only stored, and not read otherwise."""

    def reads(value: Expr) -> bool:
        while isinstance(value, Cast):
            value = value.arg
        return not isinstance(value, TileRef) and any(isinstance(node, TileRef) for node in postorder(value))

    return not any(reads(value) for stmt in statements(body) for value in values_of(stmt))


class _Calls:
    """The tanh and erf of a body that are used only in 1 + f, or for tanh in 1 - f²."""

    def __init__(self, every: Sequence[Expr], uses: Counter[Expr]) -> None:
        self._uses = uses
        self._rewritable = {
            call for call, count in Counter(self._rewritable_uses(every)).items() if count == uses[call]
        }
        self._several = {call for call in self._rewritable if uses[call] > 1}
        self._reused: set[Expr] = set()

    def _rewritable_uses(self, every: Sequence[Expr]) -> Iterator[Expr]:
        """Yield each tanh or erf, once for each of its uses that can be rewritten."""
        for node in every:
            if isinstance(node, Op) and node.dtype is torch.float32:
                if (call := _summed(node)) is not None:
                    yield call
                if (call := _squared(node)) is not None and self._uses[node.args[1]] == 1:
                    yield from (call, call)

    def summed(self, node: Op) -> Op | None:
        """Return the call `f` if `node` is 1 + f and `f` may be rewritten, else None."""
        return call if (call := _summed(node)) in self._rewritable else None

    def squared(self, node: Op) -> Op | None:
        """Return the call `f` if `node` is 1 - f² and `f` may be rewritten, else None."""
        return call if (call := _squared(node)) in self._rewritable else None

    def sigmoid(self, call: Op) -> Expr:
        """Return 1 + tanh as a quotient; the same node at each call."""
        power = Op("exp2", (_times(call.args[0], -2.0 / math.log(2.0)),), torch.float32)
        quotient = Op("truediv", (_TWO, Op("add", (power, _ONE), torch.float32)), torch.float32)
        if call in self._several:
            self._reused.add(quotient)
        return quotient

    def divided(self, factor: Expr, sigmoid: Expr) -> Expr | None:
        """Return a product with 2 / d as a quotient, where the other factor holds a constant that absorbs the 2."""
        if not (isinstance(sigmoid, Op) and sigmoid.name == "truediv" and sigmoid.args[0] is _TWO):
            return None
        if sigmoid in self._reused:
            return None
        if not (isinstance(factor, Op) and factor.name == "mul" and any(isinstance(arg, Const) for arg in factor.args)):
            return None
        return Op("truediv", (_times(factor, 2.0), sigmoid.args[1]), torch.float32)


def _summed(node: Op) -> Op | None:
    """Return `f` where `node` is 1 + f, for tanh or erf."""
    if node.name != "add":
        return None
    first, second = node.args
    call, one = (first, second) if isinstance(second, Const) else (second, first)
    if isinstance(one, Const) and one.value == 1.0 and isinstance(call, Op) and call.name in ("tanh", "erf"):
        return call
    return None


def _squared(node: Expr) -> Op | None:
    """Return `f` where `node` is 1 - f · f, for tanh."""
    call = squared(node)
    return call if isinstance(call, Op) and call.name == "tanh" else None


def _times(expr: Expr, factor: float) -> Expr:
    """Return `expr · factor`, with constants multiplied."""
    if isinstance(expr, Op) and expr.name == "mul":
        for this, other in (expr.args, expr.args[::-1]):
            if isinstance(this, Const):
                joined = float(this.value) * factor
                return other if joined == 1.0 else Op("mul", (other, const(joined, torch.float32)), torch.float32)
    return Op("mul", (expr, const(factor, torch.float32)), torch.float32)
