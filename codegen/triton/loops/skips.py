"""Derives the range of blocks over which a loop has to run, from its condition.

Input: a loop with a `where` over linear indices; output: its first and last index in this program, rounded
to blocks, and of the range within it in which the condition holds for every row, so that it need not be evaluated
there.  Supported are comparisons that are linear in the index of the loop and in the indices of the program, joined by
`and` and `or`, also with integers in memory of which the rows of a program read few (`shared_numbers`), and conditions
with such bounds; other parts of the condition that read tensors are evaluated before the loop (`lookup`); any other
part is assumed to hold.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import sympy

from fusion.codegen.interior import conditional, unconditional
from fusion.codegen.triton.blocks import Blocked, Dim
from fusion.codegen.triton.expressions.code import PRODUCT, Code, Operand, as_code, compose, listed
from fusion.codegen.triton.expressions.indices import index_code
from fusion.codegen.triton.expressions.scopes import Tile
from fusion.codegen.triton.expressions.values import Values
from fusion.codegen.triton.loops import lookup, shared_numbers
from fusion.lowering.indexing import ONE, FloorDiv, coefficient
from fusion.lowering.ir.expr import Cast, Const, Expr, IndexValue, Load, Op, loads, make_op
from fusion.lowering.ir.kernel import Loop, Role, Store
from fusion.lowering.ir.scalar_ops import ScalarName

_ZERO = Code("0")
_DIFFERENCES = {"le": (1, 0), "lt": (1, 1), "ge": (-1, 0), "gt": (-1, 1)}
"""For a comparison of a and b, the (sign, constant) with which it is sign · (a - b) + constant ≤ 0."""


@dataclass(frozen=True, slots=True)
class LoopBounds:
    """The indices of a loop from `start` (inclusive) to `end` (exclusive); None: unbounded."""

    start: Code | None = None
    end: Code | None = None


@dataclass(frozen=True, slots=True)
class LoopPart:
    """A loop over the blocks from `start` (inclusive) to `end` (exclusive).

    Attributes:
        full: none of the blocks reaches past the end of the axis.
        gap: if set, (first index, length) of blocks in between that are skipped; `end` is less by this length.
    """

    loop: Loop
    start: Code
    end: Code
    full: bool = False
    gap: tuple[Code, Code] | None = None


def parts(values: Values, loop: Loop, dim: Dim, *, split: bool) -> tuple[LoopPart, ...]:
    """Return the loop as one part; with `split` as several, some of which need neither the condition nor masks."""
    size = values.index_tile(dim.size).code
    split &= not any(isinstance(stmt, Loop) for stmt in loop.body)
    if dim.shift != 0:
        return _from_aligned(values, loop, dim, size)
    if loop.where is None:
        return _with_ragged_end(values, loop, dim, _ZERO, size) if split else (LoopPart(loop, _ZERO, size),)
    every_part, inside, loop = list(_joined_by_and(loop.where)), unconditional(loop), conditional(loop)
    looked_up = [part for part in every_part if lookup.applies(values.layout, part, dim)]
    from_indices = _conjunction([part for part in every_part if part not in looked_up])
    some, every = (
        LoopBounds() if from_indices is None else _range(values, from_indices, dim, every=flag)
        for flag in (False, True)
    )
    start, end, block = _ZERO, size, dim.constant
    if some.start is not None:
        start = _named(values, f"{dim.name}_start", compose("tl.maximum({0}, 0) // {1} * {1}", some.start, block))
    if some.end is not None:
        end = _named(values, f"{dim.name}_end", compose("tl.minimum({}, {})", some.end, size))
    where = _conjunction(looked_up)
    if where is not None:
        split &= from_indices is None or every != LoopBounds()
        return _by_lookup(values, (inside, loop), where, dim, LoopBounds(start, end), every, split=split)
    if not split:
        return (LoopPart(loop, start, end),)
    if every.end is not None and some.start is None:
        code = compose("tl.maximum(tl.minimum({0}, {1}), 0) // {2} * {2}", every.end, size, block)
        middle = _named(values, f"{dim.name}_middle", code)
        return LoopPart(inside, start, middle, full=True), LoopPart(loop, middle, end)
    if every.start is not None and every.end is not None and any(map(_is_bounded, every_part)):
        return _around_a_run(values, (inside, loop), dim, LoopBounds(start, end), every)
    if every.start is not None and some.end is None:
        code = compose("tl.minimum(tl.cdiv(tl.maximum({0}, 0), {1}) * {1}, {2})", every.start, block, size)
        middle = _named(values, f"{dim.name}_middle", code)
        return LoopPart(loop, start, middle), LoopPart(inside, middle, end)
    return _with_ragged_end(values, loop, dim, start, end)


def may_run_backwards(values: Values, loop: Loop, parts: Sequence[LoopPart], dim: Dim) -> bool:
    """Return whether a loop that reads the same data again may run backwards: the data read last may still be in the
    cache.

    It must keep no running values, and its blocks must be full, apart from a last part of their own.
    """
    if loop.where is not None or dim.shift != 0 or any(not isinstance(stmt, Store) for stmt in loop.body):
        return False
    return parts[0].full or not values.layout.masked(dim)


def is_one_block(values: Values, loop: Loop, dim: Dim) -> bool:
    """Return whether the condition is evaluated in at most one block of each loop, if the last blocks are split off.

    It is where only the end of the axis is masked.  It is, too, where the last index that any row of a program reaches
    is at most a block after the first block that not all of them reach, wherever the program starts.
    """
    if loop.where is None:
        return True
    difference = _difference(loop.where)
    if difference is None or coefficient(difference, dim.symbol) != 1:
        return False
    rows = [other for other in values.layout.within(difference) if other is not dim and other in values.layout.tiled]
    if len(rows) != 1 or coefficient(difference, rows[0].symbol) != -1 or rows[0].role is not Role.GRID:
        return False
    rows_block, block = values.layout.config.block(rows[0].name), values.layout.config.block(dim.name)
    past = 1 - sympy.expand(difference - dim.symbol + rows[0].symbol)
    if not past.is_Integer or rows_block % block:
        return False
    return int(past) % block + rows_block - 1 <= block


def _conjunction(parts: Sequence[Expr]) -> Expr | None:
    whole = parts[0] if parts else None
    for part in parts[1:]:
        assert whole is not None
        whole = make_op("and", whole, part)
    return whole


def bounded_in(where: Expr) -> list[Expr]:
    """Return the conditions in `where` whose bounds are known."""
    return [part.args[0] for part in _joined_by_and(where) if isinstance(part, Op) and _is_bounded(part)]


def needs_lookup(where: Expr) -> bool:
    """Return whether a condition reads tensors, and has no bounds."""
    return any(any(loads(part)) for part in _joined_by_and(where) if not _is_bounded(part))


def is_summarised(where: Expr) -> bool:
    """Return whether a condition reads tensors, and has bounds that other kernels computed from these."""
    return any(map(_is_bounded, _joined_by_and(where)))


def _is_bounded(part: Expr) -> bool:
    return isinstance(part, Op) and part.name == "bounded"


def _joined_by_and(where: Expr) -> Iterator[Expr]:
    """Yield the conditions that `and` joins."""
    if isinstance(where, Op) and where.name == "and":
        for arg in where.args:
            yield from _joined_by_and(arg)
    else:
        yield where


def _around_a_run(
    values: Values, loops: tuple[Loop, Loop], dim: Dim, within: LoopBounds, every: LoopBounds
) -> tuple[LoopPart, LoopPart]:
    """Return the full blocks in which all of the condition holds, and the others within a range."""
    assert within.start is not None and within.end is not None and every.start is not None and every.end is not None
    block, size = dim.constant, values.index_tile(dim.size).code
    first = compose("tl.cdiv(tl.maximum({0}, 0), {1}) * {1}", every.start, block)
    first = _named(values, f"{dim.name}_first", first)
    after = compose("tl.maximum(tl.minimum({0}, {1}) // {2} * {2}, {3})", every.end, size, block, first)
    after = _named(values, f"{dim.name}_after", after)
    return _with_gap(values, loops, dim, within, LoopBounds(first, after))


def _with_gap(
    values: Values, loops: tuple[Loop, Loop], dim: Dim, within: LoopBounds, run: LoopBounds
) -> tuple[LoopPart, LoopPart]:
    """Return two parts of a range: the blocks of `run`, which need no condition, and all others, which do."""
    inside, loop = loops
    assert within.start is not None and within.end is not None and run.start is not None and run.end is not None
    length = _named(values, f"{dim.name}_run", compose("{} - {}", run.end, run.start))
    rest = LoopPart(loop, within.start, compose("{} - {}", within.end, length), gap=(run.start, length))
    return LoopPart(inside, run.start, run.end, full=True), rest


def _by_lookup(
    values: Values, loops: tuple[Loop, Loop], where: Expr, dim: Dim, some: LoopBounds, every: LoopBounds, *, split: bool
) -> tuple[LoopPart, ...]:
    """Return the loop within `some`, narrowed by tensors: `where` is looked up before it."""
    assert some.start is not None and some.end is not None
    bounds = lookup.look_up(values, where, dim, some.start, some.end, runs=split)
    end = _named(values, f"{dim.name}_end", compose("tl.minimum({}, {})", bounds.end, some.end))
    if not split:
        return (LoopPart(loops[1], bounds.start, end),)
    return _with_gap(values, loops, dim, LoopBounds(bounds.start, end), LoopBounds(*_run(values, bounds, every, dim)))


def _run(values: Values, bounds: lookup.Bounds, every: LoopBounds, dim: Dim) -> tuple[Code, Code]:
    """Return the bounds of the blocks in which the condition holds everywhere: a lookup's bounds, within `every`."""
    block, first, after = dim.constant, bounds.first, bounds.after
    assert first is not None and after is not None, "called for a lookup of both"
    if every.start is not None:
        first = compose("tl.maximum({0}, tl.cdiv(tl.maximum({1}, 0), {2}) * {2})", first, every.start, block)
    if every.end is not None:
        after = compose("tl.minimum({}, tl.maximum({}, 0))", after, every.end)
    first = _named(values, f"{dim.name}_first", first) if first != bounds.first else first
    return first, _named(values, f"{dim.name}_after", compose("tl.maximum({0} // {1} * {1}, {2})", after, block, first))


def _from_aligned(values: Values, loop: Loop, dim: Dim, size: Code) -> tuple[LoopPart, ...]:
    """Return the block in which a row begins, the full ones, and the one in which it ends."""
    end = _named(values, f"{dim.name}_end", compose("{} + {}", values.shift(dim), size))
    middle = _named(values, f"{dim.name}_middle", compose("tl.maximum({0} // {1}, 1) * {1}", end, dim.constant))
    return (
        LoopPart(loop, _ZERO, as_code(dim.constant)),
        LoopPart(loop, as_code(dim.constant), middle, full=True),
        LoopPart(loop, middle, end),
    )


def _with_ragged_end(values: Values, loop: Loop, dim: Dim, start: Code, end: Code) -> tuple[LoopPart, ...]:
    """Return the full blocks from `start` to before `end`, then the block that reaches past the end of the axis, if any
    does.
    """
    short = dim.size.is_Integer and int(dim.size) < values.layout.config.block(dim.name)
    if short or not values.layout.masked(dim):
        return (LoopPart(loop, start, end),)
    size = values.index_tile(dim.size).code
    middle = compose("{0} // {1} * {1}", size.at(PRODUCT), dim.constant)
    if start != _ZERO:  # full blocks come before it, perhaps all of them
        middle = compose("tl.maximum({}, {})", start, middle)
    middle = _named(values, f"{dim.name}_middle", middle)
    before = middle if end == size else compose("tl.minimum({}, {})", middle, end)
    return LoopPart(loop, start, before, full=True), LoopPart(loop, middle, end)


def longer_for_later_rows(blocked: Blocked) -> bool:
    """Return whether programs of later rows loop over more blocks, so that it is faster to start them first."""
    m = next((dim for dim in blocked.grid() if dim.name == "m"), None)
    if m is None:
        return False
    growths = [_growth(where, blocked.of(loop.axes)[0], m) for loop, where in _conditions(blocked)]
    return any(end and not start for start, end in growths)


def _conditions(blocked: Blocked) -> Iterator[tuple[Loop, Expr]]:
    for stmt in blocked.body:
        if isinstance(stmt, Loop) and stmt.where is not None and blocked.of(stmt.axes):
            yield stmt, stmt.where


def _growth(where: Expr, dim: Dim, m: Dim) -> tuple[bool, bool]:
    """Return whether the first index and the last one of the loop grow with the index of `m`.

    A mask in memory is assumed to be like a causal one: later rows of its matrix reach farther.
    """
    start = end = False
    for mask in bounded_in(where):
        rows_first = _strides(mask, m) > _strides(mask, dim)
        start, end = start or not rows_first, end or rows_first
    for difference in _differences(where):
        slope, along = coefficient(difference, dim.symbol), coefficient(difference, m.symbol)
        if slope is not None and along is not None and slope.is_Integer and along.is_Integer and slope * along < 0:
            start, end = start or bool(slope < 0), end or bool(slope > 0)
    return start, end


def _strides(mask: Expr, dim: Dim) -> int:
    """Return the distance in memory of two neighbours along `dim` of the numbers that a condition reads."""
    indices = (index for load in loads(mask) for index in load.index if not isinstance(index, Expr))
    steps = (coefficient(index, dim.symbol) for index in indices)
    return max((int(step) for step in steps if step is not None and step.is_Integer), default=0)


def _differences(where: Expr) -> Iterator[sympy.Expr]:
    """Yield, for each comparison in a condition, the expression that must not be positive."""
    if isinstance(where, Op) and where.name in ("and", "or"):
        for arg in where.args:
            yield from _differences(arg)
    elif (difference := _difference(where)) is not None:
        yield difference


def _difference(where: Expr, numbers: dict[sympy.Symbol, Load] | None = None) -> sympy.Expr | None:
    """Return the linear expression that is 0 or negative exactly where a comparison holds.

    With `numbers`, loads may occur in it, as symbols, which are added there.
    """
    if not isinstance(where, Op) or where.name not in _DIFFERENCES:
        return None
    a, b = (_linear(arg, numbers) for arg in where.args)
    if a is None or b is None:
        return None
    sign, constant = _DIFFERENCES[where.name]
    return sympy.expand(sign * (a - b) + constant)


_JOINED: Mapping[ScalarName, Callable[..., sympy.Expr]] = {
    "add": sympy.Add,
    "sub": operator.sub,
    "mul": sympy.Mul,
    "neg": operator.neg,
}


def _linear(expr: Expr, numbers: dict[sympy.Symbol, Load] | None) -> sympy.Expr | None:
    """Return an integer expression as an index, with loads as symbols if `numbers` collects these."""
    if isinstance(expr, Load) and numbers is not None:
        symbol = next((known for known, load in numbers.items() if load is expr), None)
        symbol = symbol or sympy.Symbol(f"number{len(numbers)}", integer=True)
        numbers[symbol] = expr
        return symbol
    if isinstance(expr, IndexValue):
        return expr.index
    if isinstance(expr, Const) and not expr.dtype.is_floating_point:
        return sympy.Integer(int(expr.value))
    if isinstance(expr, Cast) and not expr.arg.dtype.is_floating_point and expr.dtype.itemsize >= 4:
        return None if expr.dtype.is_floating_point else _linear(expr.arg, numbers)
    if isinstance(expr, Op) and expr.name in _JOINED:
        args = [_linear(arg, numbers) for arg in expr.args]
        known = [arg for arg in args if arg is not None]
        if len(known) == len(args):
            return _JOINED[expr.name](*known)
    return None


# Bounds as code -------------------------------------------------------------------------------------------------------


def _range(values: Values, where: Expr, dim: Dim, *, every: bool) -> LoopBounds:
    """Return bounds on the indices at which `where` holds for some row of the program, or with `every` for all of them.

    With `every`, no bounds means that none are known.
    """
    if isinstance(where, Op) and where.name == "bounded":
        return _range(values, where.args[2 if every else 1], dim, every=every)
    if isinstance(where, Op) and where.name in ("and", "or"):
        ranges = [_range(values, arg, dim, every=every) for arg in where.args]
        if every and (where.name == "or" or LoopBounds() in ranges):
            return LoopBounds()
        inner, outer = ("tl.maximum", "tl.minimum") if where.name == "and" else ("tl.minimum", "tl.maximum")
        needed = where.name == "or"
        starts, ends = [each.start for each in ranges], [each.end for each in ranges]
        return LoopBounds(_joined(inner, starts, all_needed=needed), _joined(outer, ends, all_needed=needed))
    numbers: dict[sympy.Symbol, Load] = {}
    difference = _difference(where, numbers)
    slope = None if difference is None else coefficient(difference, dim.symbol)
    if difference is None or slope is None or not slope.is_Integer or slope == 0:
        return LoopBounds()
    if not all(shared_numbers.is_shared(values.layout, load, dim) for load in numbers.values()):
        return LoopBounds()
    rest = _extreme(values, sympy.expand(difference - slope * dim.symbol), greatest=every)
    if rest is None:
        return LoopBounds()
    known = {symbol: coefficient(rest, symbol) for symbol in numbers}
    if any(factor is None or not factor.is_Integer for factor in known.values()):
        return LoopBounds()
    codes = {
        symbol: shared_numbers.extreme(values, numbers[symbol], greatest=bool(factor > 0) is every)
        for symbol, factor in known.items()
        if factor is not None
    }
    if slope > 0:  # x ≤ -rest / slope
        return LoopBounds(end=_code(values, _quotient(-rest, slope) + 1, codes))
    return LoopBounds(start=_code(values, _quotient(rest - slope - 1, -slope), codes))


def _quotient(a: sympy.Expr, b: sympy.Expr) -> sympy.Expr:
    """Return `a // b`; where it is negative Triton may round it up, but indices start at 0."""
    return a if b == ONE else FloorDiv(a, b)


def _joined(function: str, bounds: Iterable[Code | None], *, all_needed: bool) -> Code | None:
    every = list(bounds)
    known = [bound for bound in every if bound is not None]
    if not known or (all_needed and len(known) < len(every)):
        return None
    return known[0] if len(known) == 1 else compose("{}({})", function, listed(known))


def _extreme(values: Values, rest: sympy.Expr, *, greatest: bool) -> sympy.Expr | None:
    """Return the least or greatest value of a linear expression over the rows of a program, over first indices of
    blocks.
    """
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


def _code(values: Values, index: sympy.Expr, numbers: Mapping[sympy.Symbol, Code]) -> Code:
    layout = values.layout
    starts = {f"{dim.name} first": values.starts.get(dim, _ZERO) for dim in layout.blocked.dims}

    def variable(symbol: sympy.Symbol) -> Operand:
        if symbol in numbers:
            return numbers[symbol]
        if symbol.name in starts:
            start = starts[symbol.name]
            return start if start.is_name else compose("({})", start)
        dim = layout.dim(symbol)
        return symbol.name if dim is None else values.index(dim).code

    code = index_code(index, layout, variable)
    return compose("tl.full([], {}, tl.int32)", code) if index.is_Integer else code


def _named(values: Values, wish: str, code: Code) -> Code:
    return values.name(wish, Tile(code, depth=values.depth)).code
