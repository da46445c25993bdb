"""Lowers the gradient of replicated edges: each element sums the gradients of its copies.  Sizes must be static."""

from __future__ import annotations

from collections.abc import Sequence

import sympy
import torch

from fusion.lowering.builder import Builder
from fusion.lowering.ir.expr import IndexValue
from fusion.lowering.registry import lowers
from fusion.lowering.rules.formula import Term, eq
from fusion.lowering.rules.promotion import rounded, widened
from fusion.lowering.rules.reduction import fold
from fusion.lowering.rules.windows import WindowAxis, fixed, windows
from fusion.lowering.value import Value

aten = torch.ops.aten


@lowers(
    *(aten.replication_pad1d_backward.default, aten.replication_pad2d_backward.default),
    *(aten.replication_pad3d_backward.default,),
)
def replication_pad_backward(ctx: Builder, grad: Value, x: Value, padding: Sequence[int]) -> Value:
    """Σ of the gradients of the copies; an edge element has copies outside."""
    count = len(padding) // 2
    sizes = fixed(x.shape[-count:])
    fixed(grad.shape[-count:])
    dims = [_copies(size, int(padding[-2 * k - 2]), int(padding[-2 * k - 1])) for k, size in enumerate(sizes)]
    taps = windows(grad.shape, dims)
    term = taps.read(grad).to(widened(grad.dtype))
    return rounded(fold(ctx, "sum", [taps.value(grad, term)], taps.over), grad.dtype)


def _copies(size: int, before: int, after: int) -> WindowAxis:
    """Position i became i + before; the edges were also copied outwards.  Negative counts crop."""
    left, right = max(before, 0), max(after, 0)

    def tests(i: sympy.Symbol, t: sympy.Symbol) -> list[Term]:
        own, at, tap = eq(Term(IndexValue(t)), left), Term(IndexValue(i)), Term(IndexValue(t))
        first, last = eq(at, 0) & (tap < left), eq(at, size - 1) & (tap > left)
        return [own | first | last] if left or right else []

    return WindowAxis(size, left + right + 1, lambda i, t: i + before - left + t, tests)
