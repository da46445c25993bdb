"""Computes windows: for each result, the few positions of a tensor that it reads.

A pooling reads windows of its input; its gradient reads, for each input, the windows that contain it.  Both have the
same form: along each of the last dimensions, a number of taps, the position that tap t of result o reads, and tests
whether it counts.  A tap outside the tensor never counts.  Sizes must be static.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import sympy

from fusion.lowering.errors import Unsupported
from fusion.lowering.indexing import FloorDiv, axis_symbol, bounds, simplify
from fusion.lowering.ir.expr import IndexValue
from fusion.lowering.rules.assembly import placed
from fusion.lowering.rules.formula import Term, both, where
from fusion.lowering.value import Shape, Value, axis_bounds

Place = Callable[[sympy.Symbol, sympy.Symbol], sympy.Expr]


def _no_tests(result: sympy.Symbol, tap: sympy.Symbol) -> list[Term]:
    return []


@dataclass(frozen=True, slots=True)
class WindowAxis:
    """One dimension: the number of results, of taps for each, the position that a tap reads, and whether it counts."""

    results: int
    taps: int
    place: Place
    tests: Callable[[sympy.Symbol, sympy.Symbol], list[Term]] = _no_tests


@dataclass(frozen=True, slots=True)
class Windows:
    """All taps of all results.

    Attributes:
        shape: leading dimensions, results, taps.
        index: the position of each tap, over the axes of `shape`.
        mask: whether the tap counts; None if all do.
        over: the dimensions of the taps.
    """

    shape: Shape
    index: tuple[sympy.Expr, ...]
    mask: Term | None
    over: tuple[int, ...]

    def read(self, x: Value) -> Term:
        """Return the elements of x at the taps, 0 for taps that do not count."""
        return placed(x, self.shape, self.index, self.mask)

    def counted(self, term: Term) -> Term:
        """Return `term` at the taps that count, 0 at others."""
        return term if self.mask is None else where(self.mask, term, 0)

    def value(self, like: Value, term: Term) -> Value:
        """Return `term`, one number per tap, on the device of `like`."""
        return Value(self.shape, term.dtype, like.device, term.expr)

    def flat(self, sizes: Sequence[int]) -> sympy.Expr:
        """Return the row-major position of each tap in the last dimensions, which have these sizes."""
        total: sympy.Expr = sympy.Integer(0)
        for size, position in zip(sizes, self.index[-len(sizes) :], strict=True):
            total = total * size + position
        return total


def windows(shape: Shape, dims: Sequence[WindowAxis]) -> Windows:
    """Return the windows that read a tensor of `shape`, along its last dimensions."""
    lead = len(shape) - len(dims)
    axes = [axis_symbol(k) for k in range(lead + 2 * len(dims))]
    whole = (
        *shape[:lead],
        *(sympy.Integer(dim.results) for dim in dims),
        *(sympy.Integer(dim.taps) for dim in dims),
    )
    limits = axis_bounds(whole)
    index: list[sympy.Expr] = list(axes[:lead])
    tests: list[Term] = []
    for k, dim in enumerate(dims):
        result, tap = axes[lead + k], axes[lead + len(dims) + k]
        position = simplify(sympy.expand(dim.place(result, tap)), limits)
        index.append(position)
        known = bounds(position, limits)
        if known is None or not known[0] >= 0:
            tests.append(Term(IndexValue(position)) >= 0)
        if known is None or not known[1] < shape[lead + k]:
            tests.append(Term(IndexValue(position)) < shape[lead + k])
        tests += dim.tests(result, tap)
    mask: Term | None = None
    for test in tests:
        mask = both(mask, test)
    return Windows(whole, tuple(index), mask, tuple(range(lead + len(dims), len(whole))))


def fixed(sizes: Sequence[sympy.Expr]) -> list[int]:
    """Return sizes as integers.

    Raises:
        Unsupported: one of them is symbolic, or a dimension is empty.
    """
    if not all(size.is_Integer and size > 0 for size in sizes):
        raise Unsupported("windows over dimensions of symbolic size, or empty ones")
    return [int(size) for size in sizes]


def each(argument: Sequence[int] | int, count: int) -> list[int]:
    """Return an argument as one number per dimension, repeating a single one."""
    numbers = [argument] if isinstance(argument, int) else [int(number) for number in argument]
    return numbers * count if len(numbers) == 1 else numbers


def strided(results: int, taps: int, stride: int, padding: int, dilation: int = 1) -> WindowAxis:
    """Return windows a stride apart: tap t of result o reads o·stride - padding + t·dilation."""
    return WindowAxis(results, taps, lambda o, t: o * stride - padding + t * dilation)


def covering(inputs: int, extent: int, stride: int, padding: int) -> WindowAxis:
    """Return the windows that may contain position i, beginning at most `extent` - 1 before it, last one first."""
    return WindowAxis(inputs, (extent - 1) // stride + 1, lambda i, t: FloorDiv(i + padding, sympy.Integer(stride)) - t)


def proportional(results: int, inputs: int) -> WindowAxis:
    """Return adaptive windows: from ⌊o·inputs / results⌋ up to ⌈(o + 1)·inputs / results⌉."""

    def start(o: sympy.Expr) -> sympy.Expr:
        return FloorDiv(o * inputs, sympy.Integer(results))

    def end(o: sympy.Expr) -> sympy.Expr:
        return FloorDiv((o + 1) * inputs + results - 1, sympy.Integer(results))

    def tests(o: sympy.Symbol, t: sympy.Symbol) -> list[Term]:
        return [] if inputs % results == 0 else [Term(IndexValue(start(o) + t)) < end(o)]

    taps = max(-(-(o + 1) * inputs // results) - o * inputs // results for o in range(results))
    return WindowAxis(results, taps, lambda o, t: start(o) + t, tests)
