"""Defines the scalar operations of the IR: one table row each.

A row holds the arity, the kind of result and the torch function that defines the operation (used by the reference
evaluator).  The other columns are algebraic facts, so that passes need not decide by name;
`tests/lowering/ir/test_scalar_facts.py` checks each numerically.  A fact that no pass reads, such as monotonicity, has
no column; `parity` serves `keeps_size`.  Targets hold a table with the same keys that writes the operations; an
operation that a target cannot write makes the node an extern there.  The names are literal types, so that a misspelt
one fails mypy.  Integer `floordiv` and `remainder` floor, as in Python; `truncdiv` truncates.  `maximum` and `minimum`
return NaN if either operand is NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

import torch

HALVES = (torch.float16, torch.bfloat16)
INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)

CHECKED: Final = "checked"
"""The operation that fails the launch where a position, or another requirement on data, is not met."""

ScalarName: TypeAlias = Literal[
    "add",
    "sub",
    "mul",
    "truediv",
    "floordiv",
    "truncdiv",
    "remainder",
    "fmod",
    "pow",
    "neg",
    "abs",
    "sign",
    "maximum",
    "minimum",
    "sqrt",
    "rsqrt",
    "exp",
    "exp2",
    "expm1",
    "log",
    "log2",
    "log10",
    "log1p",
    "sin",
    "cos",
    "tan",
    "asin",
    "acos",
    "atan",
    "atan2",
    "sinh",
    "cosh",
    "tanh",
    "asinh",
    "acosh",
    "atanh",
    "erf",
    "erfc",
    "lgamma",
    "floor",
    "ceil",
    "trunc",
    "round",
    "isnan",
    "isinf",
    "eq",
    "ne",
    "lt",
    "le",
    "gt",
    "ge",
    "and",
    "or",
    "xor",
    "not",
    "shl",
    "shr",
    "where",
    "checked",
    "bounded",
]
"""The name of a scalar operation."""

JoinName: TypeAlias = Literal["sum", "prod", "max", "min"]
"""A fold that exists as reduction, scan and scatter."""

FoldName: TypeAlias = Literal["sum", "prod", "max", "min", "any", "all", "argmax", "argmin", "dot"]
"""The name of a fold."""

ScanName: TypeAlias = Literal["sum", "prod", "max", "min", "argmax", "argmin", "logsumexp"]
"""The name of a scan."""

ScatterName: TypeAlias = Literal["store", "sum", "prod", "max", "min"]
"""The update of an element by a scatter; `store` keeps any one of the values with equal indices."""

Distribution: TypeAlias = Literal["uniform", "normal"]
"""The distribution of random numbers."""

Result: TypeAlias = Literal["same", "bool"]
"""`same`: the operands' dtype (of the last operand for `where`); `bool`: torch.bool."""


@dataclass(frozen=True, slots=True)
class ScalarOp:
    """One scalar operation: its arity, result kind, defining torch function and relative cost (1 = an addition).

    Attributes:
        linear: groups of arguments; the operation is linear in each group while the other arguments are fixed.
        of_nan: the result wherever an argument is NaN, if that decides it: NaN, true or false.
        low: a lower bound of the result; for `rsqrt`, which is -∞ at -0.0, at all other operands.
        high: an upper bound of the result.
        degree: k such that f(d·x, d·y) = d^k · f(x, y) for every d > 0; None if there is no such k.
        logarithm: the inverse, of an exponential function: f(x + y) = f(x) · f(y).
        parity: of a function of one number, even if f(-x) = f(x), odd if f(-x) = -f(x); None if neither holds.
        mirror: the comparison g with g(y, x) = f(x, y) for all numbers, NaN too; None of all but comparisons.
        negation: the comparison that is true where this one is false, unless an operand is NaN.
    """

    arity: int
    result: Result
    meaning: Callable[..., torch.Tensor]
    cost: int = 1
    linear: tuple[tuple[int, ...], ...] = ()
    of_nan: Literal["nan"] | bool | None = "nan"
    low: float = -math.inf
    high: float = math.inf
    degree: float | None = None
    logarithm: ScalarName | None = None
    parity: Literal["even", "odd"] | None = None
    mirror: ScalarName | None = None
    negation: ScalarName | None = None

    @property
    def keeps_size(self) -> bool:
        """Whether the result is the operand or its negative: |f(x)| = |x|."""
        return self.arity == 1 and self.degree == 1 and self.parity is not None


def _truncdiv(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.div(a, b, rounding_mode="trunc")


def _floordiv(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.div(a, b, rounding_mode="floor")


def _checked(index: torch.Tensor, wrap: torch.Tensor, last: torch.Tensor, dim: torch.Tensor) -> torch.Tensor:
    if index.dtype is not torch.int64:
        raise NotImplementedError(f"a position is int64, not {index.dtype}")
    position = torch.where(index < 0, index + wrap, index)
    return torch.where((position >= 0) & (position <= last), position, 0)


def _bounded(condition: torch.Tensor, outer: torch.Tensor, inner: torch.Tensor) -> torch.Tensor:
    if condition.dtype is not torch.bool:
        raise NotImplementedError(f"a condition is a bool, not {condition.dtype}")
    return condition


_QUARTER = math.pi / 2
"""A quarter of a full turn."""

SCALAR_OPS: dict[ScalarName, ScalarOp] = {
    # arithmetic
    "add": ScalarOp(2, "same", torch.add, linear=((0, 1),), degree=1),
    "sub": ScalarOp(2, "same", torch.sub, linear=((0, 1),), degree=1),
    "mul": ScalarOp(2, "same", torch.mul, linear=((0,), (1,)), degree=2),
    "truediv": ScalarOp(2, "same", torch.true_divide, 4, linear=((0,),), degree=0),  # floats only
    "floordiv": ScalarOp(2, "same", _floordiv, 8, degree=0),
    "truncdiv": ScalarOp(2, "same", _truncdiv, 8, degree=0),
    "remainder": ScalarOp(2, "same", torch.remainder, 8, degree=1),
    "fmod": ScalarOp(2, "same", torch.fmod, 8, degree=1),
    "pow": ScalarOp(2, "same", torch.pow, 20, of_nan=None),
    "neg": ScalarOp(1, "same", torch.neg, linear=((0,),), degree=1, parity="odd"),
    "abs": ScalarOp(1, "same", torch.abs, low=0, degree=1, parity="even"),
    "sign": ScalarOp(1, "same", torch.sign, of_nan=None, low=-1, high=1, degree=0, parity="odd"),
    "maximum": ScalarOp(2, "same", torch.maximum, degree=1),
    "minimum": ScalarOp(2, "same", torch.minimum, degree=1),
    # floats
    "sqrt": ScalarOp(1, "same", torch.sqrt, 4, low=0, degree=0.5),
    "rsqrt": ScalarOp(1, "same", torch.rsqrt, 4, low=0, degree=-0.5),
    "exp": ScalarOp(1, "same", torch.exp, 6, low=0, logarithm="log"),
    "exp2": ScalarOp(1, "same", torch.exp2, 4, low=0, logarithm="log2"),
    "expm1": ScalarOp(1, "same", torch.expm1, 10, low=-1),
    "log": ScalarOp(1, "same", torch.log, 6),
    "log2": ScalarOp(1, "same", torch.log2, 4),
    "log10": ScalarOp(1, "same", torch.log10, 6),
    "log1p": ScalarOp(1, "same", torch.log1p, 10),
    "sin": ScalarOp(1, "same", torch.sin, 12, low=-1, high=1, parity="odd"),
    "cos": ScalarOp(1, "same", torch.cos, 12, low=-1, high=1, parity="even"),
    "tan": ScalarOp(1, "same", torch.tan, 16, parity="odd"),
    "asin": ScalarOp(1, "same", torch.asin, 16, low=-_QUARTER, high=_QUARTER, parity="odd"),
    "acos": ScalarOp(1, "same", torch.acos, 16, low=0, high=2 * _QUARTER),
    "atan": ScalarOp(1, "same", torch.atan, 16, low=-_QUARTER, high=_QUARTER, parity="odd"),
    "atan2": ScalarOp(2, "same", torch.atan2, 20, low=-2 * _QUARTER, high=2 * _QUARTER, degree=0),
    "sinh": ScalarOp(1, "same", torch.sinh, 12, parity="odd"),
    "cosh": ScalarOp(1, "same", torch.cosh, 12, low=1, parity="even"),
    "tanh": ScalarOp(1, "same", torch.tanh, 10, low=-1, high=1, parity="odd"),
    "asinh": ScalarOp(1, "same", torch.asinh, 16, parity="odd"),
    "acosh": ScalarOp(1, "same", torch.acosh, 16, low=0),
    "atanh": ScalarOp(1, "same", torch.atanh, 16, parity="odd"),
    "erf": ScalarOp(1, "same", torch.erf, 12, low=-1, high=1, parity="odd"),
    "erfc": ScalarOp(1, "same", torch.erfc, 14, low=0, high=2),
    "lgamma": ScalarOp(1, "same", torch.lgamma, 30),
    "floor": ScalarOp(1, "same", torch.floor),
    "ceil": ScalarOp(1, "same", torch.ceil),
    "trunc": ScalarOp(1, "same", torch.trunc, parity="odd"),
    "round": ScalarOp(1, "same", torch.round, parity="odd"),  # half to even
    "isnan": ScalarOp(1, "bool", torch.isnan, of_nan=True),
    "isinf": ScalarOp(1, "bool", torch.isinf, of_nan=False),
    # comparisons
    "eq": ScalarOp(2, "bool", torch.eq, of_nan=False, mirror="eq", negation="ne"),
    "ne": ScalarOp(2, "bool", torch.ne, of_nan=True, mirror="ne", negation="eq"),
    "lt": ScalarOp(2, "bool", torch.lt, of_nan=False, mirror="gt", negation="ge"),
    "le": ScalarOp(2, "bool", torch.le, of_nan=False, mirror="ge", negation="gt"),
    "gt": ScalarOp(2, "bool", torch.gt, of_nan=False, mirror="lt", negation="le"),
    "ge": ScalarOp(2, "bool", torch.ge, of_nan=False, mirror="le", negation="lt"),
    # bool and integer bits; on bools `and`, `or`, `xor`, `not` are logical
    "and": ScalarOp(2, "same", torch.bitwise_and, of_nan=None),
    "or": ScalarOp(2, "same", torch.bitwise_or, of_nan=None),
    "xor": ScalarOp(2, "same", torch.bitwise_xor, of_nan=None),
    "not": ScalarOp(1, "same", torch.bitwise_not, of_nan=None),
    "shl": ScalarOp(2, "same", torch.bitwise_left_shift, of_nan=None),
    "shr": ScalarOp(2, "same", torch.bitwise_right_shift, of_nan=None),
    # selection: where(condition, a, b)
    "where": ScalarOp(3, "same", torch.where, linear=((1, 2),), of_nan=None),
    # checked(index, wrap, last, dim): the index, plus `wrap` where it is negative; if that is not in [0, last], a
    # failure, with any number in [0, last] as the value.  Its cost counts as 0: a comparison next to a load.
    "checked": ScalarOp(4, "same", _checked, 0, of_nan=None),
    # bounded(condition, outer, inner): the condition, which implies `outer` and is implied by `inner`.  Its value does
    # not depend on the bounds, which are never evaluated with it: they tell which blocks of a loop it rules out.
    "bounded": ScalarOp(3, "same", _bounded, 0, of_nan=None),
}

COMPARISONS: frozenset[ScalarName] = frozenset(name for name, row in SCALAR_OPS.items() if row.mirror is not None)
"""The comparisons of two numbers."""

ORDERINGS: frozenset[ScalarName] = frozenset(name for name in COMPARISONS if SCALAR_OPS[name].mirror != name)
"""The comparisons that tell which of two numbers is larger."""


@dataclass(frozen=True, slots=True)
class FoldOp:
    """A fold: the number of values it takes per element, and the kind of its result.

    A position is an int64; a sum has the dtype of `accumulator`.

    Attributes:
        joined_by: the operation that joins the results of two folds; None if it needs more than these.
        sign: the operator of that, in C and in Python; empty if it is a function there.
    """

    arity: int
    result: Literal["value", "position", "sum"]
    joined_by: ScalarName | None = None
    sign: str = ""


FOLD_OPS: dict[FoldName, FoldOp] = {
    # `identity` below returns the value that each leaves unchanged.
    "sum": FoldOp(1, "value", "add", "+"),
    "prod": FoldOp(1, "value", "mul", "*"),
    "max": FoldOp(1, "value", "maximum"),  # NaN wins
    "min": FoldOp(1, "value", "minimum"),  # NaN wins
    "any": FoldOp(1, "value", "or", "|"),  # bool
    "all": FoldOp(1, "value", "and", "&"),  # bool
    "argmax": FoldOp(2, "position"),  # (value, index): NaN wins, then the lowest index
    "argmin": FoldOp(2, "position"),
    # Σ lhs·rhs on matrix units, accumulated in float32 (int32 for int8, float64 for float64)
    "dot": FoldOp(2, "sum", "add"),
}

SCAN_OPS: dict[ScanName, FoldOp] = {
    # Folds of all values so far and the current one.
    "sum": FoldOp(1, "value", "add", "+"),
    "prod": FoldOp(1, "value", "mul", "*"),
    "max": FoldOp(1, "value", "maximum"),  # NaN wins, then the later value (-0.0 or 0.0)
    "min": FoldOp(1, "value", "minimum"),
    "argmax": FoldOp(2, "position"),  # (value, index): NaN wins, then the later index
    "argmin": FoldOp(2, "position"),
    "logsumexp": FoldOp(1, "value"),  # log Σ exp, of floats
}

EXTREMES: Mapping[FoldName | ScanName, JoinName] = {"argmax": "max", "argmin": "min"}
"""Folds and scans that return positions → the fold of the values at these positions."""

SCANNED = (torch.float32, torch.float64, torch.int32, torch.int64)
"""The dtypes that are scanned: narrower values are widened before and rounded after."""


def keeps_position(op: FoldName | ScanName) -> bool:
    """Return whether a fold or scan returns the position of a value, rather than the value.

    >>> keeps_position("argmax"), keeps_position("max")
    (True, False)
    """
    return op in EXTREMES


def joined_by(op: FoldName) -> ScalarName:
    """Return the operation that joins the results of two folds.

    >>> joined_by("max"), joined_by("any")
    ('maximum', 'or')
    """
    join = FOLD_OPS[op].joined_by
    assert join is not None, f"the results of {op} are not joined by one operation"
    return join


def identity(op: FoldName | ScanName, dtype: torch.dtype) -> bool | int | float:
    """Return the value that leaves a fold unchanged, in `dtype`.

    >>> identity("max", torch.float32), identity("sum", torch.int64), identity("all", torch.bool)
    (-inf, 0, True)
    """
    if op in ("sum", "dot"):
        return 0.0 if dtype.is_floating_point else 0
    if op == "prod":
        return 1.0 if dtype.is_floating_point else 1
    if op in ("any", "all"):
        return op == "all"
    largest = op in ("max", "argmax", "logsumexp")
    if dtype.is_floating_point:
        return float("-inf") if largest else float("inf")
    if dtype is torch.bool:
        return not largest
    info = torch.iinfo(dtype)
    return info.min if largest else info.max


def accumulator(op: FoldName, lhs: torch.dtype) -> torch.dtype:
    """Return the dtype in which `dot` accumulates operands of dtype `lhs`; other folds accumulate in `lhs` itself."""
    if op == "dot":
        if lhs is torch.float64:
            return torch.float64
        return torch.float32 if lhs.is_floating_point else torch.int32
    return lhs


def result_dtype(name: ScalarName, operand: torch.dtype) -> torch.dtype:
    """Return the dtype of scalar operation `name` on operands of dtype `operand`."""
    return torch.bool if SCALAR_OPS[name].result == "bool" else operand
