"""Replaces tanh by cheaper forms where only its absolute error counts.

Input: a body whose results are rounded so much that the last bits of an exponential are invisible; output: an equal one
with fewer operations for each element of a tile.  The exponent of an exponential is such a place, and so is the operand
of a maximum that is subtracted there: an absolute error of the exponent is a relative error of the exponential.  Sums,
products with constants and choices pass the error on.

    q = 1 / (1 + exp2(2 · log₂e · x))
    tanh(x)       →  1 - 2q         to the last bits of 1, where tanh itself has the last bits of x near 0
    1 - tanh(x)²  →  4q · (1 - q)   where the other uses of the tanh allow the first form

So scores that are capped softly, c · tanh(s / c), and their gradient take a power of 2, a reciprocal, and a few
additions and multiplications.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import torch

from fusion.lowering.ir.expr import Const, Expr, Op, const, postorder, rewrite
from fusion.lowering.ir.kernel import Fold, Stmt, map_values, statements, values_of
from fusion.lowering.ir.scalar_ops import ScalarName

_LARGEST = 512.0
"""The largest factor of a tanh: times the last bit of 1 it is 2⁻¹⁴, and a 16-bit float has at most 11 bits."""

_EXPONENTIALS = frozenset({"exp", "exp2"})
_ONE = const(1.0, torch.float32)


def with_absolute_errors(body: Sequence[Stmt]) -> tuple[Stmt, ...]:
    """Return `body` with every float32 tanh of which only the absolute error counts as a power of 2."""
    calls = frozenset(_absolute_calls(body))
    quotients: dict[Expr, Expr] = {}  # of the rewritten calls

    def rule(node: Expr) -> Expr | None:  # sees rewritten operands
        if node in calls:
            quotient = _quotient(node)
            rewritten = _line(1.0, quotient, 2.0)
            quotients[rewritten] = quotient
            return rewritten
        if (call := squared(node)) in quotients:
            quotient = quotients[call]
            return _op("mul", _op("mul", quotient, _number(4.0)), _op("sub", _ONE, quotient))
        factor, call = _factor_of(node)
        return _line(factor, quotients[call], 2 * factor) if call in quotients and call is not node else None

    return map_values(body, lambda values: rewrite(values, rule)) if calls else tuple(body)


def is_reciprocal(node: Expr) -> bool:
    """Return whether `node` is 1 / (1 + a power of 2), which is 0 at the least where the sum is large."""
    if not isinstance(node, Op) or node.name != "truediv" or node.args[0] is not _ONE:
        return False
    total = node.args[1]
    if not isinstance(total, Op) or total.name != "add":
        return False
    power, one = total.args
    return one is _ONE and isinstance(power, Op) and power.name == "exp2"


def squared(node: Expr) -> Expr | None:
    """Return `f` where `node` is 1 - f · f."""
    if not isinstance(node, Op) or node.name != "sub" or node.dtype is not torch.float32:
        return None
    one, square = node.args
    if not (one is _ONE and isinstance(square, Op) and square.name == "mul"):
        return None
    call, same = square.args
    return call if call is same else None


def _absolute_calls(body: Sequence[Stmt]) -> Iterator[Expr]:
    """Yield each tanh that is used where its absolute error counts, and otherwise only in 1 - tanh²."""
    roots = [value for stmt in statements(body) for value in values_of(stmt)]
    every = list(postorder(*roots))
    uses = Counter(child for node in every for child in node.children()) + Counter(roots)
    maxima = [value for stmt in statements(body, Fold) if stmt.op in ("max", "min") for value in stmt.args[:1]]
    absolute: Counter[Expr] = Counter(maxima)
    factors: dict[Expr, float] = dict.fromkeys(maxima, 1.0)
    exponents, squares = set[Expr](), Counter[Expr]()
    for node in reversed(every):
        if (call := squared(node)) is not None and uses[node.children()[1]] == 1:
            squares[call] += 2
        is_exponential = isinstance(node, Op) and node.name in _EXPONENTIALS
        if is_exponential or (node in factors and absolute[node] == uses[node]):
            if is_exponential or node in exponents:
                exponents.update(node.children())
            for child, factor in _passed_on(node, 1.0 if is_exponential else factors[node]).items():
                absolute[child] += node.children().count(child)
                factors[child] = max(factor, factors.get(child, 0.0))
        if _is_tanh(node) and node in exponents and absolute[node] + squares[node] == uses[node]:
            yield from (node,) if factors[node] <= _LARGEST else ()


def _passed_on(node: Expr, factor: float) -> Mapping[Expr, float]:
    """Return the operands on which an absolute error of `node` depends absolutely, each with its factor."""
    if not isinstance(node, Op) or node.dtype is not torch.float32:
        return {}
    if node.name in _EXPONENTIALS or node.name in ("add", "sub", "neg"):
        return dict.fromkeys(node.args, factor)
    if node.name == "where":
        return dict.fromkeys(node.args[1:], factor)
    scaled, by = _scale(node)
    return {} if scaled is node else {scaled: factor * abs(by)}


def _scale(node: Expr) -> tuple[Expr, float]:
    """Return the operand of a product with a constant, or of a quotient by one, and the factor."""
    if isinstance(node, Op) and node.name in ("mul", "truediv"):
        left, right = node.args
        if isinstance(right, Const) and float(right.value) != 0.0 and math.isfinite(float(right.value)):
            return left, float(right.value) if node.name == "mul" else 1.0 / float(right.value)
        if node.name == "mul" and isinstance(left, Const) and math.isfinite(float(left.value)):
            return right, float(left.value)
    return node, 1.0


def _factor_of(node: Expr) -> tuple[float, Expr]:
    """Return the product of the constant factors of `node`, and the remaining factor."""
    factor = 1.0
    while (scaled := _scale(node))[0] is not node:
        node, factor = scaled[0], factor * scaled[1]
    return factor, node


def _quotient(call: Expr) -> Expr:
    """Return 1 / (1 + exp(2x)) for tanh(x)."""
    factor, operand = _factor_of(call.children()[0])
    exponent = _op("mul", operand, _number(factor * 2.0 / math.log(2.0)))
    return _op("truediv", _ONE, _op("add", _op("exp2", exponent), _ONE))


def _is_tanh(node: Expr) -> bool:
    return isinstance(node, Op) and node.name == "tanh" and node.dtype is torch.float32


def _line(start: float, quotient: Expr, slope: float) -> Expr:
    """Return start - slope · quotient."""
    return _op("sub", _number(start), _op("mul", quotient, _number(slope)))


def _number(value: float) -> Const:
    return const(value, torch.float32)


def _op(name: ScalarName, *args: Expr) -> Op:
    return Op(name, args, torch.float32)


__all__ = ["is_reciprocal", "squared", "with_absolute_errors"]
