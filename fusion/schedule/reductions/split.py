"""Splits reductions with too few rows to fill the device into two stages.

`Program → Program`.  The first stage folds parts of the longest reduced axis, one more parallel axis; the second folds
the parts (`partial.py`).  Parts are equal where the length has a suitable divisor, and guarded at the end where it has
none, or is symbolic: then their number suits the length that was traced.  A reduction that needs the result of another
one over the same axis (the sum of a softmax, its maximum) is split together with it where the online rule allows it,
and sums of deviations with their mean (`online/centred.py`): so common operands are read once.  Reduced axes are merged
where the longest alone has too few parts (`flat.py`).  Few neighbours in memory that a reduction folds, such as the
channels of a group with channels last, are parts of their own, beside those of other groups: so whole rows are read.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import sympy

from fusion.codegen.target import Capabilities
from fusion.lowering.indexing import FloorDiv, flatten, replace_axes, stride_along
from fusion.lowering.ir.expr import Expr, Load, loads
from fusion.lowering.ir.program import Axis, Map, Program, Reduce, axis_sizes
from fusion.lowering.ir.sizes import estimate
from fusion.schedule.clusters.legality import Cluster
from fusion.schedule.iteration.contiguity import LEAST_COLUMNS, contiguous_axes, reads_contiguously
from fusion.schedule.iteration.dependences import Dependences
from fusion.schedule.iteration.space import Placement, Space
from fusion.schedule.online.merge import MERGEABLE
from fusion.schedule.reductions.column_sums import column_sums
from fusion.schedule.reductions.divisors import fitting_divisor
from fusion.schedule.reductions.flat import flattened
from fusion.schedule.reductions.partial import ClusterCut, cut_cluster, with_cuts
from fusion.schedule.reductions.row_totals import row_totals

LEAST_ELEMENTS = 1 << 17
"""Elements below which a second launch costs more than an idle device."""

_SECTORS = 2
"""Memory sectors of so few neighbours that a program would read much that it does not fold."""

_FEWEST_PARTS = 8
"""Parts of columns, if they have parts: programs of more columns than `LEAST_COLUMNS` are enough then, too, and their
partial sums are still few.  (measured: docs/performance.md, `_FEWEST_PARTS`)
"""

FIXED_PART = 1 << 15
"""The least elements of a part, where the order of additions may depend on the length of a reduction alone."""


def split_reductions(
    program: Program,
    capabilities: Capabilities,
    chains: Sequence[Cluster] = (),
    hints: Mapping[sympy.Symbol, int] | None = None,
) -> Program:
    """Split long reductions of few rows into two stages; the same object when there are none.

    Args:
        chains: clusters whose nodes stay as they are.
        hints: the values of symbolic sizes when the graph was traced.

    >>> from fusion.inspect.examples import TARGET, show_program
    >>> from torch import empty
    >>> show_program(lambda p: split_reductions(p, TARGET.capabilities), lambda x: x.sum(), empty(1 << 18))
      input x: f32[262144]
    + sum_1_part: f32[256] = sum(i0:256 over r0:1024) x[1024*i0 + r0]
    - sum_1: f32[] = sum(over r0:262144) x[r0]
    + sum_1: f32[] = sum(over r0:256) sum_1_part[r0]
      return sum_1
    """
    chained, known = {member for cluster in chains for member in cluster.members}, hints or {}
    nodes, chunks, along, apart = list(program.nodes), dict[int, int](), dict[int, Axis](), dict[int, list[Axis]]()
    across = {**column_sums(program, capabilities, known), **row_totals(program, capabilities, known)}
    for position, node in enumerate(program.nodes):
        if isinstance(node, Reduce) and position not in chained:
            few = [] if position in across else _few_neighbours(program, node, capabilities)
            nodes[position], axis, count = across.get(position) or _chunks(program, node, few, capabilities, known)
            if axis is not None and count > 1:
                chunks[position], along[position], apart[position] = count, axis, few
    if not chunks:
        return program
    dependences = Dependences(program.edited(nodes), known)
    cuts: list[ClusterCut] = []
    done: set[int] = set()
    for position in sorted(chunks, reverse=True):  # dependent reductions come after those they need
        if position in done:
            continue
        for cluster in _clusters(dependences, position, chunks, capabilities):
            if done.intersection(cluster.members):
                continue
            axis, few = along[position], apart[position]
            split = _cut(dependences, cluster, axis, chunks[position], few)
            shorter = None if split is None else _held(dependences, position, axis, split, capabilities)
            if shorter is not None:
                split = _cut(dependences, cluster, axis, shorter, few)
            if split is not None:
                cuts.append(split)
                done.update(cluster.members)
                break
    return with_cuts(program, cuts)


def _clusters(
    dependences: Dependences, position: int, chunks: Mapping[int, int], capabilities: Capabilities
) -> Iterator[Cluster]:
    """Yield the clusters in which a reduction may be split, largest first."""
    if capabilities.follows:
        family = _family(dependences, position, chunks)
        yield _with_siblings(dependences, family, chunks)
        yield family
    yield _single(dependences, position)


def _cut(
    dependences: Dependences, cluster: Cluster, axis: Axis, count: int, apart: Sequence[Axis]
) -> ClusterCut | None:
    again = len(cluster.members) > 1
    if not axis.size.is_Integer:
        length = FloorDiv(axis.size + count - 1, sympy.Integer(count))
        return cut_cluster(dependences, cluster, axis, length, count, apart=apart, again=again)
    part = -(-int(axis.size) // count)
    count = -(-int(axis.size) // part)
    return cut_cluster(dependences, cluster, axis, sympy.Integer(part), count, apart=apart, again=again)


def _held(
    dependences: Dependences, position: int, axis: Axis, split: ClusterCut, capabilities: Capabilities
) -> int | None:
    """Return the number of parts that are short enough to be held by their programs; None if they are, or need not be.

    A part is read once more where its folds need others of it, as deviations need a mean: from memory, as all parts
    that are computed at once exceed the cache.  (H100, float32, mean and variance of 64 channels of 16.8 million: 2.91
    ms in parts of 524288, 1.41 in parts of 16384.)
    """
    node = dependences.compute(position)
    elements = sympy.Mul(*(each.size for each in node.over))
    if not split.reads_again or not elements.is_Integer:
        return None
    wanted = min(-(-2 * int(elements) // capabilities.whole_limit), int(axis.size))
    if wanted <= split.count or int(elements) > wanted * capabilities.whole_limit:
        return None
    assert isinstance(node, Reduce)
    return fitting_divisor(node, axis, wanted) or wanted


def _single(dependences: Dependences, position: int) -> Cluster:
    node = dependences.compute(position)
    places = {position: {axis.symbol: axis.symbol for axis in (*node.axes, *node.over)}}
    return Cluster((position,), Space(node.axes, node.over), places)


def _family(dependences: Dependences, position: int, chunks: Mapping[int, int]) -> Cluster:
    """Return a reduction, the reductions over the same axes on which it depends, and the maps in between."""
    base = _single(dependences, position)
    outside: set[int] = set()
    while (placements := _placements(dependences, base, chunks, outside)) is None:
        pass
    kept = {position}
    for member in sorted(placements):  # maps that depend on other reductions alone are read from memory
        if isinstance(dependences.node(member), Reduce) or kept.intersection(dependences.producers(member)):
            kept.add(member)
    return replace(base, members=tuple(sorted(kept)), places={member: placements[member] for member in kept})


def _placements(
    dependences: Dependences, base: Cluster, chunks: Mapping[int, int], outside: set[int]
) -> dict[int, Placement] | None:
    """Return the placements of a family; None if a node that is read at several indices was added to `outside`."""
    places, space = dict(base.places), base.space
    todo = list(places)
    while todo:
        member = todo.pop()
        for load in dependences.loads[member]:
            producer = dependences.writer.get(load.buffer)
            if producer is None or producer in outside or not _leads(dependences, producer, chunks):
                continue
            placement = _placement(dependences, producer, load, places[member], space)
            if placement is None or places.get(producer, placement) != placement:
                outside.add(producer)
                return None
            if producer not in places:
                places[producer] = placement
                todo.append(producer)
    return places


def _with_siblings(dependences: Dependences, family: Cluster, chunks: Mapping[int, int]) -> Cluster:
    """Add families that need the same results, as the squares and the sum of deviations need a mean."""
    places = dict(family.places)
    for position in chunks if len(places) > 1 else ():
        other = _family(dependences, position, chunks)
        common = other.places.keys() & places.keys()
        if other.space == family.space and common and all(other.places[k] == places[k] for k in common):
            places |= other.places
    return replace(family, members=tuple(sorted(places)), places=places)


def _leads(dependences: Dependences, position: int, chunks: Mapping[int, int]) -> bool:
    """Return whether a node depends on a split reduction through maps alone."""
    stack, seen = [position], {position}
    while stack:
        here = stack.pop()
        if here in chunks:
            return True
        if isinstance(dependences.node(here), Map):
            more = set(dependences.producers(here)) - seen
            seen |= more
            stack.extend(more)
    return False


def _placement(dependences: Dependences, producer: int, load: Load, at: Placement, space: Space) -> Placement | None:
    """Return the axes of a map or reduction as functions of the axes of the space, where it is read."""
    node = dependences.compute(producer)
    axes_at: dict[sympy.Symbol, sympy.Expr] = {}
    for axis, index in zip(node.axes, load.index, strict=True):
        moved = index if isinstance(index, Expr) else replace_axes(index, at, space.sizes)
        if isinstance(moved, Expr):
            return None
        axes_at[axis.symbol] = moved
    if isinstance(node, Reduce):
        looped = {axis.symbol for axis in space.reduced}
        if [axis.size for axis in node.over] != [axis.size for axis in space.reduced]:
            return None
        if any(expr.free_symbols & looped for expr in axes_at.values()):
            return None
        axes_at.update({axis.symbol: other.symbol for axis, other in zip(node.over, space.reduced, strict=True)})
    return axes_at


def _few_neighbours(program: Program, node: Reduce, capabilities: Capabilities) -> list[Axis]:
    """Return the reduced axis of few neighbours in memory, if those of the next row follow them; else nothing.

    A program that folds them reads a part of each memory request, and so do those of its neighbours.
    """
    if not capabilities.sector or capabilities.invariant or len(node.over) < 2 or not any(loads(*node.args)):
        return []
    sizes = axis_sizes(node)
    largest = max(estimate(program.buffers[load.buffer].numel, {}) for load in loads(*node.args))
    for load in loads(*node.args):
        buffer = program.buffers[load.buffer]
        offset = flatten(load.index, buffer.strides, sizes)
        if estimate(buffer.numel, {}) < largest or isinstance(offset, Expr):
            continue
        for few in node.over:
            row = few.size * buffer.dtype.itemsize
            if stride_along(offset, few.symbol) != 1 or not row.is_Integer or row >= _SECTORS * capabilities.sector:
                continue
            next_ones = [axis for axis in node.axes if stride_along(offset, axis.symbol) == few.size]
            if any(estimate(few.size * axis.size, {}) >= LEAST_COLUMNS for axis in next_ones):
                return [few]
    return []


def _chunks(
    program: Program,
    node: Reduce,
    apart: Sequence[Axis],
    capabilities: Capabilities,
    hints: Mapping[sympy.Symbol, int],
) -> tuple[Reduce, Axis | None, int]:
    """Return the node, its longest reduced axis and the number of its parts (1: no split), with axes merged if needed.

    Neighbours in memory stay in one part if another axis has enough parts.

    Args:
        apart: reduced axes of which a part has one point.
    """
    if node.op not in MERGEABLE:
        return node, None, 1
    if apart:
        rows = math.prod(estimate(axis.size, hints) for axis in (*node.axes, *apart))
        folded = [axis for axis in node.over if axis not in apart]
        longest = max(folded, key=lambda axis: estimate(axis.size, hints))
        length = math.prod(estimate(axis.size, hints) for axis in folded)
        wanted = min(wanted_parts(rows, length, capabilities, contiguous=False), estimate(longest.size, hints))
        return node, longest, 1 if wanted < 2 else fitting_divisor(node, longest, wanted) or wanted
    rows = math.prod(estimate(axis.size, hints) for axis in node.axes)
    length = math.prod(estimate(axis.size, hints) for axis in node.over)
    contiguous = reads_contiguously(program, node, node.over)
    last = estimate(node.axes[-1].size, hints) if node.axes else 1
    columns = max(LEAST_COLUMNS, min(capabilities.columns, last))
    target_count = wanted_parts(rows, length, capabilities, contiguous=contiguous, columns=columns)
    if target_count > max((estimate(axis.size, hints) for axis in node.over), default=1):
        node = flattened(program, node)
    if not node.over:
        return node, None, 1
    along = contiguous_axes(program, node, node.over)
    far = [axis for axis in node.over if axis not in along and 2 * estimate(axis.size, hints) >= target_count]
    longest = max(far or node.over, key=lambda axis: estimate(axis.size, hints))
    target_count = min(target_count, estimate(longest.size, hints))
    return node, longest, 1 if target_count < 2 else fitting_divisor(node, longest, target_count) or target_count


def wanted_parts(
    rows: int, length: int, capabilities: Capabilities, *, contiguous: bool, columns: int = LEAST_COLUMNS
) -> int:
    """Return the best number of parts of `rows` of `length` elements; 1 if they fill the device without a split.

    Args:
        contiguous: whether a row is contiguous in memory; else its neighbours are, and it is a column.
        columns: that a program folds.
    """
    if capabilities.invariant:
        return max(1, length // FIXED_PART)
    if contiguous:
        programs, enough, shortest = rows, capabilities.parallelism, 1024
    else:  # a program of few columns has few bytes in flight: more programs are needed
        programs, enough, shortest = -(-rows // columns), 4 * capabilities.parallelism, 64
    if rows * length < LEAST_ELEMENTS or programs >= enough:
        return 1
    wanted = -(-2 * enough // programs)
    # long parts of rows take many threads each, so few programs fit on a multiprocessor
    wanted = max(wanted, min(length // capabilities.part, 4 * wanted) if contiguous else _FEWEST_PARTS)
    wanted = min(wanted, length // shortest or 1)
    occupied = columns > LEAST_COLUMNS and -(-rows // LEAST_COLUMNS) >= enough  # by programs of fewer columns
    return 1 if occupied and wanted < _FEWEST_PARTS else wanted
