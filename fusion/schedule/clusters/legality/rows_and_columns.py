"""Joins folds of rows and sums of columns of one matrix in one loop over the rows.

A kernel of rows spreads them over programs and folds each along its columns; a kernel that sums columns spreads these
and folds the rows.  Where both read the same matrix, a program can hold one row whole: it folds the row, stores the
results of the row, and adds it to running sums of all columns; then it continues with the next row of its part.  The
gradients of a norm are such a pair: the input's gradient needs two folds of each row, the gradients of weight and bias
are sums of columns.

Input: the cluster of the columns, whose rows are divided into parts (`reductions/column_sums.py`), and the cluster of
the rows; output: the joined cluster, in the space of the columns with the columns held, or the reason why there is
none.  The last part may be shorter than the others: then the sums read their rows under a condition, and the rest of
the kernel gets the same one (`Space.where`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import sympy

from fusion.codegen.target import Capabilities
from fusion.lowering.indexing import coefficient, replace_axes, simplify, substitute_all, within
from fusion.lowering.ir.expr import Expr, IndexValue, Load, Op, loads
from fusion.lowering.ir.program import Axis, Compute, Map, Node, Program, Reduce
from fusion.schedule.clusters.legality.cluster import CannotJoin, Cluster
from fusion.schedule.clusters.legality.joined import unspanned
from fusion.schedule.clusters.legality.pairs import ClusterPair, not_empty, same_device, small_enough
from fusion.schedule.clusters.legality.placing import placed_in
from fusion.schedule.iteration.contiguity import reads_contiguously
from fusion.schedule.iteration.dependences import Dependences
from fusion.schedule.iteration.space import Placement, Space, fresh

_OTHER_ROWS = "the rows of one are not the rows that the other adds"


def sums_columns(dependences: Dependences, cluster: Cluster) -> bool:
    """Return whether a cluster adds rows, or maps of them, across memory, and nothing in it needs a sum."""
    program = dependences.program
    nodes = {member: dependences.node(member) for member in cluster.members}
    sums = {dependences.outs[member] for member, node in nodes.items() if isinstance(node, Reduce)}
    space = cluster.space
    return (
        bool(space.reduced and space.parallel)
        and not (space.rigid or space.held)
        and all(isinstance(node, Map) or _sums_across(program, node) for node in nodes.values())
        and not any(dependences.read[member] & sums for member in cluster.members)
    )


def _sums_across(program: Program, node: Node) -> bool:
    return isinstance(node, Reduce) and node.op == "sum" and not reads_contiguously(program, node, node.over)


def folds_rows(dependences: Dependences, cluster: Cluster) -> bool:
    """Return whether a cluster folds rows, and computes maps beside; it may sum columns already."""
    nodes = [dependences.node(member) for member in cluster.members]
    space = cluster.space
    return (
        bool(space.reduced and space.parallel)
        and not (space.rigid or (space.held and not space.folds_both_ways))
        and all(isinstance(node, (Map, Reduce)) for node in nodes)
    )


def join_rows_and_columns(
    dependences: Dependences, capabilities: Capabilities, columns: Cluster, rows: Cluster
) -> Cluster | CannotJoin:
    """Return the cluster that holds each of `rows` and adds it to the sums of `columns`, or why there is none."""
    pair = ClusterPair(dependences, capabilities, columns, rows, tuple(sorted((*columns.members, *rows.members))))
    for rule in (same_device, small_enough, not_empty):
        reason = rule(pair)
        if reason is not None:
            return CannotJoin(reason)
    if rows.space.folds_both_ways:
        return _added(dependences, columns, rows, pair.members)
    placed = next(_placements(dependences, columns, rows), None)
    if placed is None:
        return CannotJoin(_OTHER_ROWS)
    common, places, held = placed
    sizes = common.sizes
    width = sympy.Mul(*(sizes[axis] for axis in held))
    if not width.is_Integer or width > capabilities.held_row:
        return CannotJoin(f"the rows are longer than the {capabilities.held_row} elements that a program holds")
    condition = _condition(dependences, columns, places, common)
    if isinstance(condition, str):
        return CannotJoin(condition)
    where = None if condition is None else condition.where
    joined = Cluster(pair.members, Space(common.parallel, common.reduced, held=held, where=where), places)
    reason = _rows_stay_whole(dependences, joined, rows, condition) or _reads_agree(dependences, joined, columns)
    return joined if reason is None else CannotJoin(reason)


def _placements(
    dependences: Dependences, columns: Cluster, rows: Cluster
) -> Iterator[tuple[Space, dict[int, Placement], frozenset[sympy.Symbol]]]:
    """Yield the space of the columns with placements of all members in it, and the axes that the rows reduce."""
    for first, second, buffer in _common(dependences, columns, rows):
        placed = placed_in(dependences, columns, rows, first, second, buffer)
        if isinstance(placed, str):
            continue
        parallel = {axis.symbol for axis in placed[0].parallel}
        folds = [member for member in rows.members if isinstance(dependences.node(member), Reduce)]
        held = _reduced(dependences, placed[1], folds)
        if folds and held and held < parallel:
            yield *placed, held


def _common(dependences: Dependences, columns: Cluster, rows: Cluster) -> Iterator[tuple[int, int, str]]:
    """Yield (member of `columns`, member of `rows`, tensor) for each tensor that both members read or write."""
    for first in columns.members:
        for second in rows.members:
            sides = [dependences.read[member] | {dependences.outs[member]} for member in (first, second)]
            yield from ((first, second, buffer) for buffer in sorted(sides[0] & sides[1]))


def _reduced(dependences: Dependences, places: dict[int, Placement], folds: list[int]) -> frozenset[sympy.Symbol]:
    """Return the axes over which all of `folds` run; empty if they run over different ones, or a part of an axis."""
    over: set[frozenset[sympy.Basic]] = set()
    for fold in folds:
        node = dependences.node(fold)
        assert isinstance(node, Reduce)
        if fold not in places:
            return frozenset()
        at = [places[fold][axis.symbol] for axis in node.over if axis.size != 1]
        over.add(frozenset(at) if all(isinstance(index, sympy.Symbol) for index in at) else frozenset())
    return frozenset(s for s in next(iter(over)) if isinstance(s, sympy.Symbol)) if len(over) == 1 else frozenset()


@dataclass(frozen=True, slots=True)
class _Condition:
    """The points of a space that belong to rows: where the number of the row is less than their number."""

    where: Expr
    row: sympy.Expr
    rows: sympy.Expr


def _condition(
    dependences: Dependences, columns: Cluster, places: dict[int, Placement], space: Space
) -> _Condition | str | None:
    """Return the condition under which all sums read their rows; None if it is unconditional."""
    conditions: set[Expr | None] = set()
    along = {axis.symbol for axis in space.reduced}
    for member in columns.members:
        if isinstance(dependences.node(member), Reduce):
            for arg in substitute_all(dependences.compute(member).exprs, places[member], space.sizes):
                read = (load for load in loads(arg) if _symbols(load) & along)
                conditions.update(load.mask for load in read)
    if conditions <= {None}:
        return None
    where = next(iter(conditions))
    match where:
        case Op(name="lt", args=(IndexValue(index=row), IndexValue(index=rows))) if len(conditions) == 1:
            return _Condition(where, row, rows) if _numbers_rows(row, space) else _OTHER_ROWS
    return "the sums of columns have conditions of their own"


def _symbols(load: Load) -> set[sympy.Basic]:
    return {symbol for index in load.index if not isinstance(index, Expr) for symbol in index.free_symbols}


def _numbers_rows(row: sympy.Expr, space: Space) -> bool:
    """Return whether each point of the parts, and of the rows in a part, has its own number: `part * length + row`."""
    looped = [axis for axis in space.reduced if axis.size != 1]
    if len(looped) != 1 or coefficient(row, looped[0].symbol) != 1:
        return False
    rest = sympy.expand(row - looped[0].symbol)
    spread = [axis for axis in space.parallel if axis.symbol in rest.free_symbols]
    if len(spread) != 1:
        return False
    return sympy.expand(rest - spread[0].symbol * looped[0].size) == 0


def _rows_stay_whole(
    dependences: Dependences, joined: Cluster, rows: Cluster, condition: _Condition | None
) -> str | None:
    """Refuse clusters unless one program holds each row, once, and stores each of its results once."""
    together = frozenset(joined.members)
    space, change = joined.space, dict[sympy.Expr, sympy.Expr]()
    if condition is not None:  # in place of the parts, and rows of parts: the rows, which these enumerate
        row = fresh("n", space.sizes)
        held = (axis for axis in space.parallel if axis.symbol in space.held)
        space, change = Space((Axis(row, condition.rows), *held), (), held=space.held), {condition.row: row}
    for member in rows.members:
        node, placement = dependences.compute(member), joined.places.get(member)
        if placement is None:
            if dependences.stored(member, together):
                return "a tensor is needed elsewhere too, and is read here at other points than it is computed"
            continue
        at = {axis: simplify(index.xreplace(change), space.sizes) for axis, index in placement.items()}
        reason = _row_of(node, at, space, stored=dependences.stored(member, together))
        if reason is not None:
            return reason
    return None


def _row_of(node: Compute, at: Placement, space: Space, *, stored: bool) -> str | None:
    """Return why a node at these indices is not a value of one row, or of each of its elements; None if it is."""
    sizes = space.sizes
    if not all(within(at[axis.symbol], axis.size, sizes) for axis in node.axes):
        return "the last part of the rows is shorter than the others"
    if isinstance(node, Reduce):
        if any(at[axis.symbol].free_symbols & space.held for axis in node.axes):
            return "a fold of a row is read along the row"
        lengths = dict[sympy.Expr, sympy.Expr](sizes.items())
        if any(axis.size not in (1, lengths.get(at[axis.symbol])) for axis in node.over):
            return "a row is a part of what the program holds"
    if isinstance(node, Reduce) or stored:
        missing = unspanned(node, at, space)
        spanned = {symbol for axis in node.axes for symbol in at[axis.symbol].free_symbols}
        points = sympy.Mul(*(size for axis, size in sizes.items() if axis in spanned))
        if missing is None or not missing <= space.held or points != sympy.Mul(*(axis.size for axis in node.axes)):
            return "a result of a row would be stored by several programs"
    return None


def _reads_agree(dependences: Dependences, joined: Cluster, columns: Cluster) -> str | None:
    """Check that values of a row are read where they were computed, and sums of columns by no row."""
    by_out = {dependences.outs[member]: member for member in joined.members}
    sums = {dependences.outs[m] for m in columns.members if isinstance(dependences.node(m), Reduce)}
    for member in joined.members:
        placement = joined.places.get(member)
        for load in dependences.loads[member]:
            if load.buffer in sums:
                return "a sum of columns is complete only after the last row"
            if load.buffer in by_out and (placement is None or not _here(dependences, joined, load, placement)):
                return "a value of a row is read at another point than its own"
    return None


def _here(dependences: Dependences, joined: Cluster, load: Load, placement: Placement) -> bool:
    producer = dependences.writer[load.buffer]
    there = joined.places.get(producer)
    if there is None:
        return False
    for axis, index in zip(dependences.compute(producer).axes, load.index, strict=True):
        moved = index if isinstance(index, Expr) else replace_axes(index, placement, joined.space.sizes)
        if isinstance(moved, Expr) or (moved != there[axis.symbol] and axis.size != 1):
            return False
    return True


# More sums ------------------------------------------------------------------------------------------------------------


def _added(dependences: Dependences, columns: Cluster, rows: Cluster, members: tuple[int, ...]) -> Cluster | CannotJoin:
    """Add the column sums of `columns` to `rows`, which sums columns already, over the same parts of the same rows."""
    space = replace(rows.space, where=None)
    for first, second, buffer in _common(dependences, columns, rows):
        placed = placed_in(dependences, replace(rows, space=space), columns, second, first, buffer)
        if isinstance(placed, str) or placed[0] != space:
            continue
        joined = Cluster(members, rows.space, placed[1])
        own = ((dependences.compute(member), placed[1].get(member)) for member in columns.members)
        whole = all(at is not None and _spans(node, at, rows.space) for node, at in own)
        condition = _condition(dependences, columns, placed[1], space) if whole else _OTHER_ROWS
        where = condition.where if isinstance(condition, _Condition) else condition
        if where is rows.space.where and _reads_agree(dependences, joined, columns) is None:
            return joined
    return CannotJoin(_OTHER_ROWS)


def _spans(node: Compute, placement: Placement, space: Space) -> bool:
    """Return whether a map has a value for each point, or a sum one for each column and part, of all its rows."""
    looped = {axis.symbol: axis.size for axis in space.reduced if axis.size != 1}
    if not isinstance(node, Reduce):
        return unspanned(node, placement, space) == set()
    over = {placement[axis.symbol]: axis.size for axis in node.over if axis.size != 1}
    return unspanned(node, placement, space) == set(looped) and over == looped
