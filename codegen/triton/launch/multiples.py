"""Determines for which sizes a kernel is faster if they are known to be multiples of 16.

Input: a kernel; output: sizes that decide whether neighbouring elements are read and written 16 bytes at a time:
factors of the strides of rows, and the lengths of rows.  For other sizes one binary serves all values, so that little
is compiled for a batch or a sequence of another length.
"""

from __future__ import annotations

from collections.abc import Iterator

import sympy

from fusion.lowering.ir.expr import Expr, index_of, postorder
from fusion.lowering.ir.kernel import Kernel, Store, statements, values_of

ALIGNED = 16


def sizes_that_matter(kernel: Kernel) -> tuple[bool, ...]:
    """Return for each size of `kernel`: does it matter whether it is a multiple of 16?"""
    products: set[frozenset[sympy.Symbol]] = set()
    step: Kernel | None = kernel
    while step is not None:
        for part in step.parts:
            products.update(_steps(part))
        step = step.then
    # A product is a multiple if one of its factors is: a factor that matters by itself decides.
    sizes = {size for product in products if len(product) == 1 for size in product}
    sizes |= {size for product in products if not product & sizes for size in product}
    return tuple(size in sizes for size in kernel.sizes)


def _steps(kernel: Kernel) -> Iterator[frozenset[sympy.Symbol]]:
    """Yield the sets of sizes whose products are strides of rows, or lengths of rows."""
    known, lengths = frozenset(kernel.sizes), {axis.symbol: axis.size for axis in kernel.axes}
    for index in set(_indices(kernel)):
        for term in _uneven(index):
            steps = known & term.free_symbols
            if steps:
                yield steps
                continue
            for axis in term.free_symbols & lengths.keys():  # its neighbours are close in memory
                yield from (known & part.free_symbols for part in _uneven(lengths[axis]))


def _uneven(index: sympy.Expr) -> list[sympy.Expr]:
    """Return the terms that may not be multiples, whatever the values of their factors."""
    terms = sympy.Add.make_args(sympy.expand(index))
    return [term for term in terms if term.as_coeff_Mul()[0] % ALIGNED != 0]


def _indices(kernel: Kernel) -> Iterator[sympy.Expr]:
    body = list(statements(kernel.body))
    for node in postorder(*(value for stmt in body for value in values_of(stmt))):
        yield from index_of(node)
    for stmt in body:
        if isinstance(stmt, Store) and not isinstance(stmt.offset, Expr):
            yield stmt.offset
