"""Represents a fold's values as terms, and multiplies, scales and writes them.

A term is ± loop(x, d) · steps(d), with varying values x (they change along the fold's axes) and running values d (folds
that are not complete yet).  `loop` stays under the fold.  It contains running values only in the exponent of a `range`,
exp(a(x) + b(d)), which would leave the range of floats if it were split, and in the shift of one factor
(a(x) + b(d)).  `steps` are factors of running values alone: they may be deferred until the fold is complete.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import IntFlag
from typing import Literal, TypeVar

import torch

from fusion.lowering.ir.expr import Cast, Const, Expr, Load, Op, TileRef, const, make_cast, make_op, postorder, rewrite
from fusion.lowering.ir.kernel import Fold
from fusion.lowering.ir.scalar_ops import SCALAR_OPS, ScalarName


class Inseparable(Exception):
    """There is no online form; the text is the reason."""


class Kind(IntFlag):
    """The dependences of an expression on varying and running values."""

    FIXED = 0
    VARYING = 1
    RUNNING = 2
    MIXED = 3


@dataclass(frozen=True, slots=True)
class DeferredFactor:
    """A deferrable factor: `mul` or `truediv` by `value`, or `where`: 0 where `value` is true."""

    name: Literal["mul", "truediv", "where"]
    value: Expr


@dataclass(frozen=True, slots=True)
class RangePart:
    """A summand ± scale · value, with running values in `value` and a fixed `scale`."""

    value: Expr
    negative: bool
    scale: Expr | None = None


@dataclass(frozen=True, slots=True)
class ExponentialFactor:
    """A factor exp(… + Σ parts) or exp2(… + Σ parts) inside of `loop`."""

    function: ScalarName
    parts: tuple[RangePart, ...]


@dataclass(frozen=True, slots=True)
class LoopTerm:
    """± loop · steps; a `loop` of None is 1.  `base` is `loop` without the factor that `shift` is a summand of."""

    loop: Expr | None
    steps: tuple[DeferredFactor, ...] = ()
    ranges: tuple[ExponentialFactor, ...] = ()
    negative: bool = False
    shift: tuple[RangePart, ...] = ()
    base: Expr | None = None


Terms = tuple[LoopTerm, ...]
Summand = TypeVar("Summand", LoopTerm, RangePart)


def nonnegative(expr: Expr, running: Mapping[str, Fold]) -> bool:
    """Return whether `expr` is known to be never negative (it may be NaN)."""
    known: dict[Expr, bool] = {}
    for node in postorder(expr):
        known[node] = _is_nonnegative(node, known, running)
    return known[expr]


def _is_nonnegative(node: Expr, known: Mapping[Expr, bool], running: Mapping[str, Fold]) -> bool:
    if isinstance(node, Const):
        return not node.value < 0
    if isinstance(node, Cast):
        return known[node.arg]
    if isinstance(node, TileRef) and node.name in running:
        return all(nonnegative(arg, running) for arg in running[node.name].args)
    if not isinstance(node, Op):
        return node.dtype in (torch.bool, torch.uint8)
    args = [known[arg] for arg in node.args]
    if SCALAR_OPS[node.name].low >= 0:
        return True
    if node.name == "maximum":
        return any(args)
    if node.name == "where":
        return args[1] and args[2]
    if node.name == "mul" and node.args[0] is node.args[1]:
        return True
    if node.name == "pow" and isinstance(node.args[1], Const):
        return args[0] or node.args[1].value % 2 == 0
    return node.name in ("add", "mul", "truediv", "minimum") and all(args)


def add_all(signed: list[tuple[Expr, bool]]) -> Expr:
    """Return the sum of values, those with a true flag negated; not empty."""
    first = next((k for k, (_, negative) in enumerate(signed) if not negative), None)
    if first is None:
        return make_op("neg", add_all([(value, False) for value, _ in signed]))
    total = signed[first][0]
    for k, (value, negative) in enumerate(signed):
        if k != first:
            total = make_op("sub" if negative else "add", total, value)
    return total


def factors_of(term: LoopTerm) -> tuple[tuple[DeferredFactor, ...], tuple[ExponentialFactor, ...]]:
    """Return the running factors of a term: terms with equal ones are corrected together."""
    return term.steps, term.ranges


def loop_of(term: LoopTerm) -> Expr:
    """Return the part of a mixed term that stays under the fold."""
    assert term.loop is not None, "a mixed term has a varying part"
    return term.loop


def signed_loop(term: LoopTerm, dtype: torch.dtype) -> Expr:
    """Return the part of a term that stays under the fold, with the term's sign; ±1 if all of it can be deferred."""
    loop = const(1, dtype) if term.loop is None else term.loop
    return make_op("neg", loop) if term.negative else loop


def is_sum(terms: Terms) -> bool:
    """Return whether the value has more than one summand, counting a shift as one."""
    return len(terms) > 1 or bool(terms[0].shift)


def one_of(name: str, terms: Terms) -> LoopTerm:
    """Return the only term of the operand of `name`.

    Raises:
        Inseparable: it is a sum.
    """
    if is_sum(terms):
        raise Inseparable(f"no factor: {name} of a sum of varying and running values")
    return terms[0]


def negated(summands: tuple[Summand, ...]) -> tuple[Summand, ...]:
    """Negate each summand."""
    return tuple(replace(summand, negative=not summand.negative) for summand in summands)


def multiplied(parts: tuple[RangePart, ...], power: float, dtype: torch.dtype) -> tuple[RangePart, ...]:
    """Multiply each of `parts` by a number."""
    if power == 1:
        return parts
    by = const(power, dtype)
    return tuple(replace(p, scale=by if p.scale is None else make_op("mul", p.scale, by)) for p in parts)


def product(left: Terms, right: Terms) -> Terms:
    """Multiply each term of a sum by the one term of the other side.

    Raises:
        Inseparable: both are sums.
    """
    if is_sum(left) and is_sum(right):
        raise Inseparable("cancels: a product of sums of varying and running values needs raw moments")
    if is_sum(right):
        return tuple(_times(term, left[0], True) for term in right)
    return tuple(_times(term, right[0], False) for term in left)


def _times(term: LoopTerm, factor: LoopTerm, swapped: bool) -> LoopTerm:
    """Multiply `term`, which may have a shift, by `factor`, whose steps come last; `swapped`: factor · term."""

    def both(one: Expr | None, other: Expr | None) -> Expr | None:
        if one is None or other is None:
            return other if one is None else one
        pair = (other, one) if swapped else (one, other)
        inverse = pair[1]
        if isinstance(inverse, Op) and inverse.name == "truediv" and _is_one(inverse.args[0]):
            return make_op("truediv", pair[0], inverse.args[1])
        return make_op("mul", *pair)

    return LoopTerm(
        both(term.loop, factor.loop),
        (*term.steps, *factor.steps),
        (*term.ranges, *factor.ranges),
        term.negative is not factor.negative,
        term.shift,
        both(term.base, factor.loop) if term.shift else None,
    )


def part_of(term: LoopTerm, dtype: torch.dtype) -> RangePart:
    """Return a term without varying values as a summand."""
    if len(term.steps) == 1 and term.steps[0].name == "mul":
        return RangePart(term.steps[0].value, term.negative, term.loop)
    return RangePart(apply(term.loop, term.steps, dtype), term.negative)


def scaled_by(part: RangePart) -> Expr:
    """Return a summand without its sign."""
    return part.value if part.scale is None else make_op("mul", part.value, part.scale)


def apply(value: Expr | None, steps: tuple[DeferredFactor, ...], dtype: torch.dtype) -> Expr:
    """Apply deferred factors to `value` (None: 1), as `dtype`.

    Steps of another dtype are converted.
    """
    for step in steps:
        if value is None and step.name == "mul":
            value = make_cast(step.value, dtype)
            continue
        value = const(1, dtype) if value is None else value
        if step.name == "where":
            value = make_op("where", step.value, const(0, dtype), value)
        else:
            value = make_op(step.name, value, make_cast(step.value, dtype))
    return const(1, dtype) if value is None else value


def step_under(name: ScalarName, step: DeferredFactor, exponent: Expr | None) -> DeferredFactor:
    """Return the factor f(d) of f(x · d), for the functions of `functions.scaled`."""
    if step.name == "where" or name in ("maximum", "minimum"):
        return step
    if name == "rsqrt":
        return DeferredFactor("truediv" if step.name == "mul" else "mul", make_op("sqrt", step.value))
    if exponent is not None:
        return DeferredFactor(step.name, make_op("pow", step.value, exponent))
    return DeferredFactor(step.name, make_op(name, step.value))


def cast_again(loop: Expr, node: Cast) -> Expr:
    """Convert `loop` as `node` converts the expression from which it was extracted."""
    if isinstance(loop, Cast) and loop.arg.dtype is node.dtype and loop.arg.dtype.itemsize < loop.dtype.itemsize:
        return loop.arg  # it was only widened
    return make_cast(loop, node.dtype, implicit=node.implicit)


def is_zero(expr: Expr | None) -> bool:
    """Return whether this is the constant 0, of either sign and any dtype."""
    return isinstance(expr, Const) and expr.value == 0


def _is_one(expr: Expr) -> bool:
    return isinstance(expr, Const) and expr.value == 1


def is_infinite(expr: Expr) -> bool:
    """Return whether this is the constant ∞ or −∞."""
    return isinstance(expr, Const) and expr.value in (float("inf"), float("-inf"))


def unmasked(expr: Expr) -> Expr:
    """Remove masks that set a value to 0."""

    def rule(node: Expr) -> Expr | None:
        if isinstance(node, Load) and node.mask is not None:
            return Load(node.buffer, node.index, node.dtype)
        if isinstance(node, Op) and node.name == "where" and is_zero(node.args[2]):
            return node.args[1]
        return None

    return rewrite([expr], rule)[0]


def cores(expr: Expr) -> set[Expr]:
    """Return the factors in `expr`, without signs, conversions and powers."""
    factors: set[Expr] = set()
    stack = [expr]
    while stack:
        node = stack.pop()
        if isinstance(node, Cast):
            stack.append(node.arg)
        elif isinstance(node, Op) and (node.name == "pow" or SCALAR_OPS[node.name].keeps_size):
            stack.append(node.args[0])
        elif isinstance(node, Op) and node.name in ("mul", "truediv"):
            stack.extend(node.args)
        elif not isinstance(node, Const):
            factors.add(node)
    return factors


_SAFE_IN_FLOAT16 = 100
"""A bound of values of which products of a few stay within float16."""


def _is_small(node: Expr) -> bool:
    """Return whether a value is small by its range, or, for an exponential in the loop, by the shift that it keeps."""
    if not isinstance(node, Op):
        return False
    row = SCALAR_OPS[node.name]
    return row.logarithm is not None or max(-row.low, row.high) <= _SAFE_IN_FLOAT16


def fits_half(expr: Expr) -> bool:
    """Return whether `expr` is certainly within float16: it was float16, or is a product of small values."""
    if isinstance(expr, Cast) and expr.arg.dtype is torch.float16:
        return True
    stack = [expr]
    while stack:
        node = stack.pop()
        if isinstance(node, Op) and (node.name in ("mul", "where") or SCALAR_OPS[node.name].keeps_size):
            stack.extend(node.args[1:] if node.name == "where" else node.args)
        elif isinstance(node, Const):
            if abs(node.value) > _SAFE_IN_FLOAT16:
                return False
        elif isinstance(node, Cast) and node.arg.dtype.is_floating_point:
            stack.append(node.arg)
        elif not ((isinstance(node, Cast) and node.arg.dtype is torch.bool) or _is_small(node)):
            return False
    return True
