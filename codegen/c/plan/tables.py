"""Hoists values that depend only on the lane axis into lookup tables, filled once per launch.

The position and the weight at which an image is sampled depend on the column; its lanes are columns, and each row would
compute them again.  They become tables over the lanes.  A load whose position is the sum of such a value and of a value
that all lanes share (the row) is *gathered*: a table holds the position, so that neighbours, in any order, are taken
from whole vectors.  Input: the sweeps of a kernel and the axis of its lanes; output: the values and loads.  Left alone:
loads that are contiguous or have a stride, loads under masks (but `without_idle_masks`), tensors that the kernel
writes, and loops that are cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import sympy
import torch

from fusion.codegen.c.plan.index_set_splitting import split_index_set
from fusion.codegen.c.plan.lanes import Lanes, terms_of
from fusion.codegen.c.plan.loop_fusion import Sweep, Symbols, extend_spans
from fusion.codegen.c.plan.scratch import WORTH_HOISTING, costs, outermost
from fusion.lowering.indexing import coefficient, symbols_of, within
from fusion.lowering.ir.expr import Expr, IndexValue, Load, Op, TileRef, free_axes, loads, postorder, rewrite
from fusion.lowering.ir.kernel import Kernel, Loop, Role, Stmt, map_statements, values_of, with_values

FEWEST_READERS = 32
"""The fewest rows that read a table: one thread computes it, while all others wait."""

LONGEST_TABLE = 1 << 12
"""The longest axis of a table: the L1 cache holds a few such tables and the operands of their loop."""


@dataclass(frozen=True, slots=True)
class Gather:
    """A load at the position `base + place`: `place` varies only along the lanes, `base` does not."""

    load: Load
    place: Expr
    base: Expr


@dataclass(frozen=True, slots=True)
class Tables:
    """The values of a table each, and the loads whose places are one."""

    values: tuple[Expr, ...] = ()
    gathers: tuple[Gather, ...] = ()


def without_idle_masks(kernel: Kernel) -> Kernel:
    """Return a kernel whose loads of short tensors have no mask that the choice around them repeats, on other axes.

    The condition does not decide which element is read.  Without it, what is computed of the element varies along the
    lanes alone, such as the deviation of a channel under the bounds of a window.
    """
    sizes = kernel.axis_sizes()

    def is_idle(load: Load, condition: Expr) -> bool:
        index, extent = load.index[0], kernel.param(load.buffer).extent
        return (
            load.mask == condition
            and bool(extent.is_Integer and extent <= LONGEST_TABLE)
            and not isinstance(index, Expr)
            and not index.free_symbols & free_axes(condition)
            and within(index, extent, sizes)
        )

    def rule(node: Expr) -> Expr | None:
        if not isinstance(node, Op) or node.name != "where":
            return None
        condition, first, second = node.args
        idle = {load for load in loads(first) if is_idle(load, condition)}
        if not idle:
            return None

        def unmask(part: Expr) -> Expr | None:
            return Load(part.buffer, part.index, part.dtype) if isinstance(part, Load) and part in idle else None

        (bare,) = rewrite([first], unmask)
        return node.rebuild((condition, bare, second))

    def each(stmt: Stmt) -> Stmt:
        return stmt if isinstance(stmt, Loop) else with_values(stmt, rewrite(values_of(stmt), rule))

    return replace(kernel, body=map_statements(kernel.body, each))


def find_tables(kernel: Kernel, sweeps: Sequence[Sweep], lanes: Lanes, where: dict[Expr, Symbols]) -> Tables:
    """Return the tables over the lanes of a kernel; `where` is extended by the parts of positions."""
    if lanes.axis is None or lanes.tile is not None or lanes.inner is not None:
        return Tables()
    if lanes.axis.size.is_Integer and lanes.axis.size > LONGEST_TABLE:
        return Tables()
    others = [axis.size for axis in kernel.with_role(Role.GRID) if axis is not lanes.axis]
    rows = sympy.Mul(*others)
    if not others or (rows.is_Integer and rows < FEWEST_READERS):
        return Tables()
    tables = _of(sweeps, kernel, lanes.axis.symbol, where)
    if lanes.block is None and (tables.values or tables.gathers):
        uncut = [sweep for sweep in sweeps if not split_index_set(sweep, lanes.axis, kernel.axis_sizes())]
        return tables if len(uncut) == len(sweeps) else _of(uncut, kernel, lanes.axis.symbol, where)
    return tables


def _of(sweeps: Sequence[Sweep], kernel: Kernel, lane: sympy.Symbol, where: dict[Expr, Symbols]) -> Tables:
    written = {param.name for param in kernel.params if param.written}
    roots = [root for sweep in sweeps for root in sweep.roots]

    def is_known(node: Expr) -> bool:
        """Return whether a value can be computed before all loops."""
        parts = postorder(node) if where[node] <= {lane} else ()
        return bool(parts) and not any(
            isinstance(part, TileRef) or (isinstance(part, Load) and part.buffer in written) for part in parts
        )

    gathers = []
    for node in postorder(*roots):
        if isinstance(node, Load) and node.mask is None and node.buffer not in written:
            gather = _gather(node, lane, where)
            if gather is not None and is_known(gather.place):
                gathers.append(gather)
    values = outermost(
        roots,
        {gather.load for gather in gathers},
        lambda node: lane in where[node] and is_known(node) and costs(node, WORTH_HOISTING, {lane}, where),
    )
    return Tables(tuple(values), tuple(gathers))


def _gather(load: Load, lane: sympy.Symbol, where: dict[Expr, Symbols]) -> Gather | None:
    """Return a load as one at two parts of its position; None if that has no such parts, or is affine in the lane."""
    terms = terms_of(load.index[0])
    extend_spans(where, terms)
    own = [term for term in terms if lane in where[term]]
    if any(where[term] != {lane} for term in own) or all(_is_affine(term, lane) for term in own):
        return None
    place, base = _sum(own), _sum([term for term in terms if lane not in where[term]])
    extend_spans(where, [place, base])
    return Gather(load, place, base)


def _is_affine(term: Expr, lane: sympy.Symbol) -> bool:
    return isinstance(term, IndexValue) and lane in symbols_of(term.index) and coefficient(term.index, lane) is not None


def _sum(terms: Sequence[Expr]) -> Expr:
    """Return the sum of positions; indices among them are one."""
    total: Expr | None = None
    index = sympy.Add(*(term.index for term in terms if isinstance(term, IndexValue)))
    for term in (*(each for each in terms if not isinstance(each, IndexValue)), IndexValue(index)):
        if total is None:
            total = term
        elif term != IndexValue(sympy.Integer(0)):
            total = Op("add", (total, term), torch.int64)
    assert total is not None
    return total
