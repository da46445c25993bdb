"""Decides which statements of a kernel share a loop over the reduced axes (loop fusion).

Input: a kernel; output: a list of sweeps, to be run one after the other for every point of the grid. Over WHOLE axes,
statements that do not need each other's folds share a sweep (mean and maximum of a row are one pass).  A `Loop` is a
sweep as it is; `blocked` takes the kernels with nested loops, and with folds over other axes than their loop's.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace

import sympy
import torch
from typing_extensions import assert_never

from fusion.codegen.c.text.storage import NARROW_FLOATS
from fusion.lowering.ir.expr import Cast, Expr, Index, Load, Op, TileRef, index_of, loads, make_cast, postorder, rewrite
from fusion.lowering.ir.kernel import (
    Fold,
    Kernel,
    KernelAxis,
    Loop,
    Prefix,
    Role,
    Spans,
    Stmt,
    Store,
    map_statements,
    running,
    spans,
    statements,
    values_of,
    with_values,
)
from fusion.lowering.ir.prefixes import named

Symbols = frozenset[sympy.Symbol]


@dataclass(frozen=True, slots=True)
class Keep:
    """A value stored in a scratch array `name` over `axes` (in the order of its dimensions), for later sweeps."""

    name: str
    value: Expr
    axes: tuple[sympy.Symbol, ...]


@dataclass(frozen=True, slots=True)
class Sweep:
    """One loop over `axes` (none: once per grid point): continue scans, keep values, accumulate folds, write stores.

    `resident`: the axes are WHOLE, so that values may be kept for later sweeps over them.
    """

    axes: tuple[KernelAxis, ...]
    folds: tuple[Fold, ...] = ()
    stores: tuple[Store, ...] = ()
    keeps: tuple[Keep, ...] = ()
    resident: bool = True
    scans: tuple[Prefix, ...] = ()

    @property
    def over(self) -> Symbols:
        """The axes folded or scanned; all folds and scans of a sweep have the same."""
        if self.scans:
            return frozenset({self.scans[0].along})
        return frozenset(self.folds[0].over) if self.folds else frozenset()

    @property
    def roots(self) -> tuple[Expr, ...]:
        """Everything this sweep evaluates."""
        scanned = (arg for scan in self.scans for arg in scan.args)
        folded = (arg for fold in self.folds for arg in fold.args)
        stored = (value for store in self.stores for value in values_of(store))
        return (*scanned, *(keep.value for keep in self.keeps), *folded, *stored)


def with_plain_folds(kernel: Kernel, products: Container[torch.dtype] = ()) -> Kernel:
    """Return `kernel` with folds of only those dtypes that C has.

    A fold of bfloat16 or float16 values becomes one of float32 whose result is rounded.  The factors of a `dot` are
    converted to its own type; unless that is one of `products`, the `dot` becomes a sum of products.  A factor that is
    stored too stays rounded as stored: readers of either get the same number.
    """
    narrow = {stmt.name: stmt.dtype for stmt in statements(kernel.body, Fold) if stmt.dtype in NARROW_FLOATS}

    stored = {stmt.value for stmt in statements(kernel.body, Store)}

    def widen(node: Expr) -> Expr | None:
        if isinstance(node, TileRef) and node.name in narrow:
            return make_cast(TileRef(node.name, torch.float32, node.before), narrow[node.name])
        return None

    def rounded(arg: Expr) -> Expr:
        return make_cast(arg.arg, arg.dtype) if isinstance(arg, Cast) and arg in stored else arg

    def rewritten(stmt: Stmt) -> Stmt:
        if not isinstance(stmt, Fold):
            return with_values(stmt, rewrite(values_of(stmt), widen))
        dtype = torch.float32 if stmt.name in narrow else stmt.dtype
        carry = None if stmt.carry is None else make_cast(rewrite([stmt.carry], widen)[0], dtype)
        args = rewrite([*map(rounded, stmt.args)], widen)
        if stmt.op == "dot":
            args = [make_cast(arg, dtype) for arg in args]
            args = args if dtype in products else [Op("mul", tuple(args), dtype)]
        args = [make_cast(arg, torch.float32) if arg.dtype in NARROW_FLOATS else arg for arg in args]
        op = "sum" if stmt.op == "dot" and dtype not in products else stmt.op
        return replace(stmt, op=op, args=tuple(args), dtype=dtype, carry=carry)

    return replace(kernel, body=map_statements(kernel.body, rewritten))


def with_held_parts(kernel: Kernel) -> Kernel:
    """Return `kernel` with loops over rows, which it folds and whose columns it sums, as part of the program.

    The folds of rows are then one sweep over all rows of a part, and the sums of their columns another one, in which
    the rows are read from the cache again.  Loops with products or running values stay, and so do those that skip.
    """
    whole = frozenset(axis.symbol for axis in kernel.with_role(Role.WHOLE))
    loops = [stmt for stmt in kernel.body if isinstance(stmt, Loop)] if whole else []
    where = spans(kernel) if loops else {}
    held = [loop for loop in loops if _folds_both_ways(loop, whole, where)]
    if not held:
        return kernel
    body = [inner for stmt in kernel.body for inner in (stmt.body if stmt in held else (stmt,))]
    symbols = {symbol for stmt in held for symbol in stmt.axes}
    axes = (replace(axis, role=Role.WHOLE) if axis.symbol in symbols else axis for axis in kernel.axes)
    return replace(kernel, axes=tuple(axes), body=tuple(body))


def _folds_both_ways(loop: Loop, whole: Symbols, where: Spans) -> bool:
    """Return whether a loop folds rows along whole axes, and sums the columns along these, with nothing in between.

    Folds of its own axes that do not keep the whole ones, as the second of two products, are computed block by block.
    """
    if loop.where is not None or running(loop) or not all(isinstance(stmt, (Fold, Store)) for stmt in loop.body):
        return False
    folds = [stmt for stmt in loop.body if isinstance(stmt, Fold)]
    rows = [fold for fold in folds if whole.issuperset(fold.over)]
    along = frozenset[sympy.Symbol]().union(*(fold.over for fold in rows))
    columns = [fold for fold in folds if not whole.issuperset(fold.over)]
    kept = all(along <= frozenset[sympy.Symbol]().union(*(where[arg] for arg in fold.args)) for fold in columns)
    return bool(rows) and kept and all(fold.op != "dot" and fold.carry is None for fold in folds)


def extend_spans(where: dict[Expr, Symbols], roots: Sequence[Expr]) -> None:
    """Add the spans of expressions over those in `where`."""
    for node in postorder(*roots):
        if node not in where:
            own = frozenset(s for index in index_of(node) for s in index.free_symbols)
            where[node] = own.union(*(where[child] for child in node.children()))


def sweeps_of(kernel: Kernel) -> tuple[Sweep, ...]:
    """Return the sweeps of a kernel, in order."""
    where = spans(kernel)
    may_move = _updates_in_place(kernel, where)
    done: list[Sweep] = []
    producer: dict[str, int] = {}
    last_read: dict[str, int] = {}  # by an earlier statement: no store to it may move before that
    scans = {stmt.name: stmt for stmt in statements(kernel.body, Prefix)}
    for stmt in kernel.body:
        match stmt:
            case Loop():
                start = len(done)
                for inner in stmt.body:
                    assert not isinstance(inner, Loop), "blocked writes nested loops"
                    if isinstance(inner, Prefix):
                        continue
                    axes = _inner(kernel, where, inner) | frozenset(stmt.axes)
                    _join(done, start, Sweep(_ordered(kernel, axes), resident=False), inner, producer)
            case Fold() | Store():
                axes = _inner(kernel, where, stmt)
                needs = [producer[name] for name in named(values_of(stmt), scans) if name not in scans]
                start = max(needs, default=-1) + 1 if may_move else len(done)
                if isinstance(stmt, Store):
                    start = max(start, last_read.get(stmt.param, 0))
                position = _join(done, start, Sweep(_ordered(kernel, axes)), stmt, producer)
                for load in loads(*values_of(stmt)):
                    last_read[load.buffer] = max(position, last_read.get(load.buffer, 0))
            case Prefix():
                pass  # each sweep that names it computes it
            case _:
                assert_never(stmt)
    return tuple(_with_scans(sweep, scans) for sweep in done)


def _with_scans(sweep: Sweep, scans: Mapping[str, Prefix]) -> Sweep:
    """Return a sweep with the scans that it names, which every sweep computes itself."""
    return replace(sweep, scans=tuple(scans[name] for name in named(sweep.roots, scans) if name in scans))


def _updates_in_place(kernel: Kernel, where: Spans) -> bool:
    """Return whether elements that are read and written are read only where they are written: stores may then move."""
    places: dict[str, set[Index]] = {}
    for stmt in statements(kernel.body):
        if isinstance(stmt, Store):
            places.setdefault(stmt.param, set()).add(stmt.offset)
    reads = (node for node in where if isinstance(node, Load) and node.buffer in places)
    return all(places[node.buffer] == {node.index[0]} for node in reads)


def _join(done: list[Sweep], start: int, fresh: Sweep, stmt: Fold | Store, producer: dict[str, int]) -> int:
    """Add `stmt` to the first sweep from `start` on over the same axes, else to a new one; return its position."""
    over = frozenset(stmt.over) if isinstance(stmt, Fold) else None
    for k in range(start, len(done)):
        same = done[k].axes == fresh.axes and done[k].resident is fresh.resident
        if same and (over is None or not done[k].folds or done[k].over == over):
            break
    else:
        k = len(done)
        done.append(fresh)
    match stmt:
        case Fold():
            done[k] = replace(done[k], folds=(*done[k].folds, stmt))
            producer[stmt.name] = k
        case Store():
            done[k] = replace(done[k], stores=(*done[k].stores, stmt))
        case _:
            assert_never(stmt)
    return k


def _inner(kernel: Kernel, where: Spans, stmt: Fold | Store) -> Symbols:
    """Return the axes inside the grid that a statement varies along."""
    symbols: set[sympy.Symbol] = set()
    for value in values_of(stmt):
        symbols |= where[value]
    match stmt:
        case Fold():
            symbols |= set(stmt.over)
        case Store():
            symbols |= set(stmt.axes or ())
            symbols |= stmt.offset.free_symbols if isinstance(stmt.offset, sympy.Expr) else set()
        case _:
            assert_never(stmt)
    return frozenset(a.symbol for a in kernel.axes if a.role is not Role.GRID and a.symbol in symbols)


def _ordered(kernel: Kernel, symbols: Symbols | Sequence[sympy.Symbol]) -> tuple[KernelAxis, ...]:
    return tuple(axis for axis in kernel.axes if axis.symbol in symbols)
