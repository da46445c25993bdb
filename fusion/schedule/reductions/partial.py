"""Cuts the folds of a cluster into partial folds along an axis, and merges the parts.

Input: a cluster with a reduced axis, and the number and length of the parts of that axis; output: nodes that replace
its own.  Each fold is computed for each part, with the part as one more parallel axis, and merged by an ordinary
reduction over the parts.  A fold that needs the result of another one over the same axis takes the result of its own
part, and is corrected to the merged result as its online form is in a loop (`online.merge`).  The nodes after the folds
follow the merge.

Where the parts do not end with the axis, folds see their identity behind its end.  A part may have one point of other
reduced axes, too: then there is a part for each of their points.

Inseparable, by None: folds without an online form, and folds of positions.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import sympy
import torch

from fusion.lowering.algebra.dead_code import eliminate_dead_code
from fusion.lowering.indexing import axis_symbol, invert, over_symbol, substitute_all
from fusion.lowering.ir.expr import (
    Expr,
    IndexValue,
    Load,
    Op,
    TileRef,
    checked_where,
    const,
    free_axes,
    guarded,
    make_cast,
    make_op,
    postorder,
    rewrite,
)
from fusion.lowering.ir.kernel import Fold
from fusion.lowering.ir.program import Axis, Buffer, Contract, Map, Node, Program, Reduce, with_exprs, writes
from fusion.lowering.ir.scalar_ops import CHECKED, identity
from fusion.lowering.value import contiguous_strides
from fusion.schedule.clusters.alternatives import Alternative
from fusion.schedule.clusters.expand import values_of
from fusion.schedule.clusters.legality import Cluster
from fusion.schedule.iteration.dependences import Dependences
from fusion.schedule.iteration.naming import unused
from fusion.schedule.iteration.space import Placement, Space, fresh, place
from fusion.schedule.online import Online, online
from fusion.schedule.online.centred import about_means
from fusion.schedule.online.merge import MERGEABLE, contribution, merged_op
from fusion.schedule.reductions.one_loop import follow, replaced


@dataclass(frozen=True, slots=True)
class ClusterCut:
    """A cluster in parts.

    Attributes:
        instead: position in the program → the nodes that replace the one there.
        buffers: the buffers that these add, with the buffer whose origin each has.
        took: buffer → the operations that its computation includes now, by their buffers.
        space, places: the loop of one part; placements by the buffer that a node writes.
        count: the number of parts.
        reads_again: whether a part has to be read once more, as its folds need others of it.
    """

    instead: Mapping[int, tuple[Node, ...]]
    buffers: tuple[tuple[Buffer, str], ...]
    took: Mapping[str, tuple[str, ...]]
    space: Space
    places: Mapping[str, Placement]
    count: int
    reads_again: bool


def cut_cluster(
    dependences: Dependences,
    cluster: Cluster,
    axis: Axis,
    length: sympy.Expr,
    count: int,
    *,
    apart: Collection[Axis] = (),
    again: bool = False,
) -> ClusterCut | None:
    """Return the nodes of `cluster` with its reduced `axis` in `count` parts of `length`; None if its folds refuse.

    Args:
        apart: other reduced axes, of which a part has one point.
        again: whether folds of a part may need others of it, as deviations need its mean; then one loop is not enough.
    """
    return _Cutting(dependences, cluster, axis, length, count, apart=apart, again=again).run()


def with_cuts(program: Program, cuts: Sequence[ClusterCut | Alternative]) -> Program:
    """Replace nodes of `program` by the nodes of cuts or alternatives, and drop nodes that are not read any more."""
    instead = {position: nodes for each in cuts for position, nodes in each.instead.items()}
    nodes = [new for position, node in enumerate(program.nodes) for new in instead.get(position, (node,))]
    buffers = [pair for each in cuts for pair in each.buffers]
    edited = program.edited(
        nodes,
        buffers=[buffer for buffer, _ in buffers],
        origins={buffer.name: original for buffer, original in buffers},
        inlined={out: names for each in cuts for out, names in each.took.items()},
    )
    apart = edited.apart.union(*(each.apart for each in cuts if isinstance(each, Alternative)))
    return eliminate_dead_code(replace(edited, apart=apart))


class _Cutting:
    def __init__(
        self,
        dependences: Dependences,
        cluster: Cluster,
        axis: Axis,
        length: sympy.Expr,
        count: int,
        *,
        apart: Collection[Axis],
        again: bool,
    ) -> None:
        self.dependences, self.cluster, self.axis_cut, self.length = dependences, cluster, axis, length
        self.again, self.reads_again = again, False
        self.part = Axis(fresh("p", cluster.space.sizes), sympy.Integer(count))
        self.numbers = self.part, *apart  # the axes of the parts
        self.ragged = length * count != axis.size
        held = cluster.space.held
        spread = (axis for axis in cluster.space.parallel if axis.symbol not in held)
        self.space = replace(
            cluster.space,
            parallel=(*spread, *self.numbers, *(axis for axis in cluster.space.parallel if axis.symbol in held)),
            reduced=tuple(Axis(a.symbol, length) if a is axis else a for a in cluster.space.reduced if a not in apart),
        )
        self.after = self._after()
        self.instead: dict[int, tuple[Node, ...]] = {}
        self.buffers: list[tuple[Buffer, str]] = []
        self.places: dict[str, Placement] = {}
        self.parts: dict[str, Load] = {}  # accumulator → its value in a part, over the axes of the space
        self.wholes: dict[str, Load] = {}  # accumulator → its merged value

    def _after(self) -> list[int]:
        """Return the members that reduce over the cut axis, and their dependents: all but tiles."""
        members_after: list[int] = []
        results: set[str] = set()
        for member in self.cluster.members:
            node, at = self.dependences.compute(member), self.cluster.places[member]
            own = any(self.axis_cut.symbol in at[axis.symbol].free_symbols for axis in node.over)
            if own or any(load.buffer in results for load in self.dependences.loads[member]):
                members_after.append(member)
                results.add(node.out)
        return members_after

    def run(self) -> ClusterCut | None:
        after = {member: self.cluster.places[member] for member in self.after}
        folds, values = values_of(self.dependences, Cluster(tuple(self.after), self.cluster.space, after))
        followed = follow(folds, [axis.symbol for axis in self.space.reduced], (), self._form)
        if isinstance(followed, str) or any(fold.op not in MERGEABLE for fold in followed.running.values()):
            return None
        makers = [member for member in self.after if not isinstance(self.dependences.node(member), Map)]
        maker = dict(zip((fold.name for fold in folds), makers, strict=True))
        for fold in followed.running.values():
            member = maker[fold.name if fold.name in maker else fold.name.rpartition("_")[0]]
            direct = fold.name in maker and followed.results[fold.name] == fold.ref
            self._put(member, *self._accumulated(fold, member, direct))
        for member in self._needed():
            value = replaced([values[self.dependences.compute(member).out]], followed.results)[0]
            if any(whole.buffer == self.dependences.compute(member).out for whole in self.wholes.values()):
                continue
            result = self._result(member, value)
            if result is None:
                return None
            self._put(member, result)
        for member in self.cluster.members:
            if member not in after and not self._tile(member):
                return None
        return ClusterCut(
            self.instead,
            tuple(self.buffers),
            self._took(),
            self.space,
            self.places,
            int(self.part.size),
            self.reads_again,
        )

    def _form(self, fold: Fold, running: Mapping[str, Fold]) -> Online | str:
        """Return the accumulators of `fold` in a part."""
        form = online(fold, running)
        centred = about_means(fold, running, self._points(fold.dtype)) if isinstance(form, str) and self.again else None
        self.reads_again |= centred is not None
        return centred or form

    def _points(self, dtype: torch.dtype) -> Expr:
        """Return the number of points of a part."""
        rows = sympy.Mul(*(axis.size for axis in self.space.reduced if axis.symbol != self.axis_cut.symbol))
        points, remaining = rows * self.length, rows * (self.axis_cut.size - self.length * self.part.symbol)
        if not self.ragged:
            return const(int(points), dtype) if points.is_Integer else make_cast(IndexValue(points), dtype)
        most = make_op("minimum", IndexValue(points), IndexValue(remaining))
        return make_cast(make_op("maximum", most, const(0, torch.int64)), dtype)

    def _took(self) -> dict[str, tuple[str, ...]]:
        """Credit the original operations of folds and removed maps to the first node that replaces or follows them."""
        operations: dict[str, tuple[str, ...]] = {}
        names: tuple[str, ...] = ()
        for member in self.after:
            out, nodes = self.dependences.compute(member).out, self.instead.get(member)
            if nodes is None:
                continue  # it is unchanged
            names += self.dependences.program.inlined.get(out, ())
            if not nodes:
                names += (out,)
                continue
            operations |= {out: (), writes(nodes[0])[0]: names}
            names = ()
        return operations

    def _put(self, member: int, *nodes: Node) -> None:
        self.instead[member] = (*self.instead.get(member, ()), *nodes)

    def _needed(self) -> list[int]:
        """Return the members after the folds whose values are needed in memory, without unchanged ones.

        A map that varies along the cut axis, and is needed, is computed from merged results.
        """
        needed: list[int] = []
        stays: set[int] = set()
        cut = {self.axis_cut.symbol, *(axis.symbol for axis in self.numbers)}
        for member in reversed(self.after):
            node, at = self.dependences.compute(member), self.cluster.places[member]
            readers = self.dependences.readers.get(node.out, ())
            if not self.dependences.stored(member, self.cluster.members) and not stays.intersection(readers):
                self.instead.setdefault(member, ())
            elif any(at[axis.symbol].free_symbols & cut for axis in node.axes):
                stays.add(member)
            else:
                needed.append(member)
        return needed[::-1]

    # Tiles ------------------------------------------------------------------------------------------------------------

    def _tile(self, member: int) -> bool:
        """Place a tile, extended to a multiple of the length; False if that is impossible."""
        node, at = self.dependences.compute(member), self.cluster.places[member]
        sizes = self.space.sizes
        position = {self.axis_cut.symbol: self.part.symbol * self.length + self.axis_cut.symbol}
        self.places[node.out] = {axis: place(expr, position, sizes) for axis, expr in at.items()}
        long = [axis for axis in node.axes if self.axis_cut.symbol in at[axis.symbol].free_symbols]
        if not self.ragged or not long:
            return True
        if len(long) > 1 or at[long[0].symbol] != self.axis_cut.symbol or not isinstance(node, (Map, Contract)):
            return False
        inside = _below(long[0].symbol, self.axis_cut.size)
        size = self.length * self.part.size
        axes = tuple(Axis(axis.symbol, size) if axis is long[0] else axis for axis in node.axes)
        exprs = [_guarded(e, inside, self._results()) if long[0].symbol in free_axes(e) else e for e in node.exprs]
        self._put(member, replace(with_exprs(node, exprs), axes=axes))
        old, shape = self.dependences.program.buffers[node.out], tuple(axis.size for axis in axes)
        self.buffers.append((replace(old, shape=shape, strides=contiguous_strides(shape)), node.out))
        return True

    # Accumulators -----------------------------------------------------------------------------------------------------

    def _accumulated(self, fold: Fold, member: int, direct: bool) -> tuple[Node, Node]:
        """Return the nodes of `fold` per part and merged; `direct`: the merged one is the result of `member`."""
        node, at = self.dependences.compute(member), self.cluster.places[member]
        refs = {node.name for node in postorder(*fold.args) if isinstance(node, TileRef)}
        varied = free_axes(*fold.args, *(self.parts[name] for name in refs)).union(fold.rows, fold.columns)
        axes = tuple(axis for axis in self.space.parallel if axis.symbol in varied and axis not in self.numbers)
        direct = direct and isinstance(node, Reduce) and [at[a.symbol] for a in node.axes] == [a.symbol for a in axes]
        shape, buffers = tuple(axis.size for axis in axes), self.dependences.program.buffers
        # The part is the outermost dimension in memory: neighbours stay neighbours where they are merged.
        several = tuple(axis.size for axis in self.numbers[1:])
        inner = contiguous_strides((*shape, *several))
        strides = (*inner[: len(shape)], sympy.Mul(*shape, *several), *inner[len(shape) :])
        part_shape = *shape, self.part.size, *several
        part_buffer = Buffer(self._name(node.out, "part"), fold.dtype, part_shape, strides, buffers[node.out].device)
        self.buffers.append((part_buffer, node.out))
        index = tuple(axis.symbol for axis in (*axes, *self.numbers))
        self.parts[fold.name] = Load(part_buffer.name, index, fold.dtype)
        whole = node.out if direct else self._name(node.out, "whole")
        if not direct:
            self.buffers.append(
                (replace(part_buffer, name=whole, shape=shape, strides=contiguous_strides(shape)), node.out)
            )
        self.wholes[fold.name] = Load(whole, tuple(axis.symbol for axis in axes), fold.dtype)
        return self._of_part(fold, axes), self._of_whole(fold, axes)

    def _name(self, out: str, ending: str) -> str:
        """Return an unused name for a buffer."""
        return unused(
            f"{out}_{ending}", {*self.dependences.program.buffers, *(buffer.name for buffer, _ in self.buffers)}
        )

    def _of_part(self, fold: Fold, axes: Sequence[Axis]) -> Node:
        """Return the node of one accumulator in each part, which uses other accumulators of the part."""
        own = tuple(Axis(axis_symbol(k), axis.size) for k, axis in enumerate((*axes, *self.numbers)))
        axis_cut = [axis for axis in self.space.reduced if axis.symbol in fold.over]
        over = tuple(Axis(over_symbol(k), axis.size) for k, axis in enumerate(axis_cut))
        names = {
            old.symbol: new.symbol for old, new in zip((*axes, *self.numbers, *axis_cut), (*own, *over), strict=True)
        }
        sizes = {axis.symbol: axis.size for axis in (*own, *over)}
        at = names[self.part.symbol] * self.length + names[self.axis_cut.symbol]

        def rule(node: Expr) -> Expr | None:
            return self.parts[node.name] if isinstance(node, TileRef) else None

        args = substitute_all(rewrite(fold.args, rule), {**names, self.axis_cut.symbol: at}, sizes)
        if self.ragged:
            inside = _below(at, self.axis_cut.size)
            own_results = self._results() | {load.buffer for load in self.parts.values()}
            neutral = 0 if fold.op == "dot" else identity(fold.op, fold.dtype)
            args = [_inside(_guarded(arg, inside, own_results), inside, const(neutral, arg.dtype)) for arg in args]
        out = self.parts[fold.name].buffer
        self.places[out] = {new: old for old, new in names.items()}
        if fold.op != "dot":
            return Reduce(out, own, over, fold.op, tuple(args), fold.dtype)
        rows, columns = (tuple(names[symbol] for symbol in side) for side in (fold.rows, fold.columns))
        return Contract(out, own, over, args[0], args[1], rows, columns, fold.dtype)

    def _of_whole(self, fold: Fold, axes: Sequence[Axis]) -> Node:
        """Return the node of one accumulator over all parts, each corrected to the merged values it depends on."""
        own = tuple(Axis(axis_symbol(k), axis.size) for k, axis in enumerate(axes))
        over = tuple(Axis(over_symbol(k), axis.size) for k, axis in enumerate(self.numbers))
        names = {old.symbol: new.symbol for old, new in zip((*axes, *self.numbers), (*own, *over), strict=True)}
        sizes = {axis.symbol: axis.size for axis in (*own, *over)}
        (arg,) = substitute_all([contribution(fold, self.parts, self.wholes)], names, sizes)
        return Reduce(self.wholes[fold.name].buffer, own, over, merged_op(fold), (arg,), fold.dtype)

    def _results(self) -> set[str]:
        return {self.dependences.compute(member).out for member in self.cluster.members}

    # Members that follow the folds ------------------------------------------------------------------------------------

    def _result(self, member: int, value: Expr) -> Map | None:
        """Return the node of `member`'s result from merged accumulators; None if its axes cannot be inverted."""
        node, at = self.dependences.compute(member), self.cluster.places[member]
        values = tuple(sympy.Symbol(f"v{k}", integer=True, nonnegative=True) for k in range(len(node.axes)))
        symbols = [axis.symbol for axis in self.cluster.space.parallel]
        exprs, extents = [at[axis.symbol] for axis in node.axes], [axis.size for axis in node.axes]
        inverse = invert(exprs, values, extents, symbols, self.cluster.space.sizes)
        if inverse is None:
            return None
        names = {symbol: axis.symbol for symbol, axis in zip(values, node.axes, strict=True)}
        sizes = {axis.symbol: axis.size for axis in node.axes}
        solved = {symbol: place(expr, names, sizes) for symbol, expr in inverse.axes.items()}
        solved |= {symbol: sympy.Integer(0) for symbol in inverse.free if self.space.sizes[symbol] == 1}

        def rule(expr: Expr) -> Expr | None:
            return self.wholes[expr.name] if isinstance(expr, TileRef) else None

        (merged_value,) = rewrite([value], rule)
        if not free_axes(merged_value) <= solved.keys() | {
            s for size in self.space.sizes.values() for s in size.free_symbols
        }:
            return None
        return Map(node.out, node.axes, substitute_all([merged_value], solved, sizes)[0])


def _below(position: sympy.Expr, end: sympy.Expr) -> Expr:
    return make_op("lt", IndexValue(position), IndexValue(end))


def _inside(value: Expr, inside: Expr, neutral: Expr) -> Expr:
    if isinstance(value, Load) and value.mask is inside and neutral is const(0, value.dtype):
        return value  # it is masked to 0 already
    return Op("where", (inside, value, neutral), value.dtype)


def _guarded(expr: Expr, inside: Expr, own_results: Collection[str]) -> Expr:
    """Guard loads of `expr` outside `inside`, except those of buffers `own_results` in the kernel."""

    def rule(node: Expr) -> Expr | None:
        if isinstance(node, Op) and node.name == CHECKED:
            return checked_where(node, inside)
        return guarded(node, inside) if isinstance(node, Load) and node.buffer not in own_results else None

    return rewrite([expr], rule)[0]
