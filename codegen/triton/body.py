"""Emits the statements of a kernel as lines of Triton.

Input: block dimensions, laid out; output: the text between `def kernel(…):` and its end.  A program first computes the
start of its block; then statements follow in their order.  A loop defines its running values before it and completes
its folds after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from typing_extensions import assert_never

from fusion.codegen.triton.blocks import Blocked, Dim, LaneDim, extent
from fusion.codegen.triton.blocks.aligned_rows import word_store
from fusion.codegen.triton.expressions import bit_fields, interleaved
from fusion.codegen.triton.expressions.code import AND, PRODUCT, UNARY, Code, compose, listed, widened
from fusion.codegen.triton.expressions.indices import expand
from fusion.codegen.triton.expressions.scalar_code import typed
from fusion.codegen.triton.expressions.scopes import Tile
from fusion.codegen.triton.expressions.values import Values
from fusion.codegen.triton.loops import skips
from fusion.codegen.triton.products import contract, stacked
from fusion.codegen.triton.products.block_order import assign_block
from fusion.codegen.triton.statements import prefix, reduce, running_folds
from fusion.codegen.triton.statements.updates import update
from fusion.lowering.ir.expr import Load, index_of, loads
from fusion.lowering.ir.kernel import Fold, Loop, Prefix, Role, Stmt, Store, running, statements, values_of


class _LoopState:
    """The state of the loop whose lines are being added.

    Attributes:
        needed: its folds whose value before the current block is read by later statements.
        ends: the lines that end its body.
        lanes: the threads, where each keeps running values of its own.
    """

    def __init__(self, loop: Loop) -> None:
        self.axes = frozenset(loop.axes)
        self.follows = bool(running(loop))
        self.needed = running_folds.needed_before(loop)
        self.ends: list[Code] = []
        self.lanes: LaneDim | None = None

    def accumulates_blocks(self, fold: Fold) -> bool:
        """Return whether every block is reduced at once, because the loop names its folds.  (False for a pair of
        values.)
        """
        return self.follows and self.axes == set(fold.over) and (fold.op == "dot" or len(fold.args) == 1)


class Body:
    """Writes the lines of one kernel."""

    def __init__(self, values: Values) -> None:
        self.values, self.layout = values, values.layout
        interleaved.join_loads(values)
        bit_fields.convert(values)
        self._policies = iter(list(_policies(self.layout.blocked)))
        self._state: _LoopState | None = None

    def statements(self) -> None:
        """Add the lines of all statements."""
        self._run(self.layout.blocked.body)

    def computations(self) -> None:
        """Add the lines of all statements except the stores at the end."""
        self._run([stmt for stmt in self.layout.blocked.body if not isinstance(stmt, Store)])

    def stores(self) -> None:
        """Add the lines of the stores at the end."""
        self._run([stmt for stmt in self.layout.blocked.body if isinstance(stmt, Store)])

    def in_loop(self, loop: Loop, body: Sequence[Stmt]) -> tuple[list[Callable[[], None]], list[Code]]:
        """Emit statements of the loop body; return callbacks that complete its folds, and the lines that end an
        iteration.
        """
        self._state = _LoopState(loop)
        later = self._run(body)
        ends, self._state = self._state.ends, None
        return later, ends

    # The block of a program -------------------------------------------------------------------------------------------

    def assign_block(self) -> None:
        """Add the lines that compute the block of this program, unless the caller has set its start."""
        values, grid = self.values, self.layout.blocked.grid()
        if values.starts:
            return
        if self.layout.blocked.contraction:
            assign_block(values, self._program())
        elif len(grid) == 1:
            values.starts[grid[0]] = self._start(grid[0], values.program)
        elif grid:
            y, x = grid
            pid = self._program()
            size = values.index_tile(x.size).code
            count = values.name("x_blocks", Tile(compose("tl.cdiv({}, {})", size, x.constant))).code
            values.starts[y] = self._start(y, compose("{} // {}", pid, count, binds=PRODUCT))
            values.starts[x] = self._start(x, compose("{} % {}", pid, count, binds=PRODUCT))

    def _program(self) -> Code:
        """Return the name of the number of this program."""
        number = self.values.program
        return number if number.is_name else self.values.name("pid", Tile(number)).code

    def _start(self, dim: Dim, block: Code) -> Code:
        """Return the first index of block number `block` of `dim`."""
        wide = dim in self.layout.wide
        block = widened(block) if wide else block
        if dim not in self.layout.tiled:
            return block
        return replace(compose("{} * {}", block.at(PRODUCT), dim.constant), wide=wide)

    # Statements -------------------------------------------------------------------------------------------------------

    def _run(self, body: Sequence[Stmt]) -> list[Callable[[], None]]:
        """Add the lines of `body`; return the functions that complete its folds after the enclosing loop."""
        later: list[Callable[[], None]] = []
        for stmt in body:
            match stmt:
                case Loop():
                    self._loop(stmt)
                case Store():
                    self.store(stmt)
                case Prefix():
                    prefix.scan_now(self.values, stmt)
                case Fold():
                    later.extend(self._fold(stmt))
                case _:
                    assert_never(stmt)
        return later

    def _loop(self, loop: Loop) -> None:
        values = self.values
        outer = values.eviction, self._state
        values.eviction = next(self._policies)
        dims = self.layout.blocked.of(loop.axes)
        if dims:
            (dim,) = dims
            self._loop_over(loop, dim)
        else:  # every axis has size 1
            self._state = _LoopState(loop)
            self._run(loop.body)
        values.eviction, self._state = outer

    def _loop_over(self, loop: Loop, dim: Dim) -> None:
        """Add the lines of a loop over blocks of `dim`, part by part, and complete its folds."""
        values = self.values
        parts = skips.parts(values, loop, dim, split=self.layout.config.split)
        back = skips.may_run_backwards(values, loop, parts, dim) and "evict_first" in values.eviction.values()
        plain, written = all(isinstance(stmt, Fold) or _is_plain(stmt) for stmt in loop.body), set(values.written)
        later: list[Callable[[], None]] = []
        for part in reversed(parts) if back else parts:
            if plain:  # no part or step of the loop reads data that another one has stored
                values.written = set(written)
            later = self._part(part, dim, backwards=back and part.start == Code("0"))
        values.full = frozenset()
        for complete in later:
            complete()

    def _part(self, part: skips.LoopPart, dim: Dim, *, backwards: bool) -> list[Callable[[], None]]:
        """Add the lines of one part of a loop, `backwards` from its last block; return the functions that complete its
        folds.
        """
        values = self.values
        self._state = _LoopState(part.loop)
        self._state.lanes = running_folds.lanes_of(values, part.loop)
        values.full = frozenset({dim}) if part.full else frozenset()
        step = start = values.open(f"{dim.name}_step" if backwards or part.gap is not None else f"{dim.name}0")

        def named(start: Code) -> Code:
            return values.name(f"{dim.name}0", Tile(start, depth=values.depth)).code

        if backwards:
            start = named(compose("{} - {} - {}", part.end, dim.constant, step))
        if part.gap is not None:
            start = named(compose("{0} + tl.where({0} < {1}, 0, {2})", start, *part.gap))
        values.starts[dim] = start
        later = self._run(part.loop.body)
        for line in self._state.ends:
            values.line("{}", line)
        steps = compose("{}, {}, {}", part.start, part.end, dim.constant)
        count = self.layout.config.unrolled
        turns = compose("range({})", steps)
        if count > 1:
            turns = compose("tl.range({}, loop_unroll_factor={})", steps, count)
        elif self.layout.config.num_stages > 1 and not self.layout.blocked.contraction:
            turns = compose("tl.range({}, num_stages={})", steps, self.layout.config.num_stages)
        values.close("for {} in {}:", step, turns)
        return later

    def _fold(self, fold: Fold) -> Iterator[Callable[[], None]]:
        """Add the lines of a fold; yield the function that completes it after the enclosing loop."""
        values, state, over = self.values, self._state, self.layout.blocked.of(fold.over)
        looped = any(dim.role is Role.LOOP for dim in over)
        if state is not None and state.accumulates_blocks(fold):
            kept = fold.name in state.needed
            depth, lanes = values.depth - looped, state.lanes if looped else None
            finish, ends = running_folds.accumulate(values, fold, depth=depth, kept=kept, lanes=lanes)
            state.ends.extend(ends)
            yield finish
        elif values.stack is not None and fold in values.stack.folds:
            if fold is values.stack.folds[0]:
                yield stacked.dot_in_loop(values, values.stack)
        elif fold.op == "dot":
            if looped:
                yield contract.dot_in_loop(values, fold)
            else:
                contract.dot_now(values, fold)
        elif looped:
            yield reduce.fold_in_loop(values, fold, over)
        else:
            reduce.fold_now(values, fold, over)
            if not over and values.is_overwritten(fold.args):
                values.line("tl.debug_barrier()")  # other threads of this program overwrite the elements read here

    def store(self, stmt: Store) -> None:
        """Add the lines of a store."""
        values = self.values
        if stmt.axes is not None:
            update(values, stmt)
            return
        tile = values.widened(values.value(stmt.value))
        transfer = values.store_through.get(stmt.param)
        tile = Tile(typed(tile.code, stmt.value.dtype), tile.dims, tile.depth)
        if transfer is not None:
            dims, corner, turned = values.block_corner(transfer)
            code = compose(turned, values.broadcast(tile, dims).code)
            if transfer.batch is not None:
                shape = values.layout.shape((transfer.rows, transfer.columns), 1)
                block = Tile(compose("tl.reshape({}, {})", code, shape), dims, values.depth)
                code = values.name(stmt.param, block).code
            if transfer.staged:
                values.line("{}({}, {}, {}, {})", "_send", transfer.name, transfer.staged, corner, code)
            else:
                values.line("{}.store({}, {})", transfer.name, corner, code)
        else:
            pointer = values.pointer(stmt.param, stmt.offset)
            padding = [dim for dim in tile.dims if dim not in pointer.dims]
            assert all(dim.size == 1 for dim in padding), f"{stmt.param} is stored where its value varies more"
            if padding:  # the block of a dimension of size 1: all but its first lane are masked
                pointer = values.broadcast(pointer, values.join((tile.dims, pointer.dims)))
            arguments = [pointer.code, expand(tile.code, tile.dims, pointer.dims)]
            passes = "evict_first" in values.eviction.values() and self._passes_cache(stmt.param)
            policy = [Code('eviction_policy="evict_first"')] if passes else []
            for mask in self._masks(stmt, pointer):
                masked = [] if mask is None else [compose("mask={}", expand(mask.code, mask.dims, pointer.dims))]
                values.line("tl.store({})", listed([*arguments, *masked, *policy]))
        values.stored(stmt.param)

    def _masks(self, stmt: Store, pointer: Tile) -> list[Tile | None]:
        """Return the mask of a store, or of two: of whole words, and of the elements where a row begins and ends."""
        values, word = self.values, word_store(self.layout.blocked, stmt)
        mask = values.masks(pointer.dims)
        if mask is None or word is None or pointer.dims != (word[0],):
            return [mask]
        whole = values.whole_words(*word)
        ends = compose("{} & ~{}", mask.code.at(AND + 1), whole.code.at(UNARY), binds=AND)
        return [whole, replace(mask, code=ends)]

    def _passes_cache(self, name: str) -> bool:
        """Return whether a result is larger than the cache, so that storing it there would only evict data that is read
        again.
        """
        param = self.layout.blocked.kernel.param(name)
        return extent(param.extent) * param.dtype.itemsize > self.values.device.cache


def _is_plain(stmt: Stmt) -> bool:
    """Return whether a statement stores each point of a block once."""
    return isinstance(stmt, Store) and stmt.axes is None


def _policies(blocked: Blocked) -> Iterator[dict[Load, str]]:
    """Yield the cache policies of each loop, outer ones first, for loads that several loops share.

    Data that a later loop reads again is kept (evict_last); in its last loop it may be evicted (evict_first).
    """
    loads_of_loops: list[list[Load]] = []
    for loop in statements(blocked.body, Loop):
        looped = {dim.symbol for dim in blocked.of(loop.axes)}
        own = loads(*(value for stmt in loop.body for value in values_of(stmt)))
        loads_of_loops.append([load for load in own if any(looped & index.free_symbols for index in index_of(load))])
    for number, state in enumerate(loads_of_loops):
        again = {load for later in loads_of_loops[number + 1 :] for load in later}
        before = {load for earlier in loads_of_loops[:number] for load in earlier}
        policies = {load: "evict_first" for load in state if load in before}
        yield {**policies, **{load: "evict_last" for load in state if load in again}}
