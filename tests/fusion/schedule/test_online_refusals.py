"""Bodies that have no online form, and the reasons."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from fusion.lowering.ir.expr import Cast, IndexValue, Load, const
from fusion.lowering.ir.expr import make_op as op
from fusion.schedule.online import online
from tests.fusion.schedule.folds import BF16, F16, F32, INF, LENGTH, ROW, Body, Folds, S, add, div, exp, mul, sub, where


def variance(b: Body) -> Folds:
    total, mean = b.mean()
    return total, b.fold("o", "sum", mul(sub(b.x, mean), sub(b.x, mean)))


def variance_by_power(b: Body) -> Folds:
    total, mean = b.mean()
    return total, b.fold("o", "sum", op("pow", sub(b.x, mean), b.c(2)))


def half_variance(b: Body) -> Folds:
    """Σ (x - mean) · x is n times the variance."""
    total, mean = b.mean()
    return total, b.fold("o", "sum", mul(sub(b.x, mean), b.x))


def deviations(b: Body) -> Folds:
    total, mean = b.mean()
    return total, b.fold("o", "sum", sub(b.x, mean))


def masked_deviations(b: Body) -> Folds:
    """As in parts of a row that its length does not fill."""
    total, mean = b.mean()
    inside = op("lt", IndexValue(S), const(LENGTH, torch.int64))
    return total, b.fold("o", "sum", where(inside, sub(b.x, mean), b.c(0)))


def covariance(b: Body) -> Folds:
    total, mean = b.mean()
    other = b.fold("u", "sum", b.y)
    return total, other, b.fold("o", "dot", sub(b.x, mean), sub(b.y, div(other.ref, b.c(LENGTH))))


def relu_of_a_norm(b: Body) -> Folds:
    """x = -inf makes the norm's factor 0 and the product NaN, which relu(x) does not show."""
    total, scale = b.squares()
    return total, b.fold("o", "dot", op("maximum", mul(b.x, scale), b.c(0)), b.v)


def relu_of_a_signed_product(b: Body) -> Folds:
    total, mean = b.mean()
    return total, b.fold("o", "sum", op("maximum", mul(b.y, mean), b.c(0)))


def rounded(b: Body) -> Folds:
    top = b.fold("a", "max", op("abs", b.x))
    return top, b.fold("o", "dot", op("round", div(b.x, div(top.ref, b.c(127)))), b.v)


def integers(b: Body) -> Folds:
    top = b.fold("a", "max", op("abs", b.x))
    return top, b.fold("o", "dot", Cast(div(b.x, div(top.ref, b.c(127))), torch.int8), Load("i", (S,), torch.int8))


def sigmoid_gate(b: Body) -> Folds:
    total, scale = b.squares()
    normed = mul(b.x, scale)
    return total, b.fold("o", "dot", div(normed, add(b.c(1), exp(op("neg", normed)))), b.v)


def count_of_largest(b: Body) -> Folds:
    top = b.top()
    return top, b.fold("o", "sum", where(op("eq", b.x, top.ref), b.c(1), b.c(0)))


def shifted_by_a_mean(b: Body) -> Folds:
    total, mean = b.mean()
    return total, b.fold("o", "sum", exp(sub(b.x, mean)))


def shifted_by_another(b: Body) -> Folds:
    """Where x has only been -inf, y has been finite."""
    top = b.top()
    return top, b.fold("o", "sum", exp(sub(b.y, top.ref)))


def masked_late(b: Body) -> Folds:
    """Σ exp(x - m) over a mask: where all x are -inf, it is NaN or 0, depending on the mask."""
    some = op("le", IndexValue(S), IndexValue(2 * ROW))
    top = b.top(where(some, b.x, b.c(-INF)))
    return top, b.fold("o", "sum", where(some, exp(sub(b.x, top.ref)), b.c(0)))


def masked_backward(b: Body) -> Folds:
    """Σ of p · (g - δ) where some are masked: 0, but NaN times 0, where all are and δ is NaN."""
    shift = b.load("w", ROW)
    some = op("lt", b.x, b.c(-1))
    p = exp(sub(where(some, b.c(-INF), b.x), shift))
    inner = b.fold("d", "sum", mul(p, b.g))
    return inner, b.fold("o", "dot", where(some, b.c(0), mul(p, sub(b.g, inner.ref))), b.v)


def given_dropout(b: Body) -> Folds:
    """Where all of a row is dropped, and its sum is NaN."""
    top, total, power = b.softmax()
    kept = where(op("lt", b.w, b.c(0.9)), div(power, total.ref), b.c(0))
    return top, total, b.fold("o", "dot", kept, b.v)


def largest_product(b: Body) -> Folds:
    total, mean = b.mean()
    return total, b.fold("o", "max", mul(b.x, mean))


def product_of_all(b: Body) -> Folds:
    total, scale = b.squares()
    return total, b.fold("o", "prod", mul(b.x, scale))


def rounded_sum(b: Body) -> Folds:
    b = Body(F32)
    total, mean = b.mean()
    return total, b.fold("o", "dot", Cast(sub(b.x, mean), BF16), Load("v", b.v.index, BF16))


def half_overflow(b: Body) -> Folds:
    """1000 · 100 is no float16, 1000 · 100 / 1000 is one."""
    b = Body(F32)
    total, scale = b.squares()
    return total, b.fold("o", "dot", Cast(mul(mul(b.x, scale), b.w), F16), Load("v", b.v.index, F16))


def sum_of_rounded(b: Body) -> Folds:
    """The folds fused with each sum read the same rounded numbers."""
    b = Body(F32)
    top, total, power = b.softmax()
    return top, total, b.fold("o", "sum", Cast(Cast(div(power, total.ref), BF16), F32))


def least_of_rounded(b: Body) -> Folds:
    """It is one of them."""
    b = Body(F32)
    top, total, power = b.softmax()
    return top, total, b.fold("o", "min", Cast(Cast(div(power, total.ref), BF16), F32))


def narrow_sum(b: Body) -> Folds:
    b = Body(BF16)
    total, scale = b.squares()
    return total, b.fold("o", "sum", mul(b.x, scale))


REFUSED: dict[Callable[[Body], Folds], str] = {
    variance: "cancels",
    variance_by_power: "cancels",
    half_variance: "cancels",
    covariance: "cancels",
    deviations: "cancels: the sum of differences",
    masked_deviations: "cancels: the sum of differences",
    rounded_sum: "cancels: a sum of varying and running values is rounded",
    rounded: "no factor: full rank",
    integers: "no factor: full rank",
    sigmoid_gate: "no factor: full rank",
    count_of_largest: "eq compares a running value with a varying one",
    shifted_by_a_mean: "out of range",
    half_overflow: "out of range",
    relu_of_a_norm: "infinity",
    masked_backward: "infinity",
    given_dropout: "infinity",
    relu_of_a_signed_product: "maximum of a product with a factor of unknown sign",
    shifted_by_another: "start: while m is at its identity",
    masked_late: "start: if m ends at its identity",
    largest_product: "unknown sign",
    product_of_all: "a prod of running values",
    sum_of_rounded: "rounded: a sum of values rounded to torch.bfloat16",
    least_of_rounded: "rounded: a min of values rounded to torch.bfloat16",
    narrow_sum: "too narrow",
}


@pytest.mark.parametrize("body", REFUSED, ids=lambda body: body.__name__)
def test_refused_with_the_reason(body: Callable[[Body], Folds]) -> None:
    *earlier, last = body(Body())
    result = online(last, {fold.name: fold for fold in earlier})
    assert isinstance(result, str)
    assert REFUSED[body] in result
