"""Random index expressions with their meaning in Python's integers, for hypothesis."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import sympy
from hypothesis import strategies as st

from fusion.lowering.indexing import FloorDiv, Mod, axis_symbol

AXES = tuple(axis_symbol(k) for k in range(4))
LENGTH = sympy.Symbol("s0", integer=True, positive=True)  # a size that is not known
Box = dict[sympy.Symbol, sympy.Expr]
Point = dict[sympy.Symbol, int]


def value(expr: sympy.Expr, point: Point) -> int:
    """`expr` in Python's integers."""
    if expr.is_Integer:
        return int(expr)
    if expr.is_Symbol:
        return point[expr]
    args = [value(arg, point) for arg in expr.args]
    if expr.is_Add:
        return sum(args)
    if expr.is_Mul:
        return math.prod(args)
    if expr.is_Pow:
        return args[0] ** args[1]
    return args[0] // args[1] if isinstance(expr, FloorDiv) else args[0] % args[1]


def points(box: Box, length: int = 1) -> Iterator[Point]:
    """Every point of a box, with `LENGTH` standing for `length`."""
    fixed = {LENGTH: length}
    ranges = [range(value(size, fixed)) for size in box.values()]
    for position in itertools.product(*ranges):
        yield {**dict(zip(box, position, strict=True)), **fixed}


# An expression and its meaning side by side, so that simplifications in constructors are tested too.
Built = tuple[sympy.Expr, "Meaning"]


@dataclass(frozen=True)
class Meaning:
    """The meaning of an expression: a tree that does not pass through sympy."""

    kind: str
    leaf: int | sympy.Symbol = 0
    parts: tuple[Meaning, ...] = ()

    def at(self, point: Point) -> int:
        if self.kind == "leaf":
            return self.leaf if isinstance(self.leaf, int) else point[self.leaf]
        a, b = (part.at(point) for part in self.parts)
        return {"+": a + b, "*": a * b}[self.kind] if self.kind in "+*" else a // b if self.kind == "//" else a % b


def leaf(value: int | sympy.Symbol) -> Built:
    return sympy.sympify(value), Meaning("leaf", value)


def combine(kind: str, a: Built, b: Built) -> Built:
    result = {"+": lambda x, y: x + y, "*": lambda x, y: x * y, "//": FloorDiv, "%": Mod}[kind](a[0], b[0])
    return result, Meaning(kind, parts=(a[1], b[1]))


divisors = st.sampled_from([leaf(n) for n in (1, 2, 3, 4, 6, 8, 12, 16)])
factors = st.sampled_from([leaf(n) for n in (1, 2, 3, 4, 6, 8, 12, -1, -4)])
numbers = st.integers(-6, 12).map(leaf)
axes = st.sampled_from([leaf(axis) for axis in AXES])


def expressions(symbolic: bool = False) -> st.SearchStrategy[Built]:
    length = st.just(leaf(LENGTH))
    leaves = st.one_of(axes, axes, axes, numbers, *([length] if symbolic else []))
    by = st.one_of(divisors, divisors, length) if symbolic else divisors
    return st.recursive(
        leaves,
        lambda parts: st.one_of(
            st.builds(combine, st.just("+"), parts, parts),
            st.builds(combine, st.just("*"), parts, st.one_of(factors, length) if symbolic else factors),
            st.builds(combine, st.just("*"), parts, axes),
            st.builds(combine, st.sampled_from(["//", "%"]), parts, by),
        ),
        max_leaves=10,
    )


def boxes(symbolic: bool = False) -> st.SearchStrategy[Box]:
    size = st.sampled_from([sympy.Integer(n) for n in (1, 2, 3, 4, 6, 8)])
    size = st.one_of(size, st.just(LENGTH)) if symbolic else size
    return st.tuples(*[size] * len(AXES)).map(lambda sizes: dict(zip(AXES, sizes, strict=True)))


def some_points(box: Box, length: int) -> list[Point]:
    result = list(points(box, length))
    return result[:: max(1, len(result) // 50)]
