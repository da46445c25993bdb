"""Lowers weighted sampling: `multinomial` for each row of a matrix.

With replacement, uniform numbers are searched in the running sums of the weights.  Without, each element has an
exponential waiting time at the rate of its weight, and the first ones are chosen (the Gumbel trick, as in eager);
several choices from a row longer than can be sorted here are refused.  Weights that are negative, infinite or NaN, or
whose sum is 0, are the caller's error, as in eager; the choice is then undefined.
"""

from __future__ import annotations

import math

import sympy
import torch

from fusion.lowering.builder import Builder
from fusion.lowering.checks.checked import required
from fusion.lowering.errors import Unsupported
from fusion.lowering.indexing import ONE, axis_symbol
from fusion.lowering.ir.expr import IndexValue
from fusion.lowering.ir.requirements import Requirement
from fusion.lowering.registry import lowers
from fusion.lowering.rules.formula import Term, log1p, minimum
from fusion.lowering.rules.ordering import chosen, keys_and_ranks
from fusion.lowering.rules.promotion import requiring, widen
from fusion.lowering.rules.random import open_term, uniform_term
from fusion.lowering.rules.reduction import fold
from fusion.lowering.rules.scans import cumsum
from fusion.lowering.rules.search import searchsorted
from fusion.lowering.value import Value, reshape

aten = torch.ops.aten


@lowers(aten.multinomial.default)
def multinomial(
    ctx: Builder, weights: Value, count: int | sympy.Expr, replacement: bool = False, *, generator: object = None
) -> Value:
    """The positions of `count` elements of each row, chosen with probabilities in proportion to the weights, int64."""
    if generator is not None:
        raise Unsupported("a generator of the caller's own")
    if not weights.shape[-1].is_Integer or 0 in weights.shape:
        raise Unsupported("choices from rows of symbolic length")
    if not weights.dtype.is_floating_point:
        raise Unsupported(f"weights of {weights.dtype}")
    number = sympy.sympify(count)
    if number == 0 or (not replacement and (weights.shape[-1] - number).is_negative):
        raise Unsupported(f"{number} choices among {weights.shape[-1]}")
    rows = reshape(widen(weights), (sympy.Mul(*weights.shape[:-1]), weights.shape[-1]))
    rows = requiring(Requirement.WEIGHT, lambda weight: (weight >= 0) & (weight < math.inf), rows)
    positions = (
        _with_replacement(ctx, rows, number) if replacement and number != 1 else _without_replacement(ctx, rows, number)
    )
    return reshape(positions, (*weights.shape[:-1], number))


def _with_replacement(ctx: Builder, rows: Value, count: sympy.Expr) -> Value:
    """Search uniform numbers in the running sums; rounding must not lift one to the total."""
    length = rows.shape[1]
    sums = cumsum(ctx, rows, 1)
    shape = (rows.shape[0], count)
    total = Term(sums.view(shape, [axis_symbol(0), length - 1]).expr)
    total = Term(required(total.expr, (total > 0).expr, Requirement.TOTAL_WEIGHT))
    drawn = uniform_term(ctx.seed(rows.device).expr, shape, rows.dtype) * total * (1 - 2.0**-22)
    positions = searchsorted(ctx, sums, ctx.map(Value(shape, rows.dtype, rows.device, drawn.expr)), right=True)
    return Value(shape, torch.int64, rows.device, minimum(Term(positions.expr), length - 1).expr)


def _without_replacement(ctx: Builder, rows: Value, count: sympy.Expr) -> Value:
    """Choose by waiting times: the larger a weight over an exponential number, the earlier."""
    total = fold(ctx, "sum", [rows], [1], keepdim=True)
    rows = requiring(Requirement.TOTAL_WEIGHT, lambda _, total: total > 0, rows, total)
    wait = -log1p(-open_term(ctx.seed(rows.device).expr, rows.shape, rows.dtype))
    rate = ctx.map(Value(rows.shape, rows.dtype, rows.device, (Term(rows.expr) / wait).expr))
    if count == 1:
        positions = Value(rows.shape, torch.int64, rows.device, IndexValue(axis_symbol(1)))
        return reshape(fold(ctx, "argmax", [rate, positions], [1]), (rows.shape[0], ONE))
    keys, positions = keys_and_ranks(ctx, rate, 1, descending=True)
    return chosen(ctx, rate, keys, positions, 1, count)[1]
