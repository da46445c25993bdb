"""Multiples: of which sizes it makes a kernel faster to know that they are multiples of 16.

What enters is a kernel; what leaves are sizes that decide whether neighbouring elements are read and written 16 bytes
at a time: those that rows begin at multiples of, and the lengths of rows.  For others one binary does, whatever they
are, so that for a batch or a sequence of another length little is compiled.
"""

from __future__ import annotations

from collections.abc import Iterator

import sympy

from fusion.lowering.expr import Expr, index_of, postorder
from fusion.lowering.kernel import Kernel, Store, statements, values_of

ALIGNED = 16


def telling(kernel: Kernel) -> tuple[bool, ...]:
    """For each size of `kernel`: does it matter whether it is a multiple of 16?"""
    products: set[frozenset[sympy.Symbol]] = set()
    step: Kernel | None = kernel
    while step is not None:
        for part in step.parts:
            products.update(_steps(part))
        step = step.then
    # A product is a multiple where one of its factors is: one that has to be anyway decides.
    found = {size for product in products if len(product) == 1 for size in product}
    found |= {size for product in products if not product & found for size in product}
    return tuple(size in found for size in kernel.sizes)


def _steps(kernel: Kernel) -> Iterator[frozenset[sympy.Symbol]]:
    """The sizes of which products are steps between rows, or lengths of rows."""
    known, lengths = frozenset(kernel.sizes), {axis.symbol: axis.size for axis in kernel.axes}
    for index in set(_indices(kernel)):
        for term in _uneven(index):
            steps = known & term.free_symbols
            if steps:
                yield steps
                continue
            for axis in term.free_symbols & lengths.keys():  # neighbours along it are close
                yield from (known & part.free_symbols for part in _uneven(lengths[axis]))


def _uneven(index: sympy.Expr) -> list[sympy.Expr]:
    """The summands that may be no multiples, whatever is in them."""
    terms = sympy.Add.make_args(sympy.expand(index))
    return [term for term in terms if term.as_coeff_Mul()[0] % ALIGNED != 0]


def _indices(kernel: Kernel) -> Iterator[sympy.Expr]:
    body = list(statements(kernel.body))
    for node in postorder(*(value for stmt in body for value in values_of(stmt))):
        yield from index_of(node)
    for stmt in body:
        if isinstance(stmt, Store) and not isinstance(stmt.offset, Expr):
            yield stmt.offset
