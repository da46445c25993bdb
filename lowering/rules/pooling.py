"""Lowers pooling: a reduction over the taps of each window; its gradient, over the windows that contain each element.

Averages of 16-bit floats are computed in float32 and rounded once.  A maximum keeps its first position; NaN is largest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import sympy
import torch

from fusion.lowering.builder import Builder
from fusion.lowering.errors import Unsupported
from fusion.lowering.indexing import FloorDiv, Mod, axis_symbol
from fusion.lowering.ir.expr import Index, IndexValue, const
from fusion.lowering.ir.scalar_ops import identity
from fusion.lowering.ir.sizes import sizes_of
from fusion.lowering.registry import lowers
from fusion.lowering.rules.assembly import choose
from fusion.lowering.rules.collisions import folded
from fusion.lowering.rules.formula import Term, both, call, eq, literal, maximum, minimum, where
from fusion.lowering.rules.promotion import convert, rounded, widen, widened
from fusion.lowering.rules.reduction import fold
from fusion.lowering.rules.windows import WindowAxis, Windows, covering, each, fixed, proportional, strided, windows
from fusion.lowering.value import Shape, Value, axes_of, reshape

aten = torch.ops.aten

NEVER = torch.iinfo(torch.int64).max
"""The position of a tap that does not count: larger than any other."""


def _result_sizes(ctx: Builder, count: int) -> list[int]:
    """The last `count` sizes of the (first) result of the call being lowered."""
    val = ctx.current.meta["val"]
    meta = val[0] if isinstance(val, (tuple, list)) else val
    return fixed(sizes_of(meta.shape)[-count:])


def _summed(ctx: Builder, x: Value, dims: Windows, term: Term) -> Value:
    return fold(ctx, "sum", [dims.value(x, term)], dims.over)


def _floats(x: Value) -> torch.dtype:
    if not x.dtype.is_floating_point:
        raise Unsupported(f"an average of {x.dtype}")
    return widened(x.dtype)


Divisor = Callable[[Sequence[sympy.Expr], torch.dtype], Term]
"""Returns the divisor of the window at a position."""


def _mean(ctx: Builder, x: Value, dims: Sequence[WindowAxis], divisor: Divisor) -> Value:
    """Σ of each window over its divisor."""
    compute, taps = _floats(x), windows(x.shape, dims)
    total = _summed(ctx, x, taps, taps.read(x).to(compute))
    at = [axis_symbol(x.rank - len(dims) + d) for d in range(len(dims))]
    mean = Term(total.expr) / divisor(at, compute)
    return rounded(Value(total.shape, compute, x.device, mean.expr), x.dtype)


def _mean_gradient(ctx: Builder, grad: Value, dims: Sequence[WindowAxis], divisor: Divisor) -> Value:
    """Σ of the gradients of the windows that contain an element, each over its divisor."""
    compute, taps = _floats(grad), windows(grad.shape, dims)
    each_one = taps.read(grad).to(compute) / divisor(taps.index[-len(dims) :], compute)
    return rounded(_summed(ctx, grad, taps, taps.counted(each_one)), grad.dtype)


# Averages of windows of one size ------------------------------------------------------------------------------------


def _average_pool(count: int) -> None:
    forward = {2: aten.avg_pool2d, 3: aten.avg_pool3d}[count]
    backward = {2: aten.avg_pool2d_backward, 3: aten.avg_pool3d_backward}[count]

    @lowers(forward.default)
    def rule(
        ctx: Builder,
        x: Value,
        kernel: Sequence[int],
        stride: Sequence[int] = (),
        padding: Sequence[int] = (0,),
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Value:
        """Σ of each window over the number of its elements."""
        sizes, results = fixed(x.shape[-count:]), _result_sizes(ctx, count)
        k, s, p = each(kernel, count), each(stride or kernel, count), each(padding, count)
        dims = [strided(*numbers) for numbers in zip(results, k, s, p, strict=True)]
        return _mean(ctx, x, dims, _elements(sizes, results, k, s, p, count_include_pad, divisor_override))

    @lowers(backward.default)
    def gradient(
        ctx: Builder,
        grad: Value,
        x: Value,
        kernel: Sequence[int],
        stride: Sequence[int],
        padding: Sequence[int],
        ceil_mode: bool,
        count_include_pad: bool,
        divisor_override: int | None,
    ) -> Value:
        """Σ of the gradients of the windows that contain an element, each over its number of elements."""
        sizes, results = fixed(x.shape[-count:]), fixed(grad.shape[-count:])
        k, s, p = each(kernel, count), each(stride or kernel, count), each(padding, count)
        dims = [_member(*numbers) for numbers in zip(sizes, k, s, p, strict=True)]
        return _mean_gradient(ctx, grad, dims, _elements(sizes, results, k, s, p, count_include_pad, divisor_override))


def _member(inputs: int, kernel: int, stride: int, padding: int) -> WindowAxis:
    """Return the windows that contain an element: each begins before it and reaches it."""
    candidates = covering(inputs, kernel, stride, padding)

    def tests(i: sympy.Symbol, t: sympy.Symbol) -> list[Term]:
        if kernel % stride == 0:
            return []  # each candidate reaches it
        return [Term(IndexValue(i + padding - candidates.place(i, t) * stride)) < kernel]

    return WindowAxis(candidates.results, candidates.taps, candidates.place, tests)


def _elements(
    sizes: Sequence[int],
    results: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    include_pad: bool,
    override: int | None,
) -> Divisor:
    """Return the divisor: the number of elements in a window."""

    def divisor(at: Sequence[sympy.Expr], dtype: torch.dtype) -> Term:
        if override is not None:
            return Term(literal(override, dtype))
        number, whole = Term(literal(1, dtype)), 1
        for o, size, n, k, s, p in zip(at, sizes, results, kernel, stride, padding, strict=True):
            inside = (n - 1) * s + k <= size + 2 * p
            if inside and (include_pad or p == 0):
                whole *= k
                continue
            start = Term(IndexValue(o * s - p))
            end = minimum(start + k, size + p)  # a window may reach beyond the padding, which does not count
            if not include_pad:
                start, end = maximum(start, 0), minimum(end, size)
            number = number * (end - start).to(dtype)
        return number * whole

    return divisor


# Averages of windows that share the input ---------------------------------------------------------------------------


WIDE = 256
"""Elements of an image beyond which a CPU's library is faster at adaptive windows of unequal lengths.

56 by 56 averaged to 5 by 5: 17 times as fast; 28 by 28: 5 times.  With as many windows as elements: 0.4 times.
"""


def _adaptive_average_pool(count: int) -> None:
    forward = {2: aten._adaptive_avg_pool2d, 3: aten._adaptive_avg_pool3d}[count]
    backward = {2: aten._adaptive_avg_pool2d_backward, 3: aten._adaptive_avg_pool3d_backward}[count]

    @lowers(forward.default)
    def rule(ctx: Builder, x: Value, output_size: Sequence[int]) -> Value:
        """The mean of each window."""
        sizes, results = fixed(x.shape[-count:]), _result_sizes(ctx, count)
        dims = [proportional(*numbers) for numbers in zip(results, sizes, strict=True)]
        return _mean(ctx, x, dims, _lengths(results, sizes))

    @lowers(backward.default)
    def gradient(ctx: Builder, grad: Value, x: Value) -> Value:
        """Σ of the gradients of the windows that contain an element, each over its length."""
        sizes, results = fixed(x.shape[-count:]), fixed(grad.shape[-count:])
        uneven = any(size % n for size, n in zip(sizes, results, strict=True))
        if uneven and math.prod(sizes) > max(WIDE, 2 * math.prod(results)) and _gathers_across_lanes(ctx, grad):
            raise Unsupported("the library takes large windows of unequal lengths one after the other")
        dims = [proportional(*numbers) for numbers in zip(sizes, results, strict=True)]
        return _mean_gradient(ctx, grad, dims, _lengths(results, sizes))


def _lengths(results: Sequence[int], sizes: Sequence[int]) -> Divisor:
    """Return the divisor of adaptive windows: their number of elements."""

    def divisor(at: Sequence[sympy.Expr], dtype: torch.dtype) -> Term:
        number, whole = Term(literal(1, dtype)), 1
        for o, n, size in zip(at, results, sizes, strict=True):
            if size % n == 0:
                whole *= size // n
                continue
            start, end = (FloorDiv(reach, sympy.Integer(n)) for reach in (o * size, (o + 1) * size + n - 1))
            number = number * Term(IndexValue(end - start)).to(dtype)
        return number * whole

    return divisor


# Maxima -------------------------------------------------------------------------------------------------------------


def _largest(ctx: Builder, x: Value, taps: Windows, sizes: Sequence[int]) -> tuple[Value, Value]:
    """(the largest element of each window, its position in the last dimensions of x)."""
    lowest = Term(literal(identity("max", x.dtype), x.dtype))
    values = taps.value(x, choose(taps.mask, taps.read(x), lowest))
    position = Term(IndexValue(taps.flat(sizes)))
    positions = taps.value(x, position if taps.mask is None else where(taps.mask, position, NEVER))
    return fold(ctx, "max", [values], taps.over), fold(ctx, "argmax", [values, positions], taps.over)


def _where_largest(ctx: Builder, grad: Value, indices: Value, taps: Windows, sizes: Sequence[int]) -> Value:
    """Σ of the gradients of the windows whose largest element is this one."""
    if _is_scattered(ctx, grad):
        return _added_at(ctx, grad, indices, sizes)
    own: sympy.Expr = sympy.Integer(0)
    for d, size in enumerate(sizes):
        own = own * size + axis_symbol(grad.rank - len(sizes) + d)
    hit = eq(taps.read(indices), Term(IndexValue(own)))
    term = where(hit, taps.read(widen(grad)), 0)
    return rounded(_summed(ctx, grad, taps, term), grad.dtype)


def _added_at(ctx: Builder, grad: Value, indices: Value, sizes: Sequence[int]) -> Value:
    """Return zeros of these sizes with each gradient added at the position in `indices`."""
    lead = grad.rank - len(sizes)
    shape = (*grad.shape[:lead], *map(sympy.Integer, sizes))
    place: list[Index] = list(axes_of(grad.shape))
    rest = Term(convert(indices, torch.int64).expr)
    for d in reversed(range(1, len(sizes))):
        place[lead + d] = call("remainder", rest, sizes[d]).expr
        rest = call("floordiv", rest, sizes[d])
    place[lead] = rest.expr
    return folded(ctx, "sum", Value(shape, grad.dtype, grad.device, const(0, grad.dtype)), place, grad)


def _is_scattered(ctx: Builder, grad: Value) -> bool:
    """Return whether scattering the few gradients is faster than each element checking the windows around it."""
    return _gathers_across_lanes(ctx, grad) and (ctx.wanted.scatters is None or "sum" in ctx.wanted.scatters)


def _gathers_across_lanes(ctx: Builder, grad: Value) -> bool:
    """Return whether the lanes of a CPU run along an image, each with other windows (not with channels last)."""
    results = ctx.results()
    return grad.device.type == "cpu" and len(results) == 1 and sizes_of(results[0].stride())[-1] == 1


def _max_pool(count: int) -> None:
    forward = {2: aten.max_pool2d_with_indices, 3: aten.max_pool3d_with_indices}[count]
    backward = {2: aten.max_pool2d_with_indices_backward, 3: aten.max_pool3d_with_indices_backward}[count]

    @lowers(forward.default)
    def rule(
        ctx: Builder,
        x: Value,
        kernel: Sequence[int],
        stride: Sequence[int] = (),
        padding: Sequence[int] = (0,),
        dilation: Sequence[int] = (1,),
        ceil_mode: bool = False,
    ) -> tuple[Value, ...]:
        """(the largest element of each window, its position)."""
        sizes, results = fixed(x.shape[-count:]), _result_sizes(ctx, count)
        k, s, p, d = (each(a, count) for a in (kernel, stride or kernel, padding, dilation))
        dims = [strided(*numbers) for numbers in zip(results, k, s, p, d, strict=True)]
        return _largest(ctx, x, windows(x.shape, dims), sizes)

    @lowers(backward.default)
    def gradient(
        ctx: Builder,
        grad: Value,
        x: Value,
        kernel: Sequence[int],
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
        ceil_mode: bool,
        indices: Value,
    ) -> Value:
        """The gradients of the windows whose largest element this is."""
        sizes = fixed(x.shape[-count:])
        k, s, p, d = (each(a, count) for a in (kernel, stride or kernel, padding, dilation))
        extents = [(taps - 1) * apart + 1 for taps, apart in zip(k, d, strict=True)]
        dims = [covering(*numbers) for numbers in zip(sizes, extents, s, p, strict=True)]
        return _where_largest(ctx, grad, indices, windows(grad.shape, dims), sizes)


def _adaptive_max_pool(count: int) -> None:
    forward = {2: aten.adaptive_max_pool2d, 3: aten.adaptive_max_pool3d}[count]
    backward = {2: aten.adaptive_max_pool2d_backward, 3: aten.adaptive_max_pool3d_backward}[count]

    @lowers(forward.default)
    def rule(ctx: Builder, x: Value, output_size: Sequence[int]) -> tuple[Value, ...]:
        """(the largest element of each window, its position)."""
        sizes, results = fixed(x.shape[-count:]), _result_sizes(ctx, count)
        dims = [proportional(*numbers) for numbers in zip(results, sizes, strict=True)]
        return _largest(ctx, x, windows(x.shape, dims), sizes)

    @lowers(backward.default)
    def gradient(ctx: Builder, grad: Value, x: Value, indices: Value) -> Value:
        """The gradients of the windows whose largest element this is."""
        sizes, results = fixed(x.shape[-count:]), fixed(grad.shape[-count:])
        dims = [proportional(*numbers) for numbers in zip(sizes, results, strict=True)]
        return _where_largest(ctx, grad, indices, windows(grad.shape, dims), sizes)


for _count in (2, 3):
    _average_pool(_count)
    _adaptive_average_pool(_count)
    _max_pool(_count)
    _adaptive_max_pool(_count)


# Unfolded windows, folded back ----------------------------------------------------------------------------------------


@lowers(aten.col2im.default)
def col2im(
    ctx: Builder,
    x: Value,
    output_size: Sequence[int | sympy.Expr],
    kernel: Sequence[int],
    dilation: Sequence[int],
    padding: Sequence[int],
    stride: Sequence[int],
) -> Value:
    """Windows [n, c·kh·kw, windows] summed at their positions in an image [n, c, h, w]."""
    sizes = fixed([sympy.sympify(size) for size in output_size])
    k, d, p, s = (each(a, 2) for a in (kernel, dilation, padding, stride))
    counts = [(n + 2 * q - e * (t - 1) - 1) // f + 1 for n, t, e, q, f in zip(sizes, k, d, p, s, strict=True)]
    *batch, rows, _ = x.shape
    fixed((rows,))
    channels = rows / sympy.Mul(*k)
    # [n, c, kh, kw, windows down, windows across]
    unfolded = reshape(x, (*batch, channels, *map(sympy.Integer, (*k, *counts))))
    lead = len(batch) + 1
    shape: Shape = (*batch, channels, *map(sympy.Integer, (*sizes, *k)))
    index: list[sympy.Expr] = [axis_symbol(n) for n in range(lead)]
    index += [axis_symbol(lead + 2), axis_symbol(lead + 3)]
    mask: Term | None = None
    for axis in range(2):
        reach = axis_symbol(lead + axis) + p[axis] - axis_symbol(lead + 2 + axis) * d[axis]
        place, tests = _window_of(reach, s[axis], counts[axis])
        index.append(place)
        for test in tests:
            mask = both(mask, test)
    taps = Windows(shape, tuple(index), mask, (lead + 2, lead + 3))
    return rounded(_summed(ctx, x, taps, taps.read(unfolded).to(widened(x.dtype))), x.dtype)


def _window_of(reach: sympy.Expr, stride: int, count: int) -> tuple[sympy.Expr, list[Term]]:
    """Return the window that begins at `reach`, and the tests that it exists."""
    at = Term(IndexValue(reach))
    tests = [at >= 0, at < stride * count]
    if stride == 1:
        return reach, tests
    return FloorDiv(reach, sympy.Integer(stride)), [*tests, eq(Term(IndexValue(Mod(reach, sympy.Integer(stride)))), 0)]


@lowers(aten.unfold_backward.default)
def unfold_backward(
    ctx: Builder, grad: Value, input_sizes: Sequence[int | sympy.Expr], dim: int, size: int, step: int
) -> Value:
    """The gradient of `unfold`: Σ over the windows that contain a position."""
    shape = tuple(map(sympy.sympify, input_sizes))
    if not shape:  # one window of one element
        return rounded(fold(ctx, "sum", [widen(grad)], [0]), grad.dtype)
    dim %= len(shape)
    length, count = fixed((shape[dim], grad.shape[dim])) if 0 not in grad.shape else (0, 0)
    if count == 0:
        return Value(shape, grad.dtype, grad.device, literal(0, grad.dtype))
    candidates = _member(length, size, step, 0)
    tap, here = axis_symbol(len(shape)), axis_symbol(dim)
    place = candidates.place(here, tap)
    index: list[sympy.Expr] = [axis_symbol(k) for k in range(len(shape))]
    index[dim] = place
    mask: Term | None = (Term(IndexValue(place)) >= 0) & (Term(IndexValue(place)) < count)
    for test in candidates.tests(here, tap):
        mask = both(mask, test)
    taps = Windows((*shape, sympy.Integer(candidates.taps)), (*index, here - place * step), mask, (len(shape),))
    return rounded(_summed(ctx, grad, taps, taps.read(grad).to(widened(grad.dtype))), grad.dtype)
