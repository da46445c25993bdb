"""Specialises the widths of attention heads, with guards, even where all sizes are symbolic.

With `dynamic=True` Dynamo makes each size symbolic, the width of a head too.  A kernel that computes scores where it
needs them holds the full head in a tile; of a symbolic width it cannot, and the scores would be stored in memory.  It
also holds the columns of the matrix that the scores are multiplied by, which may have another width.  A width belongs
to a model as the sizes of its weights do, so it is guarded: another one is recompiled.

Input: an ATen graph, forward or joint; output: the same graph, with static sizes for the reduced axes of products that
are larger than their operands and whose row maximum is taken (scores), and for the columns of products with these.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from fusion.joint.factors import is_product, operands, value_of
from fusion.joint.facts import folds
from fusion.joint.recomputation import grows, short
from fusion.lowering.ir.sizes import elements, hint_of, size_of
from fusion.schedule.chained.place_producers import LONGEST_HELD_AXIS


def specialise_head_widths(graph: fx.GraphModule) -> None:
    """Guard the widths of heads, where they are symbolic.

    >>> from fusion.inspect.examples import traced
    >>> from torch import empty
    >>> def f(q, k):
    ...     return (q @ k).softmax(-1)
    >>> graph = traced(f, empty(6, 200, 4), empty(6, 4, 300), symbolic=True)
    >>> def widths():
    ...     return [str(node.meta["val"].shape[2]) for node in graph.graph.find_nodes(op="placeholder")]
    >>> before = widths()
    >>> specialise_head_widths(graph)
    >>> [a.replace(b, "same") for a, b in zip(widths(), before, strict=True)]
    ['4', 'same']
    """
    known = {size_of(val): val for val in (node.meta.get("val") for node in graph.graph.nodes) if _is_symbol(val)}
    for node in graph.graph.nodes:
        if not is_product(node) or not grows(node):
            continue
        scores = _same_size_users(node)
        if not any(fold.op == "max" for score in scores for user in score.users for fold in folds(user)):
            continue
        for width in (short(node), *_columns(scores)):
            for symbol in size_of(width).free_symbols:
                if symbol in known:
                    int(known[symbol])  # converting to an integer adds the guard


def _is_symbol(val: object) -> bool:
    return isinstance(val, torch.SymInt) and size_of(val).is_Symbol


def _same_size_users(product: fx.Node) -> list[fx.Node]:
    """Return a product, with its users of the same size, direct or indirect."""
    size = elements(value_of(product).shape)
    users = {product: None}
    todo = [product]
    while todo:
        for user in todo.pop().users:
            val = user.meta.get("val")
            if user not in users and isinstance(val, torch.Tensor) and elements(val.shape) == size:
                users[user] = None
                todo.append(user)
    return list(users)


def _columns(scores: list[fx.Node]) -> Iterator[int | torch.SymInt]:
    """Yield the number of columns of each product that has `scores` as its left operand, if it is small."""
    for score in scores:
        for user in score.users:
            if is_product(user) and operands(user)[0] is score:
                width = value_of(user).shape[-1]
                if hint_of(width) <= LONGEST_HELD_AXIS:
                    yield width
