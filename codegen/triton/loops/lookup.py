"""Lookup: bounds of a loop that depend on tensors, computed before the loop.

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
from fusion.codegen.triton.expressions.indices import Layout
from fusion.codegen.triton.expressions.scalar_code import ATOM, TYPES, Code, literal, typed
from fusion.codegen.triton.expressions.scopes import Tile
from fusion.codegen.triton.expressions.values import Values
from fusion.lowering.expr import Const, Expr, Op, Random, TileRef, free_axes, loads, postorder
from fusion.lowering.indexing import substitute_all
from fusion.lowering.kernel import Role
from fusion.lowering.scalar_ops import INTEGERS

_FEWEST = 4
"""The fewest blocks of a loop for which a lookup pays."""

_PER_THREAD = 32
"""Elements that a thread reads in one step: each step waits for memory once."""

_COMPARED = ("eq", "ne", "lt", "le", "gt", "ge")


@dataclass(frozen=True, slots=True)
class Bounds:
    """Names of the bounds that a lookup computes: the condition may hold only in blocks from `start` to before `end`.

    From `first`, a block boundary, to before `after` it holds for all rows; "" if not requested.
    """

    start: str
    end: str
    first: str = ""
    after: str = ""


def applies(layout: Layout, where: Expr, dim: Dim) -> bool:
    """Can a lookup exclude blocks of `dim` in which `where`, which reads tensors, does not hold?  False for a short
    loop.
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
    if not isinstance(where, Op) or where.name not in _COMPARED or where.args[0].dtype not in INTEGERS:
        return False
    return all(len(_varying(layout, arg)) <= 1 for arg in where.args)


def _varying(layout: Layout, expr: Expr) -> tuple[Dim, ...]:
    """Return the dimensions along which `expr` has more than one value in a program."""
    axes = free_axes(expr)
    return tuple(dim for dim in layout.tiled if dim.symbol in axes)


def look_up(values: Values, where: Expr, dim: Dim, start: str, end: str, *, runs: bool) -> Bounds:
    """Add the lines that examine the blocks of `dim` from `start` to before `end`.

    Args:
        where: a condition to which `applies`, or several of them joined by `and`.
        runs: also find the blocks in which it holds everywhere.
    """
    dtype = TYPES[torch.int64 if dim in values.layout.wide else torch.int32]

    def named(wish: str, text: str) -> str:
        return values.name(wish, Tile(Code(text), depth=values.depth)).code.text

    if dim.symbol not in free_axes(where):
        step = _Step(values, dim)
        upper = named(f"{dim.name}_upper", f"tl.where({step.holds(where, every=False)}, {end}, {start})")
        if not runs:
            return Bounds(start, upper)
        return Bounds(start, upper, named("first", f"tl.where({step.holds(where, every=True)}, {start}, {end})"), end)
    values.line("# Which blocks can count: from the first point that some row may see to the last.")
    lower, upper = (
        named(f"{dim.name}_{wish}", f"tl.full([], {text}, {dtype})")
        for wish, text in (("lower", end), ("upper", start))
    )
    first = after = ""
    if runs:
        first, after = (named(f"{dim.name}_{wish}", f"tl.full([], {end}, {dtype})") for wish in ("first", "after"))
    length = min(32 * values.layout.config.num_warps * _PER_THREAD, power_of_two(extent(dim.size)))
    enclosing = values.layout, values.full
    at = values.open(f"{dim.name}_at")
    step = _Step(values, dim, length)
    point = step.advance(at, all_inside=start == "0" and bool((dim.size / length).is_integer))
    some = named("some", step.holds(where, every=False))
    values.line(f"{lower} = tl.minimum({lower}, tl.min(tl.where({some}, {point}, {lower}), 0))")
    values.line(f"{upper} = tl.maximum({upper}, tl.max(tl.where({some}, {point} + 1, {upper}), 0))")
    if runs:
        every = named("every", step.holds(where, every=True))
        values.line(f"{first} = tl.minimum({first}, tl.min(tl.where({every}, {point}, {first}), 0))")
        kept = f"tl.where({every} | ({point} <= {first}), {after}, {point})"
        values.line(f"{after} = tl.minimum({after}, tl.min({kept}, 0))")
    values.layout, values.full = enclosing
    values.close(f"for {at} in range({start}, {end}, {length}):")
    lower = named(f"{dim.name}_start", f"{lower} // {dim.constant} * {dim.constant}")
    if runs:
        first = named(f"{dim.name}_first", f"tl.cdiv({first}, {dim.constant}) * {dim.constant}")
    return Bounds(lower, upper, first, after)


class _Step:
    """The points of a dimension that one step of a lookup examines, `length` at once, and the conditions at them."""

    def __init__(self, values: Values, dim: Dim, length: int = 0) -> None:
        self.values, self.dim, self.length = values, dim, length
        self.points = Dim("scan", dim.axes, Role.WHOLE)
        self._intervals: dict[Expr, tuple[str, str]] = {}

    def advance(self, at: str, *, all_inside: bool) -> str:
        """Bind the points of the current loop to those from `at` on; return the name of their indices.

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
        text = f"{at} + tl.arange(0, {self.length})"
        if not all_inside:
            text = f"tl.minimum({text}, {values.index_tile(dim.size - 1).code.text})"
        index = values.name(self.points.symbol.name, Tile(Code(text), (self.points,), values.depth))
        values.bind(("index", self.points), index)
        return index.code.text

    def holds(self, where: Expr, *, every: bool) -> str:
        """Return the condition that `where` holds for some row at each point, or for all rows if `every`."""
        if isinstance(where, Op) and where.name in ("and", "or"):
            sign = " & " if where.name == "and" else " | "
            return f"({sign.join(self.holds(arg, every=every) for arg in where.args)})"
        if len(_varying(self.values.layout, self._here(where))) <= 1:
            low, high = self._interval(where)
            return f"({low if every else high} != 0)"
        assert isinstance(where, Op)
        a, b = (self._interval(arg) for arg in where.args)
        (least, greatest), (other_least, other_greatest) = a, b
        sometimes = {
            "eq": f"({least} <= {other_greatest}) & ({other_least} <= {greatest})",
            "ne": f"({least} != {other_greatest}) | ({other_least} != {greatest})",
            "lt": f"{least} < {other_greatest}",
            "le": f"{least} <= {other_greatest}",
            "gt": f"{greatest} > {other_least}",
            "ge": f"{greatest} >= {other_least}",
        }
        always = {
            "eq": f"({least} == {other_greatest}) & ({other_least} == {greatest})",
            "ne": f"({least} > {other_greatest}) | ({other_least} > {greatest})",
            "lt": f"{greatest} < {other_least}",
            "le": f"{greatest} <= {other_least}",
            "gt": f"{least} > {other_greatest}",
            "ge": f"{least} >= {other_greatest}",
        }
        return f"({(always if every else sometimes)[where.name]})"

    def _here(self, expr: Expr) -> Expr:
        """Return `expr` along the points of this step."""
        sizes = self.values.layout.blocked.sizes()
        return substitute_all([expr], {self.dim.symbol: self.points.symbol}, sizes)[0]

    def _interval(self, expr: Expr) -> tuple[str, str]:
        """Return the least and the greatest value of `expr` over the rows of the program; at each point it has only
        one.
        """
        known = self._intervals.get(expr)
        if known is None:
            known = self._intervals[expr] = self._bounded(self._here(expr))
        return known

    def _bounded(self, expr: Expr) -> tuple[str, str]:
        values = self.values
        tile = values.widened(values.value(expr))
        if isinstance(expr, Const):
            text = typed(tile.code, expr.dtype).text
            return text, text
        if expr.dtype not in (torch.int32, torch.int64):
            tile = replace(tile, code=Code(f"{typed(tile.code, expr.dtype).at(ATOM)}.to(tl.int32)"))
        name = tile.code.text if tile.code.is_name else values.name("value", tile).code.text
        if not tile.dims or tile.dims == (self.points,):
            return name, name
        least, greatest = (f"{f}({self._inside(name, tile, expr.dtype, f)}, 0)" for f in ("tl.min", "tl.max"))
        low = values.name("least", Tile(Code(least), depth=tile.depth))
        high = values.name("greatest", Tile(Code(greatest), depth=tile.depth))
        return low.code.text, high.code.text

    def _inside(self, name: str, tile: Tile, dtype: torch.dtype, function: str) -> str:
        """Return a vector along rows with the identity of `function` in the lanes past the end."""
        mask = self.values.masks(tile.dims)
        if mask is None:
            return name
        info = torch.iinfo(torch.int64 if dtype is torch.int64 else torch.int32)
        other = literal(info.max if function == "tl.min" else info.min, torch.int64)
        return f"tl.where({mask.code.text}, {name}, {other.text})"
