"""Pivots: a mean from which a row is subtracted is summed up from the first element of the row on.

    Σ x / n      is      p + Σ (x - p) / n

Where all elements are equal the differences are 0 and the mean is exact; so the deviations from it are 0, and the norm
of the row, as in eager, which brings a mean from number to number.  Far from zero the differences are small, and little
of them is lost.

Input: the steps of a schedule; output: steps in which kernels do so for each sum of which nothing but the mean is read,
and of whose row other folds take deviations.  The row must be made of what is loaded alone, at little cost: then its
first element is a load of what is read anyway.  A mean beside which its deviations are summed up gets what it lacks
from these, and stays.  Of all passes that change kernels it is the last but for those that choose where results lie
(`updates`, `reuse`): these have to see that the first element is read by all of its row, which so cannot be written
over.  (H200, layer and group norms, rows of 256 to 65536, times of sums as they are: 0.93 to 1.04, 1.002 in the middle;
with the sum of deviations 0.99 to 1.20.  A GELU made once more takes 6%.)

Source: Chan, Golub, LeVeque: Algorithms for Computing the Sample Variance, 1983.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import sympy

from fusion.lowering.expr import Cast, Const, Expr, Load, Op, make_op, postorder, rewrite
from fusion.lowering.indexing import substitute
from fusion.lowering.kernel import (
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
from fusion.lowering.program import Call
from fusion.lowering.rules.formula import literal
from fusion.lowering.sizes import may_be_empty
from fusion.schedule.kernels import KernelCall
from fusion.schedule.rewrites.inline import cost

CHEAP = 8
"""Additions that one more element of a row may cost."""


def about_pivots(steps: Sequence[KernelCall | Call]) -> tuple[KernelCall | Call, ...]:
    """The steps with means that are subtracted from their rows summed up from the first elements of these on."""
    return tuple(
        replace(step, kernel=_about_pivots(step.kernel)) if isinstance(step, KernelCall) else step for step in steps
    )


def _about_pivots(kernel: Kernel) -> Kernel:
    beside = tuple(map(_about_pivots, kernel.beside))
    if beside != kernel.beside:
        kernel = replace(kernel, beside=beside)
    for fold, mean in list(_means(kernel)):
        (row,) = fold.args
        pivot = substitute(row, dict.fromkeys(fold.over, sympy.Integer(0)), kernel.axis_sizes())
        apart = replace(fold, args=(make_op("sub", row, pivot),))
        kernel = replace(kernel, body=_with(kernel.body, fold, apart, mean, make_op("add", pivot, mean)))
    return kernel


def _means(kernel: Kernel) -> Iterator[tuple[Fold, Expr]]:
    """Sums of which nothing but the mean is read, where other folds take deviations from it, each with its mean."""
    every = list(statements(kernel.body))
    values = [value for stmt in every for value in values_of(stmt)]
    nodes = postorder(*values)
    walked = {name for stmt in every if isinstance(stmt, Loop) for name in running(stmt)}
    updated = {stmt.param for stmt in every if isinstance(stmt, Store) and stmt.axes is not None}
    sizes, found = kernel.axis_sizes(), folds(kernel).values()
    for fold in found:
        count = sympy.Mul(*(sizes[axis] for axis in fold.over))
        several = count != 1 and not may_be_empty(count)  # so that there is a first element to load
        if fold.op != "sum" or not fold.dtype.is_floating_point or not several or fold.name in walked:
            continue
        mean = make_op("truediv", fold.ref, literal(count, fold.dtype))
        users = [node for node in nodes if fold.ref in node.children()]
        if users != [mean] or fold.ref in values or not _is_loaded(fold.args[0], updated):
            continue
        deviation = make_op("sub", fold.args[0], mean)
        reading = [other.args for other in found if deviation in postorder(*other.args)]
        if reading and (deviation,) not in reading:
            yield fold, mean


def _is_loaded(row: Expr, updated: set[str]) -> bool:
    """Is `row` made of loads at known places, in tensors that nothing updates meanwhile, and cheap?"""
    nodes = postorder(row)
    return (
        cost(row) <= CHEAP
        and any(isinstance(node, Load) for node in nodes)
        and all(
            (isinstance(node, Load) and not node.children() and node.buffer not in updated)
            or isinstance(node, (Const, Cast))
            or (isinstance(node, Op) and node.name != "checked")
            for node in nodes
        )
    )


def _with(body: Sequence[Stmt], old: Fold, new: Fold, mean: Expr, centre: Expr) -> tuple[Stmt, ...]:
    """`body` with one fold in the place of another, and the mean of that about the pivot."""

    def centred(stmt: Stmt) -> Stmt:
        if stmt == old:
            return new
        return with_values(stmt, rewrite(values_of(stmt), lambda node: centre if node is mean else None))

    return map_statements(body, centred)


__all__ = ["about_pivots"]
