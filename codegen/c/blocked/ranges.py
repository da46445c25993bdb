"""Derives the range of a loop that a condition leaves, as C: the points outside it count for no row of a block.

Input: `Loop.where` and the range of each axis; output: lines, the names of the first point and of the end, and the loop
over the blocks between them.  Linear comparisons of the point with indices, and with integers that vary along the rows
of the block alone, are solved at their most favourable corner; `bounded` conditions have such comparisons as their
bounds.  Conditions on integers that vary along the loop, such as document ids, are looked up point by point before the
loop.  `and` and `or` combine ranges; of anything else no range is known.

A range begins and ends at a multiple of `PART` points, as its blocks do: then the sums of a row have the same bits
whichever rows share its block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

import sympy

from fusion.codegen.c.blocked.blocks import Block
from fusion.codegen.c.blocked.scope import TileScope
from fusion.codegen.c.blocked.skips import ALWAYS, Possible
from fusion.codegen.c.text.indices import affine, index_text
from fusion.codegen.c.text.nest import indented
from fusion.codegen.c.text.products import PART
from fusion.lowering.indexing import coefficient
from fusion.lowering.ir.expr import Expr, Op, free_axes
from fusion.lowering.ir.kernel import Loop
from fusion.lowering.ir.scalar_ops import ScalarName

_DIFFERENCES: Mapping[ScalarName, tuple[tuple[int, int], ...]] = {
    "le": ((1, 0),),
    "lt": ((1, 1),),
    "ge": ((-1, 0),),
    "gt": ((-1, 1),),
    "eq": ((1, 0), (-1, 0)),
}
"""For a comparison of a and b, each (sign, constant) with which it implies sign · (a - b) + constant ≤ 0."""

_FAR = "(INT64_C(1) << 60)"
"""No index is as large: numbers in memory are cut off there, so that sums with indices do not overflow."""


@dataclass(frozen=True, slots=True)
class LoopRange:
    """The points of a loop over `axis` that may count, from `first` up to `end` (C names), which `lines` declare."""

    axis: sympy.Symbol
    lines: list[str]
    first: str
    end: str


@dataclass(frozen=True, slots=True)
class _Ends:
    """C texts: points before any of `firsts` count for no row, nor do points from any of `ends` on."""

    firsts: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()


def range_of(loop: Loop, scope: TileScope) -> LoopRange | None:
    """Return the range of the blocked axis of a loop that its condition leaves; None if none is known.

    Each blocked axis `i` around the loop runs from `i_0` up to `i_end`; every other one is at one point.
    """
    blocks = scope.blocks.of
    symbol = next((axis for axis in loop.axes if blocks[axis].bound is not None), None)
    if loop.where is None or symbol is None:
        return None
    known = dict(scope.known)
    inner = frozenset(loop.axes[loop.axes.index(symbol) :])
    found = _Ranges(scope, symbol, inner).named(loop.where)
    scope.known = known
    return found


def around_block(block: Block, within: LoopRange | None, body: Sequence[str]) -> list[str]:
    """Return `body` in the loop over the blocks, or the points, of an axis, those in its range if it has one."""
    if within is None or within.axis != block.axis.symbol:
        return [f"{block.header} {{", *indented(body), "}"]
    at, width = block.extent.start, block.bound
    header = f"for (int64_t {at} = {within.first}; {at} < {within.end}; {at} = ({at}/{width} + 1)*{width}) {{"
    return [*within.lines, header, *indented(body), "}"]


def inside_block(block: Block, within: LoopRange | None) -> tuple[str, ...]:
    """Return the first lines in the loop over blocks: one ends at a multiple of its width, wherever a range begins."""
    if within is None or within.axis != block.axis.symbol:
        return block.inside
    at, width = block.extent.start, block.bound
    return (f"const int64_t {block.extent.end} = imin(({at}/{width} + 1)*{width}, {within.end});",)


class _Ranges:
    """Writes the range of one loop along `symbol`; loops over `inner` axes are not open."""

    def __init__(self, scope: TileScope, symbol: sympy.Symbol, inner: Set[sympy.Symbol]) -> None:
        self.scope, self.symbol, self.inner = scope, symbol, inner
        self.of_rows = Possible(scope)

    def named(self, where: Expr) -> LoopRange | None:
        """Return the range as named numbers, within the axis."""
        ends, scope = self._of(where), self.scope
        points = _Points(scope, self.symbol)
        counts = "0" if free_axes(where) & (self.inner - {self.symbol}) else points.text(where)
        looked_up = bool(points.read) and counts != ALWAYS
        if ends == _Ends() and not looked_up:
            return None
        name = scope.names[self.symbol]
        size = index_text(scope.blocks.of[self.symbol].axis.size, scope.names)
        first, end = scope.space.fresh(f"{name}_first"), scope.space.fresh(f"{name}_last")
        start, stop = _nested("imax", ("0", *ends.firsts)), _nested("imin", (size, *ends.ends))
        lines = list(self.of_rows.lines)
        if looked_up:
            least, most = scope.space.fresh("least"), scope.space.fresh("most")
            lines += points.look_up(counts, (start, stop), (least, most))
            start, stop = least, most
        lines += [
            f"const int64_t {first} = ({start})/{PART}*{PART};",
            f"const int64_t {end} = imin({size}, ({stop} + {PART - 1})/{PART}*{PART});",
        ]
        return LoopRange(self.symbol, lines, first, end)

    def _of(self, where: Expr) -> _Ends:
        if not isinstance(where, Op):
            return _Ends()
        if where.name == "bounded":
            return self._of(where.args[1])
        if where.name in ("and", "or"):
            left, right = map(self._of, where.args)
            if where.name == "and":
                return _Ends((*left.firsts, *right.firsts), (*left.ends, *right.ends))
            return _Ends(
                _either(left.firsts, right.firsts, "imin", "imax"), _either(left.ends, right.ends, "imax", "imin")
            )
        return self._of_comparison(where) if where.name in _DIFFERENCES else _Ends()

    def _of_comparison(self, where: Op) -> _Ends:
        numbers: dict[sympy.Symbol, Expr] = {}
        left, right = (self._linear(arg, numbers) for arg in where.args)
        if left is None or right is None:
            return _Ends()
        firsts: list[str] = []
        ends: list[str] = []
        for sign, constant in _DIFFERENCES[where.name]:
            difference = sympy.expand_mul(sign * (left - right) + constant)
            slope = coefficient(difference, self.symbol)
            if slope is None or abs(slope) != 1:
                continue
            rest = self._least(sympy.expand_mul(difference - slope * self.symbol), numbers)
            if rest is not None and slope == 1:  # x + rest <= 0
                ends.append(f"1 - ({rest})")
            elif rest is not None:
                firsts.append(rest)
        return _Ends(tuple(firsts), tuple(ends))

    def _linear(self, expr: Expr, numbers: dict[sympy.Symbol, Expr]) -> sympy.Expr | None:
        """Return an expression of indices; one of integers in memory, the same for all points, is a symbol."""
        index = affine(expr)
        if index is not None or free_axes(expr) & self.inner or not self.of_rows.is_vector(expr):
            return index
        symbol = sympy.Symbol(f"number{len(numbers)}", integer=True)
        numbers[symbol] = expr
        return symbol

    def _least(self, rest: sympy.Expr, numbers: Mapping[sympy.Symbol, Expr]) -> str | None:
        """Return C text of the least value of an expression in the block of rows."""
        texts: list[str] = []
        for symbol, expr in numbers.items():
            factor = coefficient(rest, symbol)
            if factor is None or abs(factor) != 1:
                return None
            low, high = self.of_rows.interval(expr)
            number = low if factor == 1 else high
            texts.append(f"{'' if factor == 1 else '-'}imin(imax({number}, -{_FAR}), {_FAR})")
            rest = sympy.expand_mul(rest - factor * symbol)
        corner = None if rest.free_symbols & self.inner else self.of_rows.least(rest)
        return None if corner is None else " + ".join([*texts, corner])


class _Points(Possible):
    """Writes a condition at one point of a loop, for all rows of a block.

    Attributes:
        read: each value that varies along the loop, and the name that it has at a point.
    """

    def __init__(self, scope: TileScope, symbol: sympy.Symbol) -> None:
        super().__init__(scope, frozenset([symbol]))
        self.symbol = symbol
        self.read: dict[Expr, str] = {}

    def of_bounded(self, where: Op) -> str:
        """Return the text of the outer bounds."""
        return self.text(where.args[1])

    def anywhere(self, where: Expr, known: str = "0") -> str:
        """Return `ALWAYS`: what varies along both rows and loop is not looked up."""
        return ALWAYS

    def interval(self, expr: Expr) -> tuple[str, str]:
        """Return the least and the greatest value for the rows of the block; a value along the loop is one number."""
        if self.symbol not in self.scope.tiled(expr) or affine(expr) is not None:
            return super().interval(expr)
        if expr not in self.read:
            self.read[expr] = self.scope.space.fresh("point")
        return self.read[expr], self.read[expr]

    def look_up(self, counts: str, within: tuple[str, str], names: tuple[str, str]) -> list[str]:
        """Return lines that name the first point in a range at which `counts` holds, and the end of these points."""
        scope, block, (first, end) = self.scope, self.blocks.of[self.symbol], names
        nest = scope.nest(list(self.read), (self.symbol,), named=frozenset(self.read))
        point = scope.names[self.symbol]
        values = zip(self.read.values(), nest.texts, strict=True)
        seen, past = scope.space.fresh("seen"), scope.space.fresh("past")
        nest.write(
            *(f"const int64_t {name} = {value};" for name, value in values),
            f"const int64_t {seen} = {counts};",
            f"{first} = imin({first}, {seen} ? {point} : INT64_MAX - {PART});",
            f"{end} = imax({end}, {seen} ? {point} + 1 : 0);",
        )
        nest.levels[-1].clauses += [f"reduction(min:{first})", f"reduction(max:{end})"]
        at, width = block.extent.start, block.bound
        return [
            *self.lines,
            f"int64_t {first} = INT64_MAX - {PART}, {end} = 0;",
            f"for (int64_t {at} = {within[0]}, {past} = {within[1]}; {at} < {past}; {at} += {width}) {{",
            *indented([f"const int64_t {block.extent.end} = imin({at} + {width}, {past});", *nest.lines()]),
            "}",
        ]


def _either(left: Sequence[str], right: Sequence[str], outer: str, inner: str) -> tuple[str, ...]:
    """Return the limit where one of two conditions holds, each of which may have several; none if one has none."""
    return (f"{outer}({_nested(inner, left)}, {_nested(inner, right)})",) if left and right else ()


def _nested(function: str, texts: Sequence[str]) -> str:
    """Return a function of two numbers, applied to all."""
    text = texts[0]
    for other in texts[1:]:
        text = f"{function}({text}, {other})"
    return text
