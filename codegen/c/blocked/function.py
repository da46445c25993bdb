"""Computes kernels with contractions tile by tile.

Input: a kernel with products (`dot`), running values or nested loops; output: one C function. Each thread takes blocks
of the grid (`blocks`) and holds intermediate values in private tiles (`held`), small enough for its caches.  A
statement is one loop nest over the points of its tiles (`scope`); a product is a call once its factors are in memory
(`factors`).

Values that several statements need are computed once per scope, by the first that needs them; loop invariants before
the loop.  A loop has a second body for blocks within the inner bounds of its condition, in the same tiles; that body
reads none of the masks that have these bounds.  The accumulator of a loop-carried fold is rescaled in place before the
current block is added to it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence, Set

import sympy
import torch
from typing_extensions import assert_never

from fusion.codegen.c.blocked.crossing import added_to, block_of, cleared, crossing_tile
from fusion.codegen.c.blocked.factors import Packed, ProductFactors
from fusion.codegen.c.blocked.held import ArrayTile, product_tile, tile_over
from fusion.codegen.c.blocked.ranges import around_block, inside_block, range_of
from fusion.codegen.c.blocked.row_steps import narrower_rows
from fusion.codegen.c.blocked.scope import TileScope, read_by
from fusion.codegen.c.blocked.skips import ALWAYS, possible
from fusion.codegen.c.blocked.stored_products import multiplied_there, stored_products
from fusion.codegen.c.blocked.turned import turned
from fusion.codegen.c.frame import Frame
from fusion.codegen.c.plan.loop_fusion import extend_spans, with_held_parts, with_plain_folds
from fusion.codegen.c.plan.scratch import outermost
from fusion.codegen.c.plan.threads import ENOUGH
from fusion.codegen.c.text.code import Code, element_of
from fusion.codegen.c.text.few_rows import MOST_ROWS
from fusion.codegen.c.text.folds import NEVER, NanWatch, across_lanes, better, combined, started, store_statement, take
from fusion.codegen.c.text.indices import index_text
from fusion.codegen.c.text.nest import indented
from fusion.codegen.c.text.products import FACTORS
from fusion.codegen.c.text.scratch import on_heap
from fusion.codegen.c.text.storage import VALUE_TYPES
from fusion.codegen.interior import conditional, within_bounds
from fusion.lowering.indexing import ZERO
from fusion.lowering.ir.expr import Expr, Load, Op, TileRef, make_cast, postorder
from fusion.lowering.ir.kernel import (
    Fold,
    Kernel,
    Loop,
    Prefix,
    Role,
    Stmt,
    Store,
    crossing_folds,
    loop_folds,
    running,
    spans,
    statements,
    values_of,
)
from fusion.lowering.ir.scalar_ops import keeps_position


def needs_blocks(kernel: Kernel) -> bool:
    """Return whether `kernel` needs tiles: it has products, running values, or loops with more than their own folds."""
    body = list(statements(with_held_parts(with_plain_folds(kernel, FACTORS)).body))
    loops = [stmt for stmt in body if isinstance(stmt, Loop)]
    inner = [(loop, stmt) for loop in loops for stmt in loop.body]
    return (
        any(isinstance(stmt, Fold) and stmt.op == "dot" for stmt in body)
        or any(isinstance(stmt, Loop) for _, stmt in inner)
        or any(isinstance(stmt, Fold) and set(stmt.over) != set(loop.axes) for loop, stmt in inner)
        or any(running(loop) for loop in loops)
    )


def sides(product: Fold, kernel: Kernel) -> tuple[sympy.Expr, sympy.Expr]:
    """Return the number of rows that the left factor of a product has of its own, and of columns of the right one."""
    sizes, spans_of = kernel.axis_sizes(), spans(kernel)
    left, right = (spans_of[arg] - set(product.over) for arg in product.args)
    rows, columns = (sympy.Mul(*(sizes[axis] for axis in own)) for own in (left - right, right - left))
    return rows, columns


def blocked_function(kernel: Kernel, *, few_rows: bool = True) -> str:
    """Return the text of one C function.

    Args:
        few_rows: whether products of few rows may read their right factor in place.

    Raises:
        BuildError: a dtype or operation without a C form.
    """
    return _Blocked(with_plain_folds(kernel, FACTORS), few_rows).text()


class _Blocked:
    """Writes one kernel: `text` visits its statements once, in order."""

    def __init__(self, kernel: Kernel, few_rows: bool) -> None:
        self.kernel, self.frame = kernel, Frame(kernel)
        self.scope = TileScope(kernel, self.frame)
        self.products = ProductFactors(self.scope, MOST_ROWS if few_rows else 0)
        self.stored = stored_products(kernel, self.scope, self.products)
        self.best: dict[str, ArrayTile] = {}  # of an argmax or argmin: the value at its position
        self.open: frozenset[sympy.Symbol] = frozenset()  # LOOP axes whose loop is open

    def text(self) -> str:
        body = self._body(self.kernel.body)
        return self.frame.function(self._around(body))

    # The grid ----------------------------------------------------------------------------------------------------

    def _around(self, body: Sequence[str]) -> list[str]:
        """Return `body` in loops over all blocks of the grid, with its tiles allocated for each thread."""
        grid = [self.scope.blocks.of[axis.symbol] for axis in self.kernel.with_role(Role.GRID)]
        nest = [*(line for block in grid for line in block.inside), *body]
        for block in reversed(grid):
            nest = [f"{block.header} {{", *indented(nest), "}"]
        clauses = self._team() if grid else ""
        before = [*self.scope.blocks.before, *self.products.before, *narrower_rows(self.kernel, self.scope)]
        tiles = [tile.scratch(self.scope.names) for tile in self.scope.tiles]
        heap = on_heap(tiles, self.scope.space, shared=bool(clauses))
        if not clauses:
            return [*before, *heap.before, *nest, *heap.after]
        collapse = f" collapse({len(grid)})" if len(grid) > 1 else ""
        # Blocks that skip part of their loops end early, so blocks are distributed dynamically.
        region = [f"#pragma omp parallel {clauses}", "{"]
        region += [*indented([*heap.inside, f"#pragma omp for{collapse} schedule(dynamic)", *nest]), "}"]
        return [*before, *heap.before, *region, *heap.after]

    def _team(self) -> str:
        """Return the clauses of a parallel region; "" if there is too little work for one."""
        amount = ZERO
        for stmt in statements(self.kernel.body):
            over = stmt.over if isinstance(stmt, Fold) else ()
            spanned = [self.scope.where[value].union(over) for value in values_of(stmt)]
            if isinstance(stmt, Fold) and stmt.op == "dot":
                spanned = [frozenset[sympy.Symbol]().union(*spanned)]
            for symbols in spanned:
                amount += sympy.Mul(*(axis.size for axis in self.kernel.axes if axis.symbol in symbols))
        if amount.is_Integer:
            return "num_threads(threads)" if amount >= ENOUGH else ""
        return f"num_threads(threads) if({index_text(amount, self.scope.names)} >= {ENOUGH})"

    # Scopes ------------------------------------------------------------------------------------------------------

    def _body(self, body: Sequence[Stmt]) -> list[str]:
        """Return the statements of one scope.  Its tiles are forgotten after it, except for results."""
        scope = self.scope
        outside = scope.shared, dict(scope.known), dict(self.products.packed)
        above = scope.outside, scope.later
        scope.shared, scope.outside = scope.shared | self._shared_in(body), frozenset(scope.known)
        lines: list[str] = []
        for position, stmt in enumerate(body):
            scope.later = (*read_by(body[position + 1 :]), *above[1])
            match stmt:
                case Loop():
                    lines += self._loop(stmt)
                case Store():
                    lines += self._store(stmt)
                case Fold():
                    lines += self._fold(stmt)
                case Prefix():
                    raise AssertionError("no scan stands beside products and running values")
                case _:
                    assert_never(stmt)
        results: dict[Expr, ArrayTile] = {node: tile for node, tile in scope.known.items() if isinstance(node, TileRef)}
        scope.shared, scope.known, self.products.packed = outside
        scope.outside, scope.later = above
        scope.known.update(results)
        return lines

    def _shared_in(self, body: Sequence[Stmt]) -> frozenset[Expr]:
        """Return the values that more than one statement of a scope evaluates and that are worth a tile.

        Those are costly values, and products combined with a tensor of as many numbers, such as scores with a mask,
        which is farther than the tile, or with a condition of indices, whose lanes are twice as wide.
        """
        counts: Counter[Expr] = Counter()
        for stmt in body:
            if not isinstance(stmt, Loop):
                counts.update(set(postorder(*values_of(stmt))))

        def repeated(node: Expr) -> bool:
            return counts[node] > 1 and (self.scope.worth_keeping(node) or self._joins(node, products))

        own = [stmt for stmt in body if not isinstance(stmt, Loop)]
        products = {stmt.ref for stmt in own if isinstance(stmt, Fold) and stmt.op == "dot" and stmt.carry is None}
        return frozenset(node for stmt in own for node in outermost(values_of(stmt), set(), repeated))

    def _joins(self, node: Expr, products: Set[Expr]) -> bool:
        """Return whether a value combines a product of its type with a number, or a condition, for each of its own."""
        if len(self.scope.tiled(node)) < 2 or isinstance(node, TileRef):
            return False
        parts, span = list(postorder(node)), set(self.scope.tiled(node))
        if any(isinstance(part, Load) and part.buffer in self.scope.written for part in parts):
            return False
        joined = (part for part in parts if isinstance(part, Load) or part.dtype is torch.bool)
        whole = any(set(self.scope.tiled(part)) == span and products.isdisjoint(postorder(part)) for part in joined)
        return whole and any(part in products and part.dtype is node.dtype for part in parts)

    # Loops -------------------------------------------------------------------------------------------------------

    def _loop(self, loop: Loop) -> list[str]:
        evaluated = _learned(conditional(loop), self.scope)
        lines = self._ahead(evaluated)
        for fold in (*loop_folds(evaluated), *crossing_folds(evaluated)):
            lines += self._start(fold)
        blocks = [self.scope.blocks.of[symbol] for symbol in loop.axes]
        within = range_of(loop, self.scope)
        inner = [line for block in blocks for line in inside_block(block, within)]
        needed, condition, whole = ([], ALWAYS, {}) if loop.where is None else possible(loop.where, self.scope)
        if condition != ALWAYS:
            inner += [*needed, f"if (!{condition}) continue;"]
        inner += self._copies(evaluated)
        outside = self.open
        self.open = outside.union(loop.axes)
        inner += self._bodies(loop, evaluated, whole if condition != ALWAYS else {})
        self.open = outside
        for block in reversed(blocks):
            inner = around_block(block, within, inner)
        return [*lines, *inner]

    def _bodies(self, loop: Loop, evaluated: Loop, whole: Mapping[Op, str]) -> list[str]:
        """Return the body of a loop that evaluates its condition, after another one for whole blocks if that differs.

        Args:
            whole: parts of the condition → the flag that is set where the block is within their inner bounds.
        """
        inside = _learned(within_bounds(loop, whole), self.scope)
        nested = any(isinstance(stmt, Loop) for stmt in loop.body)
        if nested or inside.body == evaluated.body or not _same_axes(inside, evaluated, self.scope):
            return self._turned_body(evaluated)
        known, allocated = dict(self.scope.known), len(self.scope.tiles)
        lines = self._turned_body(evaluated)
        self.scope.known, self.scope.spare = known, self.scope.tiles[allocated:]  # one of the two bodies runs
        first = self._turned_body(inside)
        self.scope.spare = []
        return [f"if ({' & '.join(whole.values())}) {{", *indented(first), "} else {", *indented(lines), "}"]

    def _turned_body(self, loop: Loop) -> list[str]:
        """Return the body of a loop, with what it would read across its rows turned before."""
        turning, copied = turned(loop, self.scope)
        lines = [*turning, *self._body(loop.body)]
        for load in copied:
            del self.scope.known[load]
        return lines

    def _ahead(self, loop: Loop) -> list[str]:
        """Return lines before the loop that compute its invariants: packed factors, and costly values."""
        loop_results = {stmt.name for stmt in statements(loop.body, Fold)}
        closed = {axis.symbol for axis in self.kernel.with_role(Role.LOOP)} - self.open
        fixed: dict[Expr, bool] = {}

        def invariant(value: Expr) -> bool:
            for node in postorder(value):
                if node not in fixed:
                    own = not (isinstance(node, TileRef) and node.name in loop_results)
                    own &= not (isinstance(node, Load) and node.buffer in self.scope.written)
                    own &= not self.scope.where[node] & closed
                    fixed[node] = own and all(fixed[child] for child in node.children())
            return fixed[value]

        lines: list[str] = []
        for stmt in statements(loop.body):
            if isinstance(stmt, Loop):
                continue
            values = values_of(stmt)
            for node in outermost(values, set(), lambda node: invariant(node) and self.scope.worth_keeping(node)):
                lines += self.scope.materialise(node)
            if isinstance(stmt, Fold) and stmt.op == "dot":
                product = self.products.product(stmt)
                if invariant(product.left) and self.scope.tiled(product.left):
                    lines += self.products.left(product)[0]
                if invariant(product.right):
                    lines += self.products.ahead(product, closed)
        return lines

    def _copies(self, loop: Loop) -> list[str]:
        """Return the lines that save running values before their update, where the previous value is read after it."""
        lines: list[str] = []
        for fold in loop_folds(loop):
            if fold.name in self.stored:
                continue
            tile = self.scope.known[fold.ref]
            position = loop.body.index(fold)
            later = [value for stmt in statements(loop.body[position + 1 :]) for value in values_of(stmt)]
            if fold.before not in postorder(*fold.args, *later):
                self.scope.known[fold.before] = tile
                continue
            name = self.scope.space.fresh(f"{fold.name}_before")
            copy = self.scope.allocate(tile_over(name, tile.held, tile.axes, self.scope.blocks))
            self.scope.known[fold.before] = copy
            lines += self.scope.fill(copy, self.scope.at(tile))
        return lines

    # Stores ------------------------------------------------------------------------------------------------------

    def _store(self, store: Store) -> list[str]:
        if any(store == product.store for product in self.stored.values()):
            return []
        value = make_cast(store.value, self.kernel.param(store.param).dtype)
        extend_spans(self.scope.where, [value])
        offset = store.offset
        roots = [value, offset] if isinstance(offset, Expr) else [value]
        roots += [] if store.where is None else [store.where]
        symbols = frozenset(offset.free_symbols) if isinstance(offset, sympy.Expr) else frozenset()
        symbols |= frozenset(store.axes or ())
        direct = [offset] if isinstance(offset, sympy.Expr) else []
        span = self.scope.blocks.tiled(symbols.union(*(self.scope.where[root] for root in roots)))
        axes = self.scope.order(span, roots, direct)
        lines = self.scope.parts(roots, axes)
        nest = self.scope.nest(roots, axes, lanes=bool(direct) and store.axes is None)
        position = nest.position(direct[0]) if direct else nest.texts[1]
        element = element_of(self.scope.params[store.param], position)
        mask = None if store.where is None else nest.texts[-1]
        nest.write(store_statement(store, self.kernel.param(store.param).dtype, element, nest.texts[0], mask))
        return [*lines, *nest.lines()]

    # Folds -------------------------------------------------------------------------------------------------------

    def _start(self, fold: Fold) -> list[str]:
        """Return a tile for the result of `fold`, filled with the fold's identity."""
        if fold.name in self.stored:
            return []
        scope, held = self.scope, VALUE_TYPES[fold.dtype]
        closed = {axis.symbol for axis in self.kernel.with_role(Role.LOOP)} - self.open
        if not closed.isdisjoint(scope.where[fold.ref]):
            tile = scope.allocate(crossing_tile(fold, scope))
            scope.known[fold.ref] = tile
            return cleared(fold, tile, scope)
        axes = tuple(symbol for symbol in scope.tiled(*fold.args) if symbol not in fold.over)
        name = scope.space.exactly(fold.name)
        if fold.op == "dot":
            product = self.products.product(fold)
            tile = product_tile(name, held, product.others, product.row, product.column, scope.blocks)
        else:
            tile = tile_over(name, held, axes, scope.blocks)
        scope.known[fold.ref] = scope.allocate(tile)
        if self.products.begins(fold):
            return []
        if not keeps_position(fold.op):
            return self.scope.fill(tile, started(fold))
        dtype = fold.args[0].dtype
        best = self.scope.allocate(
            tile_over(scope.space.exactly(f"{name}_best"), VALUE_TYPES[dtype], axes, scope.blocks)
        )
        self.best[fold.name] = best
        return [*self.scope.fill(best, started(fold, dtype)), *self.scope.fill(tile, NEVER)]

    def _fold(self, fold: Fold) -> list[str]:
        if fold.name in self.stored:
            return multiplied_there(fold, self.stored[fold.name], self.products)
        lines: list[str] = []
        complete = fold.ref not in self.scope.known  # without a loop; others were started before their loop
        fresh = complete and fold.op == "dot" and not self.products.product(fold).deeper
        if complete:
            started = self._start(fold)
            lines += [] if fresh else started
        tile = self.scope.known[fold.ref]
        if fold.op == "dot":
            return [
                *lines,
                *self._dot(fold, tile, fresh=str(int(fresh)) if complete else self.products.begins(fold) or "0"),
            ]
        lines += self._carry(fold, tile)
        over = frozenset(fold.over)
        symbols = over.union(*(self.scope.where[arg] for arg in fold.args))
        axes = self.scope.order(self.scope.blocks.tiled(symbols), fold.args, folded=over)
        lines += self.scope.parts(fold.args, axes)
        if keeps_position(fold.op):
            return [*lines, *self._extreme_position(fold, tile, axes)]
        if axes and axes[-1] in over:
            return [*lines, *self._across(fold, tile, axes)]
        element, nest = self.scope.at(tile), self.scope.nest(fold.args, axes, named=frozenset(fold.args))
        nest.write(f"{element} = {combined(fold, element, nest.texts[0])};")
        return [*lines, *nest.lines()]

    def _dot(self, fold: Fold, tile: ArrayTile, *, fresh: str) -> list[str]:
        """Return a product; its factors are read before the accumulator is rescaled."""
        product = self.products.product(fold)
        lines, left = self.products.left(product)
        right = self.products.right(product, left)
        packing = right.lines if isinstance(right, Packed) else []
        lines = [*lines, *packing, *self._carry(fold, tile)]
        if not tile.full:
            return [*lines, *self.products.multiply(product, tile, left, right, fresh=fresh)]
        block = block_of(tile, product, self.scope)
        lines += self.scope.fill(block, started(fold)) if product.deeper else []
        lines += self.products.multiply(product, block, left, right, fresh=str(int(not product.deeper)))
        return [*lines, *added_to(tile, block, self.scope)]

    def _carry(self, fold: Fold, tile: ArrayTile) -> list[str]:
        """Return lines that rescale the accumulator of `fold` by its running values."""
        if fold.carry is None:
            return []
        lines = self.scope.parts([fold.carry], tile.axes)
        nest = self.scope.nest([fold.carry], tile.axes)
        nest.write(f"{self.scope.at(tile)} = {nest.texts[0]};")
        return [*lines, *nest.lines()]

    def _across(self, fold: Fold, tile: ArrayTile, axes: Sequence[sympy.Symbol]) -> list[str]:
        """Return a fold whose lanes run along a folded axis: each lane has a partial result, combined at the end."""
        held = VALUE_TYPES[fold.dtype]
        part = Code(self.scope.space.fresh(f"{fold.name}_part"))
        outer = sum(symbol not in fold.over for symbol in axes)
        extreme = fold.op in ("max", "min") and held != "_Bool"
        watch = NanWatch(self.scope.space.fresh("nan"), held) if extreme and fold.dtype.is_floating_point else None
        nest = self.scope.nest(fold.args, axes, named=frozenset(fold.args))
        (value,) = nest.texts
        shared, kept = nest.levels[-1], nest.levels[outer]
        shared.clauses.append(across_lanes(fold, part))
        kept.before.append(f"{held if held != '_Bool' else 'int'} {part} = {started(fold)};")
        nest.write(better(fold, part, value) if extreme else f"{part} = {combined(fold, part, value)};")
        if watch is not None:
            nest.write(watch.look(value))
            shared.clauses += watch.clauses
            kept.before += watch.before
            kept.after.append(f"{part} = {watch.result(part.text)};")
        element = self.scope.at(tile)
        kept.after.append(f"{element} = {combined(fold, element, part)};")
        return nest.lines()

    def _extreme_position(self, fold: Fold, tile: ArrayTile, axes: Sequence[sympy.Symbol]) -> list[str]:
        """Return the lines of an argmax or argmin, which update the best value and its position at each point."""
        at = self.scope.at(tile)
        best = self.scope.at(self.best[fold.name])
        nest = self.scope.nest(fold.args, axes, named=frozenset(fold.args), lanes=False)
        value, index = nest.texts
        nest.write(*take(fold, self.scope.space.fresh("take"), value, index, best, at))
        return nest.lines()


def _learned(loop: Loop, scope: TileScope) -> Loop:
    """Return `loop`, after `scope` has learned the spans of its expressions."""
    for stmt in statements(loop.body):
        extend_spans(scope.where, values_of(stmt))
    return loop


def _same_axes(loop: Loop, other: Loop, scope: TileScope) -> bool:
    """Return whether the values of two versions of a loop have the same axes, so that the tiles of results fit."""
    values, others = ([value for stmt in each.body for value in values_of(stmt)] for each in (loop, other))
    return [scope.tiled(value) for value in values] == [scope.tiled(value) for value in others]
