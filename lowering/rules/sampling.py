"""Lowers sampling of an image, or a volume, at the positions in a grid: `grid_sample`, with gradients for both.

Along each dimension a sample reads one, two or four elements, its taps: a position, whether that is inside, a weight
and the derivative of the weight by the coordinate.  A sample is Σ over the taps of all dimensions of element times
weights; the gradient of the image scatters the same products to the taps, the gradient of the grid reduces them over
channels.  A position that is NaN has no element.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import sympy
import torch

from fusion.lowering.builder import Builder
from fusion.lowering.errors import Unsupported
from fusion.lowering.indexing import axis_symbol
from fusion.lowering.ir.expr import IndexValue
from fusion.lowering.registry import lowers
from fusion.lowering.rules.assembly import placed
from fusion.lowering.rules.collisions import folded
from fusion.lowering.rules.formula import Term, absolute, call, eq, literal, minimum, where
from fusion.lowering.rules.promotion import rounded, widened
from fusion.lowering.rules.reduction import fold
from fusion.lowering.value import Shape, Value, axes_of

aten = torch.ops.aten

LINEAR, NEAREST, CUBIC = range(3)
ZEROS, BORDER, REFLECTION = range(3)
TAPS = {LINEAR: 2, NEAREST: 1, CUBIC: 4}
CUBIC_A = -0.75


@dataclass(frozen=True, slots=True)
class Sampling:
    """The mapping from positions to coordinates, and from these to elements."""

    mode: int
    padding: int
    corners: bool

    def unnormalised(self, position: Term, size: sympy.Expr) -> tuple[Term, Term]:
        """(a position from [-1, 1] as a coordinate, the derivative of that)."""
        extent = Term(literal(size, position.dtype))
        if self.corners:
            return (position + 1) / 2 * (extent - 1), (extent - 1) / 2
        return ((position + 1) * extent - 1) / 2, extent / 2

    def padded(self, at: Term, size: sympy.Expr) -> tuple[Term, Term]:
        """(the coordinate that replaces `at`, which may be outside; its derivative by `at`)."""
        one = Term(literal(1, at.dtype))
        if self.padding == ZEROS:
            return at, one
        last = Term(literal(size - 1, at.dtype))
        slope = one
        if self.padding == REFLECTION:
            at, slope = self._reflected(at, size)
        return where(at > 0, minimum(at, last), 0), where((at > 0) & (at < last), slope, 0)  # NaN becomes 0

    def _reflected(self, at: Term, size: sympy.Expr) -> tuple[Term, Term]:
        """(the coordinate reflected at the outer elements, or at their outer edges; its derivative)."""
        if self.corners and size == 1:
            return Term(literal(0, at.dtype)), Term(literal(0, at.dtype))
        low = 0.0 if self.corners else -0.5
        span = Term(literal(size - 1 if self.corners else size, at.dtype))
        beyond, period = absolute(at - low), span * 2
        extra = beyond - call("trunc", beyond / period) * period
        odd = extra > period - extra
        turned = minimum(extra, period - extra) + low
        forth = Term(literal(1, at.dtype))
        return turned, where(odd, -forth, forth) * where(at < low, -forth, forth)


@dataclass(frozen=True, slots=True)
class SampledAxis:
    """One dimension of a sample.

    Attributes:
        size: the number of elements.
        start: the coordinate of the first tap, a whole number.
        coordinate: the coordinate of the sample.
        slope: the derivative of the coordinate by the position in the grid.
    """

    sampling: Sampling
    size: sympy.Expr
    coordinate: Term
    start: Term
    slope: Term

    def place(self, tap: Term) -> tuple[Term, Term]:
        """(the position of a tap, whether it is inside); taps are numbered by floats."""
        at = self.start + tap
        if self.sampling.mode == CUBIC:
            at = self.sampling.padded(at, self.size)[0]
        return at.to(torch.int64), (at >= 0) & (at < Term(literal(self.size, at.dtype)))

    def weight(self, tap: Term) -> Term:
        """Return the weight of a tap."""
        if self.sampling.mode == NEAREST:
            return Term(literal(1, self.start.dtype))
        if self.sampling.mode == LINEAR:
            beyond = self.coordinate - self.start
            return where(eq(tap, 0), 1 - beyond, beyond)
        return self._cubic(tap, _cubic_near, _cubic_far)

    def change(self, tap: Term) -> Term:
        """Return the derivative of the weight by the coordinate."""
        one = Term(literal(1, self.start.dtype))
        if self.sampling.mode == NEAREST:
            return one * 0
        if self.sampling.mode == LINEAR:
            return where(eq(tap, 0), -one, one)
        ahead = where(tap > 1.5, -one, one)
        return ahead * self._cubic(tap, _cubic_near_slope, _cubic_far_slope)

    def _cubic(self, tap: Term, near: Callable[[Term], Term], far: Callable[[Term], Term]) -> Term:
        """Return a function of the distance from the tap: `near` for up to one, `far` for up to two."""
        beyond = self.coordinate - (self.start + 1)  # of large coordinates, too, at least 0 and below 1
        gap = absolute(beyond + (1 - tap))
        return where((tap > 0.5) & (tap < 2.5), near(gap), far(gap))


def _cubic_near(x: Term) -> Term:
    return ((CUBIC_A + 2) * x - (CUBIC_A + 3)) * x * x + 1


def _cubic_far(x: Term) -> Term:
    return ((CUBIC_A * x - 5 * CUBIC_A) * x + 8 * CUBIC_A) * x - 4 * CUBIC_A


def _cubic_near_slope(x: Term) -> Term:
    return (3 * (CUBIC_A + 2) * x - 2 * (CUBIC_A + 3)) * x


def _cubic_far_slope(x: Term) -> Term:
    return (3 * CUBIC_A * x - 10 * CUBIC_A) * x + 8 * CUBIC_A


def _samples(
    ctx: Builder, x: Value, grid: Value, sampling: Sampling, shape: Shape, points: Sequence[sympy.Symbol]
) -> list[SampledAxis]:
    """Return the dimensions of the sample at each of `points` (batch, then the grid's own), over the axes of `shape`.

    A grid holds the last dimension first.  Coordinates are computed once into buffers: all channels share them.
    """
    if x.rank != grid.rank or (sampling.mode == CUBIC and x.rank != 4):
        raise Unsupported("samples of this mode in this number of dimensions")
    count, lines = x.rank - 2, grid.shape[:-1]
    dimensions = []
    for dim in range(count):
        read = grid.view(lines, [*axes_of(lines), sympy.Integer(count - 1 - dim)])
        size = x.shape[2 + dim]
        at, slope = sampling.unnormalised(Term(read.expr).to(widened(grid.dtype)), size)
        if sampling.mode != CUBIC:
            at, inner = sampling.padded(at, size)
            slope = slope * inner
        coordinate = Term(ctx.map(Value(lines, at.dtype, x.device, at.expr)).view(shape, points).expr)
        change = Term(Value(lines, slope.dtype, x.device, slope.expr).view(shape, points).expr)
        start = call("round" if sampling.mode == NEAREST else "floor", coordinate)
        dimensions.append(
            SampledAxis(sampling, size, coordinate, start - 1 if sampling.mode == CUBIC else start, change)
        )
    return dimensions


def _read(
    x: Value, dims: Sequence[SampledAxis], taps: Sequence[int], shape: Shape, batch: Sequence[sympy.Symbol]
) -> tuple[Term, list[Term]]:
    """Return (the element of x at some taps, 0 outside; the taps as terms)."""
    numbers = [Term(literal(tap, dims[0].start.dtype)) for tap in taps]
    places = [dim.place(tap) for dim, tap in zip(dims, numbers, strict=True)]
    inside = places[0][1]
    for _, test in places[1:]:
        inside = inside & test
    read = placed(x, shape, [*batch, *(at.expr for at, _ in places)], inside)
    return read.to(dims[0].start.dtype), numbers


def _product(terms: Sequence[Term]) -> Term:
    return math.prod(terms[1:], start=terms[0])


def _grid_sampler(forward: torch._ops.OpOverload, backward: torch._ops.OpOverload) -> None:
    @lowers(forward)
    def rule(ctx: Builder, x: Value, grid: Value, mode: int, padding: int, align_corners: bool) -> Value:
        """Σ over the taps of each sample of element times weights."""
        sampling = Sampling(mode, padding, align_corners)
        shape = (*x.shape[:2], *grid.shape[1:-1])
        axes = [axis_symbol(k) for k in range(x.rank)]
        dims = _samples(ctx, x, grid, sampling, shape, [axes[0], *axes[2:]])
        total: Term | None = None
        for taps in itertools.product(range(TAPS[mode]), repeat=len(dims)):
            read, numbers = _read(x, dims, taps, shape, axes[:2])
            part = read * _product([dim.weight(tap) for dim, tap in zip(dims, numbers, strict=True)])
            total = part if total is None else total + part
        assert total is not None
        return Value(shape, x.dtype, x.device, total.to(x.dtype, implicit=True).expr)

    @lowers(backward)
    def gradient(
        ctx: Builder,
        grad: Value,
        x: Value,
        grid: Value,
        mode: int,
        padding: int,
        align_corners: bool,
        output_mask: Sequence[bool],
    ) -> tuple[Value | None, ...]:
        """(the gradient of the image if it is requested, that of the grid)."""
        sampling = Sampling(mode, padding, align_corners)
        image = _image_gradient(ctx, grad, x, grid, sampling) if output_mask[0] else None
        return image, _grid_gradient(ctx, grad, x, grid, sampling)


def _image_gradient(ctx: Builder, grad: Value, x: Value, grid: Value, sampling: Sampling) -> Value:
    """Scatter each gradient, times its weights, to its taps."""
    count = x.rank - 2
    shape = (*grad.shape, *(sympy.Integer(TAPS[sampling.mode]),) * count)
    axes = [axis_symbol(k) for k in range(len(shape))]
    dims = _samples(ctx, x, grid, sampling, shape, [axes[0], *axes[2 : x.rank]])
    compute = dims[0].start.dtype
    taps = [Term(IndexValue(axis)).to(compute) for axis in axes[x.rank :]]
    places = [dim.place(tap) for dim, tap in zip(dims, taps, strict=True)]
    inside = places[0][1]
    for _, test in places[1:]:
        inside = inside & test
    own = grad.view(shape, axes[: x.rank])
    term = Term(own.expr).to(compute) * _product([dim.weight(tap) for dim, tap in zip(dims, taps, strict=True)])
    source = Value(shape, term.dtype, x.device, term.expr)
    zeros = Value(x.shape, x.dtype, x.device, literal(0, x.dtype))
    return folded(ctx, "sum", zeros, [*axes[:2], *(at.expr for at, _ in places)], source, inside)


def _grid_gradient(ctx: Builder, grad: Value, x: Value, grid: Value, sampling: Sampling) -> Value:
    """For each sample and dimension Σ over channels and taps of gradient times element times derivative of weights."""
    count = x.rank - 2
    if sampling.mode == NEAREST:
        return Value(grid.shape, grid.dtype, grid.device, literal(0, grid.dtype))
    # [batch, *points, channels]
    shape = (grad.shape[0], *grid.shape[1:-1], grad.shape[1])
    axes = [axis_symbol(k) for k in range(x.rank)]
    batch = [axes[0], axes[-1]]
    dims = _samples(ctx, x, grid, sampling, shape, axes[:-1])
    compute = dims[0].start.dtype
    own = Term(grad.view(shape, [*batch, *axes[1:-1]]).expr).to(compute)
    parts: list[Term | None] = [None] * count
    for taps in itertools.product(range(TAPS[sampling.mode]), repeat=count):
        read, numbers = _read(x, dims, taps, shape, batch)
        for k in range(count):
            factors = [
                dim.change(tap) if d == k else dim.weight(tap)
                for d, (dim, tap) in enumerate(zip(dims, numbers, strict=True))
            ]
            part, before = read * _product(factors), parts[k]
            parts[k] = part if before is None else before + part
    sums = []
    for dim, term in zip(dims, parts, strict=True):
        assert term is not None
        contribution = term * own * dim.slope
        sums.append(fold(ctx, "sum", [Value(shape, compute, x.device, contribution.expr)], [x.rank - 1]))
    # the last dimension comes first
    dimension = Term(IndexValue(axis_symbol(grid.rank - 1)))
    points = axes[:-1]
    result = Term(sums[0].view(grid.shape, points).expr)
    for k in range(1, count):
        result = where(eq(dimension, count - 1 - k), Term(sums[k].view(grid.shape, points).expr), result)
    return rounded(Value(grid.shape, compute, grid.device, result.expr), grid.dtype)


_grid_sampler(aten.grid_sampler_2d.default, aten.grid_sampler_2d_backward.default)
_grid_sampler(aten.grid_sampler_3d.default, aten.grid_sampler_3d_backward.default)
