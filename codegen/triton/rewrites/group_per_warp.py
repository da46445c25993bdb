"""Shares: of a product of few rows with packed weights, whose scales are for short groups, warps take a group each.

What enters is a Kernel with one product that `packed` has taken apart; what leaves is a Kernel with one more axis, held
whole, of the groups that lie in one line of memory, and a sum over that axis.  Of groups of 64 bytes:

    dot over r0: 2048 of x[2*r0], w[r0]    →    dot over r0: 1024 of x[2*k], w[k]   at each r1: 2,
                                                sum over r1 of that,                 k = r0 + 64*(r0 // 64) + 64*r1

A program then asks for whole lines, which memory brings best, and each of its warps takes apart other weights than the
others.  (H200, with the launch, one row: 14336 × 4096 18.4 µs, and 19.4 with two steps taken together; 4096 × 14336
19.9 and 24.0.  Shares that lie apart, each a walk of its own, take 1 to 3 µs more.)

Of a product in parts, whose walks are short, a program takes the groups of two lines: half as many steps wait for what
they are scaled by.  (By hand, 4096 × 14336 in 4 parts: 20.1 instead of 22.2 µs for one row, 23.7 instead of 24.8 for
16; without parts, 14336 × 4096, it takes longer: 19.4 instead of 19.0, and 23.6 instead of 22.0.)
"""

from __future__ import annotations

from dataclasses import replace

import sympy

from fusion.codegen.triton.rewrites.totals import total_of
from fusion.codegen.triton.rewrites.vectors import is_narrow
from fusion.lowering.expr import index_of, postorder, rewrite
from fusion.lowering.indexing import FloorDiv, over_symbol, split_points, substitute_all
from fusion.lowering.kernel import Fold, Kernel, KernelAxis, Loop, Role, Stmt, Store, statements, values_of, with_values

LINE = 128
"""Bytes that memory brings best at once."""

SHORTEST = 32
"""Bytes of the shortest group that is a step of a warp."""

MOST = 4
"""Warps of a program, of which each has a group."""


def shared(kernel: Kernel) -> Kernel:
    """`kernel`, whose contractions are those of one product, in shares; the same object where it does anything else."""
    folds = tuple(statements(kernel.body, Fold))
    walked, loops = kernel.with_role(Role.LOOP), [stmt for stmt in kernel.body if isinstance(stmt, Loop)]
    if len(folds) < 2 or len(walked) != 1 or len(loops) != 1 or kernel.with_role(Role.WHOLE):
        return kernel
    if set(loops[0].body) != set(folds) or loops[0].where is not None or any(fold.op != "dot" for fold in folds):
        return kernel
    axis, total, group = walked[0], total_of(kernel.body, folds[0]), _group(folds, walked[0])
    if total is None or total.folds != folds or group is None:
        return kernel
    if not is_narrow(kernel, folds[0].rows, folds[0].columns):
        return kernel
    together = _together(kernel, axis, group)
    count = together // group
    share = KernelAxis(over_symbol(1), sympy.Integer(count), Role.WHOLE)
    inner = replace(axis, size=axis.size / count)
    axes = (*(inner if other is axis else other for other in kernel.axes), share)
    steps = FloorDiv(axis.symbol, sympy.Integer(group))
    place = {axis.symbol: axis.symbol + (together - group) * steps + group * share.symbol}
    args = [arg for fold in folds for arg in fold.args]
    sizes = {other.symbol: other.size for other in axes}
    moved = dict(zip(args, substitute_all(args, place, sizes), strict=True))
    parts = tuple(replace(fold, args=tuple(moved[arg] for arg in fold.args)) for fold in folds)
    whole = Fold("product", "sum", (total.value,), (share.symbol,), folds[0].dtype)
    body: list[Stmt] = []
    for stmt in kernel.body:
        if isinstance(stmt, Loop):
            body += [replace(stmt, body=parts), whole]
        else:
            assert isinstance(stmt, Store)
            body.append(with_values(stmt, rewrite(values_of(stmt), {total.value: whole.ref}.get)))
    return replace(kernel, axes=axes, body=tuple(body))


def _together(kernel: Kernel, axis: KernelAxis, group: int) -> int:
    """The bytes whose groups a program takes at once: those of a line, or of two."""
    two = 2 * LINE
    fits = axis.size > two and axis.size % two == 0 and two <= MOST * group
    return two if kernel.awaited and fits else LINE


def _group(folds: tuple[Fold, ...], axis: KernelAxis) -> int | None:
    """How many neighbours along `axis` share a scale, if several such groups are a line, of which the axis consists."""
    nodes = postorder(*(arg for fold in folds for arg in fold.args))
    indices = [index for node in nodes for index in index_of(node)]
    group = next(iter(split_points(indices, axis.symbol, axis.size)), LINE)
    fits = SHORTEST <= group < LINE and LINE % group == 0
    return group if fits and axis.size.is_Integer and axis.size > LINE and axis.size % LINE == 0 else None
