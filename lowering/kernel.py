"""Kernel: the block program.

    Kernel = name, params, sizes, axes, body, then
    Axis   = symbol, size, role
    role   = GRID   spread over programs (threads on a CPU), a block of it at a time
           | LOOP   walked in blocks inside one program
           | WHOLE  held entirely in the tile
    Stmt   = Fold(name, op, args, over, dtype)     a tile reduced over axes; later statements name it by TileRef
           | Loop(axes, body)                      walk these LOOP axes; folds inside accumulate over all blocks
           | Store(param, offset, value)           write a tile
    value  = Expr                                  loads are `Load(param, (offset,))`, offset in elements

`then` is a kernel of a single program that runs once all programs of this one are done, in the same launch, over some
of the same parameters: the last step of a reduction over everything.

Statements run in order.  A fold over WHOLE axes stands outside any loop and is complete at once; a fold over LOOP axes
stands inside a `Loop` over exactly these axes, and its value may be named only after that loop.  Nothing else is said
about how an axis becomes blocks, warps, threads or vector lanes: that is the code generator's decision.  Masks follow
from the axis bounds: a code generator guards every load and store whose block can reach past the end of an axis, and a
fold sees its identity there.  Sub-expressions are shared objects; a generator computes each once per scope, and
computes outside a loop what does not depend on the loop's axes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

import sympy
import torch

from lowering.expr import Expr, Index, TileRef, index_of, postorder


class Role(Enum):
    """What becomes of an axis in a kernel."""

    GRID = "grid"
    LOOP = "loop"
    WHOLE = "whole"


@dataclass(frozen=True, slots=True)
class KernelAxis:
    """A named range with its role."""

    symbol: sympy.Symbol
    size: sympy.Expr
    role: Role


@dataclass(frozen=True, slots=True)
class Param:
    """A tensor parameter, as the flat buffer behind it.

    `shape` and `strides` (elements) describe the tensor that the caller passes; offsets are relative to its data
    pointer. `aligned` promises that the pointer is a multiple of 16 bytes.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[sympy.Expr, ...]
    strides: tuple[sympy.Expr, ...]
    written: bool
    aligned: bool = True

    @property
    def extent(self) -> sympy.Expr:
        """Elements from the first to the last one touched, inclusive."""
        if any(size == 0 for size in self.shape):
            return sympy.Integer(0)
        return sympy.Add(1, *((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True)))


@dataclass(frozen=True, slots=True)
class Fold:
    """`name = op over `over` of args`; args as in `Reduce`, for `dot` (lhs, rhs).  `dtype` is that of the result.

    For `dot`, `rows` and `columns` are the grid axes only lhs and only rhs spans.
    """

    name: str
    op: str
    args: tuple[Expr, ...]
    over: tuple[sympy.Symbol, ...]
    dtype: torch.dtype
    rows: tuple[sympy.Symbol, ...] = ()
    columns: tuple[sympy.Symbol, ...] = ()

    @property
    def ref(self) -> Expr:
        return TileRef(self.name, self.dtype)


@dataclass(frozen=True, slots=True)
class Store:
    """`param[offset] = value` for every point of the axes that `offset` spans."""

    param: str
    offset: Index
    value: Expr


@dataclass(frozen=True, slots=True)
class Loop:
    """Walk LOOP axes (outermost first) in blocks, running `body` for each."""

    axes: tuple[sympy.Symbol, ...]
    body: tuple[Stmt, ...]


Stmt: TypeAlias = "Fold | Loop | Store"


@dataclass(frozen=True, slots=True)
class Kernel:
    """One launchable block program.

    Attributes:
        params: tensors in the order of the call, inputs first, then outputs.
        sizes: size symbols passed as integers after the tensors.
        axes: GRID axes outermost first, then the reduced ones.
        then: runs in the same launch after the whole grid; it has no GRID axes and reads what this kernel wrote.
        origins: one line per operation this kernel computes, for comments.
    """

    name: str
    params: tuple[Param, ...]
    sizes: tuple[sympy.Symbol, ...]
    axes: tuple[KernelAxis, ...]
    body: tuple[Stmt, ...]
    then: Kernel | None = None
    origins: tuple[str, ...] = field(default=(), compare=False)

    def param(self, name: str) -> Param:
        return next(p for p in self.params if p.name == name)

    def axis_sizes(self) -> dict[sympy.Symbol, sympy.Expr]:
        return {axis.symbol: axis.size for axis in self.axes}

    def with_role(self, role: Role) -> tuple[KernelAxis, ...]:
        return tuple(axis for axis in self.axes if axis.role is role)


def statements(body: Sequence[Stmt]) -> Iterator[Stmt]:
    """Every statement, loops before what they hold."""
    for stmt in body:
        yield stmt
        if isinstance(stmt, Loop):
            yield from statements(stmt.body)


def folds(kernel: Kernel) -> dict[str, Fold]:
    """Every fold by name."""
    return {stmt.name: stmt for stmt in statements(kernel.body) if isinstance(stmt, Fold)}


def values_of(stmt: Stmt) -> tuple[Expr, ...]:
    """The expressions a fold or store evaluates (none for a loop)."""
    if isinstance(stmt, Fold):
        return stmt.args
    if isinstance(stmt, Store):
        return (stmt.value, stmt.offset) if isinstance(stmt.offset, Expr) else (stmt.value,)
    return ()


def spans(kernel: Kernel) -> Mapping[Expr, frozenset[sympy.Symbol]]:
    """The axes each expression of a kernel varies over; a `TileRef` varies over its fold's axes less those it folds."""
    axes = frozenset(axis.symbol for axis in kernel.axes)
    found: dict[Expr, frozenset[sympy.Symbol]] = {}
    fold_spans: dict[str, frozenset[sympy.Symbol]] = {}
    for stmt in statements(kernel.body):
        for expr in postorder(*values_of(stmt)):
            own: frozenset[sympy.Symbol] = frozenset()
            if isinstance(expr, TileRef):
                own = fold_spans[expr.name]
            for index in index_of(expr):
                own |= index.free_symbols & axes
            for child in expr.children():
                own |= found[child]
            found[expr] = own
        if isinstance(stmt, Fold):
            joined: frozenset[sympy.Symbol] = frozenset().union(*(found[arg] for arg in stmt.args))
            fold_spans[stmt.name] = joined - frozenset(stmt.over)
    return found
