"""Rewrites a reduction over WHOLE axes as a loop over blocks.

Input: a kernel whose reduced axes are WHOLE; output: an equal one whose reduced axes are LOOP.  A row of 32768
contiguous elements fits the registers of one program.  As many elements in each of sixteen neighbouring columns do not,
and fewer columns would waste part of each memory sector.  Nor does a long row fit few warps, as in a kernel that others
follow in its launch (`forms/last_block.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import sympy

from fusion.lowering.ir.expr import Expr, Load, index_of, postorder
from fusion.lowering.ir.kernel import Fold, Kernel, Loop, Prefix, Role, Stmt, Store, statements, values_of
from fusion.lowering.ir.prefixes import named, placed


def in_blocks(kernel: Kernel, over: tuple[sympy.Symbol, ...] = ()) -> Kernel:
    """Return `kernel` with loops over the axes `over` (by default every reduced axis), which each of its folds reduces.

    Each fold, and each store along such an axis, joins the preceding loop unless it needs a result of that loop.
    """
    over = over or tuple(axis.symbol for axis in kernel.axes if axis.role is not Role.GRID)
    prefixes = [stmt for stmt in kernel.body if isinstance(stmt, Prefix)]
    axes = tuple(replace(axis, role=Role.LOOP) if axis.symbol in over else axis for axis in kernel.axes)
    body: list[Stmt] = []
    for stmt in kernel.body:
        if isinstance(stmt, Prefix):  # it is placed in every loop that names it
            continue
        position = max((k for k, other in enumerate(body) if isinstance(other, Loop)), default=0)
        last = body[position] if body else None
        if isinstance(stmt, Store) and not _varies(stmt, frozenset(over)):
            body.append(stmt)
        elif isinstance(last, Loop) and not _needs(stmt, last, prefixes) and not _touches(stmt, body[position + 1 :]):
            body[position] = replace(last, body=(*last.body, stmt))
        else:
            body.append(Loop(over, (stmt,)))
    return replace(kernel, axes=axes, body=placed(body, prefixes))


def _touches(stmt: Stmt, stores: Sequence[Stmt]) -> bool:
    """Return whether `stmt` reads or writes a tensor that an earlier statement stores to."""
    touched = {node.buffer for node in postorder(*values_of(stmt)) if isinstance(node, Load)}
    touched |= {stmt.param} if isinstance(stmt, Store) else set()
    return any(isinstance(store, Store) and store.param in touched for store in stores)


def _varies(stmt: Store, over: frozenset[object]) -> bool:
    """Return whether `stmt` is executed at each point of a reduced axis."""
    if stmt.axes is not None:
        return not over.isdisjoint(stmt.axes)
    _, *roots = values_of(stmt)  # without the value
    indices = [index for node in postorder(*roots) for index in index_of(node)]
    if not roots:
        assert not isinstance(stmt.offset, Expr), "it would be one of the values"
        indices.append(stmt.offset)
    return any(over & index.free_symbols for index in indices)


def _needs(stmt: Stmt, loop: Loop, prefixes: Sequence[Prefix]) -> bool:
    """Return whether `stmt` uses the result of a fold of `loop`, directly or through scans."""
    results = {inner.name for inner in statements(loop.body, Fold)}
    return not results.isdisjoint(named(values_of(stmt), {prefix.name: prefix for prefix in prefixes}))
