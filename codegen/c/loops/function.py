"""Writes a kernel as loops over its grid and its folded axes, with SIMD lanes along one of them.

Input: a kernel; output: the text of its C function.  Other files decide which axes are inside a program (`repeated`),
which statements share a loop (`loop_fusion`), which axis the lanes run along (`lanes`), where their loops are split
(`index_set_splitting`) and end (`loop_bounds`), which conditions are `uniform` in them, which values are kept
(`scratch`), how folds accumulate (`folds`), whether threads pay (`threads`); this file writes the loops.  Kernels with
contractions or running values are written by `blocked`.

Refused (BuildError): dtypes and operations without a C form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod

import sympy

from fusion.codegen.c.frame import Frame
from fusion.codegen.c.loops.fetches import Fetches
from fusion.codegen.c.loops.float16_blocks import (
    Converted,
    convert_in_blocks,
    find_conversions,
    lanes_for,
    narrowed_value,
)
from fusion.codegen.c.loops.folds import REPEATING, LoopLevels, runs_of, write_fold
from fusion.codegen.c.loops.grid import Array, Grid, Tabled
from fusion.codegen.c.loops.nests import SweepNest, SweepPiece
from fusion.codegen.c.loops.prefixes import write_scan
from fusion.codegen.c.loops.tables import TableWriter, lanes_that_gather
from fusion.codegen.c.loops.transposed_loads import stage_tiles
from fusion.codegen.c.loops.transposed_stores import Tiles, TransposedStores, find_transposed_stores
from fusion.codegen.c.plan.idle_rows import busy_rows
from fusion.codegen.c.plan.index_set_splitting import split_index_set
from fusion.codegen.c.plan.lanes import choose_lanes, loop_order
from fusion.codegen.c.plan.loop_bounds import busy, within
from fusion.codegen.c.plan.loop_ends import Ends, suits, with_loop_ends
from fusion.codegen.c.plan.loop_fusion import Sweep, extend_spans, sweeps_of, with_held_parts, with_plain_folds
from fusion.codegen.c.plan.repeated import with_inner_axes
from fusion.codegen.c.plan.scatters import common_condition, may_collide
from fusion.codegen.c.plan.scratch import plan_scratch
from fusion.codegen.c.plan.strip_mining import with_grouped_columns, with_groups
from fusion.codegen.c.plan.tables import find_tables, without_idle_masks
from fusion.codegen.c.plan.threads import may_share, team
from fusion.codegen.c.plan.uniform import unmasked, with_chosen_positions
from fusion.codegen.c.plan.unrolled import with_unrolled_axis, with_unrolled_folds
from fusion.codegen.c.text.code import Code, element_of
from fusion.codegen.c.text.folds import store_statement
from fusion.codegen.c.text.nest import Extent, Level, chunks_of, flat, part_of, render_pieces, turns_of
from fusion.codegen.c.text.storage import VALUE_TYPES, loaded, widened
from fusion.codegen.c.text.values import ValueWriter
from fusion.codegen.scaled import factor_in_place, unconverted
from fusion.lowering.ir.expr import Expr, Load, make_cast, postorder
from fusion.lowering.ir.kernel import Fold, Kernel, KernelAxis, Store, spans


def loops_function(kernel: Kernel) -> str:
    """Return the text of one C function.

    Raises:
        BuildError: a dtype or operation without a C form.
    """
    original = kernel
    for rewritten in (
        with_plain_folds,
        with_held_parts,
        with_groups,
        with_grouped_columns,
        with_unrolled_folds,
        with_inner_axes,
        with_unrolled_axis,
    ):
        kernel = rewritten(kernel)
    return _Function(kernel).text(scaled_by(original))


def scaled_by(kernel: Kernel) -> Load | None:
    """Return the number by which a kernel, alone in its launch, multiplies all that it writes in place."""
    number = None if kernel.beside or kernel.then else factor_in_place(kernel, kernel.body)
    number = None if number is None else unconverted(number)
    if not isinstance(number, Load) or number.mask is not None or isinstance(number.index[0], Expr):
        return None
    return number


class _Function:
    def __init__(self, kernel: Kernel) -> None:
        kernel, self.ends = _with_suitable_ends(without_idle_masks(kernel))
        self.kernel, self.frame = kernel, Frame(kernel)
        self.space, self.names, self.params = self.frame.space, self.frame.names, self.frame.params
        self.where = dict(spans(kernel))
        sweeps = sweeps_of(kernel)
        shared = may_share(kernel, sweeps)
        lanes = choose_lanes(kernel, sweeps, self.where, shared=shared)
        self.conversions = find_conversions(kernel, sweeps, lanes)
        self.tables = find_tables(kernel, sweeps, lanes, self.where)
        lanes = lanes_that_gather(kernel, lanes, self.tables, shared=shared)
        self.lanes = lanes_for(kernel, lanes, self.conversions, shared=shared)
        tabled = frozenset((*self.tables.values, *(gather.load for gather in self.tables.gathers)))
        self.sweeps = plan_scratch(sweeps, self.lanes, self.where, self.space.fresh, tabled)
        self.grid = Grid(kernel, self.lanes, self.space, self.names, team(kernel, sweeps, self.names) if shared else "")
        written = frozenset(param.name for param in kernel.params if param.written)
        self.writer = ValueWriter(self.where, self.space, self.names, self.params, written)
        self.fetches = Fetches(kernel, self.lanes, self.grid, self.where, self.writer, self.params)
        lane = self.lanes.axis if self.tables.values or self.tables.gathers else None
        self.table_writer = None if lane is None else TableWriter(lane, self.space, self.names, self.params)
        self.arrays: list[Array] = []
        self.cells: dict[str, dict[str, Code]] = {}  # fold → C type → the element of its array
        self.converted = Converted()

    def text(self, number: Load | None) -> str:
        """Return the text; with `number`, the function does nothing where that is 1."""
        tabled = Tabled() if self.table_writer is None else self.table_writer.fill(self.tables, self.writer)
        roots = [root for sweep in self.sweeps for root in sweep.roots]
        shortened = self.grid.shorten(self.ends)
        body, staged = stage_tiles(roots, self.lanes, self.grid.extents, self.names, self.params, self.space)
        if self.lanes.axis is not None:
            lane = self.lanes.axis.symbol
            extent = self.grid.extents[lane]

            def array() -> tuple[str, Code]:
                name = self.space.fresh("halves")
                return name, self._array(name, "float", (lane,))

            self.converted = convert_in_blocks(self.conversions, self.lanes, extent, self.names, self.params, array)
        body += self.converted.before
        read: dict[Expr, Code] = {**dict(staged.items()), **self.converted.loads}
        for position, sweep in enumerate(self.sweeps):
            pieces = self._pieces(sweep)
            body += [line for piece in pieces for line in piece.lines]
            body += render_pieces([self._sweep(piece, read, self.sweeps[:position]) for piece in pieces])
        body = [*shortened, *body, *self.converted.after]
        arrays = [*self.arrays, *(self.table_writer.arrays if self.table_writer is not None else ())]
        lines = self.grid.around(body, arrays, tabled)
        if number is not None:
            value = loaded(number.dtype, element_of(self.params[number.buffer], str(number.index[0])))
            one = f"if ({widened(number.dtype, value)} == 1) return 0;"
            lines = [f"{one}  // times 1 everything stays as it is", *lines]
        return self.frame.function(lines)

    def _gather(self, sweep: Sweep, nest: SweepNest) -> None:
        """Gather the elements that the lanes of a sweep read through a table, before their loop."""
        lane = nest.lane
        if self.table_writer is None or lane is None or lane is not self.lanes.axis or sweep.scans:
            return
        if nest.depth[lane.symbol] == len(nest.levels) - 1:
            read = set(postorder(*sweep.roots))
            gathers = [gather for gather in self.tables.gathers if gather.load in read]
            self.table_writer.gather(gathers, self.grid.extents[lane.symbol], nest.levels[-2], self.writer)

    def _pieces(self, sweep: Sweep) -> list[SweepPiece]:
        """Return `sweep` or its pieces, each with the extent of its lanes (None: their whole axis)."""
        _, lane = loop_order(sweep, self.lanes, self.where)
        whole = [SweepPiece(sweep)]
        if lane is None or (sweep.folds and busy(sweep, lane.symbol) is not None):
            return whole
        blocked = lane is self.lanes.axis and self.lanes.block is not None
        if blocked and self._prepares_blocks():
            return whole
        pieces = split_index_set(sweep, lane, self.kernel.axis_sizes())
        for piece in pieces:
            extend_spans(self.where, piece.sweep.roots)
        if any(loop_order(piece.sweep, self.lanes, self.where)[1] is not lane for piece in pieces):
            return whole  # without its condition a piece has other lanes
        extent, parts = self.grid.extents[lane.symbol], list[SweepPiece]()
        for piece in pieces:
            lines, lanes = part_of(extent, piece.start, piece.end, self.space if blocked else None)
            parts.append(SweepPiece(piece.sweep, lanes, lines))
        return parts or whole

    def _prepares_blocks(self) -> bool:
        """Return whether lines before the sweeps compute for a whole block what its lanes read."""
        prepared = (*self.tables.values, *self.tables.gathers, *self.converted.before, *self.converted.after)
        return bool(prepared) or self.lanes.tile is not None or self.lanes.inner is not None

    def _sweep(self, piece: SweepPiece, staged: Mapping[Expr, Code], earlier: Sequence[Sweep]) -> list[Level]:
        """Return the loops of one sweep, after the lines of `earlier`.  All loads precede all stores."""
        sweep, lanes, limits = self._without_idle_lanes(piece.sweep, piece.lanes)
        sweep, busy_where = self._without_idle_rows(sweep)
        sweep = self._with_chosen_positions(sweep)
        nest = self._open(sweep, lanes)
        nest.levels[-2 if limits else -1].before += limits
        nest.levels[2 if len(nest.levels) > 3 else 0].condition = piece.condition
        self.writer.open(nest.levels, nest.depth, self._unmasked(sweep, nest))
        for value, text in staged.items():
            self.writer.learn_here(value, text)
        if lanes is None:
            self._gather(sweep, nest)
            self.fetches.write(sweep, nest, earlier)
        place = self._place(nest, piece)
        for scan in sweep.scans:
            scanned = self.writer.write(scan.args, named=frozenset(scan.args))
            self.writer.learn_here(scan.ref, write_scan(scan, scanned, place, self.space))
            self._spread(scan.ref, nest)
        repeated = frozenset(arg for fold in sweep.folds if fold.op in REPEATING for arg in fold.args)
        conditions = [] if busy_where is None else [busy_where]
        texts = iter(self.writer.write([*self._computed(sweep), *conditions], named=repeated))
        inner = nest.levels[-1].before
        learned: list[tuple[Expr, Code]] = []
        for keep in sweep.keeps:
            element = self._array(keep.name, VALUE_TYPES[keep.value.dtype], keep.axes)
            inner.append(f"{element} = {next(texts)};")
            learned.append((keep.value, element))
        for fold in sweep.folds:
            arguments = [next(texts) for _ in fold.args]
            place = self._place(nest, piece, fold)
            learned.append((fold.ref, write_fold(fold, arguments, place, self.space)))
            self._spread(fold.ref, nest)
        inner += self._stores(sweep, texts, nest)
        nest.levels[-1].condition += "".join(map(str, texts))
        for value, element in learned:
            self.writer.learn(value, element)
        return nest.levels

    def _with_chosen_positions(self, sweep: Sweep) -> Sweep:
        """Return a sweep with one load for each choice between elements of a tensor, if its lanes stay as they are."""
        order = _, lane = loop_order(sweep, self.lanes, self.where)
        if lane is None:
            return sweep
        chosen = with_chosen_positions(sweep, lane, self.kernel.axis_sizes())
        extend_spans(self.where, chosen.roots)
        return chosen if loop_order(chosen, self.lanes, self.where) == order else sweep

    def _unmasked(self, sweep: Sweep, nest: SweepNest) -> frozenset[Load]:
        """Return the loads of a sweep that need no mask in its innermost loop."""
        if nest.lane is None or nest.depth[nest.lane.symbol] < len(nest.levels) - 1:
            return frozenset()
        return unmasked(self.kernel, sweep, nest.lane, self.where)

    def _computed(self, sweep: Sweep) -> list[Expr]:
        """Return the values that a sweep keeps, folds and stores, then computed offsets and conditions of stores."""
        values = [self._stored(store) for store in sweep.stores]
        extend_spans(self.where, values)
        kept = [keep.value for keep in sweep.keeps]
        folded = [arg for fold in sweep.folds for arg in fold.args]
        offsets = [store.offset for store in sweep.stores if isinstance(store.offset, Expr)]
        conditions = [store.where for store in sweep.stores if store.where is not None]
        return [*kept, *folded, *values, *offsets, *conditions]

    def _stores(self, sweep: Sweep, texts: Iterator[Code], nest: SweepNest) -> list[str]:
        """Return the stores of a sweep; `texts` yields the remaining texts in `_computed`'s order."""
        tiles = nest.tiles
        written = [next(texts) for _ in sweep.stores]
        computed = {store: next(texts) for store in sweep.stores if isinstance(store.offset, Expr)}
        lines = []
        for store, text in zip(sweep.stores, written, strict=True):
            element = self.converted.stores.get(store.param)
            if tiles is not None and store in tiles.transposed.stores:
                element = self._tile(store, tiles)
            elif element is None:
                offset = store.offset
                position = computed[store] if isinstance(offset, Expr) else self.writer.position(offset)
                element = element_of(self.params[store.param], position)
            mask = None if store.where is None else next(texts)
            if nest.condition is not None:
                nest.levels[-1].condition, mask = str(mask), None
            lines.append(store_statement(store, self.kernel.param(store.param).dtype, element, text, mask))
        return lines

    def _tile(self, store: Store, tiles: Tiles) -> Code:
        """Add a tile for a store that is transposed; return the element of the current point."""
        name = self.space.fresh(f"{self.params[store.param]}_tile")
        self.arrays.append(tiles.array(name, store, self.kernel))
        tiles.finish(store, self.kernel, name, self.params[store.param], self.names)
        return tiles.element(name)

    def _stored(self, store: Store) -> Expr:
        """Return the stored value: a float if it is converted with the others of its block."""
        narrowed = narrowed_value(self.kernel, store) if store.param in self.converted.stores else None
        return make_cast(store.value, self.kernel.param(store.param).dtype) if narrowed is None else narrowed

    def _without_idle_lanes(self, sweep: Sweep, lanes: Extent | None) -> tuple[Sweep, Extent | None, list[str]]:
        """Return a sweep, the extent of lanes for which its folds have an effect, and lines that compute its bounds."""
        order = _, lane = loop_order(sweep, self.lanes, self.where)
        active = None if lane is None or lanes is not None else busy(sweep, lane.symbol)
        if lane is None or active is None:
            return sweep, lanes, []
        extend_spans(self.where, active.sweep.roots)
        if loop_order(active.sweep, self.lanes, self.where) != order:
            return sweep, lanes, []
        lines, lanes = within(active.limits, lane.symbol, self.grid.extents[lane.symbol], self.names, self.space)
        return active.sweep, lanes, lines

    def _without_idle_rows(self, sweep: Sweep) -> tuple[Sweep, Expr | None]:
        """Return a sweep, and the condition without which the loop of its lanes, the innermost, has no effect."""
        order = scalar, lane = loop_order(sweep, self.lanes, self.where)
        found = None if lane is None else busy_rows(sweep, lane, self.where)
        if lane is None or found is None or self._inside_lanes(sweep, scalar, lane):
            return sweep, None
        extend_spans(self.where, (*found.sweep.roots, found.condition))
        if loop_order(found.sweep, self.lanes, self.where) != order:
            return sweep, None
        return found.sweep, found.condition

    def _open(self, sweep: Sweep, lanes: Extent | None) -> SweepNest:
        """Return the loops of a sweep, still empty; its lanes run over `lanes`, else along their whole axis."""
        scalar, lane = loop_order(sweep, self.lanes, self.where)
        if self.lanes.tile is not None:
            scalar = (self.lanes.tile, *scalar)
        inside = self._inside_lanes(sweep, scalar, lane) if lanes is None else ()
        around = tuple(axis for axis in scalar if axis not in inside)
        scalar = (*around, *inside)
        runs = runs_of(sweep, [axis for axis in scalar if axis.symbol in sweep.over], lane)
        levels, depth = [Level()], {}
        outer = part = tiles = steps = None
        transposed = None if lane is None or lanes is not None or inside else self._transposed(sweep, scalar, lane)
        for axis in (*around, *((lane,) if lane is not None else ()), *inside):
            if outer is None and axis.symbol in sweep.over:
                outer = levels[-1]
            extent = lanes if lanes is not None and axis is lane else self.grid.extents[axis.symbol]
            turns: list[Level] = []
            if axis == runs.axis:
                if runs.length is not None:
                    chunks, extent = chunks_of(extent, axis.size, runs.length)
                    levels.append(Level(chunks))
                part = levels[-1]
                if runs.shares is not None:
                    start = self.space.fresh(f"{extent.name}_")
                    turns = turns_of(extent, axis.size, runs.shares, start, part)
                    steps = turns[0], start
            if transposed is not None and axis is transposed.axis and lane is not None:
                chunks, extent = chunks_of(extent, axis.size, transposed.length)
                levels.append(Level(chunks))
                tiles = Tiles(transposed, extent, self.grid.extents[lane.symbol], lane.symbol, levels[-1])
            levels += turns or [Level(extent.header)]
            depth[axis.symbol] = len(levels) - 1
        innermost = lane is not None and depth[lane.symbol] == len(levels) - 1
        condition = common_condition(sweep, lane.symbol, self.where) if lane is not None and innermost else None
        if lane is not None and not _in_order(sweep, lane, condition):
            levels[depth[lane.symbol]].pragma = self.grid.lane_pragma()
        kept = tuple(axis for axis in scalar if axis.symbol not in sweep.over)
        chunked = runs.length is not None or (part is not outer and not runs.alone)
        own = outer or levels[-1]
        return SweepNest(levels, depth, own, part or levels[-1], chunked, lane, runs, kept, tiles, steps, condition)

    def _transposed(self, sweep: Sweep, order: Sequence[KernelAxis], lane: KernelAxis) -> TransposedStores | None:
        """Return the stores of a sweep to turn, whose number of lanes is bounded."""
        bounded = lane is self.lanes.axis and self.grid.extents[lane.symbol].number is not None
        return find_transposed_stores(sweep, order, lane, self.kernel) if bounded and self.lanes.tile is None else None

    def _inside_lanes(
        self, sweep: Sweep, order: Sequence[KernelAxis], lane: KernelAxis | None
    ) -> tuple[KernelAxis, ...]:
        """Return the axis of `order` whose loop is inside the loop of the lanes, if there is one.

        Accumulators start outside of the lanes, so one of the loops that fill them must be outside, too.
        """
        inner = self.lanes.inner
        if inner is None or inner not in order or lane is not self.lanes.axis:
            return ()
        starts = not sweep.folds or (inner.symbol in sweep.over and len(sweep.over) > 1)
        return (inner,) if starts and not sweep.scans and not may_collide(sweep) else ()

    def _spread(self, ref: Expr, nest: SweepNest) -> None:
        """Mark a fold or scan whose code is inside the axes of a nest as varying along them, even if constant."""
        axes = {axis.symbol for axis in nest.kept}
        if nest.lane is not None and not nest.runs.across:
            axes.add(nest.lane.symbol)
        missing = axes - self.where[ref]
        if not missing:
            return
        spread = {ref}
        self.where[ref] |= missing
        for expr in self.where:  # operands come before their users
            if not spread.isdisjoint(expr.children()):
                self.where[expr] |= missing
                spread.add(expr)

    def _place(self, nest: SweepNest, piece: SweepPiece, fold: Fold | None = None) -> LoopLevels:
        """Return where the code of a fold goes in `nest`.  The pieces of a sweep fill one array of accumulators."""
        per_lane = nest.lane if nest.lane is not None and not nest.runs.across else None
        cell: Callable[[str], Code] | None = None
        if nest.kept or piece.lanes is not None:
            axes = tuple(axis.symbol for axis in (*nest.kept, *((per_lane,) if per_lane is not None else ())))
            elements = {} if fold is None or piece.lanes is None else self.cells.setdefault(fold.name, {})

            def cell(held: str) -> Code:
                if held not in elements:
                    elements[held] = self._array(self.space.fresh("folded"), held, axes)
                return elements[held]

        lanes = None if per_lane is None else piece.lanes or self.grid.extents[per_lane.symbol]
        apart = self.grid.extents[nest.lane.symbol] if nest.runs.apart and nest.lane is not None else None
        return LoopLevels(nest.outer, nest.part, nest.levels[-1], nest.chunked, lanes, cell, nest.runs.shares, apart)

    def _array(self, name: str, held: str, axes: tuple[sympy.Symbol, ...]) -> Code:
        """Add a scratch array over `axes`; return the element of the current point."""
        extents = [self.grid.extents[symbol] for symbol in axes]
        count, position = flat(extents)
        numbers = [extent.number for extent in extents if extent.number is not None]
        self.arrays.append(Array(name, held, count, prod(numbers) if len(numbers) == len(extents) else None))
        return element_of(name, position)


def _with_suitable_ends(kernel: Kernel) -> tuple[Kernel, Ends]:
    """Return `kernel` without guards of whole iterations, and the ends of their loops, if lanes allow it."""
    shorter, ends = with_loop_ends(kernel)
    if not ends:
        return kernel, {}
    sweeps, where = sweeps_of(shorter), spans(shorter)
    lanes = choose_lanes(shorter, sweeps, where, shared=may_share(shorter, sweeps))
    return (shorter, ends) if suits(ends, sweeps, lanes, where) else (kernel, {})


def _in_order(sweep: Sweep, lane: KernelAxis, condition: Expr | None) -> bool:
    """Return whether lanes must run in order: a scan goes from each to the next, or their stores may collide.

    `condition`: under which their loop runs.
    """
    branching = any(store.where is not condition for store in sweep.stores)
    return (bool(sweep.scans) and lane.symbol in sweep.over) or may_collide(sweep, None if branching else lane)
