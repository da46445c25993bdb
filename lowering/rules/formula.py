"""Builds scalar expressions in the notation of mathematics.

A `Term` is an expression with Python's operators, so that a rule can say `x / (1 + exp(-x))`.  Input: terms of one
dtype, and numbers, which take the dtype of the other operand; output: a term.  Nothing is promoted here: operands of
different dtypes fail an assertion, because promotion comes before a formula is applied.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import sympy
import torch
from torch.utils._sympy import functions as torch_sympy

from fusion.lowering.errors import Unsupported
from fusion.lowering.ir.expr import Expr, IndexValue, Op, const, make_cast
from fusion.lowering.ir.scalar_ops import ORDERINGS, ScalarName, result_dtype


@dataclass(frozen=True, slots=True, eq=False)
class Term:
    """An expression under Python's arithmetic and ordering operators (equality is `eq` and `ne`)."""

    expr: Expr

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its value."""
        return self.expr.dtype

    def __add__(self, other: Operand) -> Term:
        return call("add", self, other)

    def __radd__(self, other: Operand) -> Term:
        return call("add", other, self)

    def __sub__(self, other: Operand) -> Term:
        return call("sub", self, other)

    def __rsub__(self, other: Operand) -> Term:
        return call("sub", other, self)

    def __mul__(self, other: Operand) -> Term:
        return call("mul", self, other)

    def __rmul__(self, other: Operand) -> Term:
        return call("mul", other, self)

    def __truediv__(self, other: Operand) -> Term:
        return call("truediv", self, other)

    def __rtruediv__(self, other: Operand) -> Term:
        return call("truediv", other, self)

    def __neg__(self) -> Term:
        return call("neg", self)

    def __lt__(self, other: Operand) -> Term:
        return call("lt", self, other)

    def __le__(self, other: Operand) -> Term:
        return call("le", self, other)

    def __gt__(self, other: Operand) -> Term:
        return call("gt", self, other)

    def __ge__(self, other: Operand) -> Term:
        return call("ge", self, other)

    def __and__(self, other: Operand) -> Term:
        return call("and", self, other)

    def __or__(self, other: Operand) -> Term:
        return call("or", self, other)

    def __invert__(self) -> Term:
        return call("not", self)

    def to(self, dtype: torch.dtype, *, implicit: bool = False) -> Term:
        """The term converted to `dtype`."""
        return Term(make_cast(self.expr, dtype, implicit=implicit))


Operand: TypeAlias = "Term | sympy.Expr | bool | int | float"
"""An operand of an operator: a term, a number, or an index expression that stands for a size."""

_LOGICAL: dict[ScalarName, ScalarName] = {
    "add": "or",
    "mul": "and",
    "maximum": "or",
    "minimum": "and",
    "eq": "eq",
    "ne": "xor",
}


def call(name: ScalarName, *args: Operand) -> Term:
    """Build the scalar operation `name` on operands of one dtype.

    On bools arithmetic becomes logic, and orderings compare integers: targets need only `and`, `or`, `xor`, `not` and
    equality of bools.
    """
    dtype = next(arg.dtype for arg in args if isinstance(arg, Term))
    exprs = [literal(arg, dtype) for arg in args]
    assert all(expr.dtype is dtype for expr in exprs), f"{name} of {[expr.dtype for expr in exprs]}"
    if dtype is torch.bool:
        name = _LOGICAL.get(name, name)
        if name in ORDERINGS:
            exprs = [make_cast(expr, torch.uint8) for expr in exprs]
    return Term(Op(name, tuple(exprs), result_dtype(name, dtype)))


def literal(operand: Operand, dtype: torch.dtype) -> Expr:
    """Return an operand as an expression; numbers become constants of `dtype`, integers wrapped as eager does.

    >>> literal(-1, torch.uint8).value, literal(1, torch.float32).value
    (255, 1.0)
    """
    if isinstance(operand, Term):
        return operand.expr
    if isinstance(operand, sympy.Expr):
        if not operand.is_Integer:
            return make_cast(_of_sizes(operand), dtype)
        operand = int(operand)
    if dtype is torch.bool or dtype.is_floating_point:
        return const(operand, dtype)
    info = torch.iinfo(dtype)
    return const((int(operand) - info.min) % (info.max - info.min + 1) + info.min, dtype)


_REAL: dict[type, ScalarName] = {
    torch_sympy.FloatTrueDiv: "truediv",
    torch_sympy.IntTrueDiv: "truediv",
    torch_sympy.FloatPow: "pow",
    sympy.Pow: "pow",
    sympy.Add: "add",
    sympy.Mul: "mul",
    torch_sympy.Min: "minimum",
    torch_sympy.Max: "maximum",
    torch_sympy.OpaqueUnaryFn_sqrt: "sqrt",
    torch_sympy.OpaqueUnaryFn_log2: "log2",
    torch_sympy.OpaqueUnaryFn_sin: "sin",
    torch_sympy.OpaqueUnaryFn_cos: "cos",
    torch_sympy.OpaqueUnaryFn_tanh: "tanh",
}


def _of_sizes(number: sympy.Expr) -> Expr:
    """Return a number computed from sizes: an integer as an index, a real one in float64.

    Raises:
        Unsupported: it is computed by an unknown function.
    """
    if number.is_integer:
        return IndexValue(number)
    if number.is_Float or number.is_Rational:
        return const(float(number), torch.float64)
    args = [make_cast(_of_sizes(arg), torch.float64) for arg in number.args]
    if isinstance(number, torch_sympy.ToFloat):
        return args[0]
    if type(number) not in _REAL:
        raise Unsupported(f"the number {number}")
    name, total = _REAL[type(number)], args[0]
    for arg in args[1:]:
        total = Op(name, (total, arg), torch.float64)
    return total if len(args) > 1 else Op(name, (total,), torch.float64)


# Named operations ---------------------------------------------------------------------------------------------------


def eq(a: Term, b: Operand) -> Term:
    """a == b."""
    return call("eq", a, b)


def ne(a: Term, b: Operand) -> Term:
    """a != b."""
    return call("ne", a, b)


def both(mask: Term | None, test: Term) -> Term:
    """Return the conjunction of a mask, if there is one, and a test."""
    return test if mask is None else mask & test


def where(condition: Term, a: Operand, b: Operand) -> Term:
    """`a` where the bool term `condition` holds, else `b`; at least one of `a` and `b` is a term."""
    assert condition.dtype is torch.bool
    dtype = next(arg.dtype for arg in (a, b) if isinstance(arg, Term))
    return Term(Op("where", (condition.expr, literal(a, dtype), literal(b, dtype)), dtype))


def maximum(a: Operand, b: Operand) -> Term:
    """The larger operand; NaN if either is; on a CPU the second of 0.0 and -0.0.  One of them is a term."""
    return call("maximum", a, b)


def minimum(a: Operand, b: Operand) -> Term:
    """The smaller operand; NaN if either is; on a CPU the second of 0.0 and -0.0.  One of them is a term."""
    return call("minimum", a, b)


def absolute(a: Term) -> Term:
    """|a|."""
    return call("abs", a)


def exp(a: Term) -> Term:
    """e to the power of `a`."""
    return call("exp", a)


def expm1(a: Term) -> Term:
    """exp(a) - 1, accurate near 0."""
    return call("expm1", a)


def log(a: Term) -> Term:
    """The natural logarithm."""
    return call("log", a)


def log1p(a: Term) -> Term:
    """log(1 + a), accurate near 0."""
    return call("log1p", a)


def sqrt(a: Term) -> Term:
    """The square root."""
    return call("sqrt", a)


def rsqrt(a: Term) -> Term:
    """1 / sqrt(a)."""
    return call("rsqrt", a)


def tanh(a: Term) -> Term:
    """The hyperbolic tangent."""
    return call("tanh", a)


def erf(a: Term) -> Term:
    """The error function."""
    return call("erf", a)


def isnan(a: Term) -> Term:
    """Whether `a` is NaN; false for integers."""
    return call("isnan", a) if a.dtype.is_floating_point else Term(const(False, torch.bool))


def isinf(a: Term) -> Term:
    """Whether `a` is infinite; false for integers."""
    return call("isinf", a) if a.dtype.is_floating_point else Term(const(False, torch.bool))


def clamp(a: Term, low: Operand, high: Operand) -> Term:
    """`a` clamped to two bounds, a -0.0 too; if the bounds cross, `high` wins."""
    return minimum(high, maximum(low, a))


def sigmoid(a: Term) -> Term:
    """1 / (1 + exp(-a))."""
    return 1 / (1 + exp(-a))
