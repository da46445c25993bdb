"""Recognises kernels whose work is to read weights once: sums of products of a few rows with many columns.

    sum[m, n] = Σ_k x[m, k] · s[n, k // g] · w[n, k]

Input: a kernel; output: its plan, or None.  x is any expression of the rows, including sums such as a norm's; it is
computed once, before the loop over the columns.  w is stored in consecutive memory along k (`weights`).  s, a product
of factors that a group of consecutive weights share, is applied to the sum over the group.  Whatever follows is
computed for each element of the result.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, reduce
from math import prod

import sympy
import torch

from fusion.codegen.c.loops.grid import STACK
from fusion.codegen.c.plan.strip_mining import with_groups
from fusion.codegen.c.skinny.weights import Weights, weights_of
from fusion.codegen.c.text.skinny import MOST_SKINNY_ROWS, Stream, holds_pairs
from fusion.codegen.c.text.storage import NARROW_FLOATS
from fusion.lowering.indexing import coefficient
from fusion.lowering.ir.expr import Cast, Expr, Load, Op, TileRef, make_cast, postorder, rewrite
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
    spans,
    statements,
    values_of,
    with_values,
)

SHORTEST_ROW = 128
"""The shortest rows of weights: along others, a call for each would take longer than the sums."""

FEWEST_COLUMNS = 8
"""The smallest number of columns."""

LONGEST_ROW = 1 << 18
"""The longest rows, which are kept as a whole."""

MOST_GROUPS = 2048
"""The most groups of a row, whose scales are kept on the stack."""

TOGETHER = {4: 4, 8: 4}
"""Bits of weights → the columns that are multiplied in turn (measured: docs/performance.md, `TOGETHER`)."""

RESULT_COLUMNS = 32
"""The most columns whose results are computed in one loop (measured: docs/performance.md, `RESULT_COLUMNS`)."""


@dataclass(frozen=True, slots=True)
class SkinnyProduct:
    """One sum of products.

    Attributes:
        factor: x, in float32.
        scale: s, over the axes of the groups; None: 1.
        groups: the axes of the groups, outermost first; none: each row of weights has one scale.
        order: the axes of k, outermost first.
    """

    fold: Fold
    weights: Weights
    factor: Expr
    scale: Expr | None
    groups: tuple[KernelAxis, ...]
    order: tuple[KernelAxis, ...]
    stream: Stream


@dataclass(frozen=True, slots=True)
class SkinnyPlan:
    """A kernel of products.

    Attributes:
        rows, columns: the axes of its grid, of x and of the weights.
        depth: the number of terms.
        before: folds of the rows, in order.
        stores: the statements after the product.
    """

    kernel: Kernel
    rows: tuple[KernelAxis, ...]
    columns: tuple[KernelAxis, ...]
    depth: int
    before: tuple[Fold, ...]
    products: tuple[SkinnyProduct, ...]
    stores: tuple[Store, ...]

    @property
    def count(self) -> int:
        """The number of rows."""
        return _count(self.rows)

    @property
    def together(self) -> int:
        """The number of columns that are multiplied in turn."""
        return min(product.stream.columns for product in self.products)

    @property
    def block(self) -> int:
        """The number of columns whose results are computed in one loop, of whole turns; their sums fit in a stack."""
        size, width = int(self.columns[-1].size), RESULT_COLUMNS
        while width > self.together and 4 * width * self.count * len(self.products) > STACK:
            width //= 2
        return min(width, -(-size // self.together) * self.together)


@lru_cache(maxsize=256)
def plan_of(kernel: Kernel) -> SkinnyPlan | None:
    """Return the plan of a kernel; None if it is no such kernel."""
    if not kernel.with_role(Role.GRID) or not all(axis.size.is_Integer for axis in kernel.axes):
        return None
    kernel = with_groups(replace(kernel, body=map_statements(kernel.body, _in_float32)))
    body = list(_flattened(kernel.body))
    folds = [stmt for stmt in body if isinstance(stmt, Fold)]
    stores = tuple(stmt for stmt in body if isinstance(stmt, Store))
    where = spans(kernel)
    columns = _columns(kernel, folds, where)
    across = {axis.symbol for axis in columns}
    before = tuple(fold for fold in folds if not across & _span(fold.args, where))
    if len(folds) + len(stores) < len(body) or not columns or not _is_plain(kernel, before, stores, where):
        return None
    rows = tuple(axis for axis in kernel.with_role(Role.GRID) if axis not in columns)
    products = [_product(kernel, fold, rows, across, where) for fold in folds if fold not in before]
    streamed = tuple(product for product in products if product is not None)
    depths = {_count(product.order) for product in streamed}
    if (
        len(streamed) < len(products)
        or len(depths) != 1
        or _count(rows) > MOST_SKINNY_ROWS
        or _count(columns) < FEWEST_COLUMNS
    ):
        return None
    (depth,) = depths
    return (
        SkinnyPlan(kernel, rows, columns, depth, before, _together(streamed, columns[-1], depth), stores)
        if SHORTEST_ROW <= depth <= LONGEST_ROW
        else None
    )


def _in_float32(stmt: Stmt) -> Stmt:
    """Return a product in float32 with operands in float32: products of narrower numbers are exact there."""
    if not isinstance(stmt, Fold) or stmt.op != "dot" or stmt.dtype is not torch.float32:
        return stmt
    return with_values(stmt, [make_cast(value, torch.float32) for value in values_of(stmt)])


def _count(axes: Sequence[KernelAxis]) -> int:
    return prod(int(axis.size) for axis in axes)


def _flattened(body: Sequence[Fold | Prefix | Loop | Store]) -> Iterator[Stmt]:
    """Yield the statements of loops that only fold; other loops as they are."""
    for stmt in body:
        if isinstance(stmt, Loop) and all(isinstance(inner, Fold) and inner.carry is None for inner in stmt.body):
            yield from stmt.body
        else:
            yield stmt


def _span(values: Sequence[Expr], where: Spans) -> frozenset[sympy.Symbol]:
    return frozenset().union(*(where[value] for value in values))


def _columns(kernel: Kernel, folds: Sequence[Fold], where: Spans) -> tuple[KernelAxis, ...]:
    """Return the axes of the grid along which the largest tensor of a fold varies."""
    grid = kernel.with_role(Role.GRID)
    best: tuple[KernelAxis, ...] = ()
    for fold in folds:
        for node in postorder(*fold.args):
            if isinstance(node, Load) and set(fold.over) & where[node]:
                own = tuple(axis for axis in grid if axis.symbol in where[node])
                best = own if _count(own) > _count(best) else best
    return best


def _is_plain(kernel: Kernel, before: Sequence[Fold], stores: Sequence[Store], where: Spans) -> bool:
    """Return whether the rows' folds are of float32, and each element of the grid is stored by itself."""
    grid = {axis.symbol for axis in kernel.with_role(Role.GRID)}
    inner = (where[value] - grid for store in stores for value in values_of(store))
    offsets = (store.offset.free_symbols - grid for store in stores if isinstance(store.offset, sympy.Expr))
    plain = all(store.op == "store" and not set(store.axes or ()) - grid for store in stores)
    floats = all(fold.dtype is torch.float32 and fold.op != "dot" for fold in before)
    return plain and floats and not any(inner) and not any(offsets)


def _factors(expr: Expr) -> Iterator[Expr]:
    if isinstance(expr, Op) and expr.name == "mul" and expr.dtype is torch.float32:
        for arg in expr.args:
            yield from _factors(arg)
    else:
        yield expr


def _times(factors: Sequence[Expr]) -> Expr:
    return reduce(lambda left, right: Op("mul", (left, right), torch.float32), factors)


def _product(
    kernel: Kernel, fold: Fold, rows: Sequence[KernelAxis], across: set[sympy.Symbol], where: Spans
) -> SkinnyProduct | None:
    """Return a fold as a sum of products."""
    if fold.op not in ("sum", "dot") or fold.dtype is not torch.float32:
        return None
    factors = [factor for arg in fold.args for factor in _factors(arg)]
    weighed = [factor for factor in factors if across & where.get(factor, frozenset())]
    others = [factor for factor in factors if factor not in weighed]
    own = {axis.symbol for axis in rows}
    named = any(isinstance(node, TileRef) for factor in weighed for node in postorder(factor))
    shared = any(axis.size != 1 and axis.symbol not in _span(others, where) for axis in rows)  # the same for all rows
    if not others or named or shared or any(own & where[factor] for factor in weighed):
        return None
    sizes = kernel.axis_sizes()
    halves = [symbol for symbol in fold.over if sizes[symbol] == 2]
    elements = [factor for factor in weighed if len(where[factor] & set(fold.over)) == len(fold.over)]
    weights = weights_of(elements[0], halves) if len(elements) == 1 else None
    order = None if weights is None else _order(kernel, fold, weights)
    if weights is None or order is None:
        return None
    scales = [factor for factor in weighed if factor is not elements[0]]
    grouped = _span(scales, where) & set(fold.over)
    groups = order[: len(grouped)]
    if {axis.symbol for axis in groups} != grouped:
        return None
    factor, scale = _times(others), _times(scales) if scales else None
    group = _count(order[len(groups) :]) if groups else None
    stream = _stream(weights, _count(rows), group, _pairs(kernel, fold, others))
    if stream.fixed_point is not None and _read_as(kernel, fold, (torch.bfloat16,)):
        stream = replace(stream, coarse=True)
    depth = _count(order)
    if group is not None and (group & (group - 1) or group < stream.per_word or depth // group > MOST_GROUPS):
        return None
    return SkinnyProduct(fold, weights, factor, scale, groups, order, stream)


def _stream(weights: Weights, count: int, group: int | None, pairs: int) -> Stream:
    stream = Stream(weights.bits, count, weights.signed, weights.high, weights.offset_by, group, pairs)
    several = pairs > 1 and weights.bits == 8 and count > 1  # conversions cost less than four products
    return replace(stream, pairs=0) if several or not holds_pairs(stream) else stream


def _together(products: Sequence[SkinnyProduct], axis: KernelAxis, depth: int) -> tuple[SkinnyProduct, ...]:
    """Return products of columns in turn, if each has a form for that and its columns' weights are side by side."""

    def side_by_side(product: SkinnyProduct) -> bool:
        bits = product.stream.bits
        return 8 * (coefficient(product.weights.offset, axis.symbol) or 0) == depth * bits

    if not all(product.stream.fixed_point is not None and side_by_side(product) for product in products):
        return tuple(products)
    count = min(TOGETHER[product.stream.bits] for product in products)
    return tuple(replace(product, stream=replace(product.stream, columns=count)) for product in products)


def _pairs(kernel: Kernel, fold: Fold, factors: Sequence[Expr]) -> int:
    """Return of how many bfloat16 numbers the product of `factors` is the sum; 0 if only float32 holds it.

    If a sum is only read as a number of 16 bits, two of them, with an error of 2^-17, are enough.
    """
    (first, *rest) = factors
    if not rest and isinstance(first, Cast) and first.arg.dtype is torch.bfloat16:
        return 1
    return 2 if _read_as(kernel, fold, NARROW_FLOATS) else 0


def _read_as(kernel: Kernel, fold: Fold, dtypes: Collection[torch.dtype]) -> bool:
    """Return whether a sum is only read as a number of these dtypes."""
    nodes = postorder(*(value for stmt in statements(kernel.body) for value in values_of(stmt)))
    readers = [node for node in nodes if fold.ref in node.children()]
    narrow = all(isinstance(node, Cast) and node.dtype in dtypes for node in readers)
    stored = any(isinstance(stmt, Store) and fold.ref in values_of(stmt) for stmt in statements(kernel.body))
    return narrow and not stored


def _order(kernel: Kernel, fold: Fold, weights: Weights) -> tuple[KernelAxis, ...] | None:
    """Return the axes of a fold in the order in which weights are stored; None if there are gaps between them."""
    axes = {axis.symbol: axis for axis in kernel.axes if axis.symbol in fold.over and axis.symbol != weights.half}
    strides = {symbol: coefficient(weights.offset, symbol) for symbol in axes}
    if any(stride is None or not stride.is_Integer for stride in strides.values()):
        return None
    order = sorted(axes, key=lambda symbol: -int(strides[symbol] or 0))
    run = 1
    for symbol in reversed(order):
        if strides[symbol] != run:
            return None
        run *= int(axes[symbol].size)
    inner = () if weights.half is None else tuple(axis for axis in kernel.axes if axis.symbol == weights.half)
    return (*(axes[symbol] for symbol in order), *inner)


def scaled(plan: SkinnyPlan, values: Sequence[Expr]) -> list[Expr]:
    """Return values in which each sum is multiplied by the scale of its row of weights, if that has one."""
    whole = {p.fold.name: p.scale for p in plan.products if p.scale is not None and not p.groups}

    def times_scale(node: Expr) -> Expr | None:
        if isinstance(node, TileRef) and node.name in whole:
            return Op("mul", (node, whole[node.name]), torch.float32)
        return None

    return rewrite(values, times_scale)
