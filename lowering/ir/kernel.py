"""Defines Kernel, the block program.

    Kernel = name, params, sizes, axes, body, beside, then
    Axis   = symbol, size, role
    role   = GRID   spread over programs (threads on a CPU), a block of it at a time
           | LOOP   iterated over in blocks inside one program
           | WHOLE  held entirely in the tile
    Stmt   = Fold(name, op, args, over, dtype)     a tile reduced over axes; later statements name it by TileRef
           | Prefix(name, op, args, along, dtype)  a tile that holds at each point the fold of all points up to it
           | Loop(axes, body)                      iterate over LOOP axes; folds inside accumulate over all blocks
           | Store(param, offset, value)           write a tile, or update elements, whose indices may collide
    value  = Expr                                  loads are `Load(param, (offset,))`, offset in elements

`beside` are independent kernels in the same launch (horizontal fusion), each with axes of its own, over some of the
same parameters: their programs run in any order.  None of them reads a tensor that another one writes.
`then` is a kernel that follows in the same launch, over some of the same parameters.  Without GRID axes it is a single
program that runs once all programs of this launch are done: the last step of a reduction over everything.  With some of
this kernel's GRID axes it follows tile by tile: its program for a point of these runs once all programs of that point
are done, and reads their results: split-K sums its parts so.

Statements run in order.  A fold over WHOLE axes is complete at once; a fold over LOOP axes stands inside a `Loop` over
exactly these axes and is complete after it.  It may also stand in a loop inside that one: such a *crossing* fold has a
result for each point of the inner loop, which is kept until the outer loop is over.  So one loop nest computes the sums
of the rows and of the columns of a matrix that is never stored.  Nothing else is said about how an axis becomes blocks,
warps, threads or vector lanes: the code generator decides.

A fold may be named inside its own loop, after its definition: that is its running value, over all blocks so far and the
current one.  A later fold that accumulates values computed from such a running value must be corrected when it changes,
before the current block is added: its `carry` is the corrected value.  An online softmax is

    max0 = max(x); sum0 = sum(exp(x - max0)), carrying sum0' * exp(max0' - max0)

where the prime, `TileRef(…, before=True)`, is the value before the current block.  Masks follow
from the axis bounds: a code generator guards every load and store whose block can reach past the end of an axis, and a
fold sees its identity there.  Sub-expressions are shared objects; a generator computes each once per scope, and
hoists loop invariants.

`statements` iterates over a body, `map_statements` and `map_values` rebuild it; no other function recurses into loops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TypeAlias, TypeVar, cast, overload

import sympy
import torch
from typing_extensions import assert_never

from fusion.lowering.ir.affine import extent_of
from fusion.lowering.ir.expr import Expr, Index, TileRef, index_of, loads, postorder, renamed
from fusion.lowering.ir.scalar_ops import FoldName, ScanName, ScatterName


class Role(Enum):
    """Says how a kernel iterates over an axis."""

    GRID = "grid"
    LOOP = "loop"
    WHOLE = "whole"


@dataclass(frozen=True, slots=True)
class KernelAxis:
    """An axis of a kernel with its size and role."""

    symbol: sympy.Symbol
    size: sympy.Expr
    role: Role


@dataclass(frozen=True, slots=True)
class Param:
    """A tensor parameter, as the flat buffer behind it.

    `shape` and `strides` (elements) describe the tensor that the caller passes; offsets are relative to its data
    pointer. `aligned` promises that the pointer is a multiple of 16 bytes.  A `number` is a 0-d tensor on the host,
    which is passed by value to a kernel for another device.  Later kernels store the values that they compute from a
    `rounded_later` parameter only as 16-bit floats: it holds parts of a sum that they merge.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[sympy.Expr, ...]
    strides: tuple[sympy.Expr, ...]
    written: bool
    aligned: bool = True
    number: bool = False
    rounded_later: bool = False

    @property
    def extent(self) -> sympy.Expr:
        """Elements from the first to the last one touched, inclusive."""
        return extent_of(self.shape, self.strides)


@dataclass(frozen=True, slots=True)
class Fold:
    """`name = op over `over` of args`; args as in `Reduce`, for `dot` (lhs, rhs).  `dtype` is the result's.

    For `dot`, `rows` are the axes only lhs spans, `columns` those only rhs spans.  `carry`, for a fold in a loop, is
    the corrected value of all blocks before the current one, to which that is added; None leaves it as it was.
    """

    name: str
    op: FoldName
    args: tuple[Expr, ...]
    over: tuple[sympy.Symbol, ...]
    dtype: torch.dtype
    rows: tuple[sympy.Symbol, ...] = ()
    columns: tuple[sympy.Symbol, ...] = ()
    carry: Expr | None = None

    @property
    def ref(self) -> Expr:
        """The expression by which later statements refer to it."""
        return TileRef(self.name, self.dtype)

    @property
    def before(self) -> Expr:
        """The running value before the current block."""
        return TileRef(self.name, self.dtype, True)


@dataclass(frozen=True, slots=True)
class Prefix:
    """`name = op over all points of `along` up to and including the current one of args`; args as in `program.Scan`.

    `along` is a WHOLE axis, or a LOOP axis: then the prefix stands inside a loop over that axis alone, whose blocks run
    in order, and its value is known in that loop only.
    """

    name: str
    op: ScanName
    args: tuple[Expr, ...]
    along: sympy.Symbol
    dtype: torch.dtype

    @property
    def ref(self) -> Expr:
        """The expression by which later statements refer to it."""
        return TileRef(self.name, self.dtype)


@dataclass(frozen=True, slots=True)
class Store:
    """`param[offset] = value` for every point of the axes that `offset` spans.

    With `axes`, `param[offset] op= value` at every point of these at which `where` holds (as `program.Scatter`).
    Updates of one element are sequential along LOOP axes; across GRID axes each update is atomic.
    """

    param: str
    offset: Index
    value: Expr
    op: ScatterName = "store"
    axes: tuple[sympy.Symbol, ...] | None = None
    where: Expr | None = None


@dataclass(frozen=True, slots=True)
class Loop:
    """Iterate over LOOP axes (outermost first) in blocks, running `body` for each.

    `where` (a bool) is false only at points that change nothing as long as the tensors hold finite numbers there: every
    fold of the body adds its identity.  A generator may skip blocks in which it is false throughout.
    """

    axes: tuple[sympy.Symbol, ...]
    body: tuple[Stmt, ...]
    where: Expr | None = None


Stmt: TypeAlias = "Fold | Prefix | Loop | Store"
AnyStmt = TypeVar("AnyStmt", bound="Fold | Prefix | Loop | Store")


@dataclass(frozen=True, slots=True)
class Kernel:
    """One launchable block program.

    Attributes:
        params: tensors in the order of the call, inputs first, then outputs.
        sizes: size symbols passed as integers after the tensors.
        axes: GRID axes outermost first, then the reduced ones.
        beside: run in the same launch, independent of this kernel and of each other; then nothing follows.
        then: runs in the same launch after the whole grid, or after its part of it at each point of its GRID axes.
        traced: the values of size symbols when the graph was traced; only performance may depend on them.
        origins: for comments: the operations of this kernel, with their lines in the program (`errors.by_place`).
    """

    name: str
    params: tuple[Param, ...]
    sizes: tuple[sympy.Symbol, ...]
    axes: tuple[KernelAxis, ...]
    body: tuple[Stmt, ...]
    beside: tuple[Kernel, ...] = ()
    then: Kernel | None = None
    traced: tuple[tuple[sympy.Symbol, int], ...] = ()
    origins: tuple[str, ...] = field(default=(), compare=False)

    def param(self, name: str) -> Param:
        """Return the parameter of this name, which must exist."""
        return next(p for p in self.params if p.name == name)

    def axis_sizes(self) -> dict[sympy.Symbol, sympy.Expr]:
        """Return the size of each axis."""
        return {axis.symbol: axis.size for axis in self.axes}

    def with_role(self, role: Role) -> tuple[KernelAxis, ...]:
        """Return the axes of this role, in order."""
        return tuple(axis for axis in self.axes if axis.role is role)

    @property
    def awaited(self) -> tuple[KernelAxis, ...]:
        """The GRID axes along which `then` waits for all programs, if it follows tile by tile; else empty."""
        own = () if self.then is None else self.then.with_role(Role.GRID)
        return tuple(axis for axis in self.with_role(Role.GRID) if axis not in own) if own else ()

    @property
    def parts(self) -> tuple[Kernel, ...]:
        """The kernels that share the launch side by side, each by itself: this one, then `beside`."""
        if not self.beside:
            return (self,)
        touched = loaded(self) | stored(self)
        own = replace(self, params=tuple(param for param in self.params if param.name in touched), beside=())
        return (own, *self.beside)

    @property
    def launched(self) -> tuple[Kernel, ...]:
        """All kernels of the launch: its parts, then the kernels that follow."""
        return (*self.parts, *(() if self.then is None else self.then.launched))


@overload
def statements(body: Sequence[Stmt]) -> Iterator[Stmt]: ...


@overload
def statements(body: Sequence[Stmt], kind: type[AnyStmt]) -> Iterator[AnyStmt]: ...


def statements(body: Sequence[Stmt], kind: type[AnyStmt] | None = None) -> Iterator[Stmt]:
    """Iterate over all statements, or over the statements of one kind, loops before their bodies."""
    every = _nested(body)
    return every if kind is None else (stmt for stmt in every if isinstance(stmt, kind))


def _nested(body: Sequence[Stmt]) -> Iterator[Stmt]:
    for stmt in body:
        yield stmt
        if isinstance(stmt, Loop):
            yield from _nested(stmt.body)


def loaded(kernel: Kernel) -> frozenset[str]:
    """Return the parameters that the statements of a kernel read, or update."""
    updated = (stmt.param for stmt in statements(kernel.body, Store) if stmt.axes is not None)
    read = (load.buffer for stmt in statements(kernel.body) for load in loads(*values_of(stmt)))
    return frozenset((*updated, *read))


def stored(kernel: Kernel) -> frozenset[str]:
    """Return the parameters that the statements of a kernel write."""
    return frozenset(stmt.param for stmt in statements(kernel.body, Store))


def only_stored(kernel: Kernel) -> frozenset[str]:
    """Return the parameters of a launch whose previous contents are neither read nor accumulated into."""
    launched = kernel.launched
    return frozenset[str]().union(*map(stored, launched)) - frozenset[str]().union(*map(loaded, launched))


def folds(kernel: Kernel) -> dict[str, Fold]:
    """Return every fold by name."""
    return {stmt.name: stmt for stmt in statements(kernel.body, Fold)}


def values_of(stmt: Stmt) -> tuple[Expr, ...]:
    """Return the expressions that a statement evaluates itself; of a loop, without its body."""
    match stmt:
        case Fold():
            return stmt.args if stmt.carry is None else (*stmt.args, stmt.carry)
        case Prefix():
            return stmt.args
        case Loop():
            return () if stmt.where is None else (stmt.where,)
        case Store():
            values = (stmt.value, stmt.offset) if isinstance(stmt.offset, Expr) else (stmt.value,)
            return values if stmt.where is None else (*values, stmt.where)
        case _:
            assert_never(stmt)


def with_values(stmt: AnyStmt, values: Sequence[Expr]) -> AnyStmt:
    """Return a statement with other expressions, in the order of `values_of`; the same object if they are the same.

    The statements inside a loop stay.
    """
    if all(new is old for new, old in zip(values, values_of(stmt), strict=True)):
        return stmt
    return cast("AnyStmt", _of_values(stmt, values))


def _of_values(stmt: Stmt, values: Sequence[Expr]) -> Stmt:
    match stmt:
        case Fold():
            args, carry = values[: len(stmt.args)], None if stmt.carry is None else values[-1]
            return replace(stmt, args=tuple(args), carry=carry)
        case Prefix():
            return replace(stmt, args=tuple(values))
        case Loop():
            return replace(stmt, where=None if stmt.where is None else values[-1])
        case Store():
            offset = values[1] if isinstance(stmt.offset, Expr) else stmt.offset
            return replace(stmt, value=values[0], offset=offset, where=None if stmt.where is None else values[-1])
        case _:
            assert_never(stmt)


def map_statements(body: Sequence[Stmt], change: Callable[[Stmt], Stmt | tuple[Stmt, ...]]) -> tuple[Stmt, ...]:
    """Rebuild a body, loops before their bodies; the same object where `change` returns each statement unchanged.

    `change` returns a statement, or several, for a statement.  The body of a loop that it returns is rebuilt next.

    >>> keep = Store("out", sympy.Integer(0), TileRef("total", torch.float32))
    >>> body = (Loop((sympy.Symbol("r0"),), (keep,)),)
    >>> map_statements(body, lambda stmt: stmt) is body
    True
    >>> twice = map_statements(body, lambda stmt: (stmt, stmt) if isinstance(stmt, Store) else stmt)
    >>> [stmt.param for stmt in statements(twice, Store)]
    ['out', 'out']
    """
    rebuilt: list[Stmt] = []
    for stmt in body:
        changed = change(stmt)
        for part in changed if isinstance(changed, tuple) else (changed,):
            if isinstance(part, Loop):
                inner = map_statements(part.body, change)
                rebuilt.append(part if inner is part.body else replace(part, body=inner))
            else:
                rebuilt.append(part)
    same = len(rebuilt) == len(body) and all(new is old for new, old in zip(rebuilt, body, strict=True))
    return body if same and isinstance(body, tuple) else tuple(rebuilt)


def map_values(body: Sequence[Stmt], change: Callable[[Sequence[Expr]], Sequence[Expr]]) -> tuple[Stmt, ...]:
    """Rebuild a body with `change` applied to the expressions of each statement, also of those in loops."""
    return map_statements(body, lambda stmt: with_values(stmt, change(values_of(stmt))))


def rename(body: Sequence[Stmt], names: Mapping[str, str]) -> tuple[Stmt, ...]:
    """Rebuild a body with parameters renamed."""

    def renaming(stmt: Stmt) -> Stmt:
        stmt = with_values(stmt, renamed(values_of(stmt), names))
        if not isinstance(stmt, Store) or names[stmt.param] == stmt.param:
            return stmt
        return replace(stmt, param=names[stmt.param])

    return map_statements(body, renaming)


def running(loop: Loop) -> frozenset[str]:
    """Return the folds of a loop whose running value is used: named in the loop, or carrying."""
    own = loop_folds(loop)
    values = [value for stmt in statements(loop.body) for value in values_of(stmt)]
    named = {node.name for node in postorder(*values) if isinstance(node, TileRef)}
    return frozenset(fold.name for fold in own if fold.name in named or fold.carry is not None)


def loop_folds(loop: Loop) -> tuple[Fold, ...]:
    """Return the folds that a loop completes: over its axes, and not complete within each block."""
    return tuple(stmt for stmt in loop.body if isinstance(stmt, Fold) and set(stmt.over) & set(loop.axes))


def crossing_folds(loop: Loop) -> tuple[Fold, ...]:
    """Return the folds over a loop's axes that stand in loops inside it, of whose points each has a result."""
    inner = (stmt for part in loop.body if isinstance(part, Loop) for stmt in statements(part.body, Fold))
    return tuple(fold for fold in inner if set(fold.over) == set(loop.axes))


def outer_axes(kernel: Kernel) -> frozenset[sympy.Symbol]:
    """Return the axes of the loops over which crossing folds run."""
    loops = (loop for loop in statements(kernel.body, Loop) if crossing_folds(loop))
    return frozenset(axis for loop in loops for axis in loop.axes)


Spans = Mapping[Expr, frozenset[sympy.Symbol]]
"""The axes that each expression of a kernel varies over."""


def spans(kernel: Kernel) -> Spans:
    """Return the axes each expression of a kernel varies over; a `TileRef`'s are its fold's less the folded ones."""
    axes = frozenset(axis.symbol for axis in kernel.axes)
    axes_of: dict[Expr, frozenset[sympy.Symbol]] = {}
    fold_spans: dict[str, frozenset[sympy.Symbol]] = {}

    def add(roots: Sequence[Expr]) -> None:
        for expr in postorder(*roots):
            own: frozenset[sympy.Symbol] = frozenset()
            if isinstance(expr, TileRef):
                own = fold_spans[expr.name]
            for index in index_of(expr):
                own |= index.free_symbols & axes
            for child in expr.children():
                own |= axes_of[child]
            axes_of[expr] = own

    def union(args: Sequence[Expr]) -> frozenset[sympy.Symbol]:
        return frozenset().union(*(axes_of[arg] for arg in args))

    for stmt in statements(kernel.body):
        match stmt:
            case Fold():
                add(stmt.args)
                fold_spans[stmt.name] = union(stmt.args) - frozenset(stmt.over)
                add(values_of(stmt))  # the carry names the fold itself
            case Prefix():
                add(stmt.args)
                fold_spans[stmt.name] = union(stmt.args) | {stmt.along}
            case Loop() | Store():
                add(values_of(stmt))
            case _:
                assert_never(stmt)
    return axes_of
