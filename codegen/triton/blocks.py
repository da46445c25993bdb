"""Blocks: which axes of a kernel become which block dimensions.

What enters is a Kernel; what leaves is its block dimensions in the order in which tiles are laid out (the contiguous
one last), and the rewriting of every axis as a digit of the linear index of its dimension.

    pointwise     GRID axes → x, or (y, x) where a load and the store are contiguous along different axes
    reduction     GRID axes → x, reduced axes → r (more of them where folds take different axes)
    contraction   rows → m, columns → n, folded axes → k, the other GRID axes → b, one value per program; the sides
                  of further contractions are these dimensions too, or reduced ones of their own

Axes of size 1 are dropped, but for one of each side of a contraction.  Which axes are contiguous is read from the
offsets of loads and stores.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import sympy
import torch

from codegen.triton.exponentials import in_powers_of_two
from codegen.triton.groups import grouped
from codegen.triton.packed import unpacked
from codegen.triton.rounding import is_rounded
from codegen.triton.spell import HALF
from codegen.triton.vectors import is_narrow, unrolled
from codegen.triton.walk import walked
from lowering.errors import Unsupported
from lowering.expr import Cast, Expr, Load, TileRef, postorder
from lowering.indexing import ONE, ZERO, FloorDiv, Mod, coefficient, simplify, substitute_all
from lowering.kernel import (
    Fold,
    Kernel,
    KernelAxis,
    Loop,
    Prefix,
    Role,
    Stmt,
    Store,
    spans,
    statements,
    values_of,
    with_values,
)

HELD_COLUMN, HELD_ONCE = 1024, 128
"""The longest column that is held whole, where it is needed again and where it is read once: times 16 columns it fills
the registers of 16 warps, and a walk keeps wider rows of memory in flight."""

RUN = 16
"""Elements side by side in memory that are worth a thread each, at least."""

_NAMES = ("r", "q", "u", "v", "w", "p", "o", "h")  # of reduced dimensions beyond those that have a name of their own


@dataclass(frozen=True, slots=True)
class Dim:
    """Axes that are walked together, outermost first, as one linear index."""

    name: str
    axes: tuple[KernelAxis, ...]
    role: Role

    @property
    def size(self) -> sympy.Expr:
        return sympy.Mul(*(axis.size for axis in self.axes))

    @property
    def symbol(self) -> sympy.Symbol:
        """The linear index, `0 ≤ symbol < size`."""
        return sympy.Symbol(f"{self.name}i", integer=True, nonnegative=True)

    @property
    def constant(self) -> str:
        """The name of its block size in the source."""
        return f"{self.name.upper()}BLOCK"

    def digits(self) -> dict[sympy.Symbol, sympy.Expr]:
        """Each axis as a digit of the linear index; of one without points, what keeps loads behind its mask."""
        if self.size == 0:
            return {axis.symbol: self.symbol for axis in self.axes}
        found: dict[sympy.Symbol, sympy.Expr] = {}
        weight = ONE
        for position, axis in reversed(list(enumerate(self.axes))):
            digit = FloorDiv(self.symbol, weight)
            found[axis.symbol] = digit if position == 0 else Mod(digit, axis.size)
            weight = weight * axis.size
        return found


@dataclass(frozen=True, slots=True)
class Blocked:
    """A kernel over block dimensions.

    Attributes:
        dims: in the order in which tiles are laid out.
        body: the statements of the kernel, over the linear indices of `dims`; `over`, `rows`, `columns` and the axes
            of loops are still axes.
    """

    kernel: Kernel
    dims: tuple[Dim, ...]
    body: tuple[Stmt, ...]

    def sizes(self) -> dict[sympy.Symbol, sympy.Expr]:
        """The bounds of the linear indices."""
        return {dim.symbol: dim.size for dim in self.dims}

    def of(self, axes: Sequence[sympy.Symbol]) -> tuple[Dim, ...]:
        """The dimensions that hold `axes`, in tile order."""
        return tuple(dim for dim in self.dims if any(axis.symbol in axes for axis in dim.axes))

    def grid(self) -> tuple[Dim, ...]:
        """The dimensions spread over programs, outermost first."""
        spread = [dim for dim in self.dims if dim.role is Role.GRID]
        return tuple(sorted(spread, key=lambda dim: "byxmn".index(dim.name)))

    @property
    def dots(self) -> tuple[Fold, ...]:
        """The contractions, in order."""
        return _dots(self.body)

    @property
    def contraction(self) -> bool:
        return bool(self.dots)

    @property
    def chained(self) -> bool:
        """Does a loop walk the rows or the columns of some contraction, to fold them or to contract them again?"""
        return any(dim.role is Role.LOOP for dot in self.dots for dim in self.sides(dot)[:2])

    def sides(self, dot: Fold) -> tuple[Dim, Dim, Dim]:
        """The dimensions of the rows, the columns and the folded axes of a dot.

        A side without axes is a dimension without axes: the one that the first dot names so, if it has none either.
        """
        found = [tuple(dim for dim in self.of(axes) if dim.name != "b") for axes in _sides(dot)]
        empty = [dim for dim in self.dims if not dim.axes]
        sides: list[Dim] = []
        for dims, name in zip(found, "mnk", strict=True):
            if not dims:
                dims = tuple(sorted(empty, key=lambda dim: dim.name != name)[:1])
                empty.remove(dims[0])
            sides.append(dims[0])
        rows, columns, over = sides
        return rows, columns, over


def block(kernel: Kernel) -> Blocked:
    """The kernel over block dimensions."""
    sums = unrolled(kernel)
    kernel = unpacked(kernel) if sums is kernel else grouped(unpacked(sums))
    dots = _dots(kernel.body)
    dims = _contraction_dims(kernel, dots) if dots else _dims(kernel)
    if not dots and _too_tall(kernel, dims):
        kernel = walked(kernel)
        dims = _dims(kernel)
    digits: dict[sympy.Symbol, sympy.Expr] = {axis.symbol: ZERO for axis in kernel.axes}  # of size 1, if in no dim
    for dim in dims:
        digits.update(dim.digits())
    body = _rewrite(kernel.body, digits, {dim.symbol: dim.size for dim in dims})
    return Blocked(kernel, dims, in_powers_of_two(body) if dots and is_rounded(kernel) else body)


def _dots(body: Sequence[Stmt]) -> tuple[Fold, ...]:
    return tuple(stmt for stmt in statements(body) if isinstance(stmt, Fold) and stmt.op == "dot")


# Pointwise and reductions ---------------------------------------------------------------------------------------------


def _dims(kernel: Kernel) -> tuple[Dim, ...]:
    grid = _by_stride([axis for axis in kernel.with_role(Role.GRID) if axis.size != 1], kernel)
    reduced = _reduced_dims(kernel, ())
    if reduced:
        x = (Dim("x", grid, Role.GRID),) if grid else ()
        along_x = x and _contiguous_along(kernel, x[0]) > max(_contiguous_along(kernel, dim) for dim in reduced)
        return (*reduced, *x) if along_x else (*x, *reduced)
    crossing = _crossing_axis(kernel, grid)
    if crossing is not None:
        others = tuple(axis for axis in grid[:-1] if axis is not crossing)
        return Dim("y", (*others, crossing), Role.GRID), Dim("x", grid[-1:], Role.GRID)
    return (Dim("x", grid, Role.GRID),) if grid else ()


def _too_tall(kernel: Kernel, dims: Sequence[Dim]) -> bool:
    """Would a block of neighbouring columns, each held whole, not fit the registers of a program, or for nothing?"""
    if len(dims) != 2 or dims[1].name != "x" or dims[0].role is not Role.WHOLE:
        return False
    folds = [stmt for stmt in kernel.body if isinstance(stmt, Fold)]
    again = any(isinstance(node, TileRef) for node in postorder(*(arg for fold in folds for arg in fold.args)))
    reduced = {axis.symbol for axis in dims[0].axes}
    again |= any(reduced & offset.free_symbols for offset in _store_offsets(kernel))
    return not dims[0].size.is_Integer or int(dims[0].size) > (HELD_COLUMN if again else HELD_ONCE)


def _reduced_dims(
    kernel: Kernel, named: Sequence[tuple[frozenset[sympy.Symbol], str]], needed: frozenset[sympy.Symbol] = frozenset()
) -> tuple[Dim, ...]:
    """One dimension per set of reduced axes that every fold and loop takes together.

    Axes of size 1 are left out unless they are `needed`.
    """
    groups: dict[tuple[object, ...], list[KernelAxis]] = {}
    for axis in kernel.axes:
        if axis.role is not Role.GRID and (axis.size != 1 or axis.symbol in needed):
            groups.setdefault((axis.role, *_memberships(kernel, axis.symbol)), []).append(axis)
    spare = iter(_NAMES)
    dims = []
    for axes in groups.values():
        symbols = frozenset(axis.symbol for axis in axes)
        name = next((name for over, name in named if symbols <= over), None)
        named = [entry for entry in named if entry[1] != name]
        dims.append(Dim(name or next(spare), _by_stride(axes, kernel), axes[0].role))
    return tuple(dims)


def _memberships(kernel: Kernel, symbol: sympy.Symbol) -> Iterator[bool]:
    for stmt in statements(kernel.body):
        if isinstance(stmt, Fold):
            yield from (symbol in stmt.over, symbol in stmt.rows, symbol in stmt.columns)
        elif isinstance(stmt, Prefix):
            yield symbol == stmt.along
        elif isinstance(stmt, Loop):
            yield symbol in stmt.axes


def _crossing_axis(kernel: Kernel, grid: Sequence[KernelAxis]) -> KernelAxis | None:
    """The axis along which some load is contiguous while the store is contiguous along the last one."""
    stored = next((o for o in _store_offsets(kernel) if grid and coefficient(o, grid[-1].symbol) == 1), None)
    if stored is None or not _at_least(grid[-1].size, 8):
        return None
    for load in _loads(kernel):
        along = [axis for axis in grid[:-1] if coefficient(load, axis.symbol) == 1 and _at_least(axis.size, 8)]
        if along and coefficient(load, grid[-1].symbol) != ZERO:
            return along[-1]
    return None


# Contractions ---------------------------------------------------------------------------------------------------------


def _contraction_dims(kernel: Kernel, dots: Sequence[Fold]) -> tuple[Dim, ...]:
    """(b, m, k, n, …), named for the first dot: its operands are [m, k] and [k, n], its result [m, n], in tile order.

    What is spread over programs comes before what is walked or held: where the columns of the first dot are spread and
    its rows are not, these are its m.  So the operands of later dots come out as the matrix units take them.  The
    columns are its m too where there are few rows.
    """
    needed = _only_axes(kernel, dots)
    grid = [axis for axis in kernel.with_role(Role.GRID) if axis.size != 1 or axis.symbol in needed]
    groups = _spread_together(kernel, dots, grid)
    first = dots[0]
    lead, other = frozenset(first.rows), frozenset(first.columns)
    alone = lead and not _spread_side(groups, lead) and _spread_side(groups, other)
    if alone or (_alike(dots) and is_narrow(kernel, lead, other)):
        lead, other = other, lead
    m_axes = _spread_side(groups, lead)
    n_axes = _spread_side(groups, other) or next((g for g in groups if m_axes and g != m_axes), frozenset())
    unnamed = [(lead, "m")] * (not m_axes) + [(other, "n")] * (not n_axes)
    reduced = {dim.name: dim for dim in _reduced_dims(kernel, (*unnamed, (frozenset(first.over), "k")), needed)}

    def spread(name: str, axes: frozenset[sympy.Symbol]) -> Dim:
        return Dim(name, tuple(axis for axis in grid if axis.symbol in axes), Role.GRID)

    m = reduced.pop("m", None) or spread("m", m_axes)
    n = reduced.pop("n", None) or spread("n", n_axes)
    k = reduced.pop("k", None) or Dim("k", (), Role.WHOLE)
    batch = tuple(axis for axis in grid if axis.symbol not in m_axes | n_axes)
    b = (Dim("b", batch, Role.GRID),) if batch else ()
    dims = (*b, m, k, n, *reduced.values())
    return (*dims, *_paddings(kernel, dots, dims))


def _spread_together(
    kernel: Kernel, dots: Sequence[Fold], grid: Sequence[KernelAxis]
) -> tuple[frozenset[sympy.Symbol], ...]:
    """The GRID axes that are rows or columns of some dot, those of one side together; at most two sets.

    An axis that both operands of some dot span is none of them: each program has one value of it.
    """
    found, one_each = spans(kernel), frozenset[sympy.Symbol]()
    for dot in dots:
        one_each |= found[dot.args[0]] & found[dot.args[1]]
    spread = frozenset(axis.symbol for axis in grid) - one_each
    groups: list[frozenset[sympy.Symbol]] = []
    for side in (spread.intersection(axes) for dot in dots for axes in (dot.rows, dot.columns)):
        joined = side.union(*(group for group in groups if group & side))
        groups = [group for group in groups if not group & side] + [joined] * bool(side)
    if len(groups) > 2 or any(_spread_side(groups, dot.rows) & _spread_side(groups, dot.columns) for dot in dots):
        raise Unsupported(
            f"{kernel.name}: its contractions spread other axes over programs, one than another",
            hint="hold the columns of a later contraction whole",
        )
    return tuple(groups)


def _alike(dots: Sequence[Fold]) -> bool:
    """Are these contractions over the same axes, of the same rows and columns?"""
    return len({_sides(dot) for dot in dots}) == 1


def _spread_side(groups: Iterable[frozenset[sympy.Symbol]], side: Iterable[sympy.Symbol]) -> frozenset[sympy.Symbol]:
    """The set of GRID axes that a side of a dot belongs to."""
    return next((group for group in groups if group.intersection(side)), frozenset())


def _only_axes(kernel: Kernel, dots: Sequence[Fold]) -> frozenset[sympy.Symbol]:
    """An axis of each side of which all have size 1."""
    sizes = kernel.axis_sizes()
    sides = [side for dot in dots for side in _sides(dot) if side]
    return frozenset(side[0] for side in sides if all(sizes[symbol] == 1 for symbol in side))


def _paddings(kernel: Kernel, dots: Sequence[Fold], dims: Sequence[Dim]) -> tuple[Dim, ...]:
    """Dimensions without axes, so that each side of a dot has one; refuses sides that are several dimensions."""
    most, sided = 0, [dim for dim in dims if dim.name != "b"]
    for dot in dots:
        counts = [sum(any(axis.symbol in axes for axis in dim.axes) for dim in sided) for axes in _sides(dot)]
        if max(counts) > 1:
            raise Unsupported(f"{kernel.name}: the axes of one side of {dot.name} cannot be walked as one")
        most = max(most, counts.count(0))
    there = sum(not dim.axes for dim in dims)
    return tuple(Dim(f"z{number}", (), Role.WHOLE) for number in range(there, most))


def _sides(dot: Fold) -> tuple[tuple[sympy.Symbol, ...], ...]:
    return dot.rows, dot.columns, dot.over


# Which axes are contiguous --------------------------------------------------------------------------------------------


def _loads(kernel: Kernel) -> list[sympy.Expr]:
    """The offsets of all direct loads."""
    roots = [value for stmt in statements(kernel.body) for value in values_of(stmt)]
    found = [node.index[0] for node in postorder(*roots) if isinstance(node, Load)]
    return [offset for offset in found if not isinstance(offset, Expr)]


def _store_offsets(kernel: Kernel) -> list[sympy.Expr]:
    stores = [stmt.offset for stmt in statements(kernel.body) if isinstance(stmt, Store)]
    return [offset for offset in stores if not isinstance(offset, Expr)]


def _contiguous_along(kernel: Kernel, dim: Dim) -> int:
    """How many of the largest loads, those that span the most axes, are contiguous along the last axis of `dim`."""
    axes, last = {axis.symbol for axis in kernel.axes}, dim.axes[-1].symbol
    spans = [(len(offset.free_symbols & axes), offset) for offset in _loads(kernel)]
    widest = max((span for span, _ in spans), default=0)
    return sum(coefficient(_within_run(offset, last), last) == 1 for span, offset in spans if span == widest)


def _within_run(offset: sympy.Expr, axis: sympy.Symbol) -> sympy.Expr:
    """`offset` as it grows along `axis` until a digit carries: heads of 64 side by side are contiguous in runs.

    >>> i = sympy.Symbol("i", integer=True, nonnegative=True)
    >>> _within_run(65536 * FloorDiv(i, 64) + Mod(i, 64), i)
    i
    """

    def is_long(expr: sympy.Basic) -> bool:
        if not isinstance(expr, (FloorDiv, Mod)) or axis not in expr.free_symbols:
            return False
        return bool(expr.args[1].is_Integer and expr.args[1] >= RUN)

    return offset.replace(is_long, lambda expr: ZERO if isinstance(expr, FloorDiv) else expr.args[0])


def _by_stride(axes: Sequence[KernelAxis], kernel: Kernel) -> tuple[KernelAxis, ...]:
    """Axes by falling stride in the first access that has a known stride for each; else as they are."""
    reduced = bool(axes) and axes[0].role is not Role.GRID
    accesses = _loads(kernel) if reduced else _store_offsets(kernel)
    for offset in accesses:
        strides = {axis: coefficient(offset, axis.symbol) or ZERO for axis in axes}
        if all(stride.is_Integer and stride != 0 for stride in strides.values()):
            return tuple(sorted(axes, key=lambda axis: -abs(int(strides[axis]))))
    return tuple(axes)


def _at_least(size: sympy.Expr, least: int) -> bool:
    return not size.is_Integer or int(size) >= least


# Rewriting ------------------------------------------------------------------------------------------------------------


def _rewrite(
    body: Sequence[Stmt], digits: dict[sympy.Symbol, sympy.Expr], sizes: dict[sympy.Symbol, sympy.Expr]
) -> tuple[Stmt, ...]:
    """`body` over linear indices.  All expressions are rewritten at once, because they share parts."""
    body = _with_narrow_factors(body)
    roots = [value for stmt in statements(body) for value in values_of(stmt)]
    rewritten = dict(zip(roots, substitute_all(roots, digits, sizes), strict=True))

    def rebuild(stmt: Stmt) -> Stmt:
        if isinstance(stmt, Loop):
            where = None if stmt.where is None else rewritten[stmt.where]
            return replace(stmt, body=tuple(rebuild(inner) for inner in stmt.body), where=where)
        if isinstance(stmt, Fold):
            carry = None if stmt.carry is None else rewritten[stmt.carry]
            return replace(stmt, args=tuple(rewritten[arg] for arg in stmt.args), carry=carry)
        if isinstance(stmt, Prefix):
            return replace(stmt, args=tuple(rewritten[arg] for arg in stmt.args))
        moved = with_values(stmt, [rewritten[value] for value in values_of(stmt)])
        if isinstance(moved.offset, Expr):
            return moved
        return replace(moved, offset=simplify(moved.offset.xreplace(digits), sizes))

    return tuple(rebuild(stmt) for stmt in body)


def _with_narrow_factors(body: Sequence[Stmt]) -> tuple[Stmt, ...]:
    """`body` where factors of a product that are only widened from the same 16-bit float are left narrow.

    Their product is exact in float32, which is what the matrix units compute.
    """

    def narrowed(stmt: Stmt) -> Stmt:
        if isinstance(stmt, Loop):
            return replace(stmt, body=tuple(narrowed(inner) for inner in stmt.body))
        if not isinstance(stmt, Fold) or stmt.op != "dot":
            return stmt
        factors = tuple(arg.arg for arg in stmt.args if isinstance(arg, Cast) and arg.dtype is torch.float32)
        dtypes = {factor.dtype for factor in factors}
        return replace(stmt, args=factors) if len(factors) == 2 and len(dtypes) == 1 and dtypes <= set(HALF) else stmt

    return tuple(narrowed(stmt) for stmt in body)
