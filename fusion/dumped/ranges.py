"""Finds the values that the integer inputs of a kernel may hold, from the checks that the kernel makes of them.

Input: a kernel and its sizes; output: a range for each parameter that is checked as it is loaded: a position lies
within its dimension, a divisor is not 0.  Positions that are computed before they are checked have no range here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import sympy

from fusion.lowering.checks import checks_of, requirement_checked_by
from fusion.lowering.evaluate import size_value
from fusion.lowering.expr import Cast, Const, Expr, IndexValue, Load, Op
from fusion.lowering.kernel import Kernel
from fusion.lowering.requirements import Requirement

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
        for check in checks_of(part):
            for name, (low, high) in _range(check, sizes):
                known = ranges.get(name, (low, high))
                both = max(low, known[0]), min(high, known[1])
                ranges[name] = both if both[0] <= both[1] else known
    return ranges


def _range(check: Op, sizes: Mapping[sympy.Symbol, int]) -> Iterator[tuple[str, Range]]:
    index, wrap, last, _ = check.args
    if (requirement := requirement_checked_by(check)) is not None:
        divisor = _divisor(index) if requirement is Requirement.DIVISOR else None
        if divisor is not None:
            yield divisor.buffer, (1, LARGEST_DIVISOR)
        return
    position = _uncast(index)
    if isinstance(position, Load):
        yield position.buffer, (-_value(wrap, sizes), _value(last, sizes))


def _divisor(index: Expr) -> Load | None:
    """Return what `where(divisor == 0, 1, 0)` compares, if it is an element of a tensor."""
    match index:
        case Op(name="where", args=(Op(name="eq", args=(number, _)), *_)):
            loaded = _uncast(number)
            return loaded if isinstance(loaded, Load) else None
    return None


def _uncast(value: Expr) -> Expr:
    while isinstance(value, Cast) and not value.dtype.is_floating_point:
        value = value.arg
    return value


def _value(bound: Expr, sizes: Mapping[sympy.Symbol, int]) -> int:
    assert isinstance(bound, (Const, IndexValue)), "bounds are sizes"
    return int(bound.value) if isinstance(bound, Const) else size_value(bound.index, sizes)


__all__ = ["Range", "ranges_of"]
