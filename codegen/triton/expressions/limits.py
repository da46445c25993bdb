"""Determines for which sizes all indices of a kernel fit into 32 bits; each launch compares its sizes.

Input: the layouts of a kernel whose sizes are symbols; output: one polynomial of these that bounds all indices and
their intermediate values.  Arithmetic on 64 bits costs a GPU two to four times as much, a division more, so a kernel is
generated for sizes within the limit, and again if larger ones come.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import TypeAlias

import sympy

from fusion.codegen.triton.expressions.indices import INT32_END, Layout, summands
from fusion.lowering.indexing import FloorDiv, Mod
from fusion.lowering.ir.division import may_be_negative

Polynomial: TypeAlias = "Counter[tuple[str, ...]]"
"""For each product, given by the names of its factors, its coefficient, which may be a fraction."""


class _Unbounded(Exception):
    """Raised at an operation on sizes that has no bound here."""


def limit_of(layouts: Sequence[Layout]) -> str | None:
    """Return an upper bound of all indices, an expression over sizes as text; if it is below 2³¹, 32 bits suffice.

    None if no size is symbolic, if indices never fit, and for operations on sizes that this module cannot bound.
    """
    bound: Polynomial = Counter()
    try:
        for layout in layouts:
            for ceiling in _of_layout(layout):
                bound |= ceiling  # the greater coefficient for each product
    except _Unbounded:
        return None
    if max(map(len, bound), default=0) == 0 or bound[()] >= INT32_END:
        return None
    return " + ".join(_text(bound[term], term) for term in sorted(bound))


def _text(count: int, factors: tuple[str, ...]) -> str:
    count = math.ceil(count)
    return " * ".join([str(count)] * (count != 1 or not factors) + [*factors])


def _of_layout(layout: Layout) -> Iterator[Polynomial]:
    sizes, kernel = layout.blocked.sizes(), layout.blocked.kernel
    own = {size.name for size in kernel.sizes}
    for dim in layout.blocked.dims:
        yield from _ceilings(dim.size + layout.config.block(dim.name), sizes, own)
    for index in summands(layout):
        yield from _ceilings(index, sizes, own)
    for param in kernel.params:  # descriptors use these
        for size, stride in zip(param.shape, param.strides, strict=True):
            yield from _ceilings(size * stride, sizes, own)


def _ceilings(index: sympy.Expr, sizes: Mapping[sympy.Symbol, sympy.Expr], own: set[str]) -> Iterator[Polynomial]:
    """Yield bounds on the dividends in `index`, then a bound on its absolute value."""
    inside: list[Polynomial] = []

    def bound(expr: sympy.Expr) -> Polynomial:
        if expr.is_Integer:
            return Counter({(): abs(int(expr))} if expr else {})
        if isinstance(expr, sympy.Symbol) and expr in sizes:
            return bound(sizes[expr])
        if isinstance(expr, sympy.Symbol) and expr.name in own:
            return Counter({(expr.name if expr.is_nonnegative else f"abs({expr.name})",): 1})
        if expr.is_Add:
            return sum(map(bound, expr.args), Counter())
        if expr.is_Mul:
            return _product(map(bound, expr.args))
        if isinstance(expr, sympy.Pow) and expr.exp.is_Integer and expr.exp > 0:
            return _product([bound(expr.base)] * int(expr.exp))
        if isinstance(expr, (FloorDiv, Mod)):
            whole, by = map(bound, expr.args)
            inside.extend([whole, by + by + whole if may_be_negative(expr.args[0]) else by])
            if isinstance(expr, FloorDiv) and expr.args[1].is_Integer:
                each = Fraction(1, int(expr.args[1]))  # a quotient is at most this share of its dividend
                below = Counter({(): 1} if may_be_negative(expr.args[0]) else {})
                return below + Counter({term: count * each for term, count in whole.items()})
            return whole if isinstance(expr, FloorDiv) else by
        raise _Unbounded(expr)

    outer = bound(index)
    yield from inside
    yield outer


def _product(factors: Iterator[Polynomial] | Sequence[Polynomial]) -> Polynomial:
    result: Polynomial = Counter({(): 1})
    for factor in factors:
        grown: Polynomial = Counter()
        for a, times in result.items():
            for b, count in factor.items():
                grown[tuple(sorted((*a, *b)))] += times * count
        result = grown
    return result
