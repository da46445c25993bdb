"""Decomposes one value of a fold into terms by their dependences.

Input: an expression over varying and running values; output: its terms.  Each operation has a rule: sums and products
(`sums`), functions (`functions`), `where` and casts (`selections`).  Refused are expressions in which no rule separates
the two, and sums that cancel.
"""

from __future__ import annotations

from collections.abc import Mapping

from fusion.lowering.ir.expr import Cast, Expr, Op
from fusion.lowering.ir.scalar_ops import SCALAR_OPS
from fusion.schedule.online.dependences import RunningDependences, undivided
from fusion.schedule.online.functions import exponential, scaled
from fusion.schedule.online.selections import choice, rounded
from fusion.schedule.online.sums import added, inverse, summands, with_shift
from fusion.schedule.online.terms import (
    Inseparable,
    Kind,
    Terms,
    negated,
    one_of,
    product,
)


def terms_of(dependences: RunningDependences, root: Expr) -> Terms:
    """Return the terms of `root`.

    Raises:
        Inseparable: no rule separates varying and running values, or the terms would cancel.
    """
    done: dict[Expr, Terms | Inseparable] = {}
    stack = [root]
    while stack:
        node = stack[-1]
        mixed = dependences.kind(node) is Kind.MIXED
        missing = [child for child in node.children() if child not in done] if mixed else []
        if missing:
            stack.extend(missing)
            continue
        stack.pop()
        done[node] = _node(dependences, node, done) if mixed else undivided(dependences, node)
    result = done[root]
    if isinstance(result, Inseparable):
        raise result
    return result


def _node(dependences: RunningDependences, node: Expr, done: Mapping[Expr, Terms | Inseparable]) -> Terms | Inseparable:
    args: list[Terms] = []
    for child in node.children():
        terms = done[child]
        if isinstance(terms, Inseparable):
            return terms
        args.append(terms)
    try:
        if isinstance(node, Cast):
            return rounded(node, args[0])
        if isinstance(node, Op):
            return _operation(dependences, node, args)
    except Inseparable as refused:
        return refused
    return Inseparable("an address depends on a running value")


def _operation(dependences: RunningDependences, node: Op, args: list[Terms]) -> Terms:
    if not node.dtype.is_floating_point:
        raise Inseparable(f"no factor: {node.name} compares a running value with a varying one")
    if node.name in ("add", "sub"):
        left, right = (summands(dependences, arg, terms) for arg, terms in zip(node.args, args, strict=True))
        return added(left, negated(right) if node.name == "sub" else right, node.dtype)
    if node.name == "neg":
        return negated(args[0])
    if node.name == "mul":
        left, right = (with_shift(dependences, a, t, o) for a, t, o in zip(node.args, args, args[::-1], strict=True))
        return product(left, right)
    if node.name == "truediv":
        factor = (inverse(one_of(node.name, args[1]), node.dtype),)
        return product(with_shift(dependences, node.args[0], args[0], factor), factor)
    row = SCALAR_OPS[node.name]
    if row.logarithm is not None:
        return (exponential(dependences, node, args[0], row.logarithm),)
    if node.name == "where":
        return choice(dependences, node, args)
    if (row.arity == 1 and row.degree) or node.name in ("pow", "maximum", "minimum"):
        return (scaled(dependences, node, args),)
    raise Inseparable(f"no factor: {node.name} of a running value and a varying one")
