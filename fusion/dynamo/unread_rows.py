"""Computes only the rows of a large product that are read.

    linear(x, w)[:, :-1]      becomes      linear(x[:, :-1], w)

Two laws say so, for any product in any program: a row of a product is the product of that row, (x · w)[i] = x[i] · w,
and what is computed for each element by itself is computed for those that are read.  (Logits are made for every token,
of which a loss leaves out the last one, and generation all but the last one.)  The functions are known by name, since
Dynamo's graph calls the program's own: there are no ATen operations yet whose lowered form would tell.

Input: Dynamo's graph, before autograd is derived from it, so that backward makes no more rows than forward does; it is
changed in place.  Left alone is a product that anything else reads, also after operations on each element; one of which
rows are read that are not known before it is made; and one whose rows are returned as they are, because a caller sees
how they lie in memory.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator

import torch
from torch import fx

from fusion.dynamo.writes import memory_of
from fusion.lowering.sizes import elements

PRODUCTS = frozenset({torch._C._nn.linear, torch.matmul, operator.matmul})
"""Functions of two matrices that read the rows of the first one apart."""
METHODS = frozenset({"float", "double", "half", "bfloat16", "contiguous", "tanh", "relu", "sigmoid", "neg", "clone"})
EACH = frozenset({torch.tanh, torch.relu, torch.sigmoid, torch.neg, operator.neg, torch.clone})
"""Functions of each element of one tensor."""
SCALED = frozenset(
    {
        *(operator.mul, operator.truediv, operator.add, operator.sub),
        *(torch.mul, torch.div, torch.add, torch.sub, torch.clamp),
        *("mul", "div", "add", "sub", "clamp", "to"),
    }
)
"""Functions or methods of each element of their first argument, the only tensor, and of numbers or a dtype."""


def skip_unread_rows(graph: fx.GraphModule, workspace: int) -> None:
    """Have products of more than `workspace` bytes made for the rows that are read of them."""
    changed = False
    for node in list(graph.graph.find_nodes(op="call_function", target=operator.getitem)):
        changed |= _read_before(node, workspace)
    if changed:
        graph.recompile()


def _read_before(node: fx.Node, workspace: int) -> bool:
    """Let `node` read the operand of the product it reads, if it can; says so."""
    path = list(_path_to_product(node))
    if not path or not _is_of_rows(node) or _is_returned(node):
        return False
    product, (_, index) = path[-1], node.args
    val, operand = product.meta["example_value"], product.args[0]
    if elements(val.shape) * val.dtype.itemsize <= workspace:
        return False
    assert isinstance(operand, fx.Node)
    with product.graph.inserting_before(product):
        rows = product.graph.call_function(operator.getitem, (operand, index))
    rows.meta = {**product.meta, "example_value": operand.meta["example_value"][index]}
    product.update_arg(0, rows)
    for step in path:
        step.meta["example_value"] = step.meta["example_value"][index]
    node.replace_all_uses_with(path[0])
    node.graph.erase_node(node)
    return True


def _path_to_product(node: fx.Node) -> Iterator[fx.Node]:
    """What `node` reads, up to a product: operations on each element that nothing else reads; nothing without one."""
    path: list[fx.Node] = []
    while isinstance(made := node.args[0] if node.args else None, fx.Node):
        val = made.meta.get("example_value")
        if len(made.users) != 1 or not isinstance(val, torch.Tensor):
            return
        path.append(made)
        if _is_product(made):
            yield from path
            return
        if not _is_of_each(made):
            return
        node = made


def _is_product(node: fx.Node) -> bool:
    if node.op != "call_function" or node.target not in PRODUCTS or len(node.all_input_nodes) < 2:
        return False
    vals = [arg.meta.get("example_value") if isinstance(arg, fx.Node) else None for arg in node.args[:2]]
    first, second = vals
    return isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor) and first.ndim > 1 and second.ndim == 2


def _is_of_each(node: fx.Node) -> bool:
    if len(node.all_input_nodes) != 1:
        return False
    others = (*node.args[1:], *node.kwargs.values())
    if node.target in SCALED:
        return all(other is None or isinstance(other, (int, float, torch.dtype)) for other in others)
    known = METHODS if node.op == "call_method" else EACH
    return not others and node.target in known


def _is_of_rows(node: fx.Node) -> bool:
    """Is this slices and numbers known before the product, of all its dimensions but the last?"""
    source, index = node.args
    assert isinstance(source, fx.Node)
    items = index if isinstance(index, tuple) else (index,)
    if node.all_input_nodes != [source] or not all(isinstance(item, (slice, int)) or item is ... for item in items):
        return False
    rank = source.meta["example_value"].ndim
    whole = slice(None, None, None)
    if ... in items:
        at = items.index(...)
        items = (*items[:at], *[whole] * (rank - len(items) + 1), *items[at + 1 :])
    return len(items) < rank or items[-1] == whole


def _is_returned(node: fx.Node) -> bool:
    """Does the graph return what lies in the memory of `node`?"""
    returned = (result.meta.get("example_value") for result in node.graph.output_node().all_input_nodes)
    memory = memory_of(node.meta["example_value"])
    return any(memory_of(val) == memory for val in returned if isinstance(val, torch.Tensor))
