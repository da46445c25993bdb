"""Hoists factors that do not vary along the summed axes out of a sum.

    Σ_k x[m, k] · (w[n, k] · s[n])  =  s[n] · Σ_k x[m, k] · w[n, k]

Input: the operands of one contraction, or the argument of one sum, with everything fused into them visible; output:
smaller operands and the factors and divisors for the sum.  A scale per channel is then applied once per result instead
of once per element, and the tensor it scaled is multiplied in the type it is stored in.  For a contraction it is done
in its kernel: a library that may be called instead keeps the operands as they were.

Floating point rounds differently: the sum is exact in the accumulator's type, and scaled there.  A narrowing
conversion stays on the rest of the operand; where that could leave the narrow type's range, nothing moves.  An
infinite factor gives an infinity where a sum of infinities of both signs gave NaN.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import sympy
import torch

from fusion.lowering.ir.expr import Cast, Const, Expr, Op, const, free_axes, make_cast

_NARROW = (torch.float16, torch.bool, torch.int8, torch.uint8, torch.int16)
"""Types whose every value float16 can hold, rounded."""


Scale: TypeAlias = "tuple[Literal['mul', 'truediv'], Expr]"
"""A scalar operation and its second operand."""


@dataclass(frozen=True, slots=True)
class Hoisted:
    """Operands of a contraction without the hoisted factors.

    `scales` are applied to the sum in order: pairs of a scalar operation and its second operand.
    """

    operands: tuple[Expr, ...]
    scales: tuple[Scale, ...] = ()

    def scaled(self, total: Expr) -> Expr:
        """Apply the scales to a partial sum over the remaining operands."""
        for name, factor in self.scales:
            total = Op(name, (total, make_cast(factor, total.dtype)), total.dtype)
        return total

    def summed(self, total: Expr) -> Expr:
        """Apply the scales to the full sum; a zero stays +0.0 whatever the sign of a factor, as in a sum from 0."""
        value = self.scaled(total)
        may_flip_zero = any(not isinstance(factor, Const) or not factor.value > 0 for _, factor in self.scales)
        return Op("add", (value, const(0.0, value.dtype)), value.dtype) if may_flip_zero else value


def hoist(operands: Sequence[Expr], over: Iterable[sympy.Symbol]) -> Hoisted:
    """Hoist out of each operand every factor and divisor that varies along no axis of `over`.

    Out of a sum, factors that all its terms share.  Operands keep their dtypes.  An operand that does not vary along
    `over` at all is left as it is.
    """
    axes = frozenset(over)
    kept: list[Expr] = []
    scales: list[Scale] = []
    for operand in operands:
        rest, hoisted_scales = _peel(operand, axes) if _varies(operand, axes) else (operand, [])
        kept.append(rest)
        scales.extend(hoisted_scales)
    return Hoisted(tuple(kept), tuple(scales))


def _varies(expr: Expr, axes: frozenset[sympy.Symbol]) -> bool:
    return bool(free_axes(expr) & axes)


def _peel(expr: Expr, axes: frozenset[sympy.Symbol]) -> tuple[Expr, list[Scale]]:
    """Split `expr`, which varies along `axes`, into an expression that varies along them and scales that do not."""
    if isinstance(expr, Cast):
        return _peel_cast(expr, axes)
    if not isinstance(expr, Op) or not expr.dtype.is_floating_point or expr.name not in ("mul", "truediv", "add"):
        return expr, []
    a, b = expr.args
    if expr.name == "add":
        return _peel_terms(expr, axes)
    if not _varies(b, axes):
        rest, scales = _peel(a, axes)
        return rest, [*scales, (expr.name, b)]
    if expr.name == "truediv":
        rest, scales = _peel(a, axes) if _varies(a, axes) else (a, [])
        return (expr.rebuild((rest, b)), scales) if scales else (expr, [])
    if not _varies(a, axes):
        rest, scales = _peel(b, axes)
        return rest, [("mul", a), *scales]
    (left, of_left), (right, of_right) = _peel(a, axes), _peel(b, axes)
    scales = of_left + of_right
    return (expr.rebuild((left, right)), scales) if scales else (expr, [])


def _peel_terms(expr: Op, axes: frozenset[sympy.Symbol]) -> tuple[Expr, list[Scale]]:
    """Hoist the scales that both terms of a sum share."""
    if not all(_varies(arg, axes) for arg in expr.args):
        return expr, []
    (left, of_left), (right, of_right) = (_peel(arg, axes) for arg in expr.args)
    return (expr.rebuild((left, right)), of_left) if of_left and of_left == of_right else (expr, [])


def _peel_cast(expr: Cast, axes: frozenset[sympy.Symbol]) -> tuple[Expr, list[Scale]]:
    if not expr.dtype.is_floating_point or not expr.arg.dtype.is_floating_point:
        return expr, []
    rest, scales = _peel(expr.arg, axes)
    if not scales or not _in_range(rest, expr.dtype):
        return expr, []
    if isinstance(rest, Cast) and rest.arg.dtype is expr.dtype and rest.dtype.itemsize > expr.dtype.itemsize:
        return rest.arg, scales  # it was widened only for the multiplication
    return make_cast(rest, expr.dtype, implicit=expr.implicit), scales


def _in_range(expr: Expr, dtype: torch.dtype) -> bool:
    """Return whether every finite value of `expr` is known to be finite in `dtype` (bfloat16 has float32's range)."""
    wide = (torch.float32, torch.bfloat16)
    if dtype.itemsize >= expr.dtype.itemsize and not (dtype is torch.float16 and expr.dtype is torch.bfloat16):
        return True
    if dtype in wide and expr.dtype in (*wide, torch.float16):
        return True
    while isinstance(expr, Cast):
        expr = expr.arg
        if expr.dtype is dtype or expr.dtype in _NARROW:
            return True
    return False
