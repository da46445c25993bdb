"""Maps the axes of a contraction to the M, N and K dimensions of the matrix units.

Refuses contractions of one kernel that spread different axes over programs, sides that are not one dimension, and
operands that are more than matrices.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import sympy
from typing_extensions import assert_never

from fusion.codegen.triton.blocks.dims import Blocked, Dim, sides_of
from fusion.codegen.triton.blocks.rows import reduced_dims
from fusion.codegen.triton.rewrites.batches import batch_axes
from fusion.codegen.triton.rewrites.vectors import is_narrow
from fusion.lowering.errors import Unsupported
from fusion.lowering.ir.expr import Expr, TileRef, index_of, postorder
from fusion.lowering.ir.kernel import Fold, Kernel, KernelAxis, Loop, Prefix, Role, Store, spans, statements


def contraction_dims(kernel: Kernel, dots: Sequence[Fold], *, turns: bool = True) -> tuple[Dim, ...]:
    """Return (b, s, m, k, n, …), named for the first dot: its operands are [m, k] and [k, n], its result [m, n].

    The dimensions are in tile order.  Those spread over programs come before those looped over or held: where the
    columns of the first dot are spread and its rows are not, the columns are m, so that the operands of later dots have
    the layout that the matrix units read.  The columns are m too where there are few rows, unless `turns` is false.  A
    dimension held whole that both operands span is s, the groups of which each warp takes one
    (`rewrites/group_per_warp.py`).
    """
    needed = _unit_axes(kernel, dots)
    grid = [axis for axis in kernel.with_role(Role.GRID) if axis.size != 1 or axis.symbol in needed]
    groups = _spread_together(kernel, dots, grid)
    first = dots[0]
    lead, other = frozenset(first.rows), frozenset(first.columns)
    alone = lead and not _spread_side(groups, lead) and _spread_side(groups, other)
    if alone or (turns and _same_sides(dots) and is_narrow(kernel, lead, other)):
        lead, other = other, lead
    m_axes = _spread_side(groups, lead)
    n_axes = _spread_side(groups, other) or next((g for g in groups if m_axes and g != m_axes), frozenset())
    apart = _matrix_axes(kernel, dots, grid, m_axes) | _matrix_axes(kernel, dots, grid, n_axes)
    m_axes, n_axes = m_axes - apart, n_axes - apart
    unnamed = [(lead, "m")] * (not m_axes) + [(other, "n")] * (not n_axes)
    reduced = {dim.name: dim for dim in reduced_dims(kernel, (*unnamed, (frozenset(first.over), "k")), needed)}

    def spread(name: str, axes: frozenset[sympy.Symbol]) -> Dim:
        return Dim(name, tuple(axis for axis in grid if axis.symbol in axes), Role.GRID)

    m = reduced.pop("m", None) or spread("m", m_axes)
    n = reduced.pop("n", None) or spread("n", n_axes)
    k = reduced.pop("k", None) or Dim("k", (), Role.WHOLE)
    batch = tuple(axis for axis in grid if axis.symbol not in m_axes | n_axes)
    b = (Dim("b", batch, Role.GRID),) if batch else ()
    axes_of = spans(kernel)
    both = axes_of[first.args[0]] & axes_of[first.args[1]]
    common = [name for name, dim in reduced.items() if both.issuperset(axis.symbol for axis in dim.axes)]
    s = tuple(replace(reduced.pop(name), name="s") for name in common)
    dims = (*b, *s, m, k, n, *reduced.values())
    return (*dims, *_paddings(kernel, dots, dims))


def _matrix_axes(
    kernel: Kernel, dots: Sequence[Fold], grid: Sequence[KernelAxis], side: frozenset[sympy.Symbol]
) -> frozenset[sympy.Symbol]:
    """Return the axes of a side of the only contraction that step from matrix to matrix of a batch."""
    return batch_axes(kernel, dots, [axis for axis in grid if axis.symbol in side]) if len(dots) == 1 else frozenset()


def _spread_together(
    kernel: Kernel, dots: Sequence[Fold], grid: Sequence[KernelAxis]
) -> tuple[frozenset[sympy.Symbol], ...]:
    """Return the GRID axes that are rows or columns of some dot, one set for each side; at most two sets.

    Excluded are axes that both operands of some dot span, of which each program has one value, and axes of a side of
    which another axis is looped over or held, such as the number of a part whose columns a program loops over.
    """
    axes_of, one_each = spans(kernel), frozenset[sympy.Symbol]()
    inside = {axis.symbol for axis in kernel.axes if axis.role is not Role.GRID and axis.size != 1}
    for dot in dots:
        one_each |= axes_of[dot.args[0]] & axes_of[dot.args[1]]
        one_each |= {symbol for side in (dot.rows, dot.columns) if inside.intersection(side) for symbol in side}
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


def _same_sides(dots: Sequence[Fold]) -> bool:
    """Return whether contractions have the same reduced axes, rows and columns."""
    return len({sides_of(dot) for dot in dots}) == 1


def _spread_side(groups: Iterable[frozenset[sympy.Symbol]], side: Iterable[sympy.Symbol]) -> frozenset[sympy.Symbol]:
    """Return the set of GRID axes that a side of a dot belongs to."""
    return next((group for group in groups if group.intersection(side)), frozenset())


def _unit_axes(kernel: Kernel, dots: Sequence[Fold]) -> frozenset[sympy.Symbol]:
    """Return one axis of each side whose axes all have size 1."""
    sizes = kernel.axis_sizes()
    sides = [side for dot in dots for side in sides_of(dot) if side]
    return frozenset(side[0] for side in sides if all(sizes[symbol] == 1 for symbol in side))


def _paddings(kernel: Kernel, dots: Sequence[Fold], dims: Sequence[Dim]) -> tuple[Dim, ...]:
    """Return dimensions without axes, so that each side of a dot has one; refuse sides that are several dimensions."""
    most, sided = 0, [dim for dim in dims if dim.name != "b"]
    for dot in dots:
        counts = [sum(any(axis.symbol in axes for axis in dim.axes) for dim in sided) for axes in sides_of(dot)]
        if max(counts) > 1:
            raise Unsupported(f"{kernel.name}: the axes of one side of {dot.name} are not one dimension")
        most = max(most, counts.count(0))
    present = sum(not dim.axes for dim in dims)
    return tuple(Dim(f"z{number}", (), Role.WHOLE) for number in range(present, most))


def only_matrices(blocked: Blocked) -> Blocked:
    """Return `blocked`; refuse operands that span more than their side and the sum, apart from axes of which a program
    has one value.

    A product of which one side is in no dimension of the others gets a dimension without axes.
    """
    over: dict[str, frozenset[Dim]] = {}  # fold → the dimensions of its result

    def dims_of(*roots: Expr) -> frozenset[Dim]:
        axes_of = frozenset[Dim]()
        for expr in postorder(*roots):
            axes_of |= over[expr.name] if isinstance(expr, TileRef) else frozenset()
            symbols = {symbol for index in index_of(expr) for symbol in index.free_symbols}
            axes_of |= {dim for dim in blocked.dims if dim.symbol in symbols and dim.name not in ("b", "s")}
        return axes_of

    for stmt in statements(blocked.body):
        match stmt:
            case Prefix():
                over[stmt.name] = dims_of(*stmt.args) | {*blocked.of((stmt.along,))}
            case Fold(op="dot"):
                rows, columns, summed = blocked.sides(stmt)
                over[stmt.name] = frozenset((rows, columns))
                for operand, side in zip(stmt.args, (rows, columns), strict=True):
                    if not dims_of(operand) <= {side, summed}:
                        raise Unsupported(f"{blocked.kernel.name}: an operand of {stmt.name} is more than a matrix")
            case Fold():
                over[stmt.name] = dims_of(*stmt.args) - {*blocked.of(stmt.over)}
            case Loop() | Store():
                pass
            case _:
                assert_never(stmt)
    return blocked
