"""Merges two loads of every other element of a contiguous range into one contiguous load.

Input: expressions with loads at `2*k` and `2*k + 1`, which unpacking weights leaves in the other operand; output: the
lines of one contiguous load that serves both, split in registers:

    both = tl.load(x_ptr + 2 * k0 + tl.arange(0, 2 * KBLOCK))
    even, odd = tl.split(tl.reshape(both, [KBLOCK, 2]))

Each of the two alone would use half of every word it reads, an element at a time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

import sympy

from fusion.codegen.triton.blocks import Dim
from fusion.codegen.triton.expressions.code import AND, COMPARE, SUM, as_code, compose, listed
from fusion.codegen.triton.expressions.indices import Layout, expand
from fusion.codegen.triton.expressions.scalar_code import literal
from fusion.codegen.triton.expressions.scopes import Tile
from fusion.codegen.triton.expressions.values import Values
from fusion.lowering.indexing import coefficient
from fusion.lowering.ir.expr import Expr, Load, loads
from fusion.lowering.ir.kernel import Loop, Role, Store, statements, values_of


@dataclass(frozen=True, slots=True)
class InterleavedLoads:
    """Two loads that interleave.

    Attributes:
        loads: the loads at `rest + 2*along` and at the next element.
        along: the dimension of which every index has one element of each load.
        rest: the part of the offset that does not depend on it.
    """

    loads: tuple[Load, Load]
    along: Dim
    rest: sympy.Expr


def join_loads(values: Values) -> None:
    """Register joint loads for interleaved loads of the kernel of `values`."""
    stmts = list(statements(values.layout.blocked.body))
    written = {stmt.param for stmt in stmts if isinstance(stmt, Store)} | values.behind
    every = loads(*(value for stmt in stmts if not isinstance(stmt, Loop) for value in values_of(stmt)))
    for pair in _pairs((load for load in every if load.buffer not in written), values.layout):
        for load in pair.loads:
            values.emitters[load] = partial(_half, values, pair, load)


def _pairs(candidates: Iterable[Load], layout: Layout) -> list[InterleavedLoads]:
    """Return the loads that interleave, each in one pair."""
    unmasked: dict[tuple[str, sympy.Expr], Load] = {}
    for load in candidates:
        if load.mask is None and not isinstance(load.index[0], Expr):
            unmasked[load.buffer, load.index[0]] = load
    result: dict[Load, InterleavedLoads] = {}
    for (buffer, offset), even in unmasked.items():
        odd = unmasked.get((buffer, offset + 1))
        if odd is None or even in result or odd in result:
            continue
        for dim in layout.within(offset):
            if (
                coefficient(layout.by_block(offset), dim.symbol) == 2
                and dim.role is not Role.GRID
                and dim not in layout.wide
            ):
                rest = sympy.expand(offset - 2 * dim.symbol)
                result[even] = result[odd] = InterleavedLoads((even, odd), dim, rest)
    return list(dict.fromkeys(result.values()))


def _half(values: Values, pair: InterleavedLoads, load: Load) -> Tile:
    """Return the value of one of the loads, after the lines that load and split both, if they are not there yet."""
    known = values.find(("half", load))
    if known is None:
        _split(values, pair)
        known = values.find(("half", load))
    assert known is not None
    return known


def _split(values: Values, pair: InterleavedLoads) -> None:
    """Add the lines that load both and split them."""
    layout, dim = values.layout, pair.along
    both = _both(values, pair)
    others = tuple(other for other in both.dims if other is not dim)
    shape = listed([*(other.constant for other in others), dim.constant, 2])
    names = [values.fresh(f"{pair.loads[0].buffer}_{word}", both.depth) for word in ("even", "odd")]
    values.line("{} = tl.split(tl.reshape({}, [{}]))", listed(names), both.code, shape, depth=both.depth)
    has, wants = (*others, dim), values.join((both.dims,))
    for half, load in zip(names, pair.loads, strict=True):
        code = as_code(half)
        if has != wants:
            code = compose("tl.permute({}, {})", half, listed(has.index(want) for want in wants))
        values.bind(("half", load), Tile(code, wants, max(both.depth, layout.depth[dim])))


def _both(values: Values, pair: InterleavedLoads) -> Tile:
    """Return both loads as one named tile, whose last dimension is twice as long."""
    layout, dim, first = values.layout, pair.along, pair.loads[0]
    pointer = values.pointer(first.buffer, pair.rest)
    others = pointer.dims
    start = values.starts.get(dim)
    index = values.find(("both", dim))
    if index is None:
        points = compose("tl.arange(0, 2 * {})", dim.constant)
        if start is not None:
            points = compose("2 * {} + {}", start, points, binds=SUM)
        index = values.bind(("both", dim), values.name(f"{dim.name}i_both", Tile(points, (dim,), layout.depth[dim])))
    dims = (*others, dim)
    arguments = compose(
        "{} + {}", expand(pointer.code, others, dims).at(SUM), expand(index.code, (dim,), dims).at(SUM + 1)
    )
    inside = values.masks(others)
    checks = [] if inside is None else [expand(inside.code, inside.dims, dims)]
    if layout.masked(dim):
        limit = values.index_tile(2 * dim.size).code.at(COMPARE + 1)
        checks.append(expand(compose("{} < {}", index.code, limit, binds=COMPARE), (dim,), dims))
    if checks:
        mask = listed((check.at(AND + 1) for check in checks), " & ") if len(checks) > 1 else checks[0]
        arguments = compose("{}, mask={}, other={}", arguments, mask, literal(0, first.dtype))
    depth = max(pointer.depth, index.depth, 0 if inside is None else inside.depth)
    return values.name(f"{first.buffer}_both", Tile(compose("tl.load({})", arguments), dims, depth))
