"""Lowers fractional max pooling: windows of one size at random distances, and their gradients.

Window o of a row begins at ⌊(o + u)·α⌋ - ⌊u·α⌋, the last one at the end, with a random number u for each channel and
dimension; α is the average distance of windows.  On a CPU eager computes that in the dtype of the input, and so do the
rules here: rounding decides where a window begins.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import sympy
import torch

from fusion.lowering.builder import Builder
from fusion.lowering.errors import Unsupported
from fusion.lowering.indexing import axis_symbol
from fusion.lowering.ir.expr import Index, IndexValue
from fusion.lowering.ir.scalar_ops import HALVES
from fusion.lowering.registry import lowers
from fusion.lowering.rules.assembly import placed
from fusion.lowering.rules.collisions import folded
from fusion.lowering.rules.formula import Term, eq, literal, where
from fusion.lowering.rules.promotion import rounded, widen, widened
from fusion.lowering.rules.reduction import fold
from fusion.lowering.rules.windows import fixed
from fusion.lowering.value import Value, reshape

aten = torch.ops.aten


def _rounding(dtype: torch.dtype, device: torch.device) -> Callable[[Term], Term]:
    """Return the rounding that eager applies to each operation on the beginnings of windows."""
    if dtype in HALVES and device.type == "cpu":
        return lambda term: term.to(dtype).to(torch.float32)
    return lambda term: term


def _begin(
    drawn: Term, window: sympy.Symbol, windows: int, size: int, kernel: int, rounded: Callable[[Term], Term]
) -> Term:
    """Return the first position of a window, int64."""
    last = Term(literal(size - kernel, torch.int64))
    if windows == 1:
        return last
    number = Term(IndexValue(window))
    distance = rounded(Term(literal(size - kernel, drawn.dtype)) / (windows - 1))
    reach = rounded(rounded(number.to(drawn.dtype) + drawn) * distance).to(torch.int64)
    return where(eq(number, windows - 1), last, reach - rounded(drawn * distance).to(torch.int64))


def _fractional_max_pool(count: int) -> None:
    forward = {2: aten.fractional_max_pool2d, 3: aten.fractional_max_pool3d}[count]
    backward = {2: aten.fractional_max_pool2d_backward, 3: aten.fractional_max_pool3d_backward}[count]

    @lowers(forward.default)
    def rule(
        ctx: Builder, x: Value, kernel: Sequence[int], output_size: Sequence[int], samples: Value
    ) -> tuple[Value, ...]:
        """(the largest element of each window, its position in the last dimensions)."""
        lead, sizes = x.rank - count, fixed(x.shape[-count:])
        if not x.dtype.is_floating_point:
            raise Unsupported(f"fractional pooling of {x.dtype}")
        shape = (*x.shape[:lead], *map(sympy.Integer, (*output_size, *kernel)))
        axes = [axis_symbol(k) for k in range(len(shape))]
        batch = axes[:lead] if lead == 2 else [sympy.Integer(0), axes[0]]
        rounding = _rounding(x.dtype, x.device)
        index: list[Index] = list(axes[:lead])
        flat = Term(literal(0, torch.int64))
        for d in range(count):
            which = count - 1 - d if count == 2 else d  # of a plane the last dimension is drawn first
            drawn = Term(samples.view(shape, [*batch, sympy.Integer(which)]).expr).to(widened(samples.dtype))
            begin = _begin(drawn, axes[lead + d], output_size[d], sizes[d], kernel[d], rounding)
            at = begin + Term(IndexValue(axes[lead + count + d]))
            index.append(at.expr)
            flat = flat * sizes[d] + at
        wide = widen(x)
        values = Value(shape, wide.dtype, x.device, placed(wide, shape, index, None).expr)
        positions = Value(shape, torch.int64, x.device, flat.expr)
        over = list(range(lead + count, len(shape)))
        largest = rounded(fold(ctx, "max", [values], over), x.dtype)
        return largest, fold(ctx, "argmax", [values, positions], over)

    @lowers(backward.default)
    def gradient(
        ctx: Builder, grad: Value, x: Value, kernel: Sequence[int], output_size: Sequence[int], indices: Value
    ) -> Value:
        """Add each gradient to the largest element of its window."""
        lead = x.rank - count
        total = sympy.Mul(*x.shape[lead:])
        zeros = Value((*x.shape[:lead], total), grad.dtype, grad.device, literal(0, grad.dtype))
        target: list[Index] = [axis_symbol(k) for k in range(lead)]
        return reshape(folded(ctx, "sum", zeros, [*target, indices.expr], grad), x.shape)


for _count in (2, 3):
    _fractional_max_pool(_count)
