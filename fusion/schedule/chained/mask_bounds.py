"""Derives bounds from masks that are data: the blocks of a chain's loop which a mask in memory rules out.

    where(m[q, k], scores, -∞)     →     where(bounded(m[q, k], outer, inner), scores, -∞)
    outer: first[q // 64] <= k < end[q // 64]        inner: full_first[q // 64] <= k < full_end[q // 64]

`Program → Program`, for targets whose loops begin and end where numbers in memory say (`Capabilities.bounds`).  The
added nodes fold the mask once: for each group of rows, the first and the last column that some row of the group sees,
and the range that each of its rows sees whole (`mask_folds.py`).  So the loop runs from the first block that counts to
the last, and blocks that all rows see whole evaluate no condition (`codegen/triton/loops/skips.py`).  Every chain of
the graph that reads the mask in the same way shares these nodes: all layers of a model do.

A causal mask, a window, lengths, or documents that follow each other leave one range to each row.  In a mask of another
kind the blocks between the first and the last are computed under their condition, as without bounds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import sympy
import torch

from fusion.codegen.target import Capabilities
from fusion.lowering.algebra.conditions import conjuncts, negated, plain
from fusion.lowering.indexing import substitute
from fusion.lowering.ir.expr import (
    Const,
    Expr,
    Index,
    IndexValue,
    Op,
    const,
    free_axes,
    loads,
    make_op,
    postorder,
    rewrite,
)
from fusion.lowering.ir.kernel import Fold
from fusion.lowering.ir.program import Axis, Compute, Node, Program, with_exprs
from fusion.schedule.chained.mask_folds import ROWS_PER_BOUND, Folds, TileCondition, groups_of, lines_of
from fusion.schedule.chained.occupancy import rows_of, time_in_parts
from fusion.schedule.clusters.expand import values_of
from fusion.schedule.clusters.legality import Cluster, positions_in
from fusion.schedule.iteration.dependences import Dependences
from fusion.schedule.iteration.space import Placement
from fusion.schedule.reductions.one_loop import counting, follow
from fusion.schedule.reductions.skipped_blocks import added_number, counts_where, is_known, vanish_at

_SHARE = 1 / 8
"""The greatest share of a chain's time that the folds of its mask may take.  A causal mask saves more than a third."""


def bound_masks(
    program: Program,
    capabilities: Capabilities,
    chains: Sequence[Cluster],
    hints: Mapping[sympy.Symbol, int] | None = None,
) -> tuple[Program, tuple[Cluster, ...]]:
    """Compute bounds of the masks of chains; return the program (the same object if there are none), and the chains in
    it.

    >>> from dataclasses import replace
    >>> from fusion.inspect.examples import TARGET, show_program
    >>> from fusion.schedule.chained import chain_products
    >>> from torch import bool as flag, empty
    >>> capabilities = replace(TARGET.capabilities, bounds=True)
    >>> def bounded(program):
    ...     chained, chains = chain_products(program, capabilities)
    ...     return bound_masks(chained, capabilities, chains)[0]
    >>> show_program(
    ...     bounded,
    ...     lambda q, k, mask: (q @ k).masked_fill(mask, float("-inf")).amax(-1),
    ...     empty(9999, 256, 4),
    ...     empty(9999, 4, 256),
    ...     empty(256, 256, dtype=flag),
    ... )
      input q: f32[9999, 256, 4]
      input k: f32[9999, 4, 256]
      input mask: bool[256, 256]
    + masked_fill_first: i32[256] = min(i0:256 over r0:256) where(not(mask[i0, r0]), index_i32(r0), index_i32(256))
    + masked_fill_end: i32[256] = max(i0:256 over r0:256) where(not(mask[i0, r0]), index_i32(r0) + 1_i32, 0_i32)
    + masked_fill_count: i32[256] = sum(i0:256 over r0:256) where(not(mask[i0, r0]), 1_i32, 0_i32)
    + masked_fill_group_first: i32[4] = min(i0:4 over r0:64) masked_fill_first[64*i0 + r0]
    + masked_fill_group_end: i32[4] = max(i0:4 over r0:64) masked_fill_end[64*i0 + r0]
    +   %1 = masked_fill_first[64*i0 + r0]
    + masked_fill_group_whole_first: i32[4] = max(i0:4 over r0:64) where(masked_fill_end[64*i0 + r0] - %1 ==
            masked_fill_count[64*i0 + r0], %1, index_i32(256))
    +   %1 = masked_fill_end[64*i0 + r0]
    + masked_fill_group_whole_end: i32[4] = min(i0:4 over r0:64) where(%1 - masked_fill_first[64*i0 + r0] ==
            masked_fill_count[64*i0 + r0], %1, 0_i32)
      bmm: f32[9999, 256, 256] = contract(i0:9999, i1:256, i2:256 over r0:4; rows i1, columns i2; in f32) q[i0, i1,
            r0], k[i0, r0, i2]
    +   %1 = (index_i32(i2) >= masked_fill_group_whole_first[i1//64]) & (index_i32(i2) <
            masked_fill_group_whole_end[i1//64])
    +   %2 = bounded(not(mask[i1, i2]), (index_i32(i2) >= masked_fill_group_first[i1//64]) & (index_i32(i2) <
            masked_fill_group_end[i1//64]), %1)
    - masked_fill: f32[9999, 256, 256] = map(i0:9999, i1:256, i2:256) where(mask[i1, i2], -inf, bmm[i0, i1, i2])
    + masked_fill: f32[9999, 256, 256] = map(i0:9999, i1:256, i2:256) where(%2, bmm[i0, i1, i2], -inf)
      amax: f32[9999, 256] = max(i0:9999, i1:256 over r0:256) masked_fill[i0, i1, r0]
      return amax
    """
    if not capabilities.bounds or not chains:
        return program, tuple(chains)
    search = _Masks(Dependences(program, hints), capabilities)
    nodes = list(program.nodes)
    for chain in chains:
        for position, node in search.in_chain(chain):
            nodes[position] = node
    if not search.added:
        return program, tuple(chains)
    ordered: list[Node] = []
    for position in range(-1, len(nodes)):
        ordered += [nodes[position]] if position >= 0 else []
        ordered += [node for each in search.added if each.after == position for node in each.folds.nodes]
    buffers = [buffer for each in search.added for buffer in each.folds.buffers]
    origins = {name: each.origin for each in search.added for name in each.folds.names}
    bounded = program.edited(ordered, buffers=buffers, origins=origins)
    return bounded, positions_in(bounded, program, chains)


@dataclass(frozen=True, slots=True)
class _Added:
    """Added folds of a mask.

    Attributes:
        after: position of the node that they follow; -1 for the inputs.
        origin: result whose origin they get.
    """

    folds: Folds
    after: int
    origin: str


class _Masks:
    """Searches the chains of one program for masks, and creates the nodes that fold them."""

    def __init__(self, dependences: Dependences, capabilities: Capabilities) -> None:
        self.dependences, self.capabilities = dependences, capabilities
        self.added: list[_Added] = []
        self._lines: dict[Expr, _Added] = {}  # condition → the folds of its lines
        self._bounds: dict[tuple[Expr, bool], tuple[str, ...]] = {}

    def in_chain(self, chain: Cluster) -> Iterator[tuple[int, Compute]]:
        """Yield the position of each node of a chain that selects by a mask, and the node with the mask's bounds."""
        rows = rows_of(self.dependences, chain)
        if len(chain.space.reduced) != 1 or not rows:
            return
        (looped,) = chain.space.reduced
        if self.dependences.estimate(looped.size) <= ROWS_PER_BOUND:  # one block
            return
        folds: Sequence[Fold] | None = None
        for position in chain.members:
            node, places = self.dependences.compute(position), chain.places.get(position)
            if places is None:
                continue
            columns = [axis for axis in (*node.axes, *node.over) if looped.symbol in _symbols(places[axis.symbol])]
            lines = [axis for axis in (*node.axes, *node.over) if places.get(axis.symbol) in rows]
            axes = [*product(lines, columns)]
            masks = self._masks({part: (part, None) for part in _selecting(node.exprs)}, axes, chain)
            added = self._masks({number: _settled(number) for number in _added(node.exprs)}, axes, chain)
            if (masks or added) and folds is None:
                folds = self._folds(chain)

            def placed(value: Expr, places: Placement = places) -> Expr:
                return substitute(value, places, chain.space.sizes)

            out = ruled_out(folds or (), [looped.symbol]) if masks else frozenset()
            parts = {part: self._bounded(mask, node.out, chain) for part, mask in masks.items() if placed(part) in out}
            numbers = {
                number: self._bounded(mask, node.out, chain)
                for number, mask in added.items()
                if hides(folds or (), placed(number))
            }
            changed = _with_parts(node.exprs, parts, numbers)
            if any(new is not old for new, old in zip(changed, node.exprs, strict=True)):
                yield position, with_exprs(node, changed)

    def _masks(
        self, conditions: Mapping[Expr, tuple[Expr, Expr | None]], axes: Sequence[tuple[Axis, Axis]], chain: Cluster
    ) -> dict[Expr, TileCondition]:
        """Return the masks among conditions, by replaced expression: each is one matrix over two of the axes."""
        masks: dict[Expr, TileCondition] = {}
        for replaced, (part, settled) in conditions.items():
            for row, column in axes:
                mask = self._mask(part, row, column, chain)
                if mask is not None:
                    masks[replaced] = replace(mask, settled=settled)
        return masks

    def _mask(self, part: Expr, row: Axis, column: Axis, chain: Cluster) -> TileCondition | None:
        """Return a condition as a mask over these axes; None if it is not one matrix, or the chain computes it."""
        batch: dict[sympy.Expr, sympy.Expr] = {}
        within, axes = {row.symbol, column.symbol}, free_axes(part)
        for load in loads(part):
            if self.dependences.writer.get(load.buffer) in chain.places:
                return None
            for index, size in zip(load.index, self.dependences.program.buffers[load.buffer].shape, strict=True):
                assert not isinstance(index, Expr), "a plain flag"
                own = index.free_symbols & axes
                if own and not own & within:
                    batch[index] = size
                elif len(own) > 1:
                    return None
        spanned = ({axis for index in load.index for axis in _symbols(index)} for load in loads(part))
        numbers = (node.index.free_symbols for node in postorder(part) if isinstance(node, IndexValue))
        if not any(within <= symbols for symbols in spanned) or any((symbols & axes) - within for symbols in numbers):
            return None
        return TileCondition(
            part, row, column, tuple(batch.items()), self._stride(part, row) < self._stride(part, column)
        )

    def _stride(self, part: Expr, axis: Axis) -> int:
        """Return the distance in memory of two neighbours along `axis` of the numbers that a condition reads."""
        buffers = self.dependences.program.buffers
        steps = (
            self.dependences.estimate(stride)
            for load in loads(part)
            for index, stride in zip(load.index, buffers[load.buffer].strides, strict=True)
            if axis.symbol in _symbols(index)
        )
        return max(steps, default=0)

    def _folds(self, chain: Cluster) -> Sequence[Fold]:
        """Return the folds of a chain that run over its loop; empty if these do not share one."""
        axes = [axis.symbol for axis in chain.space.reduced]
        followed = follow(values_of(self.dependences, chain)[0], axes, ())
        return () if isinstance(followed, str) else counting(followed, chain.space.outer)

    def _bounded(self, mask: TileCondition, reader: str, chain: Cluster) -> Expr:
        """Return the condition of a mask with its bounds; as it is if these would cost too much."""
        condition = mask.canonical()
        if (condition, mask.turned) not in self._bounds:
            if self._cost(condition) > _SHARE * time_in_parts(self.dependences, chain, 1, self.capabilities):
                return mask.part
            lines = self._lines.get(condition) or self._folded(mask, condition, reader)
            groups, bounds = groups_of(mask, lines.folds, lines.origin, self._taken)
            self.added.append(replace(lines, folds=groups))
            self._bounds[condition, mask.turned] = bounds
        return mask.bounded(self._bounds[condition, mask.turned])

    def _folded(self, mask: TileCondition, condition: Expr, reader: str) -> _Added:
        """Return the folds of the lines of a mask, which are added."""
        after = max(self.dependences.writer.get(load.buffer, -1) for load in loads(condition))
        device = self.dependences.program.buffers[reader].device
        lines = _Added(lines_of(mask, reader, device, self._taken), after, reader)
        self.added.append(lines)
        self._lines[condition] = lines
        return lines

    @property
    def _taken(self) -> set[str]:
        return {*self.dependences.program.buffers, *(name for each in self.added for name in each.folds.names)}

    def _cost(self, condition: Expr) -> float:
        """Return the microseconds of folding a mask."""
        moved = sum(self.dependences.bytes(name) for name in {load.buffer for load in loads(condition)})
        return self.capabilities.rates.price(moved, launches=2).total


def _symbols(index: Index) -> set[sympy.Basic]:
    return set() if isinstance(index, Expr) else {*index.free_symbols}


def _selecting(roots: Sequence[Expr]) -> Iterator[Expr]:
    """Yield the parts of conditions without which one branch of a selection is a constant."""
    for node in postorder(*roots):
        kept = _kept(node)
        if kept is not None:
            yield from (part for part in conjuncts(kept) if any(loads(part)) and _is_known(part))


def _is_known(part: Expr) -> bool:
    """Return whether this is a single condition, of numbers in memory that are no floats."""
    joined = isinstance(part, Op) and part.name in ("and", "bounded")
    return not joined and is_known(part)


def _kept(node: Expr) -> Expr | None:
    """Return the condition under which a selection is not a constant; None for other expressions."""
    if not isinstance(node, Op) or node.name != "where":
        return None
    if isinstance(node.args[1], Const) == isinstance(node.args[2], Const):
        return None
    (condition,) = plain([node.args[0]])
    return condition if isinstance(node.args[2], Const) else negated(condition)


def ruled_out(folds: Sequence[Fold], looped: Sequence[sympy.Symbol]) -> frozenset[Expr]:
    """Return the conditions without which no point of a loop counts."""
    where = counts_where(folds, looped) if folds else None
    return frozenset() if where is None else frozenset(conjuncts(where))


def hides(folds: Sequence[Fold], number: Expr) -> bool:
    """Return whether no point of a loop counts at which `number`, which is added there, is minus infinity."""
    values = postorder(*(arg for fold in folds for arg in fold.args))
    sums = [node for node in values if isinstance(node, Op) and node.name == "add" and number in node.args]
    return bool(sums) and all(vanish_at(folds, node) for node in sums)


def _added(roots: Sequence[Expr]) -> Iterator[Expr]:
    """Yield the numbers in memory, perhaps converted, that are added to others."""
    for node in postorder(*roots):
        if isinstance(node, Op) and node.name == "add":
            yield from (arg for arg in node.args if arg.dtype.is_floating_point and added_number(arg) is not None)


def _settled(number: Expr) -> tuple[Expr, Expr]:
    """Return the conditions that an added number hides nothing, and that it changes nothing.

    A number that is about the least one, or less, hides as minus infinity does, unless all numbers of its row are such;
    NaN hides nothing.
    """
    load = added_number(number)
    assert load is not None, "called for what `_added` yields"
    least = const(0.9 * torch.finfo(load.dtype).min, load.dtype)
    return make_op("not", make_op("le", load, least)), make_op("eq", load, const(0.0, load.dtype))


def _with_parts(roots: Sequence[Expr], changed: Mapping[Expr, Expr], numbers: Mapping[Expr, Expr]) -> list[Expr]:
    """Return `roots` with parts of the conditions of their selections replaced, and with selections for added numbers.

    `changed`: part → its replacement; `numbers`: added number → its condition.  A sum with such a number becomes minus
    infinity where the condition is false, and omits the number where it is known to be 0.
    """

    def joined(condition: Expr) -> Expr:
        if isinstance(condition, Op) and condition.name == "and":
            return make_op("and", *map(joined, condition.args))
        return changed.get(condition, condition)

    def rule(node: Expr) -> Expr | None:
        if isinstance(node, Op) and node.name == "add" and (number := next(filter(numbers.get, node.args), None)):
            hidden, other = numbers[number], node.args[node.args[0] is number]
            if not isinstance(hidden, Op) or hidden.name != "bounded":
                return None
            chosen = make_op("where", hidden.args[2], other, node)
            return make_op("where", hidden, chosen, const(float("-inf"), node.dtype))
        kept = _kept(node)
        condition = None if kept is None else joined(kept)
        if kept is None or condition is kept or condition is None:
            return None
        assert isinstance(node, Op)
        value, constant = sorted(node.args[1:], key=lambda arg: isinstance(arg, Const))
        return make_op("where", condition, value, constant)

    return rewrite(roots, rule)
