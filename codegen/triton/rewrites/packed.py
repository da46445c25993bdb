"""Unpacks a contraction over an axis of which several neighbours share one stored element, such as two 4-bit weights.

Input: a Kernel with folds over the same axes, `dot` or `sum`; output: a Kernel that loops over stored elements and
unpacks each once: one `dot` for each position in an element, or one `sum` of as many terms.

    dot over r0: 4096 of x[r0], q(w[r0 // 2], r0 % 2)   →   dot over r0: 2048 of x[2*r0],     q(w[r0], 0)
                                                        +   dot over r0: 2048 of x[2*r0 + 1], q(w[r0], 1)

Loads are then of neighbouring elements again, and expressions of the position become constants.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import sympy

from fusion.lowering.algebra.conditions import plain
from fusion.lowering.indexing import replace_axes, split_points, substitute_all
from fusion.lowering.ir.expr import (
    Expr,
    IndexValue,
    Load,
    Op,
    TileRef,
    index_of,
    loads,
    postorder,
    rewrite,
)
from fusion.lowering.ir.kernel import (
    Fold,
    Kernel,
    Loop,
    Prefix,
    Role,
    Stmt,
    Store,
    map_statements,
    statements,
    values_of,
    with_values,
)

MOST_PACKED = 8
"""The most positions in a stored element: bits of a byte."""


@dataclass(frozen=True, slots=True)
class _Packing:
    """`positions` neighbours along `axis`, an axis of all `folds`, share a stored element."""

    folds: tuple[Fold, ...]
    axis: sympy.Symbol
    positions: int


def unpacked(kernel: Kernel) -> Kernel:
    """Return `kernel` with its folds over packed (stored) elements; the same object if nothing is packed."""
    packing = _packing(kernel)
    if packing is None:
        return kernel
    count = packing.positions
    axes = tuple(replace(axis, size=axis.size / count) if axis.symbol == packing.axis else axis for axis in kernel.axes)
    sizes = {axis.symbol: axis.size for axis in axes}
    positions = [{packing.axis: count * packing.axis + number} for number in range(count)]
    args = [arg for fold in packing.folds for arg in fold.args]
    at = [dict(zip(args, plain(substitute_all(args, place, sizes)), strict=True)) for place in positions]
    return replace(kernel, axes=axes, body=_rebuilt(kernel.body, _parts(packing.folds, at)))


def _packing(kernel: Kernel) -> _Packing | None:
    """Return the first axis of the folds along which neighbours share a stored element and differ in their use of it,
    or None.
    """
    folds = tuple(statements(kernel.body, Fold))
    nodes = postorder(*(arg for fold in folds for arg in fold.args))
    if not _is_one_loop(kernel, folds) or any(isinstance(node, TileRef) for node in nodes):
        return None
    indices = [index for node in nodes for index in index_of(node)]
    sizes = {axis.symbol: axis.size for axis in kernel.axes if axis.role is not Role.GRID}
    for axis in folds[0].over:
        points = split_points(indices, axis, sizes[axis])
        digits = [node.index for node in nodes if isinstance(node, IndexValue) and axis in node.index.free_symbols]
        if not points or points[0] > MOST_PACKED or not digits or _stored_along(kernel, axis):
            continue
        if any(_is_shared(load, axis, points[0], sizes) for load in loads(*nodes)):
            return _Packing(folds, axis, points[0])
    return None


def _is_shared(load: Load, axis: sympy.Symbol, count: int, sizes: Mapping[sympy.Symbol, sympy.Expr]) -> bool:
    """Return whether `count` neighbours along an axis load one element, or elements that begin at one place."""
    sizes = {**sizes, axis: sizes[axis] / count}
    computed = postorder(*(index for index in load.index if isinstance(index, Expr)))
    indices = (index for node in (load, *computed) for index in index_of(node))
    along = [index for index in indices if axis in index.free_symbols]
    first, second = ([replace_axes(index, {axis: count * axis + place}, sizes) for index in along] for place in (0, 1))
    return any(index == other for index, other in zip(first, second, strict=True))


def _is_one_loop(kernel: Kernel, folds: Sequence[Fold]) -> bool:
    """Return whether the kernel's loops contain only `folds`, of one operation over the same axes, with no kernel after
    them.
    """
    if len({(fold.op, fold.over) for fold in folds}) != 1 or folds[0].op not in ("dot", "sum"):
        return False
    if any(fold.carry is not None for fold in folds) or (kernel.then is not None and not kernel.awaited):
        return False
    looped = [stmt for loop in kernel.body if isinstance(loop, Loop) for stmt in loop.body]
    scanned = any(isinstance(stmt, Prefix) for stmt in statements(kernel.body))
    return not scanned and all(stmt in folds for stmt in looped)


def _stored_along(kernel: Kernel, axis: sympy.Symbol) -> bool:
    """Return whether a store depends on the folded axis too, as in a normalised row."""
    stores = list(statements(kernel.body, Store))
    nodes = postorder(*(value for stmt in stores for value in values_of(stmt)))
    offsets = [stmt.offset for stmt in stores if not isinstance(stmt.offset, Expr)]
    return any(axis in index.free_symbols for index in (*offsets, *(i for node in nodes for i in index_of(node))))


def _parts(folds: Sequence[Fold], at: Sequence[Mapping[Expr, Expr]]) -> dict[str, tuple[Fold, ...]]:
    """Return, for the name of each old fold, the folds over stored elements whose sum it is."""
    parts: dict[str, tuple[Fold, ...]] = {}
    for fold in folds:
        if fold.op == "dot":
            parts[fold.name] = tuple(
                replace(fold, name=f"{fold.name}_{k}", args=tuple(place[arg] for arg in fold.args))
                for k, place in enumerate(at)
            )
            continue
        total, *rest = (place[fold.args[0]] for place in at)
        for term in rest:
            total = Op("add", (total, term), total.dtype)
        parts[fold.name] = (replace(fold, args=(total,)),)
    return parts


def _rebuilt(body: Sequence[Stmt], parts: Mapping[str, tuple[Fold, ...]]) -> tuple[Stmt, ...]:
    """Return `body` with each fold replaced by its parts."""

    def rule(node: Expr) -> Expr | None:
        if not isinstance(node, TileRef):
            return None
        total, *rest = (fold.ref for fold in parts[node.name])
        for term in rest:
            total = Op("add", (total, term), node.dtype)
        return total

    def rebuilt(stmt: Stmt) -> Stmt | tuple[Stmt, ...]:
        assert not isinstance(stmt, Prefix), "a kernel with a contraction has no scan"
        return parts[stmt.name] if isinstance(stmt, Fold) else with_values(stmt, rewrite(values_of(stmt), rule))

    return map_statements(body, rebuilt)
