"""Follow: running folds, values that their own loop follows from block to block.

What enters is a fold that is named inside its loop, or carries; what leaves are lines.  Its value so far stands before
the loop and begins as the identity.  Each block is reduced at once, what came before is brought up to date by `carry`,
and the two are joined.  Where a later statement needs the value as it was before the block, the new one has a name of
its own and takes its place at the end of the loop's body.

Where a program walks one row, each of its threads follows what it has seen of it itself, as if that were a row, and no
thread waits for others.  After the loop their values are joined as blocks are: each is first brought up to date, by
`carry`, from what its thread has found to what all of them have.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from fusion.codegen.triton.blocks import Lanes
from fusion.codegen.triton.blocks.dims import WORD
from fusion.codegen.triton.devices import Feature
from fusion.codegen.triton.expressions.scopes import Tile
from fusion.codegen.triton.expressions.spell import TYPES, Code, cast, literal, typed
from fusion.codegen.triton.expressions.values import Values
from fusion.codegen.triton.products import contract
from fusion.codegen.triton.statements import reduce
from fusion.lowering.expr import Expr, TileRef, free_axes, loads, postorder
from fusion.lowering.kernel import Fold, Loop, Role, running, statements, values_of
from fusion.lowering.scalar_ops import identity


def named_before(loop: Loop) -> frozenset[str]:
    """The folds whose value before the current block is needed by something else than their own `carry`."""
    found: set[str] = set()
    for stmt in statements(loop.body):
        before = {node.name for node in postorder(*values_of(stmt)) if isinstance(node, TileRef) and node.before}
        found |= before - {stmt.name} if isinstance(stmt, Fold) else before
    return frozenset(found)


def lanes_of(values: Values, loop: Loop) -> Lanes | None:
    """The threads that follow the folds of `loop` each by itself; None where all follow them together."""
    layout, folds = values.layout, [stmt for stmt in loop.body if isinstance(stmt, Fold)]
    dims = layout.blocked.of(loop.axes)
    if not values.device.has(Feature.PTX) or len(dims) != 1 or layout.tiled != dims or not running(loop):
        return None
    if len(folds) < len(loop.body) or not all(_is_followed_by_lane(fold, loop) for fold in folds):
        return None
    read = [load for fold in folds for load in loads(*values_of(fold)) if dims[0].symbol in free_axes(load)]
    word = WORD // max((load.dtype.itemsize for load in read), default=WORD)
    lanes = Lanes("l", (), Role.WHOLE, count=32 * layout.config.num_warps, word=word)
    return lanes if layout.config.block(dims[0].name) % (lanes.count * word) == 0 else None


def _is_followed_by_lane(fold: Fold, loop: Loop) -> bool:
    return fold.op in ("max", "min", "sum") and fold.dtype.is_floating_point and set(fold.over) == set(loop.axes)


def take_in(
    values: Values, fold: Fold, *, depth: int, kept: bool, lanes: Lanes | None = None
) -> tuple[Callable[[], None], tuple[str, ...]]:
    """Take the current block into a running fold, which `lanes` follow each by itself.

    `depth` is where the value stands between blocks; it is `kept` where something still needs it after this fold.
    Returns what makes the result known after the loop, and the lines that end the loop's body.
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
        first = literal(identity(fold.op, fold.args[0].dtype), carried).text
        start = Tile(values.filled(block.dims, first, TYPES[carried]), block.dims, depth)
    state = values.accumulator(fold.name, start)
    _known(values, fold.before, state, carried, inside)
    before = _carried(values, fold, state, carried)
    if product is not None:
        text = product.text(values, before.text)
    else:
        assert block is not None
        text = reduce.combined(fold, before, block.code).text
    name = values.fresh(f"{fold.name}_now", inside) if kept else state.code.text
    values.line(f"{name} = {text}")
    _known(values, fold.ref, replace(state, code=Code(name)), carried, inside)
    moved = (f"{state.code.text} = {name}",) if kept else ()
    return lambda: _complete(values, fold, state, carried, depth), moved


def _complete(values: Values, fold: Fold, state: Tile, carried: torch.dtype, depth: int) -> None:
    """After the loop a fold has its value: that of all threads, where each has followed it."""
    if state.dims and isinstance(state.dims[0], Lanes):
        _known(values, fold.before, state, carried, depth)
        joined = replace(state, code=_carried(values, fold, state, carried))
        state = values.name(fold.name, reduce.of_all_lanes(values, fold, joined), depth)
    _known(values, fold.ref, state, carried, depth)


def _carried(values: Values, fold: Fold, state: Tile, carried: torch.dtype) -> Code:
    """What the value before the current block has become, as a full tile."""
    tile = values.widened(values.value(fold.before if fold.carry is None else fold.carry))
    tile = values.spread(replace(tile, code=typed(tile.code, fold.dtype)), state.dims)
    return cast(tile.code, fold.dtype, carried)


def _known(values: Values, key: Expr, tile: Tile, carried: torch.dtype, depth: int) -> None:
    values.bind(key, replace(tile, code=cast(tile.code, carried, key.dtype), depth=depth))
