"""Computes only the rows of a large product that are read.

    linear(x, w)[:, :-1]      becomes      linear(x[:, :-1], w)

Two laws justify it, for any product in any program: a row of a product is the product of that row, (x · w)[i] = x[i] ·
w, and elementwise operations can be restricted to the elements that are read.  (Logits are computed for every token; a
loss ignores the last one, and generation all but the last one.)  The functions are named in tables because Dynamo's
graph calls the program's own: there are no ATen operations yet whose lowered form could be examined.

Input: Dynamo's graph, before autograd is derived from it, so that backward computes no more rows than forward does; it
is changed in place.  Unchanged: a product with other readers, also after elementwise operations; one whose read rows
are not known before it is computed; and one whose rows are returned directly, because a caller sees their strides.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator

import torch
from torch import fx

from fusion.dynamo.writes import memory_of
from fusion.lowering.ir.sizes import elements

ROW_WISE_PRODUCTS = frozenset({torch._C._nn.linear, torch.matmul, operator.matmul})
"""Functions of two matrices that use the rows of the first one separately."""
METHODS = frozenset({"float", "double", "half", "bfloat16", "contiguous", "tanh", "relu", "sigmoid", "neg", "clone"})
EACH = frozenset({torch.tanh, torch.relu, torch.sigmoid, torch.neg, operator.neg, torch.clone})
"""Elementwise functions of one tensor."""
SCALED = frozenset(
    {
        *(operator.mul, operator.truediv, operator.add, operator.sub),
        *(torch.mul, torch.div, torch.add, torch.sub, torch.clamp),
        *("mul", "div", "add", "sub", "clamp", "to"),
    }
)
"""Elementwise functions or methods of their first argument, the only tensor, and of numbers or a dtype."""


def skip_unread_rows(graph: fx.GraphModule, workspace: int) -> None:
    """Compute products of more than `workspace` bytes only for the rows that are read.

    >>> from fusion.inspect.examples import show_captured
    >>> from torch import empty
    >>> def f(x, w):
    ...     return (x @ w)[:, :-1].relu() + 1
    >>> show_captured(lambda graph: skip_unread_rows(graph, 0), f, empty(2, 5, 6), empty(6, 7))
    - matmul = matmul(l_x_, l_w_)
    - getitem = getitem(matmul, (slice(None, None, None), slice(None, -1, None)))
    + getitem_1 = getitem(l_x_, (slice(None, None, None), slice(None, -1, None)))
    + matmul = matmul(getitem_1, l_w_)
    - relu = relu(getitem)
    + relu = relu(matmul)
      add = add(relu, 1)
      return add
    """
    changed = False
    for node in list(graph.graph.find_nodes(op="call_function", target=operator.getitem)):
        changed |= _move_before_product(node, workspace)
    if changed:
        graph.recompile()


def _move_before_product(node: fx.Node, workspace: int) -> bool:
    """Move the index `node` before the product that it reads, if possible; return whether it was moved."""
    path = list(_path_to_product(node))
    if not path or not _selects_rows(node) or _is_returned(node):
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
    """Yield the chain of elementwise operations without other readers from `node` to a product; nothing without one."""
    path: list[fx.Node] = []
    while isinstance(producer := node.args[0] if node.args else None, fx.Node):
        val = producer.meta.get("example_value")
        if len(producer.users) != 1 or not isinstance(val, torch.Tensor):
            return
        path.append(producer)
        if _is_product(producer):
            yield from path
            return
        if not _is_elementwise(producer):
            return
        node = producer


def _is_product(node: fx.Node) -> bool:
    if node.op != "call_function" or node.target not in ROW_WISE_PRODUCTS or len(node.all_input_nodes) < 2:
        return False
    vals = [arg.meta.get("example_value") if isinstance(arg, fx.Node) else None for arg in node.args[:2]]
    first, second = vals
    return isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor) and first.ndim > 1 and second.ndim == 2


def _is_elementwise(node: fx.Node) -> bool:
    if len(node.all_input_nodes) != 1:
        return False
    others = (*node.args[1:], *node.kwargs.values())
    if node.target in SCALED:
        return all(other is None or isinstance(other, (int, float, torch.dtype)) for other in others)
    known = METHODS if node.op == "call_method" else EACH
    return not others and node.target in known


def _selects_rows(node: fx.Node) -> bool:
    """Return whether this selects rows by slices and numbers that are known before the product."""
    source, index = node.args
    assert isinstance(source, fx.Node)
    items = index if isinstance(index, tuple) else (index,)
    if node.all_input_nodes != [source] or not all(isinstance(item, (slice, int)) or item is ... for item in items):
        return False
    rank = source.meta["example_value"].ndim
    full = slice(None, None, None)
    if ... in items:
        at = items.index(...)
        items = (*items[:at], *[full] * (rank - len(items) + 1), *items[at + 1 :])
    return len(items) < rank or items[-1] == full


def _is_returned(node: fx.Node) -> bool:
    """Return whether the graph returns a tensor in the memory of `node`."""
    returned = (result.meta.get("example_value") for result in node.graph.output_node().all_input_nodes)
    memory = memory_of(node.meta["example_value"])
    return any(memory_of(val) == memory for val in returned if isinstance(val, torch.Tensor))
