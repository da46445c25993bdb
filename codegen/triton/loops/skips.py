"""Skips: from where to where a loop has to walk, read from its condition.

What enters is a loop with a `where` over linear indices; what leaves is the text of its first and last index in this
program, rounded to blocks, and of the part in between in which the condition holds for every row, so that it need not
be computed there.  What is understood are comparisons that are linear in the index of the loop and in those of the
program, joined by `and` and `or`; what the condition asks of memory is looked up before the loop (`scan`); anything
else is taken to hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import sympy

from fusion.codegen.triton.blocks import Blocked, Dim
from fusion.codegen.triton.expressions.indices import index_code
from fusion.codegen.triton.expressions.spell import PRODUCT
from fusion.codegen.triton.expressions.values import Values
from fusion.codegen.triton.loops import scan
from fusion.codegen.triton.rewrites.interior import unconditional
from fusion.lowering.conditions import conjuncts
from fusion.lowering.expr import Cast, Const, Expr, IndexValue, Op, make_op
from fusion.lowering.indexing import ONE, FloorDiv, coefficient
from fusion.lowering.kernel import Loop, Role, Store

_DIFFERENCES = {"le": (1, 0), "lt": (1, 1), "ge": (-1, 0), "gt": (-1, 1)}
"""Comparison of a and b → (sign, constant) so that it says sign · (a - b) + constant ≤ 0."""


@dataclass(frozen=True, slots=True)
class Reach:
    """The indices of a loop from `start` to before `end`, as text; None where there is no bound."""

    start: str | None = None
    end: str | None = None


@dataclass(frozen=True, slots=True)
class Part:
    """A loop over the blocks from `start` to before `end`.

    Attributes:
        full: none of the blocks reaches past the end of the axis.
        gap: where given, (first index, length) of blocks in between that are left out; `end` is less by this length.
    """

    loop: Loop
    start: str
    end: str
    full: bool = False
    gap: tuple[str, str] | None = None


def parts(values: Values, loop: Loop, dim: Dim, *, split: bool) -> tuple[Part, ...]:
    """The loop in one part, or if `split` asks for it in two: one of them computes neither the condition nor masks."""
    size = values.index_tile(dim.size).code.text
    split &= not any(isinstance(stmt, Loop) for stmt in loop.body)
    if dim.shift != 0:
        return _from_aligned(values, loop, dim, size)
    if loop.where is None:
        return _with_ragged_end(values, loop, dim, "0", size) if split else (Part(loop, "0", size),)
    every_part = [p for p in conjuncts(loop.where) if not (isinstance(p, Op) and p.name == "and")]
    asked = [part for part in every_part if scan.decides(values.layout, part, dim)]
    plain = _conjunction([part for part in every_part if part not in asked])
    some, every = (Reach() if plain is None else _reach(values, plain, dim, every=flag) for flag in (False, True))
    start, end, block = "0", size, dim.constant
    if some.start is not None:
        start = _named(values, f"{dim.name}_start", f"tl.maximum({some.start}, 0) // {block} * {block}")
    if some.end is not None:
        end = _named(values, f"{dim.name}_end", f"tl.minimum({some.end}, {size})")
    where = _conjunction(asked)
    if where is not None:
        split &= plain is None or every != Reach()
        return _looked_up(values, loop, where, dim, Reach(start, end), every, split=split)
    if not split:
        return (Part(loop, start, end),)
    if every.end is not None and some.start is None:
        text = f"tl.maximum(tl.minimum({every.end}, {size}), 0) // {block} * {block}"
        middle = _named(values, f"{dim.name}_middle", text)
        return Part(unconditional(loop), start, middle, full=True), Part(loop, middle, end)
    if every.start is not None and some.end is None:
        text = f"tl.minimum(tl.cdiv(tl.maximum({every.start}, 0), {block}) * {block}, {size})"
        middle = _named(values, f"{dim.name}_middle", text)
        return Part(loop, start, middle), Part(unconditional(loop), middle, end)
    return _with_ragged_end(values, loop, dim, start, end)


def ends_first(values: Values, loop: Loop, found: Sequence[Part], dim: Dim) -> bool:
    """May what is walked again be walked backwards?  What was read last may still be in the cache then.

    Nothing may be followed from block to block, and blocks are whole, but for those of a last part of their own.
    """
    if loop.where is not None or dim.shift != 0 or any(not isinstance(stmt, Store) for stmt in loop.body):
        return False
    return found[0].full or not values.layout.masked(dim)


def is_one_block(values: Values, loop: Loop, dim: Dim) -> bool:
    """Is at most one block of each walk computed under a condition, where that splits off the last ones?

    It is where only the end of the axis does.  It is, too, where the last index that some row of a program reaches lies
    no further than a block behind the first block that not all of them reach, wherever the program begins.
    """
    if loop.where is None:
        return True
    difference = _difference(loop.where)
    if difference is None or coefficient(difference, dim.symbol) != 1:
        return False
    rows = [other for other in values.layout.within(difference) if other is not dim and other in values.layout.tiled]
    if len(rows) != 1 or coefficient(difference, rows[0].symbol) != -1 or rows[0].role is not Role.GRID:
        return False
    spread, block = values.layout.config.block(rows[0].name), values.layout.config.block(dim.name)
    past = 1 - sympy.expand(difference - dim.symbol + rows[0].symbol)
    if not past.is_Integer or spread % block:
        return False
    return int(past) % block + spread - 1 <= block


def _conjunction(parts: Sequence[Expr]) -> Expr | None:
    whole = parts[0] if parts else None
    for part in parts[1:]:
        assert whole is not None
        whole = make_op("and", whole, part)
    return whole


def _looked_up(
    values: Values, loop: Loop, where: Expr, dim: Dim, some: Reach, every: Reach, *, split: bool
) -> tuple[Part, ...]:
    """The loop within `some`, of which memory says where it walks: `where` is looked up before it."""
    assert some.start is not None and some.end is not None
    found = scan.scan(values, where, dim, some.start, some.end, runs=split)
    end = _named(values, f"{dim.name}_end", f"tl.minimum({found.end}, {some.end})")
    if not split:
        return (Part(loop, found.start, end),)
    first, after = _run(values, found, every, dim)
    length = _named(values, f"{dim.name}_run", f"{after} - {first}")
    rest = Part(loop, found.start, f"{end} - {length}", gap=(first, length))
    return Part(unconditional(loop), first, after, full=True), rest


def _run(values: Values, found: scan.Found, every: Reach, dim: Dim) -> tuple[str, str]:
    """From where to where whole blocks stand in which all of the condition holds: what a scan found, within `every`."""
    block, first, after = dim.constant, found.first, found.after
    if every.start is not None:
        first = f"tl.maximum({first}, tl.cdiv(tl.maximum({every.start}, 0), {block}) * {block})"
    if every.end is not None:
        after = f"tl.minimum({after}, tl.maximum({every.end}, 0))"
    first = _named(values, f"{dim.name}_first", first) if first != found.first else first
    return first, _named(values, f"{dim.name}_after", f"tl.maximum({after} // {block} * {block}, {first})")


def _from_aligned(values: Values, loop: Loop, dim: Dim, size: str) -> tuple[Part, ...]:
    """The block in which a row begins, the full ones, and the one in which it ends."""
    end = _named(values, f"{dim.name}_end", f"{values.shift(dim)} + {size}")
    middle = _named(values, f"{dim.name}_middle", f"tl.maximum({end} // {dim.constant}, 1) * {dim.constant}")
    return (
        Part(loop, "0", dim.constant),
        Part(loop, dim.constant, middle, full=True),
        Part(loop, middle, end),
    )


def _with_ragged_end(values: Values, loop: Loop, dim: Dim, start: str, end: str) -> tuple[Part, ...]:
    """The full blocks from `start` to before `end`, then the one that reaches past the end of the axis, if any does."""
    short = dim.size.is_Integer and int(dim.size) < values.layout.config.block(dim.name)
    if short or not values.layout.masked(dim):
        return (Part(loop, start, end),)
    size = values.index_tile(dim.size).code
    middle = f"{size.at(PRODUCT)} // {dim.constant} * {dim.constant}"
    if start != "0":  # whole blocks come before it, perhaps all
        middle = f"tl.maximum({start}, {middle})"
    middle = _named(values, f"{dim.name}_middle", middle)
    before = middle if end == size.text else f"tl.minimum({middle}, {end})"
    return Part(loop, start, before, full=True), Part(loop, middle, end)


def longer_for_later_rows(blocked: Blocked) -> bool:
    """Does a program of later rows walk further, so that it is better started first?"""
    m = next((dim for dim in blocked.grid() if dim.name == "m"), None)
    if m is None:
        return False
    found = [_growth(where, blocked.of(loop.axes)[0], m) for loop, where in _conditions(blocked)]
    return any(end and not start for start, end in found)


def _conditions(blocked: Blocked) -> Iterator[tuple[Loop, Expr]]:
    for stmt in blocked.body:
        if isinstance(stmt, Loop) and stmt.where is not None and blocked.of(stmt.axes):
            yield stmt, stmt.where


def _growth(where: Expr, dim: Dim, m: Dim) -> tuple[bool, bool]:
    """Do the first index and the last one of the loop grow with those of `m`?"""
    start = end = False
    for difference in _differences(where):
        slope, along = coefficient(difference, dim.symbol), coefficient(difference, m.symbol)
        if slope is not None and along is not None and slope.is_Integer and along.is_Integer and slope * along < 0:
            start, end = start or bool(slope < 0), end or bool(slope > 0)
    return start, end


def _differences(where: Expr) -> Iterator[sympy.Expr]:
    """What must not be positive: for each comparison in a condition."""
    if isinstance(where, Op) and where.name in ("and", "or"):
        for arg in where.args:
            yield from _differences(arg)
    elif (found := _difference(where)) is not None:
        yield found


def _difference(where: Expr) -> sympy.Expr | None:
    """The linear expression that is 0 or negative exactly where a comparison holds."""
    if not isinstance(where, Op) or where.name not in _DIFFERENCES:
        return None
    a, b = (_linear(arg) for arg in where.args)
    if a is None or b is None:
        return None
    sign, constant = _DIFFERENCES[where.name]
    return sympy.expand(sign * (a - b) + constant)


def _linear(expr: Expr) -> sympy.Expr | None:
    """An integer expression as an index."""
    if isinstance(expr, IndexValue):
        return expr.index
    if isinstance(expr, Const) and not expr.dtype.is_floating_point:
        return sympy.Integer(int(expr.value))
    if isinstance(expr, Cast) and not expr.arg.dtype.is_floating_point and expr.dtype.itemsize >= 4:
        return None if expr.dtype.is_floating_point else _linear(expr.arg)
    if isinstance(expr, Op) and expr.name in ("add", "sub", "mul", "neg"):
        args = [_linear(arg) for arg in expr.args]
        known = [arg for arg in args if arg is not None]
        if len(known) == len(args):
            joined = {"add": sympy.Add, "mul": sympy.Mul, "sub": lambda a, b: a - b, "neg": lambda a: -a}
            return joined[expr.name](*known)
    return None


# Bounds as text -------------------------------------------------------------------------------------------------------


def _reach(values: Values, where: Expr, dim: Dim, *, every: bool) -> Reach:
    """Bounds on the indices at which `where` holds for some row of the program, or on those at which it does for all.

    Of the latter there may be none without bounds, where they are not known.
    """
    if isinstance(where, Op) and where.name in ("and", "or"):
        reaches = [_reach(values, arg, dim, every=every) for arg in where.args]
        if every and (where.name == "or" or Reach() in reaches):
            return Reach()
        inner, outer = ("tl.maximum", "tl.minimum") if where.name == "and" else ("tl.minimum", "tl.maximum")
        needed = where.name == "or"
        starts, ends = [reach.start for reach in reaches], [reach.end for reach in reaches]
        return Reach(_joined(inner, starts, all_needed=needed), _joined(outer, ends, all_needed=needed))
    difference = _difference(where)
    slope = None if difference is None else coefficient(difference, dim.symbol)
    if difference is None or slope is None or not slope.is_Integer or slope == 0:
        return Reach()
    rest = _extreme(values, sympy.expand(difference - slope * dim.symbol), greatest=every)
    if rest is None:
        return Reach()
    if slope > 0:  # x ≤ -rest / slope
        return Reach(end=_text(values, _quotient(-rest, slope) + 1))
    return Reach(start=_text(values, _quotient(rest - slope - 1, -slope)))


def _quotient(a: sympy.Expr, b: sympy.Expr) -> sympy.Expr:
    """`a // b`; where it is negative Triton may round it up, but indices begin at 0."""
    return a if b == ONE else FloorDiv(a, b)


def _joined(function: str, texts: Iterable[str | None], *, all_needed: bool) -> str | None:
    given = list(texts)
    known = [text for text in given if text is not None]
    if not known or (all_needed and len(known) < len(given)):
        return None
    return known[0] if len(known) == 1 else f"{function}({', '.join(known)})"


def _extreme(values: Values, rest: sympy.Expr, *, greatest: bool) -> sympy.Expr | None:
    """The least or greatest value of a linear expression over the rows of a program, over first indices of blocks."""
    layout = values.layout
    for dim in layout.within(rest):
        if dim not in layout.tiled:
            continue
        slope = coefficient(rest, dim.symbol)
        if slope is None or not slope.is_Integer:
            return None
        first: sympy.Expr = sympy.Symbol(f"{dim.name} first", integer=True)
        last = first + sympy.Symbol(dim.constant, integer=True) - 1
        if dim.role is Role.WHOLE:
            first, last = sympy.Integer(0), dim.size - 1
        rest = rest.xreplace({dim.symbol: last if bool(slope > 0) is greatest else first})
    return sympy.expand(rest)


def _text(values: Values, index: sympy.Expr) -> str:
    layout = values.layout
    starts = {f"{dim.name} first": values.starts.get(dim, "0") for dim in layout.blocked.dims}

    def variable(symbol: sympy.Symbol) -> str:
        if symbol.name in starts:
            start = starts[symbol.name]
            return start if start.isidentifier() else f"({start})"
        dim = layout.dim(symbol)
        return symbol.name if dim is None else values.index(dim).code.text

    text = index_code(index, layout, variable).text
    return f"tl.full([], {text}, tl.int32)" if index.is_Integer else text


def _named(values: Values, wish: str, text: str) -> str:
    name = values.fresh(wish, values.depth)
    values.line(f"{name} = {text}")
    return name
