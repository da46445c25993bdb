"""Emits folds whose value is updated at each block, because their own loop needs it.

Input: a fold that is named inside its loop, or has a `carry`; output: lines.  Its running value is defined before the
loop and starts as the identity.  Each block is reduced at once, the previous value is corrected by `carry`, and the two
are combined.  Where a later statement needs the previous value, the new one has another name and replaces it at the end
of the loop's body.

Where a program loops over one row, each of its threads keeps the running values of its own elements, as if they were a
row, and no thread waits for others.  After the loop the values of the threads are combined as blocks are: each is first
corrected, by `carry`, from the result of its thread to the result of all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from fusion.codegen.triton.blocks import LaneDim
from fusion.codegen.triton.blocks.dims import WORD
from fusion.codegen.triton.devices import Feature
from fusion.codegen.triton.expressions.code import Code, as_code, compose
from fusion.codegen.triton.expressions.scalar_code import TYPES, cast, literal, typed
from fusion.codegen.triton.expressions.scopes import Tile
from fusion.codegen.triton.expressions.values import Values
from fusion.codegen.triton.products import contract
from fusion.codegen.triton.statements import reduce
from fusion.lowering.ir.expr import Expr, TileRef, free_axes, loads, postorder
from fusion.lowering.ir.kernel import Fold, Loop, Role, running, statements, values_of
from fusion.lowering.ir.scalar_ops import identity


def needed_before(loop: Loop) -> frozenset[str]:
    """Return the folds whose value before the current block is needed outside of their own `carry`."""
    names: set[str] = set()
    for stmt in statements(loop.body):
        before = {node.name for node in postorder(*values_of(stmt)) if isinstance(node, TileRef) and node.before}
        names |= before - {stmt.name} if isinstance(stmt, Fold) else before
    return frozenset(names)


def lanes_of(values: Values, loop: Loop) -> LaneDim | None:
    """Return the threads that each keep running values of the folds of `loop`; None where all threads share them."""
    layout, folds = values.layout, [stmt for stmt in loop.body if isinstance(stmt, Fold)]
    dims = layout.blocked.of(loop.axes)
    if not values.device.has(Feature.PTX) or len(dims) != 1 or layout.tiled != dims or not running(loop):
        return None
    if len(folds) < len(loop.body) or not all(_allows_lanes(fold, loop) for fold in folds):
        return None
    read = [load for fold in folds for load in loads(*values_of(fold)) if dims[0].symbol in free_axes(load)]
    word = WORD // max((load.dtype.itemsize for load in read), default=WORD)
    lanes = LaneDim("l", (), Role.WHOLE, count=32 * layout.config.num_warps, word=word)
    return lanes if layout.config.block(dims[0].name) % (lanes.count * word) == 0 else None


def _allows_lanes(fold: Fold, loop: Loop) -> bool:
    return fold.op in ("max", "min", "sum") and fold.dtype.is_floating_point and set(fold.over) == set(loop.axes)


def accumulate(
    values: Values, fold: Fold, *, depth: int, kept: bool, lanes: LaneDim | None = None
) -> tuple[Callable[[], None], tuple[Code, ...]]:
    """Add the lines that accumulate the current block into a running fold, of which each thread has one where `lanes`
    is set.

    `depth` is the scope of the value between blocks; it is `kept` where something still needs the previous value after
    this fold.  Returns a function that defines the result after the loop, and the lines that end the loop's body.
    """
    inside = values.depth
    product = contract.product(values, fold) if fold.op == "dot" else None
    if product is not None:
        carried, block, start = product.sums, None, contract.zeros(values, product, depth)
    else:
        over = values.layout.blocked.of(fold.over)
        if lanes is None:
            block, carried = reduce.block_value(values, fold, over)
        else:
            block, carried = reduce.lane_value(values, fold, over[0], lanes)
        first = literal(identity(fold.op, fold.args[0].dtype), carried)
        start = Tile(values.filled(block.dims, first, TYPES[carried]), block.dims, depth)
    state = values.accumulator(fold.name, start)
    _bind(values, fold.before, state, carried, inside)
    before = _carried(values, fold, state, carried)
    if product is not None:
        code = product.code(values, before)
    else:
        assert block is not None
        code = reduce.combined(fold, before, block.code)
    name = as_code(values.fresh(f"{fold.name}_now", inside)) if kept else state.code
    values.line("{} = {}", name, code)
    _bind(values, fold.ref, replace(state, code=name), carried, inside)
    ends = (compose("{} = {}", state.code, name),) if kept else ()
    return lambda: _complete(values, fold, state, carried, depth), ends


def _complete(values: Values, fold: Fold, state: Tile, carried: torch.dtype, depth: int) -> None:
    """Define the value of a fold after its loop: combined over all threads, where each has its own."""
    if state.dims and isinstance(state.dims[0], LaneDim):
        _bind(values, fold.before, state, carried, depth)
        joined = replace(state, code=_carried(values, fold, state, carried))
        state = values.name(fold.name, reduce.of_all_lanes(values, fold, joined), depth)
    _bind(values, fold.ref, state, carried, depth)


def _carried(values: Values, fold: Fold, state: Tile, carried: torch.dtype) -> Code:
    """Return the corrected value before the current block, as a full tile."""
    tile = values.widened(values.value(fold.before if fold.carry is None else fold.carry))
    tile = values.broadcast(replace(tile, code=typed(tile.code, fold.dtype)), state.dims)
    return cast(tile.code, fold.dtype, carried)


def _bind(values: Values, key: Expr, tile: Tile, carried: torch.dtype, depth: int) -> None:
    values.bind(key, replace(tile, code=cast(tile.code, carried, key.dtype), depth=depth))
