"""Computes a mean that is subtracted from its row relative to the row's first element, the pivot.

    Σ x / n      is      p + Σ (x - p) / n

If all elements are equal the differences are 0 and the mean is exact; so the deviations from it are 0, and the norm of
the row, as in eager, which updates a mean number by number.  Far from zero the differences are small, and little
precision is lost.

Input: the steps of a schedule; output: steps in which kernels do so for each sum of which only the mean is read, and
from which other folds of the row take deviations.  The row must be computed from loads alone, at little cost: then its
first element is a load of data that is read anyway.  A mean whose deviations are summed beside it is corrected by
these, and stays.  This pass runs after all others that change kernels, but before the passes that choose the memory of
results (`updates`, `reuse`): these have to see that all programs of a row read its first element, which therefore
cannot be overwritten.  (measured: docs/performance.md, `shift_means`)

Source: Chan, Golub, LeVeque: Algorithms for Computing the Sample Variance, 1983.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import sympy

from fusion.lowering.indexing import substitute
from fusion.lowering.ir.expr import Expr, is_of_static_loads, loads, make_op, postorder, rewrite
from fusion.lowering.ir.kernel import (
    Fold,
    Kernel,
    Loop,
    Stmt,
    Store,
    folds,
    map_statements,
    running,
    statements,
    values_of,
    with_values,
)
from fusion.lowering.ir.program import Call
from fusion.lowering.ir.sizes import may_be_empty
from fusion.lowering.rules.formula import literal
from fusion.schedule.kernels import KernelCall
from fusion.schedule.rewrites.inline import cost

CHEAP = 8
"""Additions that one more element of a row may cost."""


def shift_means(steps: Sequence[KernelCall | Call]) -> tuple[KernelCall | Call, ...]:
    """Compute means that are subtracted from their rows relative to the first elements of these.

    >>> from fusion.inspect.examples import show_launches
    >>> from torch import empty
    >>> show_launches(
    ...     lambda steps, program: shift_means(steps),
    ...     lambda x: (x - x.mean(-1, keepdim=True)).square().mean(-1),
    ...     empty(300, 70),
    ...     kernels=True,
    ... )
      kernel mean_sub_pow(in0: f32[300, 70], out0: f32[300] written)
        grid  i0: 300
        whole r0: 70
    -   sum0 = sum over r0 of in0[70*i0 + r0]
    +   sum0 = sum over r0 of in0[70*i0 + r0] - in0[70*i0]
    -   %1 = in0[70*i0 + r0] - sum0 / 70.0
    +   %1 = in0[70*i0 + r0] - (in0[70*i0] + sum0 / 70.0)
        sum1 = sum over r0 of %1 * %1
        store out0[i0] = sum1 / 70.0
    """
    return tuple(
        replace(step, kernel=_shift_means(step.kernel)) if isinstance(step, KernelCall) else step for step in steps
    )


def _shift_means(kernel: Kernel) -> Kernel:
    packed = tuple(map(_shift_means, kernel.beside))
    if packed != kernel.beside:
        kernel = replace(kernel, beside=packed)
    for fold, mean in list(_means(kernel)):
        (row,) = fold.args
        pivot = substitute(row, dict.fromkeys(fold.over, sympy.Integer(0)), kernel.axis_sizes())
        shifted = replace(fold, args=(make_op("sub", row, pivot),))
        kernel = replace(kernel, body=_with(kernel.body, fold, shifted, mean, make_op("add", pivot, mean)))
    return kernel


def _means(kernel: Kernel) -> Iterator[tuple[Fold, Expr]]:
    """Yield sums of which only the mean is read, from which other folds take deviations, each with its mean."""
    every = list(statements(kernel.body))
    values = [value for stmt in every for value in values_of(stmt)]
    nodes = postorder(*values)
    running_names = {name for stmt in every if isinstance(stmt, Loop) for name in running(stmt)}
    updated = {stmt.param for stmt in every if isinstance(stmt, Store) and stmt.axes is not None}
    sizes, all_folds = kernel.axis_sizes(), folds(kernel).values()
    for fold in all_folds:
        count = sympy.Mul(*(sizes[axis] for axis in fold.over))
        several = count != 1 and not may_be_empty(count)  # so that there is a first element to load
        if fold.op != "sum" or not fold.dtype.is_floating_point or not several or fold.name in running_names:
            continue
        mean = make_op("truediv", fold.ref, literal(count, fold.dtype))
        users = [node for node in nodes if fold.ref in node.children()]
        if users != [mean] or fold.ref in values or not _is_loaded(fold.args[0], updated):
            continue
        deviation = make_op("sub", fold.args[0], mean)
        reading = [other.args for other in all_folds if deviation in postorder(*other.args)]
        if reading and (deviation,) not in reading:
            yield fold, mean


def _is_loaded(row: Expr, updated: set[str]) -> bool:
    """Return whether `row` is cheap and computed from loads at static indices, in tensors not updated meanwhile."""
    fixed = all(load.buffer not in updated for load in loads(row))
    return cost(row) <= CHEAP and is_of_static_loads(row) and fixed


def _with(body: Sequence[Stmt], old: Fold, new: Fold, mean: Expr, centre: Expr) -> tuple[Stmt, ...]:
    """Replace one fold by another, and the mean by that about the pivot."""

    def centred(stmt: Stmt) -> Stmt:
        if stmt == old:
            return new
        return with_values(stmt, rewrite(values_of(stmt), lambda node: centre if node is mean else None))

    return map_statements(body, centred)


__all__ = ["shift_means"]
