"""Decomposes functions of a product or sum of varying and running values: exponentials, powers, extremes with 0.

Inseparable (`Inseparable`): exponents that no extreme value bounds, factors of unknown sign, powers of sums.
"""

from __future__ import annotations

from fusion.lowering.ir.expr import Const, Expr, Op, TileRef, const, make_op, postorder
from fusion.lowering.ir.scalar_ops import SCALAR_OPS, ScalarName
from fusion.schedule.online.dependences import RunningDependences
from fusion.schedule.online.terms import (
    DeferredFactor,
    ExponentialFactor,
    Inseparable,
    Kind,
    LoopTerm,
    RangePart,
    Terms,
    add_all,
    is_sum,
    loop_of,
    multiplied,
    nonnegative,
    one_of,
    part_of,
    scaled_by,
    signed_loop,
    step_under,
)


def exponential(dependences: RunningDependences, node: Op, terms: Terms, logarithm: ScalarName) -> LoopTerm:
    """Decompose exp(a(x) + b(d)); a summand log(d) of the exponent is a factor that can be deferred."""
    inside: list[tuple[Expr, bool]] = []
    parts: list[RangePart] = []
    steps: list[DeferredFactor] = []
    for term in terms:
        if term.ranges or term.shift or (term.steps and not dependences.is_fixed(term)):
            raise Inseparable(f"no factor: {node.name} of a product of a running and a varying value")
        part = part_of(term, node.dtype) if term.steps else None
        if part is None:
            inside.append((loop_of(term), term.negative))
        elif isinstance(part.value, Op) and part.value.name == logarithm and part.scale is None:
            steps.append(DeferredFactor("truediv" if part.negative else "mul", part.value.args[0]))
        else:
            _check_bounded(dependences, node, part)
            inside.append((scaled_by(part), part.negative))
            parts.append(part)
    loop = make_op(node.name, add_all(inside)) if steps else node
    return LoopTerm(loop, tuple(steps), (ExponentialFactor(node.name, tuple(parts)),) if parts else ())


def _check_bounded(dependences: RunningDependences, node: Op, part: RangePart) -> None:
    """Refuse an exponent shifted by another running value than an extreme, which bounds it in every block."""
    for ref in postorder(part.value):
        if isinstance(ref, TileRef) and dependences.running[ref.name].op not in ("max", "min"):
            raise Inseparable(f"out of range: the exponent of {node.name} is shifted by {ref.name}, no extreme value")


def scaled(dependences: RunningDependences, node: Op, args: list[Terms]) -> LoopTerm:
    """Decompose functions with f(x · d) = f(x) · d^k, at least for non-negative d: powers, and extremes with 0."""
    if node.name == "pow" and is_sum(args[0]):
        raise Inseparable("cancels: a power of a sum of varying and running values needs raw moments")
    term = one_of(node.name, args[0] if dependences.kind(node.args[0]) is Kind.MIXED else args[1])
    if node.name in ("maximum", "minimum"):
        other = node.args[1] if dependences.kind(node.args[0]) is Kind.MIXED else node.args[0]
        if not isinstance(other, Const) or other.value != 0:
            raise Inseparable(f"no factor: {node.name} of a product and something that is not 0")
    exponent: Expr | None = None
    if node.name == "pow":
        exponent = node.args[1]
        if not isinstance(exponent, Const):
            raise Inseparable("no factor: a running value under an exponent that is no constant")
    _check_signs(dependences, node, term)
    signed = signed_loop(term, node.dtype)
    rest = node.args[1:] if node.name == "pow" else ()
    if node.name in ("maximum", "minimum"):
        rest = (const(0, node.dtype),)
    power = exponent.value if isinstance(exponent, Const) else SCALAR_OPS[node.name].degree
    assert power is not None, "what is scaled has a degree"
    steps = tuple(step_under(node.name, step, exponent) for step in term.steps)
    ranges = tuple(ExponentialFactor(r.function, multiplied(r.parts, power, node.dtype)) for r in term.ranges)
    return LoopTerm(make_op(node.name, signed, *rest), steps, ranges)


def _check_signs(dependences: RunningDependences, node: Op, term: LoopTerm) -> None:
    is_integer_power = node.name == "pow" and isinstance(node.args[1], Const) and float(node.args[1].value).is_integer()
    for step in term.steps:
        if step.name == "where" and node.name in ("rsqrt", "pow"):
            raise Inseparable(f"no factor: {node.name} of what a running value switches off")
        if SCALAR_OPS[node.name].keeps_size or is_integer_power or step.name == "where":
            continue
        if not nonnegative(step.value, dependences.running):
            raise Inseparable(f"no factor: {node.name} of a product with a factor of unknown sign")
