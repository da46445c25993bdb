"""Lowers antialiased resizing of images, with a filter as wide as the step between samples, and its gradients.

Dimensions are resized one after the other.  Result o of a dimension is the mean, weighted by the filter, of the inputs
within its reach; the gradient of an input is Σ over the results within whose reach it is.  Integers are refused, sizes
must be static.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import sympy
import torch

from fusion.lowering.builder import Builder
from fusion.lowering.errors import Unsupported
from fusion.lowering.indexing import axis_symbol
from fusion.lowering.ir.expr import Index, IndexValue
from fusion.lowering.registry import lowers
from fusion.lowering.rules.assembly import placed
from fusion.lowering.rules.formula import Term, absolute, call, eq, literal, maximum, minimum, where
from fusion.lowering.rules.promotion import rounded, widen
from fusion.lowering.rules.reduction import fold
from fusion.lowering.rules.windows import fixed
from fusion.lowering.value import Value

aten = torch.ops.aten

CUBIC_A = -0.5


def _linear(x: Term) -> Term:
    return maximum(1 - absolute(x), 0)


def _cubic(x: Term) -> Term:
    gap = absolute(x)
    near = ((CUBIC_A + 2) * gap - (CUBIC_A + 3)) * gap * gap + 1
    far = (((gap - 5) * gap + 8) * gap - 4) * CUBIC_A
    return where(gap < 1, near, where(gap < 2, far, 0))


FILTERS: dict[str, tuple[int, Callable[[Term], Term]]] = {"bilinear": (2, _linear), "bicubic": (4, _cubic)}
"""The number of inputs that an unstretched filter covers, and its weight at a distance."""


@dataclass(frozen=True, slots=True)
class ResampledAxis:
    """One dimension: from `inputs` to `results`, which are `step` apart, measured in inputs."""

    inputs: int
    results: int
    step: float
    width: int
    weight_at: Callable[[Term], Term]
    dtype: torch.dtype

    @property
    def reach(self) -> float:
        """The extent of the filter to either side."""
        return self.width * 0.5 * max(self.step, 1.0)

    @property
    def taps(self) -> int:
        """The largest number of inputs that a result reads."""
        return math.ceil(self.reach) * 2 + 1

    @property
    def views(self) -> int:
        """The largest number of results that read an input."""
        if self.step == 0:
            return self.results
        return min(self.results, math.ceil(2 * (self.reach + 1) / self.step) + 2)

    def centre(self, result: Term) -> Term:
        """Return the centre of the inputs that a result reads."""
        return (result.to(self.dtype) + 0.5) * self.step

    def window(self, result: Term) -> tuple[Term, Term]:
        """Return (the first input that a result reads, the end of these)."""
        centre = self.centre(result)
        first = maximum((centre - self.reach + 0.5).to(torch.int64), 0)
        return first, minimum((centre + self.reach + 0.5).to(torch.int64), self.inputs)

    def weight(self, result: Term, at: Term) -> Term:
        """Return the weight of an input within reach."""
        return self.weight_at((at.to(self.dtype) - self.centre(result) + 0.5) * (1 / max(self.step, 1.0)))

    def first_view(self, at: Term) -> Term:
        """Return a result before which none reads this input."""
        if self.views == self.results:
            return Term(literal(0, torch.int64))
        return call("floor", (at.to(self.dtype) - self.reach - 0.5) * (1 / self.step) - 0.5).to(torch.int64)

    def totals(self, ctx: Builder, device: torch.device) -> Value:
        """Return the sum of the weights of each result, [results]."""
        result, tap = (Term(IndexValue(axis_symbol(k))) for k in range(2))
        first, end = self.window(result)
        weight = where(first + tap < end, self.weight(result, first + tap), 0)
        shape = (sympy.Integer(self.results), sympy.Integer(self.taps))
        return fold(ctx, "sum", [Value(shape, self.dtype, device, weight.expr)], [1])


def _resampled(ctx: Builder, x: Value, dim: int, along: ResampledAxis) -> Value:
    """Resample x along `dim`."""
    shape = (*x.shape[:dim], sympy.Integer(along.results), *x.shape[dim + 1 :], sympy.Integer(along.taps))
    axes = [axis_symbol(k) for k in range(len(shape))]
    result, tap = Term(IndexValue(axes[dim])), Term(IndexValue(axes[-1]))
    first, end = along.window(result)
    at = first + tap
    index: list[Index] = list(axes[:-1])
    index[dim] = at.expr
    term = placed(x, shape, index, at < end) * along.weight(result, at)
    total = fold(ctx, "sum", [Value(shape, x.dtype, x.device, term.expr)], [x.rank])
    total_weight = Term(along.totals(ctx, x.device).view(total.shape, [axes[dim]]).expr)
    return Value(total.shape, x.dtype, x.device, (Term(total.expr) / _not_zero(total_weight)).expr)


def _not_zero(total: Term) -> Term:
    return where(eq(total, 0), 1, total)


def _gathered(ctx: Builder, grad: Value, dim: int, along: ResampledAxis) -> Value:
    """Return for each input along `dim` Σ over the results that read it."""
    shape = (*grad.shape[:dim], sympy.Integer(along.inputs), *grad.shape[dim + 1 :], sympy.Integer(along.views))
    axes = [axis_symbol(k) for k in range(len(shape))]
    at = Term(IndexValue(axes[dim]))
    result = along.first_view(at) + Term(IndexValue(axes[-1]))
    first, end = along.window(result)
    is_read = (result >= 0) & (result < along.results) & (at >= first) & (at < end)
    index: list[Index] = list(axes[:-1])
    index[dim] = result.expr
    total_weight = placed(along.totals(ctx, grad.device), shape, [result.expr], is_read)
    share = placed(grad, shape, index, is_read) * along.weight(result, at) / _not_zero(total_weight)
    term = where(is_read, share, 0)
    return fold(ctx, "sum", [Value(shape, grad.dtype, grad.device, term.expr)], [grad.rank])


def _dimensions(
    name: str, x: Value, inputs: Sequence[int], results: Sequence[int], align: bool, scales: Sequence[float | None]
) -> list[ResampledAxis]:
    """Return the last two dimensions, each with its step as eager computes it."""
    if not x.dtype.is_floating_point:
        raise Unsupported(f"images of {x.dtype}")
    width, weight = FILTERS[name]
    dimensions = []
    for size, count, scale in zip(inputs, results, scales, strict=True):
        if align:
            step = _divided(size - 1, count - 1, x.dtype) if count > 1 else 0.0
        else:
            step = _divided(size, count, x.dtype) if scale is None or scale <= 0 else _divided(1.0, scale, x.dtype)
        dimensions.append(ResampledAxis(size, count, step, width, weight, x.dtype))
    return dimensions


def _divided(a: float, b: float, dtype: torch.dtype) -> float:
    return float((torch.tensor(a, dtype=torch.float64) / b).to(dtype))


def _antialiased(name: str) -> None:
    forward = getattr(aten, f"_upsample_{name}2d_aa").default
    backward = getattr(aten, f"_upsample_{name}2d_aa_backward").default

    @lowers(forward)
    def rule(
        ctx: Builder,
        x: Value,
        output_size: Sequence[int],
        align_corners: bool,
        scales_h: float | None = None,
        scales_w: float | None = None,
    ) -> Value:
        """x resampled along its last dimension, then along the one before."""
        wide = widen(x)
        results = fixed([sympy.sympify(size) for size in output_size])
        down, across = _dimensions(name, wide, fixed(x.shape[-2:]), results, align_corners, (scales_h, scales_w))
        turned = _resampled(ctx, wide, x.rank - 1, across)
        return rounded(_resampled(ctx, turned, x.rank - 2, down), x.dtype)

    @lowers(backward)
    def gradient(
        ctx: Builder,
        grad: Value,
        output_size: Sequence[int],
        input_size: Sequence[int],
        align_corners: bool,
        scales_h: float | None = None,
        scales_w: float | None = None,
    ) -> Value:
        """For each input Σ of the gradients of the results that read it, by its weight in them."""
        wide = widen(grad)
        inputs = fixed([sympy.sympify(size) for size in input_size[-2:]])
        down, across = _dimensions(name, wide, inputs, fixed(grad.shape[-2:]), align_corners, (scales_h, scales_w))
        turned = _gathered(ctx, wide, grad.rank - 2, down)
        return rounded(_gathered(ctx, turned, grad.rank - 1, across), grad.dtype)


for _name in FILTERS:
    _antialiased(_name)
