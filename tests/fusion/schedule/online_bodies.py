"""Bodies that have an online form: softmax, attention, norms, divergences."""

from __future__ import annotations

import torch

from fusion.lowering.ir.expr import Cast, Expr, IndexValue, Random, const
from fusion.lowering.ir.expr import make_op as op
from tests.fusion.schedule.folds import INF, LENGTH, ROW, Body, Folds, S, add, div, exp, mul, sub, where


def denominator(b: Body) -> Folds:
    top, total, _ = b.softmax()
    return top, total


def attention(b: Body) -> Folds:
    top, total, power = b.softmax()
    return top, total, b.fold("o", "dot", power, b.v)


def normalised_attention(b: Body) -> Folds:
    top, total, power = b.softmax()
    return top, total, b.fold("o", "dot", div(power, total.ref), b.v)


def dropout(b: Body) -> Folds:
    top, total, power = b.softmax()
    drawn = Cast(Random("uniform", const(7, torch.int64), LENGTH * ROW + S), b.dtype)
    kept = where(op("lt", drawn, b.c(0.9)), mul(div(power, total.ref), b.c(1.25)), b.c(0))
    return top, total, b.fold("o", "dot", kept, b.v)


def masked(b: Body) -> Folds:
    causal = op("le", IndexValue(S), IndexValue(2 * ROW))
    top, total, power = b.softmax(where(causal, b.x, b.c(-INF)))
    return top, total, b.fold("o", "dot", div(power, total.ref), b.v)


def added_mask(b: Body) -> Folds:
    top, total, power = b.softmax(add(mul(b.x, b.c(0.5)), b.y))
    return top, total, b.fold("o", "dot", div(power, total.ref), b.v)


def scaled_exponent(b: Body) -> Folds:
    top = b.top()
    return top, b.fold("l", "sum", exp(mul(sub(b.x, top.ref), b.c(0.125))))


def temperature(b: Body) -> Folds:
    top = b.top()
    return top, b.fold("l", "sum", exp(div(sub(b.x, top.ref), b.load("w", ROW))))


def powers_of_two(b: Body) -> Folds:
    top = b.top()
    return top, b.fold("l", "sum", op("exp2", mul(sub(b.x, top.ref), b.c(1.4426950408889634))))


def log_sum_exp(b: Body) -> Folds:
    top = b.top()
    shift = where(op("isinf", top.ref), b.c(0), top.ref)
    return top, b.fold("l", "sum", exp(sub(b.x, shift)))


def log_softmax_products(b: Body) -> Folds:
    """Σ exp(x - m - log l) · v"""
    top, total, _ = b.softmax()
    return top, total, b.fold("o", "dot", exp(sub(sub(b.x, top.ref), op("log", total.ref))), b.v)


def softcap(b: Body) -> Folds:
    top, total, power = b.softmax(mul(op("tanh", div(b.x, b.c(30))), b.c(30)))
    return top, total, b.fold("o", "dot", div(power, total.ref), b.v)


def soft_minimum(b: Body) -> Folds:
    least = b.fold("n", "min", b.x)
    return least, b.fold("l", "sum", exp(sub(least.ref, b.x)))


def safe_attention(b: Body) -> Folds:
    """0 where a whole row is masked"""
    top, total, power = b.softmax()
    empty = op("eq", top.ref, b.c(-INF))
    return top, total, b.fold("o", "dot", where(empty, b.c(0), div(power, total.ref)), b.v)


def rms_linear(b: Body) -> Folds:
    total, scale = b.squares()
    return total, b.fold("o", "dot", mul(mul(b.x, scale), b.w), b.v)


def gated_by_relu(b: Body) -> Folds:
    """relu(x / max |y|)"""
    top = b.fold("a", "max", op("abs", b.y))
    scale = op("maximum", top.ref, b.c(1e-5))
    return top, b.fold("o", "dot", op("maximum", div(b.x, scale), b.c(0)), b.v)


def chosen_factor(b: Body) -> Folds:
    """The looped operand selects between a running value and its product: the factor is 1 or the other operand."""
    total, scale = b.squares()
    return total, b.fold("o", "dot", where(op("lt", b.y, b.c(0)), scale, mul(b.x, scale)), b.v)


def log_sum_of_running(b: Body) -> Folds:
    """The shift and the logarithm of the sum were added before."""
    top, total, _ = b.softmax()
    return top, total, b.fold("o", "dot", exp(sub(b.x, add(top.ref, op("log", total.ref)))), b.v)


def cubes(b: Body) -> Folds:
    total, scale = b.squares()
    return total, b.fold("o", "sum", op("pow", op("abs", mul(b.x, scale)), b.c(3)))


def quantised(b: Body) -> Folds:
    top = b.fold("a", "max", op("abs", b.x))
    return top, b.fold("o", "dot", div(b.x, op("maximum", div(top.ref, b.c(127)), b.c(1e-5))), b.v)


def cosine(b: Body) -> Folds:
    """Both operands of a product have a factor that waits."""
    total, other = b.squares()[0], b.fold("p", "sum", mul(b.y, b.y))
    left, right = div(b.x, op("sqrt", total.ref)), div(b.y, op("sqrt", other.ref))
    return total, other, b.fold("o", "sum", mul(left, right))


def centred_linear(b: Body) -> Folds:
    total, mean = b.mean()
    return total, b.fold("o", "dot", sub(b.x, mean), b.v)


def shifted_maximum(b: Body) -> Folds:
    total, mean = b.mean()
    return total, b.fold("o", "max", sub(b.x, mean))


def masked_maximum(b: Body) -> Folds:
    """The largest standardised value of some"""
    (total, mean), (squares, scale) = b.mean(), b.squares()
    some = op("le", IndexValue(S), IndexValue(2 * ROW))
    return total, squares, b.fold("o", "max", where(some, mul(sub(b.x, mean), scale), b.c(-INF)))


def largest_power(b: Body) -> Folds:
    top, _, power = b.softmax()
    return top, b.fold("o", "max", power)


def entropy(b: Body) -> Folds:
    top, total, power = b.softmax()
    logarithm = sub(sub(b.x, top.ref), op("log", total.ref))
    return top, total, b.fold("o", "sum", mul(div(power, total.ref), logarithm))


def _two_logarithms(b: Body) -> tuple[Folds, Expr, Expr, Expr]:
    """Folds, p, log p, log q of two softmaxes."""
    top, total, power = b.softmax()
    other = b.fold("m2", "max", b.y)
    sums = b.fold("l2", "sum", exp(sub(b.y, other.ref)))
    log_p = sub(sub(b.x, top.ref), op("log", total.ref))
    log_q = sub(sub(b.y, other.ref), op("log", sums.ref))
    return (top, other, total, sums), div(power, total.ref), log_p, log_q


def divergence(b: Body) -> Folds:
    folds, p, log_p, log_q = _two_logarithms(b)
    return *folds, b.fold("o", "sum", mul(p, sub(log_p, log_q)))


def divergence_from_given(b: Body) -> Folds:
    """Σ w · (log w - log p)"""
    top, total, _ = b.softmax()
    log_p = sub(sub(b.x, top.ref), op("log", total.ref))
    return top, total, b.fold("o", "sum", mul(b.w, sub(op("log", b.w), log_p)))


def attention_backward(b: Body) -> Folds:
    """Σ p · (g - δ) · v with δ = Σ p · g"""
    top, total, power = b.softmax()
    p = div(power, total.ref)
    inner = b.fold("d", "sum", mul(p, b.g))
    return top, total, inner, b.fold("o", "dot", mul(p, sub(b.g, inner.ref)), b.v)
