"""Determines where the last bits of values are invisible, since results are rounded, in a kernel or by its readers.

Input: a kernel; output: yes or no, or the expressions of which that is true.  There divisions, roots and exponentials
use the fast forms of the hardware, whose error is two units in the last place of float32.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import torch

from fusion.codegen.triton.rewrites.denormals import is_below
from fusion.lowering.algebra.last_bits import to_integers
from fusion.lowering.ir.expr import Const, Expr, Op, TileRef, postorder
from fusion.lowering.ir.kernel import Fold, Kernel, Loop, Param, Stmt, Store, statements, values_of
from fusion.lowering.ir.scalar_ops import HALVES
from fusion.lowering.ir.sizes import estimate

_LONG_SUM = 1024
"""Terms of a sum, at least, whose own rounding exceeds the errors of its terms.  (measured: docs/performance.md,
`_LONG_SUM`)
"""


def is_rounded(kernel: Kernel) -> bool:
    """Return whether every result is a 16-bit float, is read only to compute such, or is computed from products of
    these, with no float rounded to an integer on the way.
    """
    stmts = list(statements(kernel.body))
    dots = [stmt for stmt in stmts if isinstance(stmt, Fold) and stmt.op == "dot"]
    products = bool(dots) and all(arg.dtype in HALVES for dot in dots for arg in dot.args)
    if not products and not all(_rounds(param) for param in kernel.params if param.written):
        return False
    return not to_integers(*(value for stmt in stmts for value in values_of(stmt)))


def rounded_parts(kernel: Kernel, body: Sequence[Stmt]) -> frozenset[Expr]:
    """Return the expressions in the body of a kernel that contribute only to 16-bit floats, stored here or later.

    For a kernel that also stores a sum in float32, such as a loss along with the gradients of its logits.
    """
    rounded, others = _results(kernel, body)
    return frozenset(postorder(*rounded)) - frozenset(postorder(*others))


def under_logarithms(kernel: Kernel, body: Sequence[Stmt]) -> frozenset[Expr]:
    """Return the exponentials exp(x - max(x)) in the body of a kernel whose long sums contribute to logarithms, and
    otherwise to 16-bit floats only, such as the loss of a row and the gradients of its logits.

    The logarithm is rounded as a number of its size, or next to the 1 of the maximum where it is small: the few units
    in the last place of each term are invisible beside that, and average out.
    """
    sizes = {axis.symbol: estimate(axis.size, {}) for axis in kernel.axes if axis.size.is_Integer}
    folds = list(statements(body, Fold))
    maxima = [fold for fold in folds if fold.op == "max"]
    sums = {
        fold.name: (fold, term)
        for fold in folds
        if fold.op == "sum" and math.prod(sizes.get(axis, 0) for axis in fold.over) >= _LONG_SUM
        for term in fold.args
        if isinstance(term, Op) and term.dtype is torch.float32 and any(is_below(term, top) for top in maxima)
    }
    others = [stmt for stmt in statements(body) if not isinstance(stmt, Loop) and getattr(stmt, "name", "") not in sums]
    carries = [fold.carry for fold, _ in sums.values() if fold.carry is not None]
    read = set(_outside_logarithms([*_results(kernel, others)[1], *carries]))
    read |= {term for fold, term in sums.values() if fold.ref in read}
    return frozenset(term for _, term in sums.values()) - read


def _outside_logarithms(roots: Iterable[Expr]) -> Iterator[Expr]:
    """Yield the expressions below `roots`, but for tiles whose logarithm is taken, if they are not NaN instead."""
    stack, seen = list(roots), set[Expr]()
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        yield node
        children = list(node.children())
        if isinstance(node, Op) and node.name == "log":
            (argument,) = node.args
            if isinstance(argument, Op) and argument.name == "where" and isinstance(argument.args[1], Const):
                children = [argument.args[0], argument.args[2]]
            children = [child for child in children if not isinstance(child, TileRef)]
        stack += children


def _results(kernel: Kernel, body: Sequence[Stmt]) -> tuple[list[Expr], list[Expr]]:
    """Return the values that are stored as 16-bit floats, there or later, and all others."""
    rounded: list[Expr] = []
    others: list[Expr] = []
    for stmt in statements(body):
        values = list(values_of(stmt))
        if isinstance(stmt, Store) and _rounds(kernel.param(stmt.param)) and not to_integers(stmt.value):
            rounded.append(values.pop(0))
        others += values
    return rounded, others


def _rounds(param: Param) -> bool:
    """Return whether the stored values are rounded to 16 bits, there or by their readers."""
    return param.dtype in HALVES or param.rounded_later
