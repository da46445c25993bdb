"""Follow: running folds, values that their own loop follows from block to block.

What enters is a fold that is named inside its loop, or carries; what leaves are lines.  Its value so far stands before
the loop and begins as the identity.  Each block is reduced at once, what came before is brought up to date by `carry`,
and the two are joined.  Where a later statement needs the value as it was before the block, the new one has a name of
its own and takes its place at the end of the loop's body.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from codegen.triton.expressions.scopes import Tile
from codegen.triton.expressions.spell import TYPES, Code, cast, literal, typed
from codegen.triton.expressions.values import Values
from codegen.triton.products import contract
from codegen.triton.statements import reduce
from lowering.expr import Expr, TileRef, postorder
from lowering.kernel import Fold, Loop, statements, values_of
from lowering.scalar_ops import identity


def named_before(loop: Loop) -> frozenset[str]:
    """The folds whose value before the current block is needed by something else than their own `carry`."""
    found: set[str] = set()
    for stmt in statements(loop.body):
        before = {node.name for node in postorder(*values_of(stmt)) if isinstance(node, TileRef) and node.before}
        found |= before - {stmt.name} if isinstance(stmt, Fold) else before
    return frozenset(found)


def take_in(
    values: Values, fold: Fold, arch: str, *, depth: int, kept: bool
) -> tuple[Callable[[], None], tuple[str, ...]]:
    """Take the current block into a running fold.

    `depth` is where the value stands between blocks; it is `kept` where something still needs it after this fold.
    Returns what makes the result known after the loop, and the lines that end the loop's body.
    """
    inside = values.depth
    product = contract.product(values, fold, arch) if fold.op == "dot" else None
    if product is not None:
        carried, block, start = product.sums, None, contract.zeros(values, product, depth)
    else:
        block, carried = reduce.block_value(values, fold, values.layout.blocked.of(fold.over))
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
    return lambda: _known(values, fold.ref, state, carried, depth), moved


def _carried(values: Values, fold: Fold, state: Tile, carried: torch.dtype) -> Code:
    """What the value before the current block has become, as a full tile."""
    tile = values.widened(values.value(fold.before if fold.carry is None else fold.carry))
    tile = values.spread(replace(tile, code=typed(tile.code, fold.dtype)), state.dims)
    return cast(tile.code, fold.dtype, carried)


def _known(values: Values, key: Expr, tile: Tile, carried: torch.dtype, depth: int) -> None:
    values.bind(key, replace(tile, code=cast(tile.code, carried, key.dtype), depth=depth))
