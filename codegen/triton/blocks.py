"""Blocks: which axes of a kernel become which block dimensions.

What enters is a Kernel; what leaves is its block dimensions in the order in which tiles are laid out (the contiguous
one last), and the rewriting of every axis as a digit of the linear index of its dimension.

    pointwise     GRID axes → x, or (y, x) where a load and the store are contiguous along different axes
    reduction     GRID axes → x, reduced axes → r (more of them where folds take different axes)
    contraction   rows → m, columns → n, folded axes → k, the other GRID axes → b, one value per program

Axes of size 1 are dropped.  Which axes are contiguous is read from the offsets of loads and stores.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import sympy
import torch

from codegen.triton.spell import HALF
from codegen.triton.walk import walked
from lowering.errors import Unsupported
from lowering.expr import Cast, Expr, Load, TileRef, postorder
from lowering.indexing import ONE, ZERO, FloorDiv, Mod, coefficient, simplify, substitute_all
from lowering.kernel import Fold, Kernel, KernelAxis, Loop, Role, Stmt, Store, statements, values_of

HELD_COLUMN, HELD_ONCE = 1024, 128
"""The longest column that is held whole, where it is needed again and where it is read once: times 16 columns it fills
the registers of 16 warps, and a walk keeps wider rows of memory in flight."""

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
        """Each axis as a digit of the linear index."""
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
    def contraction(self) -> bool:
        return any(isinstance(stmt, Fold) and stmt.op == "dot" for stmt in statements(self.body))


def block(kernel: Kernel) -> Blocked:
    """The kernel over block dimensions."""
    dots = [stmt for stmt in statements(kernel.body) if isinstance(stmt, Fold) and stmt.op == "dot"]
    dims = _contraction_dims(kernel, dots) if dots else _dims(kernel)
    if not dots and _too_tall(kernel, dims):
        kernel = walked(kernel)
        dims = _dims(kernel)
    digits: dict[sympy.Symbol, sympy.Expr] = {axis.symbol: ZERO for axis in kernel.axes if axis.size == 1}
    for dim in dims:
        digits.update(dim.digits())
    return Blocked(kernel, dims, _rewrite(kernel.body, digits, {dim.symbol: dim.size for dim in dims}))


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


def _reduced_dims(kernel: Kernel, named: Sequence[tuple[frozenset[sympy.Symbol], str]]) -> tuple[Dim, ...]:
    """One dimension per set of reduced axes that every fold and loop takes together."""
    groups: dict[tuple[object, ...], list[KernelAxis]] = {}
    for axis in kernel.axes:
        if axis.role is not Role.GRID and axis.size != 1:
            groups.setdefault((axis.role, *_memberships(kernel, axis.symbol)), []).append(axis)
    spare = iter(_NAMES)
    dims = []
    for axes in groups.values():
        symbols = frozenset(axis.symbol for axis in axes)
        name = next((name for over, name in named if symbols <= over), None)
        dims.append(Dim(name or next(spare), _by_stride(axes, kernel), axes[0].role))
    return tuple(dims)


def _memberships(kernel: Kernel, symbol: sympy.Symbol) -> Iterator[bool]:
    for stmt in statements(kernel.body):
        if isinstance(stmt, Fold):
            yield from (symbol in stmt.over, symbol in stmt.rows, symbol in stmt.columns)
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
    """(b, m, k, n, …): operands are [m, k] and [k, n], results [m, n], all in tile order."""
    first = dots[0]
    rows, columns, over = (frozenset(axes) for axes in (first.rows, first.columns, first.over))
    grid = [axis for axis in kernel.with_role(Role.GRID) if axis.size != 1]
    spread_out = {axis.symbol for axis in grid}
    for dot in dots:
        if not (spread_out.intersection(dot.rows) <= rows and spread_out.intersection(dot.columns) <= columns):
            raise Unsupported(
                f"{kernel.name}: {dot.name} spreads other axes over programs than {first.name}",
                hint="hold the columns of a later contraction whole",
            )
    reduced = {dim.name: dim for dim in _reduced_dims(kernel, ((rows, "m"), (columns, "n"), (over, "k")))}

    def spread(name: str, axes: frozenset[sympy.Symbol]) -> Dim:
        return Dim(name, tuple(axis for axis in grid if axis.symbol in axes), Role.GRID)

    m = reduced.pop("m", None) or spread("m", rows)
    n = reduced.pop("n", None) or spread("n", columns)
    k = reduced.pop("k", None) or Dim("k", (), Role.WHOLE)
    batch = tuple(axis for axis in grid if axis.symbol not in rows | columns)
    b = (Dim("b", batch, Role.GRID),) if batch else ()
    dims = (*b, m, k, n, *reduced.values())
    for dot in dots:
        for axes in (dot.rows, dot.columns, dot.over):
            if sum(any(axis.symbol in axes for axis in dim.axes) for dim in dims) > 1:
                raise Unsupported(f"{kernel.name}: the axes of one side of {dot.name} cannot be walked as one")
    return dims


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
    axes = {axis.symbol for axis in kernel.axes}
    spans = [(len(offset.free_symbols & axes), offset) for offset in _loads(kernel)]
    widest = max((span for span, _ in spans), default=0)
    return sum(coefficient(offset, dim.axes[-1].symbol) == 1 for span, offset in spans if span == widest)


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
            return replace(stmt, body=tuple(rebuild(inner) for inner in stmt.body))
        if isinstance(stmt, Fold):
            return replace(stmt, args=tuple(rewritten[arg] for arg in stmt.args))
        if isinstance(stmt.offset, Expr):
            return replace(stmt, offset=rewritten[stmt.offset], value=rewritten[stmt.value])
        offset = simplify(stmt.offset.xreplace(digits), sizes)
        return replace(stmt, offset=offset, value=rewritten[stmt.value])

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
