"""Adds folds of a mask: for each group of rows of a tile, the bounds of the columns that the mask shows.

Input: a condition over the rows and columns of a tile; output: reductions, first of the lines of the mask, as they lie
in memory, then of groups of rows:

    first[l] = min over a of (m[l, a] ? a : A)    end[l] = max over a of (m[l, a] ? a + 1 : 0)    count[l] = Σ m[l, a]

Where lines are the rows, the bounds of a group are the least `first` and the greatest `end` of its rows; all of them
see the columns from the greatest `first` to the least `end`, if each sees one range (end - first = count).  Where lines
are the columns, as in the gradient of keys, a group of rows meets the lines whose range meets it, and all of it meets
those whose range contains it.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass

import sympy
import torch

from fusion.lowering.indexing import FloorDiv, axis_symbol, over_symbol, substitute
from fusion.lowering.ir.expr import Expr, IndexValue, Load, const, make_op, rewrite
from fusion.lowering.ir.program import Axis, Buffer, Map, Reduce
from fusion.lowering.ir.scalar_ops import FoldName
from fusion.lowering.value import contiguous_strides
from fusion.schedule.iteration.naming import unused

ROWS_PER_BOUND = 64
"""Rows that share their bounds: no more than most blocks of a kernel have, and as many as a group of warps computes."""

_INT = torch.int32
_ZERO, _ONE = const(0, _INT), const(1, _INT)


@dataclass(frozen=True, slots=True)
class TileCondition:
    """A condition over the rows and columns of a tile.

    Attributes:
        part: the condition, over the axes of a node.
        row, column: the axes along which it varies within a tile.
        batch: each index at which its loads select a matrix, with the number of its values.
        turned: whether columns, not rows, are the lines of the mask in memory.
        settled: where the numbers that the mask reads change nothing, if it is a condition on numbers that are added.
    """

    part: Expr
    row: Axis
    column: Axis
    batch: tuple[tuple[sympy.Expr, sympy.Expr], ...]
    turned: bool
    settled: Expr | None = None

    @property
    def matrices(self) -> tuple[Axis, ...]:
        """The axes of the folds that number the mask's matrices."""
        return tuple(Axis(axis_symbol(k), size) for k, (_, size) in enumerate(self.batch))

    @property
    def lines(self) -> Axis:
        """The axis of the folds that numbers the mask's lines."""
        return Axis(axis_symbol(len(self.batch)), (self.column if self.turned else self.row).size)

    @property
    def along(self) -> Axis:
        """The axis along which the mask's lines are reduced."""
        return Axis(over_symbol(0), (self.row if self.turned else self.column).size)

    def canonical(self, condition: Expr | None = None) -> Expr:
        """Return the condition, or another one, over the axes of the line folds, equal for all readers of a mask."""
        chosen = dict(zip((index for index, _ in self.batch), (axis.symbol for axis in self.matrices), strict=True))

        def rule(node: Expr) -> Expr | None:
            if not isinstance(node, Load):
                return None
            index = tuple(each if isinstance(each, Expr) else chosen.get(each, each) for each in node.index)
            return Load(node.buffer, index, node.dtype)

        (part,) = rewrite([self.part if condition is None else condition], rule)
        sizes = {axis.symbol: axis.size for axis in (*self.matrices, self.lines, self.along)}
        line, along = (self.column, self.row) if self.turned else (self.row, self.column)
        return substitute(part, {line.symbol: self.lines.symbol, along.symbol: self.along.symbol}, sizes)

    def bounded(self, bounds: Sequence[str]) -> Expr:
        """Return the condition with its bounds, which are read from the results of `groups_of`."""
        matrix = tuple(index for index, _ in self.batch)
        group = (*matrix, FloorDiv(self.row.symbol, sympy.Integer(ROWS_PER_BOUND)))
        first, end, whole_first, whole_end = (Load(name, group, _INT) for name in bounds[:4])
        column, part = IndexValue(self.column.symbol, _INT), self.part
        if self.settled is not None:  # a line that hides every point: none of its numbers is ruled out
            line = self.column if self.turned else self.row
            part = make_op("or", part, make_op("eq", Load(bounds[4], (*matrix, line.symbol), _INT), _ZERO))
        return make_op("bounded", part, _between(first, column, end), _between(whole_first, column, whole_end))


@dataclass(frozen=True, slots=True)
class Folds:
    """Nodes that fold a mask, in order, and their results."""

    nodes: tuple[Map | Reduce, ...]
    device: torch.device

    @property
    def names(self) -> tuple[str, ...]:
        """The results, in the order of the nodes."""
        return tuple(node.out for node in self.nodes)

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        """The tensors of the results."""
        shapes = (tuple(axis.size for axis in node.axes) for node in self.nodes)
        return tuple(
            Buffer(name, _INT, shape, contiguous_strides(shape), self.device)
            for name, shape in zip(self.names, shapes, strict=True)
        )


def lines_of(mask: TileCondition, origin: str, device: torch.device, taken: Container[str]) -> Folds:
    """Return the nodes that fold the lines of a mask: to the first point that each shows, the end, and the count.

    Of a mask of added numbers also the same of the points at which these change nothing.

    Args:
        origin: a result that reads the mask; the names of the folds begin with it.
        device: of the folds.
        taken: names that are in use.
    """
    at, axes, over = IndexValue(mask.along.symbol, _INT), (*mask.matrices, mask.lines), (mask.along,)

    def folds(condition: Expr, prefix: str) -> tuple[Reduce, ...]:
        def fold(ending: str, op: FoldName, seen: Expr, hidden: Expr) -> Reduce:
            value = make_op("where", condition, seen, hidden)
            return Reduce(unused(f"{origin}_{prefix}{ending}", taken), axes, over, op, (value,), _INT)

        return (
            fold("first", "min", at, IndexValue(mask.along.size, _INT)),
            fold("end", "max", make_op("add", at, _ONE), _ZERO),
            fold("count", "sum", _ONE, _ZERO),
        )

    settled = () if mask.settled is None else folds(mask.canonical(mask.settled), "settled_")
    return Folds((*folds(mask.canonical(), ""), *settled), device)


def groups_of(mask: TileCondition, lines: Folds, origin: str, taken: Container[str]) -> tuple[Folds, tuple[str, ...]]:
    """Return the nodes that compute the bounds of groups of rows from the folds of lines, and operands of `bounded`.

    These are the first column that some row of a group sees, the end of these columns, the same of the columns that all
    of its rows see, and the count of each line.
    """
    group = Axis(mask.lines.symbol, FloorDiv(mask.row.size + ROWS_PER_BOUND - 1, sympy.Integer(ROWS_PER_BOUND)))
    fold = _Fold((*mask.matrices, group), mask, origin, taken)
    nodes = _of_columns(mask, lines.names, group, fold) if mask.turned else _of_rows(mask, lines.names, group, fold)
    return Folds(nodes, lines.device), (*(node.out for node in (*nodes[:2], *nodes[-2:])), lines.names[2])


@dataclass(frozen=True, slots=True)
class _Fold:
    """The axes and the names of the folds of groups."""

    axes: tuple[Axis, ...]
    mask: TileCondition
    origin: str
    taken: Container[str]

    def name(self, ending: str) -> str:
        """Return the name of a result."""
        return unused(f"{self.origin}_{'turned' if self.mask.turned else 'group'}_{ending}", self.taken)

    def over(self, axis: Axis, ending: str, op: FoldName, value: Expr) -> Reduce:
        """Return a reduction over `axis`."""
        return Reduce(self.name(ending), self.axes, (axis,), op, (value,), _INT)


def _of_rows(mask: TileCondition, lines: Sequence[str], group: Axis, fold: _Fold) -> tuple[Reduce, ...]:
    """Return the reductions of per-row bounds, in the buffers `lines`, to the bounds of groups of rows."""
    size = sympy.Integer(ROWS_PER_BOUND)
    member, length = Axis(over_symbol(0), size), IndexValue(mask.column.size, _INT)
    place = group.symbol * size + member.symbol
    full = bool((mask.row.size / size).is_integer)
    inside = None if full else make_op("lt", IndexValue(place), IndexValue(mask.row.size))
    index = (*(axis.symbol for axis in mask.matrices), place)
    numbers = [Load(name, index, _INT, inside) for name in lines]
    first, end = _or_all(mask, numbers)
    whole_first, whole_end, whole_count = numbers[-3:]
    whole = make_op("eq", make_op("sub", whole_end, whole_first), whole_count)

    def of(ending: str, op: FoldName, value: Expr, outside: Expr) -> Reduce:
        return fold.over(member, ending, op, value if inside is None else make_op("where", inside, value, outside))

    return (
        of("first", "min", first, length),
        of("end", "max", end, _ZERO),
        of("whole_first", "max", make_op("where", whole, whole_first, length), _ZERO),
        of("whole_end", "min", make_op("where", whole, whole_end, _ZERO), length),
    )


def _of_columns(mask: TileCondition, lines: Sequence[str], group: Axis, fold: _Fold) -> tuple[Map | Reduce, ...]:
    """Return the bounds of groups whose columns are lines; lines of which some columns are hidden see none whole."""
    line, size = Axis(over_symbol(0), mask.column.size), sympy.Integer(ROWS_PER_BOUND)
    index = (*(axis.symbol for axis in mask.matrices), line.symbol)
    numbers = [Load(name, index, _INT) for name in lines]
    first, end = _or_all(mask, numbers)
    whole_first, whole_end, whole_count = numbers[-3:]
    start, after = IndexValue(group.symbol * size, _INT), IndexValue(group.symbol * size + size, _INT)
    full = bool((mask.row.size / size).is_integer)
    stop = after if full else make_op("minimum", after, IndexValue(mask.row.size, _INT))
    at, length = IndexValue(line.symbol, _INT), IndexValue(line.size, _INT)
    behind = make_op("add", at, _ONE)
    meets = make_op("and", make_op("lt", first, stop), make_op("gt", end, start))
    contains = make_op("and", make_op("le", whole_first, start), make_op("ge", whole_end, stop))
    contains = make_op("and", contains, make_op("eq", make_op("sub", whole_end, whole_first), whole_count))

    def of(ending: str, op: FoldName, where: Expr, value: Expr, otherwise: Expr) -> Reduce:
        return fold.over(line, ending, op, make_op("where", where, value, otherwise))

    folds = (
        of("first", "min", meets, at, length),
        of("end", "max", meets, behind, _ZERO),
        of("containing_first", "min", contains, at, length),
        of("containing_end", "max", contains, behind, _ZERO),
        of("containing", "sum", contains, _ONE, _ZERO),
    )
    own = tuple(axis.symbol for axis in fold.axes)
    begin, close, number = (Load(node.out, own, _INT) for node in folds[2:])
    one_range = make_op("eq", make_op("sub", close, begin), number)
    whole = (
        Map(fold.name("whole_first"), fold.axes, make_op("where", one_range, begin, length)),
        Map(fold.name("whole_end"), fold.axes, make_op("where", one_range, close, _ZERO)),
    )
    return (*folds, *whole)


def _or_all(mask: TileCondition, numbers: Sequence[Expr]) -> tuple[Expr, Expr]:
    """Return the first point that a line shows, and the end: of a line of added numbers without one, all its points."""
    first, end, count = numbers[:3]
    if mask.settled is None:
        return first, end
    empty = make_op("eq", count, _ZERO)
    return make_op("where", empty, _ZERO, first), make_op("where", empty, IndexValue(mask.along.size, _INT), end)


def _between(first: Expr, point: Expr, end: Expr) -> Expr:
    return make_op("and", make_op("ge", point, first), make_op("lt", point, end))
