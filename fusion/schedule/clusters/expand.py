"""Expands a cluster into the expressions that it evaluates, over the axes of its space.

Input: a cluster; output: its folds in order and its stores, in which members appear no more: each was replaced by its
value (where reader and producer meet at the same point) or by its own expression at the index where it is read.
Interning makes a shared expression one object again, so nothing is computed twice.  A stored value, or one whose copy
is stored, is rounded before anything is computed from it here: a row from one kernel and its mean from another have to
fit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import sympy
from typing_extensions import assert_never

from fusion.lowering.algebra.hoist import Hoisted, hoist
from fusion.lowering.algebra.implied_conditions import simplify_implied
from fusion.lowering.indexing import Sizes, flatten, substitute, substitute_all
from fusion.lowering.ir.expr import (
    Expr,
    Index,
    IndexValue,
    Load,
    Op,
    TileRef,
    as_stored,
    checked_where,
    free_axes,
    guarded,
    make_cast,
    make_op,
    postorder,
    rewrite,
)
from fusion.lowering.ir.kernel import Fold, Prefix
from fusion.lowering.ir.program import Contract, Map, Reduce, Scan, Scatter, with_exprs
from fusion.lowering.ir.scalar_ops import CHECKED, ScatterName
from fusion.schedule.clusters.legality import Cluster
from fusion.schedule.iteration.dependences import Dependences
from fusion.schedule.iteration.space import Placement

FLAT = "@"


@dataclass(frozen=True, slots=True)
class Write:
    """One output of a cluster: the buffer, the offset in elements, the value.

    For a scatter also its operation, its axes in terms of the space's axes, and its condition.
    """

    buffer: str
    offset: Index
    value: Expr
    op: ScatterName = "store"
    points: tuple[sympy.Expr, ...] | None = None
    where: Expr | None = None


@dataclass(frozen=True, slots=True)
class Expanded:
    """The expressions of a cluster: folds in order, then writes; prefixes, in order, precede their first use.

    Loads are of buffers outside of the cluster, called `@name`, at flat offsets; loads without the sign are unresolved.
    """

    folds: tuple[Fold, ...]
    writes: tuple[Write, ...]
    prefixes: tuple[Prefix, ...] = ()

    @property
    def values(self) -> tuple[Expr, ...]:
        """All evaluated expressions: operands of folds and prefixes, written values, and conditions of writes."""
        args = [
            *(arg for fold in self.folds for arg in fold.args),
            *(arg for scan in self.prefixes for arg in scan.args),
        ]
        held = (write.where for write in self.writes if write.where is not None)
        return (*args, *(write.value for write in self.writes), *held)

    def simplified(self, sizes: Sizes) -> Expanded:
        """Return it with conditions decided by the choices around them; `sizes`: the sizes of its axes."""
        roots = [*self.values]
        decided = dict(zip(roots, simplify_implied(roots, sizes), strict=True))
        if all(old is new for old, new in decided.items()):
            return self

        def each(args: Sequence[Expr]) -> tuple[Expr, ...]:
            return tuple(decided[arg] for arg in args)

        return _without_dead_folds(
            Expanded(
                tuple(replace(fold, args=each(fold.args)) for fold in self.folds),
                tuple(
                    replace(write, value=decided[write.value], where=write.where and decided[write.where])
                    for write in self.writes
                ),
                tuple(replace(scan, args=each(scan.args)) for scan in self.prefixes),
            )
        )

    @property
    def offsets(self) -> tuple[Expr, ...]:
        """The data-dependent offsets of writes."""
        return tuple(write.offset for write in self.writes if isinstance(write.offset, Expr))


def expand(dependences: Dependences, cluster: Cluster, *, grown: bool = True, hoists: bool = True) -> Expanded:
    """Evaluate the members of `cluster` symbolically.

    Args:
        grown: whether its members are final; while it may still grow, only values that are stored anyway are rounded.
        hoists: whether a factor of an operand may be applied to the product instead.
    """
    return _without_dead_folds(_Expansion(dependences, cluster, grown=grown, hoists=hoists).run())


def _without_dead_folds(expanded: Expanded) -> Expanded:
    """Remove folds that no stored value needs: the position in a dimension of one element is known."""
    kept: list[Fold] = []
    roots = [*expanded.values[sum(len(fold.args) for fold in expanded.folds) :], *expanded.offsets]
    named = {node.name for node in postorder(*roots) if isinstance(node, TileRef)}
    for fold in reversed(expanded.folds):
        if fold.name in named:
            kept.append(fold)
            named.update(node.name for node in postorder(*fold.args) if isinstance(node, TileRef))
    return expanded if len(kept) == len(expanded.folds) else replace(expanded, folds=tuple(reversed(kept)))


def values_of(dependences: Dependences, cluster: Cluster) -> tuple[tuple[Fold, ...], Mapping[str, Expr]]:
    """Return the folds of `cluster`, and the value of each of its placed members, by buffer.

    As in `expand` with `grown=False`, but loads from outside keep their buffer's name and one index per dimension.
    """
    expansion = _Expansion(dependences, cluster, flat=False, grown=False)
    return expansion.run().folds, expansion.values


def _symbols(axes: Iterable[sympy.Symbol], placement: Placement) -> tuple[sympy.Symbol, ...]:
    """Return the axes of the cluster's space in which the node's `axes` are expressed, in order."""
    symbols = (symbol for axis in axes for symbol in sorted(placement[axis].free_symbols, key=str))
    return tuple(dict.fromkeys(symbols))


class _Expansion:
    """Evaluates the members of a cluster in order, each from the values of its predecessors."""

    def __init__(
        self,
        dependences: Dependences,
        cluster: Cluster,
        *,
        flat: bool = True,
        grown: bool = True,
        hoists: bool = True,
    ) -> None:
        self.dependences, self.flat, self.hoists = dependences, flat, hoists
        self.cluster = cluster
        self.sizes = cluster.space.sizes
        self.spread = {axis.symbol for axis in cluster.space.parallel} - cluster.space.held
        self.together = frozenset(cluster.members)
        self.rounded = dependences.rounded(self.together) if grown else dependences.rounded_anyway
        self.inside = {dependences.compute(m).out: m for m in cluster.members}
        self.values: dict[str, Expr] = {}
        self.inlined: dict[Load, Expr] = {}
        self.spans: dict[str, frozenset[sympy.Symbol]] = {}  # fold → the axes its value varies over
        self.folds: list[Fold] = []
        self.prefixes: list[Prefix] = []
        self.writes: list[Write] = []

    def run(self) -> Expanded:
        for member in self.cluster.members:
            placement = self.cluster.places.get(member)
            if placement is None:
                continue
            node = self.dependences.compute(member)
            exprs = tuple(self._of_rows(self._resolve(e)) for e in substitute_all(node.exprs, placement, self.sizes))
            if isinstance(node, Scatter):
                self.writes.append(self._scattered(node, exprs, placement))
                continue
            value = self._value(node, exprs, placement)
            if member in self.rounded:
                value = as_stored(value)
            if self.dependences.stored(member, self.together):
                index = tuple(placement[axis.symbol] for axis in node.axes)
                offset = flatten(index, self.dependences.program.buffers[node.out].strides, self.sizes)
                where = self.cluster.space.where
                looped = {axis.symbol for axis in self.cluster.space.reduced}
                if where is not None and not isinstance(offset, Expr) and offset.free_symbols & looped:
                    self.writes.append(Write(node.out, offset, value, points=index, where=where))
                else:
                    self.writes.append(Write(node.out, offset, value))
            self.values[node.out] = value
        return Expanded(tuple(self.folds), tuple(self.writes), tuple(self.prefixes))

    def _value(self, node: Map | Reduce | Scan | Contract, exprs: tuple[Expr, ...], placement: Placement) -> Expr:
        """Return the value of `node` at a point of the cluster; add its fold or prefix."""
        match node:
            case Map():
                return exprs[0]
            case Contract():
                return self._contracted(node, exprs, placement)
            case Scan():
                along = placement[node.along]
                assert isinstance(along, sympy.Symbol), "a scan is placed along an axis"
                prefix = Prefix(f"running_{node.op}{len(self.prefixes)}", node.op, exprs, along, node.dtype)
                self.prefixes.append(prefix)
                self.spans[prefix.name] = self._spanned(*exprs) | {along}
                return prefix.ref
            case Reduce():
                return self._reduced(node, exprs, placement)
            case _:
                assert_never(node)

    def _reduced(self, node: Reduce, exprs: tuple[Expr, ...], placement: Placement) -> Expr:
        """Return the fold of a reduction: over the cluster's reduced axes, or over its own where rows are held."""
        over = tuple(axis.symbol for axis in self.cluster.space.reduced)
        if self.cluster.space.folds_both_ways:
            over = _symbols((axis.symbol for axis in node.over), placement)
        if not over:  # of one element
            return make_cast(exprs[-1], node.dtype)
        fold = Fold(f"{node.op}{len(self.folds)}", node.op, exprs, over, node.dtype)
        self.folds.append(fold)
        self.spans[fold.name] = self._spanned(*exprs) - {*over}
        return fold.ref

    def _contracted(self, node: Contract, exprs: tuple[Expr, ...], placement: Placement) -> Expr:
        """Return a contraction as a fold, with its rows spread over programs, times its hoisted factors."""
        left, right = map(self._spanned, exprs)
        kept = _symbols((axis.symbol for axis in node.axes), placement)
        named = ({*_symbols(node.rows, placement)} | left, {*_symbols(node.columns, placement)} | right)
        rows = tuple(axis for axis in kept if axis in named[0] - right)  # a part of a batch axis may be one
        columns = tuple(axis for axis in kept if axis in named[1] - left)
        own = _symbols((axis.symbol for axis in node.over), placement)
        if self.spread.intersection(columns) and not self.spread.intersection(rows):
            exprs, rows, columns = exprs[::-1], columns, rows
        hoisted = self._hoisted(exprs, own)
        fold = Fold(f"dot{len(self.folds)}", "dot", hoisted.operands, own, node.accumulate, rows, columns)
        self.folds.append(fold)
        self.spans[fold.name] = (left | right) - {*own}
        dtype = self.dependences.program.buffers[node.out].dtype
        return make_cast(hoisted.summed(fold.ref), dtype, implicit=True)

    def _scattered(self, node: Scatter, exprs: Sequence[Expr], placement: Placement) -> Write:
        moved = with_exprs(node, exprs)
        assert isinstance(moved, Scatter)
        index = [place.index if isinstance(place, IndexValue) else place for place in moved.index]
        offset = flatten(index, self.dependences.program.buffers[node.out].strides, self.sizes)
        points = tuple(placement[axis.symbol] for axis in node.axes)
        return Write(node.out, offset, moved.value, node.op, points, moved.where)

    def _hoisted(self, operands: tuple[Expr, ...], own: tuple[sympy.Symbol, ...]) -> Hoisted:
        """Hoist factors out of a product; in a chain only out of one in the loop, and only factors without folds."""
        if not self.hoists:
            return Hoisted(operands)
        if not self.cluster.space.chained:
            return hoist(operands, own)
        if not {*own} <= {axis.symbol for axis in self.cluster.space.reduced} | self.cluster.space.outer:
            return Hoisted(
                operands
            )  # computed where it is read, in every block: a factor is applied to an operand once
        hoisted = hoist(operands, own)
        followed = any(isinstance(node, TileRef) for _, factor in hoisted.scales for node in postorder(factor))
        return Hoisted(operands) if followed else hoisted

    def _spanned(self, *exprs: Expr) -> frozenset[sympy.Symbol]:
        """Return the axes that the values of `exprs` vary over."""
        refs = {node.name for node in postorder(*exprs) if isinstance(node, TileRef)}
        return free_axes(*exprs).union(*(self.spans[name] for name in refs))

    def _of_rows(self, expr: Expr) -> Expr:
        """Return `expr` with its loads and checks along the rows masked beyond the last row."""
        where = self.cluster.space.where
        if where is None:
            return expr
        along = free_axes(where)

        def rule(node: Expr) -> Expr | None:
            if isinstance(node, Op) and node.name == CHECKED:
                return checked_where(node, where)
            if not isinstance(node, Load) or along.isdisjoint(free_axes(node)) or node.mask is where:
                return None
            mask = where if node.mask is None else make_op("and", where, node.mask)
            return Load(node.buffer, node.index, node.dtype, mask)

        return rewrite([expr], rule)[0]

    def _resolve(self, expr: Expr) -> Expr:
        """Return `expr` with members replaced by their values, and flat offsets in all other loads."""

        def rule(node: Expr) -> Expr | None:
            if not isinstance(node, Load) or node.buffer.startswith(FLAT):
                return None
            member = self.inside.get(node.buffer)
            if member is None:
                if not self.flat:
                    return None
                buffer = self.dependences.program.buffers[node.buffer]
                offset = flatten(node.index, buffer.strides, self.sizes)
                return Load(f"{FLAT}{node.buffer}", (offset,), node.dtype, node.mask)
            if self._here(member, node.index):
                value = self.values[node.buffer]
                return value if node.mask is None else guarded(value, node.mask)
            if node not in self.inlined:
                self.inlined[node] = self._inline(member, node)
            return self.inlined[node]

        return rewrite([expr], rule)[0]

    def _here(self, member: int, index: tuple[Index, ...]) -> bool:
        placement = self.cluster.places.get(member)
        if placement is None:
            return False
        axes = self.dependences.compute(member).axes
        return all(placement[axis.symbol] == i or axis.size == 1 for axis, i in zip(axes, index, strict=True))

    def _inline(self, member: int, load: Load) -> Expr:
        node = self.dependences.compute(member)
        assert isinstance(node, Map), "only maps are read at other points than their own"
        at = {axis.symbol: index for axis, index in zip(node.axes, load.index, strict=True)}
        value = self._resolve(substitute(node.expr, at, self.sizes))
        if member in self.rounded:
            value = as_stored(value)
        return value if load.mask is None else guarded(value, load.mask)
