"""Computes bounds of a loop from tensors, before the loop runs.

Input: a condition, and the range of a loop that follows from indices; output: lines that read the vectors of the
condition and narrow the range: to the first and the last block in which the condition may hold, and to a run of blocks
in which it holds everywhere.  Nothing is assumed of the vectors: with ids in any order the bounds are correct, if
wider.

Every point of the loop is compared with all rows of the program at once: a value that varies along rows becomes an
interval, from its least to its greatest value.  `==` cannot hold where the other value is outside of it.  A part of the
condition with an operand that varies both along the loop and along rows is assumed to hold.

    doc[q] == doc[k]    →    least doc[q] <= doc[k]  and  doc[k] <= greatest doc[q]
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from fusion.codegen.triton.blocks import Dim, extent, power_of_two
from fusion.codegen.triton.expressions.code import ATOM, Code, compose, listed
from fusion.codegen.triton.expressions.indices import Layout
from fusion.codegen.triton.expressions.scalar_code import TYPES, literal, typed
from fusion.codegen.triton.expressions.scopes import Tile
from fusion.codegen.triton.expressions.values import Values
from fusion.lowering.indexing import substitute_all
from fusion.lowering.ir.expr import Const, Expr, Op, Random, TileRef, free_axes, loads, postorder
from fusion.lowering.ir.kernel import Role
from fusion.lowering.ir.scalar_ops import COMPARISONS, INTEGERS

_FEWEST = 4
"""The fewest blocks of a loop for which a lookup pays."""

_PER_THREAD = 32
"""Elements that a thread reads in one step: each step waits for memory once."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """The bounds that a lookup computes: the condition may hold only in blocks from `start` to before `end`.

    From `first`, a block boundary, to before `after` it holds for all rows; None if not requested.
    """

    start: Code
    end: Code
    first: Code | None = None
    after: Code | None = None


def applies(layout: Layout, where: Expr, dim: Dim) -> bool:
    """Return whether a lookup can exclude blocks of `dim` in which `where`, which reads tensors, does not hold.  False
    for a short loop.
    """
    short = extent(dim.size) < _FEWEST * layout.config.block(dim.name)
    if not any(loads(where)) or (short and dim.symbol in free_axes(where)):
        return False
    return _is_supported(layout, where, dim)


def _is_supported(layout: Layout, where: Expr, dim: Dim) -> bool:
    if isinstance(where, Op) and where.name in ("and", "or"):
        return all(_is_supported(layout, arg, dim) for arg in where.args)
    if any(isinstance(node, (TileRef, Random)) for node in postorder(where)) or any(
        load.mask is not None for load in loads(where)
    ):
        return False
    if len(_varying(layout, where)) <= 1:
        return True
    if not isinstance(where, Op) or where.name not in COMPARISONS or where.args[0].dtype not in INTEGERS:
        return False
    return all(len(_varying(layout, arg)) <= 1 for arg in where.args)


def _varying(layout: Layout, expr: Expr) -> tuple[Dim, ...]:
    """Return the dimensions along which `expr` has more than one value in a program."""
    axes = free_axes(expr)
    return tuple(dim for dim in layout.tiled if dim.symbol in axes)


def look_up(values: Values, where: Expr, dim: Dim, start: Code, end: Code, *, runs: bool) -> Bounds:
    """Add the lines that examine the blocks of `dim` from `start` to before `end`.

    Args:
        where: a condition to which `applies`, or several of them joined by `and`.
        runs: also find the blocks in which it holds everywhere.
    """
    dtype = TYPES[torch.int64 if dim in values.layout.wide else torch.int32]

    def named(wish: str, code: Code) -> Code:
        return values.name(wish, Tile(code, depth=values.depth)).code

    if dim.symbol not in free_axes(where):
        step = _Step(values, dim)
        upper = named(f"{dim.name}_upper", compose("tl.where({}, {}, {})", step.holds(where, every=False), end, start))
        if not runs:
            return Bounds(start, upper)
        every = step.holds(where, every=True)
        return Bounds(start, upper, named("first", compose("tl.where({}, {}, {})", every, start, end)), end)
    values.line("# Which blocks can count: from the first point that some row may see to the last.")
    lower, upper = (
        named(f"{dim.name}_{wish}", compose("tl.full([], {}, {})", bound, dtype))
        for wish, bound in (("lower", end), ("upper", start))
    )
    first = after = None
    if runs:
        first, after = (
            named(f"{dim.name}_{wish}", compose("tl.full([], {}, {})", end, dtype)) for wish in ("first", "after")
        )
    length = min(32 * values.layout.config.num_warps * _PER_THREAD, power_of_two(extent(dim.size)))
    enclosing = values.layout, values.full
    at = values.open(f"{dim.name}_at")
    step = _Step(values, dim, length)
    point = step.advance(at, all_inside=start == Code("0") and bool((dim.size / length).is_integer))
    some = named("some", step.holds(where, every=False))
    values.line("{0} = tl.minimum({0}, tl.min(tl.where({1}, {2}, {0}), 0))", lower, some, point)
    values.line("{0} = tl.maximum({0}, tl.max(tl.where({1}, {2} + 1, {0}), 0))", upper, some, point)
    if first is not None and after is not None:
        every = named("every", step.holds(where, every=True))
        values.line("{0} = tl.minimum({0}, tl.min(tl.where({1}, {2}, {0}), 0))", first, every, point)
        kept = compose("tl.where({0} | ({1} <= {2}), {3}, {1})", every, point, first, after)
        values.line("{0} = tl.minimum({0}, tl.min({1}, 0))", after, kept)
    values.layout, values.full = enclosing
    values.close("for {} in range({}, {}, {}):", at, start, end, length)
    lower = named(f"{dim.name}_start", compose("{0} // {1} * {1}", lower, dim.constant))
    if first is not None:
        first = named(f"{dim.name}_first", compose("tl.cdiv({0}, {1}) * {1}", first, dim.constant))
    return Bounds(lower, upper, first, after)


class _Step:
    """The points of a dimension that one step of a lookup examines, `length` at once, and the conditions at them."""

    def __init__(self, values: Values, dim: Dim, length: int = 0) -> None:
        self.values, self.dim, self.length = values, dim, length
        self.points = Dim("scan", dim.axes, Role.WHOLE)
        self._intervals: dict[Expr, tuple[Code, Code]] = {}

    def advance(self, at: Code, *, all_inside: bool) -> Code:
        """Bind the points of the current loop to those from `at` on; return their indices.

        Args:
            whole: none of them is past the end.
        """
        values, dim = self.values, self.dim
        layout = values.layout
        values.layout = replace(
            layout,
            blocked=replace(layout.blocked, dims=(*layout.blocked.dims, self.points)),
            config=replace(layout.config, blocks=(*layout.config.blocks, (self.points.name, self.length))),
            tiled=(*layout.tiled, self.points),
            depth={**layout.depth, self.points: values.depth},
            wide=layout.wide | ({self.points} if dim in layout.wide else set()),
        )
        values.full = frozenset({self.points})  # past the end the last point repeats, which changes no bound
        code = compose("{} + tl.arange(0, {})", at, self.length)
        if not all_inside:
            code = compose("tl.minimum({}, {})", code, values.index_tile(dim.size - 1).code)
        index = values.name(self.points.symbol.name, Tile(code, (self.points,), values.depth))
        values.bind(("index", self.points), index)
        return index.code

    def holds(self, where: Expr, *, every: bool) -> Code:
        """Return the condition that `where` holds for some row at each point, or for all rows if `every`."""
        if isinstance(where, Op) and where.name in ("and", "or"):
            sign = " & " if where.name == "and" else " | "
            return compose("({})", listed((self.holds(arg, every=every) for arg in where.args), sign))
        if len(_varying(self.values.layout, self._here(where))) <= 1:
            low, high = self._interval(where)
            return compose("({} != 0)", low if every else high)
        assert isinstance(where, Op)
        a, b = (self._interval(arg) for arg in where.args)
        (least, greatest), (other_least, other_greatest) = a, b
        sometimes = {
            "eq": compose("({} <= {}) & ({} <= {})", least, other_greatest, other_least, greatest),
            "ne": compose("({} != {}) | ({} != {})", least, other_greatest, other_least, greatest),
            "lt": compose("{} < {}", least, other_greatest),
            "le": compose("{} <= {}", least, other_greatest),
            "gt": compose("{} > {}", greatest, other_least),
            "ge": compose("{} >= {}", greatest, other_least),
        }
        always = {
            "eq": compose("({} == {}) & ({} == {})", least, other_greatest, other_least, greatest),
            "ne": compose("({} > {}) | ({} > {})", least, other_greatest, other_least, greatest),
            "lt": compose("{} < {}", greatest, other_least),
            "le": compose("{} <= {}", greatest, other_least),
            "gt": compose("{} > {}", least, other_greatest),
            "ge": compose("{} >= {}", least, other_greatest),
        }
        return compose("({})", (always if every else sometimes)[where.name])

    def _here(self, expr: Expr) -> Expr:
        """Return `expr` along the points of this step."""
        sizes = self.values.layout.blocked.sizes()
        return substitute_all([expr], {self.dim.symbol: self.points.symbol}, sizes)[0]

    def _interval(self, expr: Expr) -> tuple[Code, Code]:
        """Return the least and the greatest value of `expr` over the rows of the program; at each point it has only
        one.
        """
        known = self._intervals.get(expr)
        if known is None:
            known = self._intervals[expr] = self._bounded(self._here(expr))
        return known

    def _bounded(self, expr: Expr) -> tuple[Code, Code]:
        values = self.values
        tile = values.widened(values.value(expr))
        if isinstance(expr, Const):
            number = typed(tile.code, expr.dtype)
            return number, number
        if expr.dtype not in (torch.int32, torch.int64):
            tile = replace(tile, code=compose("{}.to(tl.int32)", typed(tile.code, expr.dtype).at(ATOM)))
        name = tile.code if tile.code.is_name else values.name("value", tile).code
        if not tile.dims or tile.dims == (self.points,):
            return name, name
        least, greatest = (
            compose("{}({}, 0)", f, self._inside(name, tile, expr.dtype, f)) for f in ("tl.min", "tl.max")
        )
        low = values.name("least", Tile(least, depth=tile.depth))
        high = values.name("greatest", Tile(greatest, depth=tile.depth))
        return low.code, high.code

    def _inside(self, name: Code, tile: Tile, dtype: torch.dtype, function: str) -> Code:
        """Return a vector along rows with the identity of `function` in the lanes past the end."""
        mask = self.values.masks(tile.dims)
        if mask is None:
            return name
        info = torch.iinfo(torch.int64 if dtype is torch.int64 else torch.int32)
        other = literal(info.max if function == "tl.min" else info.min, torch.int64)
        return compose("tl.where({}, {}, {})", mask.code, name, other)
