"""Specialises the width of attention heads to a guarded number, even where all sizes are symbols.

With `dynamic=True` Dynamo makes a symbol of each size, that of a head among them.  A kernel that makes scores where it
needs them holds the head whole, in a tile; of a width that may be anything it cannot, and the scores would be made in
memory.  It holds the columns of what the scores are multiplied with, too, which may be as many or others.  A width
belongs to a model as the sizes of its weights do, so it is guarded: another one is compiled anew.

Input: an ATen graph, forward or joint; output: the same graph, in which the sizes that short products run over are
numbers, if the products are larger than their operands and the maximum of their rows is taken: scores. So are the sizes
of the columns of products with them.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from fusion.joint.factors import PRODUCTS, operands, value_of
from fusion.joint.facts import folds
from fusion.joint.large_products import grows, short
from fusion.lowering.sizes import elements, hint_of, size_of
from fusion.schedule.chained.place_producers import HELD


def fix_widths(graph: fx.GraphModule) -> None:
    """Guard the widths of heads, where they are symbols."""
    known = {size_of(val): val for val in (node.meta.get("val") for node in graph.graph.nodes) if _is_symbol(val)}
    for node in graph.graph.nodes:
        if node.target not in PRODUCTS or not grows(node):
            continue
        scores = _made_of(node)
        if not any(fold.op == "max" for score in scores for user in score.users for fold in folds(user)):
            continue
        for width in (short(node), *_columns(scores)):
            for symbol in size_of(width).free_symbols:
                if symbol in known:
                    int(known[symbol])  # asking for the number makes the guard


def _is_symbol(val: object) -> bool:
    return isinstance(val, torch.SymInt) and size_of(val).is_Symbol


def _made_of(product: fx.Node) -> list[fx.Node]:
    """A product, and what is made of it element by element or row by row, in its size."""
    size = elements(value_of(product).shape)
    found = {product: None}
    todo = [product]
    while todo:
        for user in todo.pop().users:
            val = user.meta.get("val")
            if user not in found and isinstance(val, torch.Tensor) and elements(val.shape) == size:
                found[user] = None
                todo.append(user)
    return list(found)


def _columns(scores: list[fx.Node]) -> Iterator[int | torch.SymInt]:
    """The columns of products with `scores`, if they are few."""
    for score in scores:
        for user in score.users:
            if user.target in PRODUCTS and operands(user)[0] is score:
                width = value_of(user).shape[-1]
                if hint_of(width) <= HELD:
                    yield width
