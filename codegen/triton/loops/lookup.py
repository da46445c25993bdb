"""Scan: which blocks of a loop can count, looked up in memory before the loop.

What enters is a condition and the range that indices leave of a loop; what leaves are lines that go through the vectors
that the condition asks, and narrow the range: to the first and the last block that can count, and to a run of blocks
in it in which the condition holds throughout.  Nothing is assumed of the vectors: with ids in any order the bounds are
right, if wider.

Every point of the loop is held against all rows of the program at once: what varies along rows is an interval, from
its least to its greatest value.  `==` cannot hold where a value lies outside of it.  An operand that varies both along
the loop and along rows is not understood: its part of the condition is taken to hold.

    doc[q] == doc[k]    →    least doc[q] <= doc[k]  and  doc[k] <= greatest doc[q]
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from fusion.codegen.triton.blocks import Dim, extent, power_of_two
from fusion.codegen.triton.expressions.indices import Layout
from fusion.codegen.triton.expressions.scopes import Tile
from fusion.codegen.triton.expressions.spell import ATOM, TYPES, Code, literal, typed
from fusion.codegen.triton.expressions.values import Values
from fusion.lowering.expr import Const, Expr, Op, Random, TileRef, free_axes, loads, postorder
from fusion.lowering.indexing import substitute_all
from fusion.lowering.kernel import Role
from fusion.lowering.scalar_ops import INTEGERS

_FEWEST = 4
"""The fewest blocks of a loop for which looking at them first is worth the time."""

_PER_THREAD = 32
"""Elements that a thread looks at in one step: each step waits for memory once."""

_COMPARED = ("eq", "ne", "lt", "le", "gt", "ge")


@dataclass(frozen=True, slots=True)
class Found:
    """What a scan has found, as names: only blocks from `start` to before `end` can count.

    From `first`, where a block begins, to before `after` the condition holds for all rows; "" if not asked.
    """

    start: str
    end: str
    first: str = ""
    after: str = ""


def decides(layout: Layout, where: Expr, dim: Dim) -> bool:
    """Can a scan say of a block of `dim` that `where`, which asks memory, does not hold in it?  Not of a short loop."""
    short = extent(dim.size) < _FEWEST * layout.config.block(dim.name)
    if not any(loads(where)) or (short and dim.symbol in free_axes(where)):
        return False
    return _is_understood(layout, where, dim)


def _is_understood(layout: Layout, where: Expr, dim: Dim) -> bool:
    if isinstance(where, Op) and where.name in ("and", "or"):
        return all(_is_understood(layout, arg, dim) for arg in where.args)
    if any(isinstance(node, (TileRef, Random)) for node in postorder(where)) or any(
        load.mask is not None for load in loads(where)
    ):
        return False
    if len(_varies(layout, where)) <= 1:
        return True
    if not isinstance(where, Op) or where.name not in _COMPARED or where.args[0].dtype not in INTEGERS:
        return False
    return all(len(_varies(layout, arg)) <= 1 for arg in where.args)


def _varies(layout: Layout, expr: Expr) -> tuple[Dim, ...]:
    """The dimensions that `expr` has more than one value along in a program."""
    axes = free_axes(expr)
    return tuple(dim for dim in layout.tiled if dim.symbol in axes)


def scan(values: Values, where: Expr, dim: Dim, start: str, end: str, *, runs: bool) -> Found:
    """Add the lines that look at the blocks of `dim` from `start` to before `end`.

    Args:
        where: what `decides` says yes to, or several such joined by `and`.
        runs: also find blocks in which it holds throughout.
    """
    dtype = TYPES[torch.int64 if dim in values.layout.wide else torch.int32]

    def named(wish: str, text: str) -> str:
        return values.name(wish, Tile(Code(text), depth=values.depth)).code.text

    if dim.symbol not in free_axes(where):
        look = _Look(values, dim)
        upper = named(f"{dim.name}_upper", f"tl.where({look.holds(where, every=False)}, {end}, {start})")
        if not runs:
            return Found(start, upper)
        return Found(start, upper, named("first", f"tl.where({look.holds(where, every=True)}, {start}, {end})"), end)
    values.line("# Which blocks can count: from the first point that some row may see to the last.")
    lower, upper = (
        named(f"{dim.name}_{wish}", f"tl.full([], {text}, {dtype})")
        for wish, text in (("lower", end), ("upper", start))
    )
    first = after = ""
    if runs:
        first, after = (named(f"{dim.name}_{wish}", f"tl.full([], {end}, {dtype})") for wish in ("first", "after"))
    length = min(32 * values.layout.config.num_warps * _PER_THREAD, power_of_two(extent(dim.size)))
    outside = values.layout, values.full
    at = values.open(f"{dim.name}_at")
    look = _Look(values, dim, length)
    point = look.stand(at, whole=start == "0" and bool((dim.size / length).is_integer))
    some = named("some", look.holds(where, every=False))
    values.line(f"{lower} = tl.minimum({lower}, tl.min(tl.where({some}, {point}, {lower}), 0))")
    values.line(f"{upper} = tl.maximum({upper}, tl.max(tl.where({some}, {point} + 1, {upper}), 0))")
    if runs:
        every = named("every", look.holds(where, every=True))
        values.line(f"{first} = tl.minimum({first}, tl.min(tl.where({every}, {point}, {first}), 0))")
        kept = f"tl.where({every} | ({point} <= {first}), {after}, {point})"
        values.line(f"{after} = tl.minimum({after}, tl.min({kept}, 0))")
    values.layout, values.full = outside
    values.close(f"for {at} in range({start}, {end}, {length}):")
    lower = named(f"{dim.name}_start", f"{lower} // {dim.constant} * {dim.constant}")
    if runs:
        first = named(f"{dim.name}_first", f"tl.cdiv({first}, {dim.constant}) * {dim.constant}")
    return Found(lower, upper, first, after)


class _Look:
    """What holds at the points of a dimension, of which one step of a scan looks at `length` at once."""

    def __init__(self, values: Values, dim: Dim, length: int = 0) -> None:
        self.values, self.dim, self.length = values, dim, length
        self.points = Dim("scan", dim.axes, Role.WHOLE)
        self._intervals: dict[Expr, tuple[str, str]] = {}

    def stand(self, at: str, *, whole: bool) -> str:
        """From here on, in the current loop, the points are those from `at`; returns the name of their indices.

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
        values.full = frozenset({self.points})  # past the end the last point is repeated, which changes no bound
        text = f"{at} + tl.arange(0, {self.length})"
        if not whole:
            text = f"tl.minimum({text}, {values.index_tile(dim.size - 1).code.text})"
        index = values.name(self.points.symbol.name, Tile(Code(text), (self.points,), values.depth))
        values.bind(("index", self.points), index)
        return index.code.text

    def holds(self, where: Expr, *, every: bool) -> str:
        """Does `where` hold for some row at each point, or for all of them?"""
        if isinstance(where, Op) and where.name in ("and", "or"):
            sign = " & " if where.name == "and" else " | "
            return f"({sign.join(self.holds(arg, every=every) for arg in where.args)})"
        if len(_varies(self.values.layout, self._here(where))) <= 1:
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
        """`expr` along the points of this step."""
        sizes = self.values.layout.blocked.sizes()
        return substitute_all([expr], {self.dim.symbol: self.points.symbol}, sizes)[0]

    def _interval(self, expr: Expr) -> tuple[str, str]:
        """The least and the greatest value of `expr` in the rows of the program; at each point it has only one."""
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
        name = tile.code.text if tile.code.text.isidentifier() else values.name("value", tile).code.text
        if not tile.dims or tile.dims == (self.points,):
            return name, name
        least, greatest = (f"{f}({self._inside(name, tile, expr.dtype, f)}, 0)" for f in ("tl.min", "tl.max"))
        low = values.name("least", Tile(Code(least), depth=tile.depth))
        high = values.name("greatest", Tile(Code(greatest), depth=tile.depth))
        return low.code.text, high.code.text

    def _inside(self, name: str, tile: Tile, dtype: torch.dtype, function: str) -> str:
        """A vector along rows with what changes nothing in the lanes past the end."""
        mask = self.values.masks(tile.dims)
        if mask is None:
            return name
        info = torch.iinfo(torch.int64 if dtype is torch.int64 else torch.int32)
        other = literal(info.max if function == "tl.min" else info.min, torch.int64)
        return f"tl.where({mask.code.text}, {name}, {other.text})"
