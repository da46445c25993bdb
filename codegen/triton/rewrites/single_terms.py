"""Replaces a sum over a row with one term that is not zero by a load of that element.

    for r:  s += where(r == e, x[n*i + r], 0)      becomes      s = x[n*i + e],  before the loop

This is the law of the Kronecker delta, Σ_r δ(r, e)·x[r] = x[e], for sums of any elements in any program: a comparison
of the loop index with a value that is constant in the loop is true at most once.  A cross-entropy selects its logit
this way, a one-hot product its row.

Input: a kernel; output: an equal one in which sums with a single term that is not zero, at an index that is constant in
the loop, are folds over no axes.  An index outside of the row gives 0.  (measured: docs/performance.md, `single_terms`)

Unchanged: sums over rows that are held whole, since their elements are in registers; a loop of such sums alone; a sum
whose running value is needed, or that reads a fold; and elements that are loaded under a mask, or at an index that is
data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import sympy
import torch

from fusion.lowering.indexing import substitute
from fusion.lowering.ir.expr import (
    Cast,
    Const,
    Expr,
    IndexValue,
    Load,
    Op,
    TileRef,
    const,
    free_axes,
    guarded,
    make_cast,
    make_op,
    postorder,
)
from fusion.lowering.ir.kernel import Fold, Kernel, Loop, Stmt, running
from fusion.lowering.ir.scalar_ops import CHECKED


def load_single_terms(kernel: Kernel) -> Kernel:
    """Return the kernel with such elements loaded; the same object if there are none."""
    sizes = kernel.axis_sizes()
    body: list[Stmt] = []
    for stmt in kernel.body:
        body += _split_loop(stmt, sizes) if isinstance(stmt, Loop) and stmt.where is None else [stmt]
    return kernel if len(body) == len(kernel.body) else replace(kernel, body=tuple(body))


def _split_loop(loop: Loop, sizes: Mapping[sympy.Symbol, sympy.Expr]) -> Sequence[Stmt]:
    """Return the folds of a loop that become loads, and then the loop without them; the loop alone if it had nothing
    else.
    """
    loaded: list[Stmt] = []
    kept: list[Stmt] = []
    followed = running(loop)
    for stmt in loop.body:
        term = _term(stmt, sizes) if isinstance(stmt, Fold) and stmt.name not in followed else None
        if term is None or not isinstance(stmt, Fold):
            kept.append(stmt)
        else:
            loaded.append(replace(stmt, args=(term,), over=()))
    return [*loaded, replace(loop, body=tuple(kept))] if kept else [loop]


def _term(fold: Fold, sizes: Mapping[sympy.Symbol, sympy.Expr]) -> Expr | None:
    """Return the only term of a sum over an axis that may not be zero; None if there may be others."""
    if fold.op != "sum" or len(fold.over) != 1:
        return None
    (axis,), (value,) = fold.over, fold.args
    if not (isinstance(value, Op) and value.name == "where") or any(isinstance(n, TileRef) for n in postorder(value)):
        return None  # the value of a fold may be known only in this loop, or after it
    condition, element, other = value.args
    if not (isinstance(condition, Op) and condition.name == "eq" and isinstance(other, Const) and other.value == 0):
        return None
    bare = element.arg if isinstance(element, Cast) else element
    if not isinstance(bare, Load) or bare.mask is not None or any(isinstance(offset, Expr) for offset in bare.index):
        return None
    for position, wanted in (condition.args, condition.args[::-1]):
        if isinstance(position, IndexValue) and position.index == axis and wanted.dtype is torch.int64:
            return None if axis in free_axes(wanted) else make_cast(_at(element, axis, wanted, sizes), value.dtype)
    return None


def _at(element: Expr, axis: sympy.Symbol, index: Expr, sizes: Mapping[sympy.Symbol, sympy.Expr]) -> Expr:
    """Return `element` at an `index` on the axis; 0 outside of it."""
    size = sizes[axis]
    inside = substitute(element, {axis: index}, dict(sizes))
    if _is_inside(index, size):
        return inside
    above = make_op("ge", index, const(0, torch.int64))
    below = make_op("lt", index, IndexValue(size))
    return guarded(inside, make_op("and", above, below), safe=(index,))


def _is_inside(index: Expr, size: sympy.Expr) -> bool:
    """Return whether an index is checked to be within an axis of this size."""
    if not (isinstance(index, Op) and index.name == CHECKED):
        return False
    last = index.args[2]
    return isinstance(last, Const) and size.is_Integer and last.value < int(size)


__all__ = ["load_single_terms"]
