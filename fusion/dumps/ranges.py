"""Finds the values that the integer inputs of a kernel may hold, from the checks that the kernel makes of them.

Input: a kernel and its sizes; output: a range for each parameter that is a position, checked as it is loaded, and for
each that integers are divided by; for bounds of a mask, a number that holds for any mask.  Positions that are computed
before they are checked have no range here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import sympy

from fusion.codegen.tuning.inputs import open_bounds
from fusion.lowering.checks.checked import checks_of, requirement_checked_by
from fusion.lowering.ir.expr import Cast, Const, Expr, IndexValue, Load, Op, postorder
from fusion.lowering.ir.kernel import Kernel, statements, values_of
from fusion.lowering.ir.sizes import size_value

DIVISIONS = ("floordiv", "truncdiv", "remainder", "fmod")

LARGEST_DIVISOR = 100
"""The largest divisor that is drawn."""

Range = tuple[int, int]
"""The least and the largest value."""


def ranges_of(kernel: Kernel, sizes: Mapping[sympy.Symbol, int]) -> dict[str, Range]:
    """Return the range of each integer parameter whose values a launch checks.

    Args:
        sizes: a value for each size symbol of the kernel.

    >>> from fusion.inspect.examples import TARGET, lowered
    >>> from fusion.schedule import grow
    >>> import torch
    >>> from fusion.schedule.launches.generate import kernels_of
    >>> program = lowered(lambda table, ids: table[ids], torch.empty(5, 3), torch.empty(7, dtype=torch.int64))
    >>> (call,), _ = kernels_of(program, grow(program, TARGET.capabilities), TARGET)
    >>> ranges_of(call.kernel, {})
    {'in0': (-5, 4)}
    """
    ranges: dict[str, Range] = {}
    for part in kernel.launched:
        for name, (low, high) in (*_of_positions(part, sizes), *_of_divisors(part)):
            known = ranges.get(name, (low, high))
            both = max(low, known[0]), min(high, known[1])
            ranges[name] = both if both[0] <= both[1] else known
    return ranges | {name: (number, number) for name, number in open_bounds(kernel, sizes).items()}


def _of_positions(kernel: Kernel, sizes: Mapping[sympy.Symbol, int]) -> Iterator[tuple[str, Range]]:
    for check in checks_of(kernel):
        index, wrap, last, _ = check.args
        position = _uncast(index)
        if requirement_checked_by(check) is None and isinstance(position, Load):
            yield position.buffer, (-_value(wrap, sizes), _value(last, sizes))


def _of_divisors(kernel: Kernel) -> Iterator[tuple[str, Range]]:
    """Yield the divisors that are elements of a tensor, whether the kernel checks them or, on a GPU, does not."""
    for node in postorder(*(value for stmt in statements(kernel.body) for value in values_of(stmt))):
        if isinstance(node, Op) and node.name in DIVISIONS and not node.dtype.is_floating_point:
            divisor = _unchecked(node.args[1])
            if isinstance(divisor, Load):
                yield divisor.buffer, (1, LARGEST_DIVISOR)


def _unchecked(divisor: Expr) -> Expr:
    """Return a divisor without the check that is added to it."""
    match divisor:
        case Op(name="add", args=(number, _)):
            return _uncast(number)
    return _uncast(divisor)


def _uncast(value: Expr) -> Expr:
    while isinstance(value, Cast) and not value.dtype.is_floating_point:
        value = value.arg
    return value


def _value(bound: Expr, sizes: Mapping[sympy.Symbol, int]) -> int:
    assert isinstance(bound, (Const, IndexValue)), "bounds are sizes"
    return int(bound.value) if isinstance(bound, Const) else size_value(bound.index, sizes)


__all__ = ["Range", "ranges_of"]
