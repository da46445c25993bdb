"""Removes gradients of maxima that cancel.

A softmax does not change when its row is shifted.  Written by hand it subtracts the row's maximum, only for range, and
the gradient through that maximum is 0: but as a sum whose terms cancel only in real arithmetic, spread over the row by
a comparison with the maximum (`amax`) or by its index (`max` along a dimension), for which the full row has to be
recomputed, to the last bit.  Here such a gradient is removed if its polynomial has no terms.

Input: the functional ATen graph of forward and backward, which is changed in place.  A gradient stays if its terms do
not cancel exactly, as where the maximum has other uses, or if the tensor that it is added to is not NaN wherever the
maximum is: then the NaN that eager has in the row's full gradient would be lost.  Rows with an infinity, or of nothing
but -∞, are NaN from their exponentials.  One difference remains: if the incoming gradient is not finite, eager has NaN
at the maximum, and here there may be an infinity.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from operator import getitem
from typing import cast

import torch
from torch import fx

from fusion.joint.factors import (
    Factor,
    added,
    count,
    factor_of,
    is_tensor,
    merged_runs,
    multiplied,
    root,
    shape_of,
    value_of,
)
from fusion.joint.facts import compared, constant_of, fold_of
from fusion.joint.normal_forms import Forms
from fusion.joint.special_numbers import is_zero_of_zero, spreading
from fusion.lowering.ir.sizes import sizes_of

aten = torch.ops.aten

EXTREMES, PLACES = ("max", "min"), ("argmax", "argmin")
"""Folds that return an extreme element of a row, and folds that return its position."""


def drop_vanishing_gradients(joint: fx.GraphModule) -> None:
    """Remove gradients through a maximum over the last axis that cancel, with the nodes that only they need.

    >>> from fusion.inspect.examples import show_graph
    >>> from torch import empty
    >>> def f(s, g):
    ...     m = s.amax(-1, keepdim=True)
    ...     e = torch.exp(s - m)
    ...     ds = e * (g - (g * e).sum(-1, keepdim=True) / e.sum(-1, keepdim=True))
    ...     return ds + (s == m) * -ds.sum(-1, keepdim=True)
    >>> show_graph(drop_vanishing_gradients, f, empty(3, 5), empty(3, 5))
      amax = amax(s, [-1], True)
      sub = sub.Tensor(s, amax)
      exp = exp(sub)
      mul = mul.Tensor(g, exp)
      sum_1 = sum.dim_IntList(mul, [-1], True)
      sum_2 = sum.dim_IntList(exp, [-1], True)
      div = div.Tensor(sum_1, sum_2)
      sub_1 = sub.Tensor(g, div)
      mul_1 = mul.Tensor(exp, sub_1)
    + return mul_1
    - eq = eq.Tensor(s, amax)
    - sum_3 = sum.dim_IntList(mul_1, [-1], True)
    - neg = neg(sum_3)
    - mul_2 = mul.Tensor(eq, neg)
    - add = add.Tensor(mul_1, mul_2)
    - return add
    """
    forms = Forms()
    comparisons = _comparisons(joint.graph)
    changed = False
    for node in list(joint.graph.nodes):
        spread = (_compared(node, comparisons) if comparisons else None) or _scattered(node)
        if spread is None:
            continue
        gradient, maximum = spread
        sums = list(_sums(node))
        if sums and any(_follows(other, maximum) for _, other in sums) and forms.vanishes(gradient):
            total, other = sums[0]
            total.replace_all_uses_with(other)
            changed = True
    if changed:
        joint.graph.eliminate_dead_code()
        joint.recompile()


# Gradients spread by a maximum ----------------------------------------------------------------------------------------


def _comparisons(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Return the comparisons of a graph with a maximum, each with the maximum."""
    pairs = [(node, compared(node, "eq")) for node in graph.nodes]
    sides = [(mask, root(side)) for mask, pair in pairs for side in reversed(pair)]
    return {mask: side for mask, side in sides if _is_fold(side, EXTREMES)}


def _compared(node: fx.Node, comparisons: Mapping[fx.Node, fx.Node]) -> tuple[fx.Node, fx.Node] | None:
    """Match a gradient spread by a comparison with a maximum; return the factor that has to be 0, and the maximum."""
    if node.op != "call_function" or not is_tensor(node):
        return None
    for part, divides in multiplied(node):
        mask = part.root if isinstance(part, Factor) else root(part) if isinstance(part, fx.Node) else None
        maximum = None if mask is None or divides else comparisons.get(mask)
        if maximum is not None:
            return node, maximum
    return None


def _scattered(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Match a gradient scattered to the position of a maximum; return the factor that has to be 0, and the maximum."""
    # By name: this is how PyTorch's own formula writes the gradient of a maximum along a dimension, into zeros.
    if node.target is not aten.scatter.src:
        return None
    zeros, _, index, gradient = (cast(fx.Node, arg) for arg in node.args)
    position = root(index)
    if position.target is not getitem or not _is_fold(position, PLACES) or constant_of(zeros) != 0:
        return None
    values = [user for user in position.all_input_nodes[0].users if _is_fold(user, EXTREMES)]
    return (gradient, values[0]) if values else None


def _is_fold(node: fx.Node, ops: Collection[str]) -> bool:
    """Return whether a tensor is one of these folds of another one."""
    fold = fold_of(node)
    return fold is not None and fold.op in ops


# Sums with other gradients --------------------------------------------------------------------------------------------


def _sums(node: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Yield the sums that a tensor is a term of, each with the other term, while nothing else reads the tensor or them.

    The first sum equals its other term where the tensor is 0; if that has another shape, dtype or strides, nothing is
    yielded.
    """
    first = True
    while len(node.users) == 1:
        (user,) = node.users
        if (other := _added_to(user, node)) is not None:
            if first and not _alike(user, other):
                return
            first = False
            yield user, other
        elif not is_zero_of_zero(user, node):
            return
        node = user


def _added_to(user: fx.Node, node: fx.Node) -> fx.Node | None:
    """Return the tensor that a call adds to another one; None if it computes anything else."""
    terms = [part for part, scale in added(user) if scale == 1 and isinstance(part, fx.Node)]
    others = [part for part in terms if part is not node]
    return others[0] if len(terms) == 2 and len(others) == 1 else None


def _alike(one: fx.Node, other: fx.Node) -> bool:
    a, b = value_of(one), value_of(other)
    return a.dtype is b.dtype and shape_of(one) == shape_of(other) and sizes_of(a.stride()) == sizes_of(b.stride())


def _follows(node: fx.Node, maximum: fx.Node) -> bool:
    """Return whether every number of a tensor is NaN if the maximum of its row is."""
    size = count(shape_of(node)) / count(shape_of(maximum))
    rows = merged_runs([(True, count(shape_of(maximum))), (False, size)])
    todo, seen = [(node, rows)], {node}  # tensors, with how the maximum is repeated to them
    while todo and size.is_integer:
        node, rows = todo.pop()
        shape = shape_of(node)
        if node is maximum and rows == factor_of(node, shape).runs:
            return True
        for part in spreading(node):
            full = count(shape_of(part)) == count(shape)
            if part not in seen and (full or factor_of(part, shape).runs == rows):
                todo.append((part, rows if full else factor_of(part, shape_of(part)).runs))
                seen.add(part)
    return False
