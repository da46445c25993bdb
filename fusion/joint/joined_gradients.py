"""Joins the gradients of layers that read the same tensor: one product for their weights, one for the tensor.

Each layer `y = x · wᵀ + b` with the gradient `g` of its result has three gradients: `gᵀ · x` of the weight, `g · w` of
the tensor, and the sum of the rows of `g`, of the bias.  Layers of the same `x` (the queries, keys and values of
attention) have small products, each of which leaves a part of the device idle, and the gradients of `x` are added
afterwards.  With the gradients of their results side by side in one matrix, and their weights below one another, there
is one product of each kind, and the sum is part of it.  (measured: docs/performance.md, `joined_gradients`)

The matrix is a copy.  It is made where that costs less than the launches, and the reads of sums, that it saves.

Input: the backward half of a partitioned graph; it is changed in place.  The gradients of weights are rows of one
tensor.  Unchanged: gradients of symbolic sizes or with other readers, gradients that are computed element by element
(which kernels of products compute with their result), and layers with another product between them, for whose time all
their gradients would have to be kept.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import cast

import torch
from torch import fx

from fusion.codegen.price import Rates
from fusion.joint.facts import axis_order, is_rearranged
from fusion.joint.layout_plans import bytes_of, is_known, is_view
from fusion.joint.writing import write

aten = torch.ops.aten

MATRIX_PRODUCTS = {aten.mm.default, aten.addmm.default}


@dataclass(frozen=True, slots=True)
class _Layer:
    """The gradients of one layer.

    Attributes:
        gradient: of its result, a matrix.
        weight: the product that is the gradient of the weight.
        back: the product that is a term of the gradient of the layer's input, if there is one.
        biases: the sums of the rows.
    """

    gradient: fx.Node
    weight: fx.Node
    back: fx.Node | None
    biases: tuple[fx.Node, ...]


@dataclass(frozen=True, slots=True)
class _Total:
    """A sum of products and `others`."""

    node: fx.Node
    others: tuple[fx.Node, ...]


def join_gradients(backward: fx.GraphModule, rates: Rates) -> None:
    """Join the gradients of layers that read the same tensor, where `rates` say that it saves time.

    >>> from fusion.inspect.examples import show_graph
    >>> from torch import empty
    >>> def backward(x, p, q, v, w):
    ...     g, h = p @ p, q @ q
    ...     return g.t() @ x, g.sum(0), h.t() @ x, h.sum(0), g @ v + h @ w
    >>> rates = Rates(launch_us=4.0, bandwidth=4e6, flops=1e7, matrix_flops=8e8, product_us=1.0)
    >>> show_graph(lambda graph: join_gradients(graph, rates), backward, *(empty(32, 32) for _ in range(5)))
      mm = mm(p, p)
      mm_1 = mm(q, q)
    - t = t(mm)
    + cat = cat([mm, mm_1], 1)
    + t_2 = t(cat)
    - mm_2 = mm(t, x)
    + mm_6 = mm(t_2, x)
    + slice_1 = slice.Tensor(mm_6, 0, 0, 32)
    - sum_1 = sum.dim_IntList(mm, [0])
    + sum_3 = sum.dim_IntList(cat, [0])
    + slice_2 = slice.Tensor(sum_3, 0, 0, 32)
    + slice_3 = slice.Tensor(mm_6, 0, 32, 64)
    + slice_4 = slice.Tensor(sum_3, 0, 32, 64)
    + cat_1 = cat([v, w])
    + mm_7 = mm(cat, cat_1)
    + return slice_1, slice_2, slice_3, slice_4, mm_7
    - t_1 = t(mm_1)
    - mm_3 = mm(t_1, x)
    - sum_2 = sum.dim_IntList(mm_1, [0])
    - mm_4 = mm(mm, v)
    - mm_5 = mm(mm_1, w)
    - add = add.Tensor(mm_4, mm_5)
    - return mm_2, sum_1, mm_3, sum_2, add
    """
    changed = False
    for layers in list(_groups(backward.graph)):
        total = _total(layers)
        gains = {each: _gain(layers, each, rates) for each in (None, total)}
        best = max(gains, key=lambda each: gains[each])
        if gains[best] > 0:
            changed |= _join(backward.graph, layers, best)
    if changed:
        backward.graph.eliminate_dead_code()
        backward.graph.lint()
        backward.recompile()


def _groups(graph: fx.Graph) -> Iterator[list[_Layer]]:
    """Yield the layers of each tensor that have no other product between them."""
    order = {node: number for number, node in enumerate(graph.nodes)}
    products = [node for node in order if node.target in MATRIX_PRODUCTS]
    layers = defaultdict[fx.Node, list[_Layer]](list)
    for product in products:
        layer = _layer(product)
        if layer is not None:
            layers[cast(fx.Node, product.args[1])].append(layer)
    for same in layers.values():
        own = {product for layer in same for product in (layer.weight, layer.back)}
        foreign = [order[product] for product in products if product not in own]
        group = same[:1]
        for before, layer in pairwise(same):
            apart = any(order[before.weight] < place < order[layer.weight] for place in foreign)
            if apart or not _alike(before, layer):
                yield from [group] if len(group) > 1 else []
                group = []
            group.append(layer)
        yield from [group] if len(group) > 1 else []


def _alike(first: _Layer, second: _Layer) -> bool:
    """Return whether the gradients of two layers may be columns of one matrix."""
    one, other = first.gradient.meta["val"], second.gradient.meta["val"]
    return one.dtype is other.dtype and one.shape[0] == other.shape[0]


def _layer(product: fx.Node) -> _Layer | None:
    """Return the layer of whose weight this product is the gradient; None if it is none, or may not be joined."""
    if product.target is not aten.mm.default:
        return None
    turned = cast(fx.Node, product.args[0])
    if axis_order(turned) != [1, 0] or len(turned.users) > 1:
        return None
    gradient = turned.all_input_nodes[0]
    if not is_known(gradient.meta["val"]) or not is_known(product.meta["val"]) or _is_pointwise(gradient):
        return None
    backs = [user for user in gradient.users if user.target is aten.mm.default and user.args[0] is gradient]
    biases = tuple(user for user in gradient.users if _sums_rows(user, gradient))
    if len(backs) > 1 or len(gradient.users) != 1 + len(backs) + len(biases):
        return None
    return _Layer(gradient, product, backs[0] if backs else None, biases)


def _is_pointwise(node: fx.Node) -> bool:
    """Return whether a tensor is computed element by element, apart from conversions and a change of its order."""
    while node.target is aten._to_copy.default or (node.all_input_nodes and is_rearranged(node)):
        node = node.all_input_nodes[0]
    return torch.Tag.pointwise in getattr(node.target, "tags", ())


def _sums_rows(node: fx.Node, matrix: fx.Node) -> bool:
    """Return whether a node is the sum of the rows of a matrix, in the matrix's type."""
    return (
        node.target is aten.sum.dim_IntList
        and node.args[0] is matrix
        and node.args[1] in ([0], [-2])
        and node.meta["val"].dtype is matrix.meta["val"].dtype
    )


def _total(layers: Sequence[_Layer]) -> _Total | None:
    """Return the sum of the gradients that the layers contribute to that of their input; None if there is none."""
    terms = dict[fx.Node, fx.Node]()
    tops = set[fx.Node]()
    for layer in layers:
        if layer.back is None or layer.back.meta["val"].shape[1] != layers[0].weight.meta["val"].shape[1]:
            return None
        term = layer.back
        while len(term.users) == 1 and is_view(user := next(iter(term.users))) and _keeps_order(user):
            term = user
        terms[term] = layer.back
        tops.add(_top(term))
    if len(tops) > 1:
        return None
    (top,) = tops
    others = [leaf for leaf in _leaves(top, top) if leaf not in terms]
    return _Total(top, tuple(others)) if top not in terms else None


def _keeps_order(view: fx.Node) -> bool:
    """Return whether a view only has other sizes than its contiguous operand."""
    return view.target in (aten.view.default, aten._unsafe_view.default, aten.reshape.default)


def _top(term: fx.Node) -> fx.Node:
    """Return the last of the sums, each of which is only a term of the next one, that begin with `term`."""
    while len(term.users) == 1 and _adds(user := next(iter(term.users)), term):
        term = user
    return term


def _adds(node: fx.Node, term: fx.Node) -> bool:
    """Return whether a node adds two tensors like its result, of which one is `term`."""
    if node.target is not aten.add.Tensor or node.kwargs or len(node.all_input_nodes) != 2:
        return False
    result = node.meta["val"]
    values = [arg.meta["val"] for arg in node.all_input_nodes]
    return term in node.all_input_nodes and all(
        value.shape == result.shape and value.dtype is result.dtype for value in values
    )


def _leaves(node: fx.Node, top: fx.Node) -> list[fx.Node]:
    """Return the terms of a sum in order; sums with other readers are terms."""
    first = node.all_input_nodes[0] if node.all_input_nodes else node
    if not _adds(node, first) or (node is not top and len(node.users) > 1):
        return [node]
    return [leaf for arg in node.all_input_nodes for leaf in _leaves(arg, top)]


def _gain(layers: Sequence[_Layer], total: _Total | None, rates: Rates) -> float:
    """Return the microseconds that are saved by joining the gradients of weights and, with `total`, of the input."""
    more = len(layers) - 1
    call = rates.launch_us + rates.product_us
    matrix = sum(bytes_of(layer.gradient.meta["val"]) for layer in layers)
    saved = more * call
    if all(layer.biases for layer in layers):  # the sums read the matrix, which is written meanwhile
        saved += more * rates.launch_us - rates.memory_us(matrix)
    else:
        saved -= rates.launch_us + rates.memory_us(2 * matrix)
    if total is not None:
        backs = [cast(fx.Node, layer.back) for layer in layers]
        weights = sum(bytes_of(cast(fx.Node, back.args[1]).meta["val"]) for back in backs)
        saved += more * (call + rates.memory_us(bytes_of(total.node.meta["val"])))
        saved -= rates.launch_us + rates.memory_us(2 * weights)
    return saved


def _join(graph: fx.Graph, layers: Sequence[_Layer], total: _Total | None) -> bool:
    """Replace the products and sums of the layers; return whether their readers allow it."""
    order = {node: number for number, node in enumerate(graph.nodes)}
    below = [cast(fx.Node, cast(fx.Node, layer.back).args[1]) for layer in layers if total is not None]
    shared = cast(fx.Node, layers[0].weight.args[1])
    read = [shared, *(layer.gradient for layer in layers), *below]
    last = max(read, key=lambda node: order[node])
    moved = _early_readers([node for layer in layers for node in (layer.weight, *layer.biases)], order, order[last])
    if moved is None or not moved.isdisjoint(read) or (total is not None and order[total.node] < order[last]):
        return False
    widths = [layer.gradient.meta["val"].shape[1] for layer in layers]
    parts = list(pairwise(accumulate(widths, initial=0)))
    first, summed = layers[0], None
    with graph.inserting_before(last.next):
        matrix = write(first.gradient, aten.cat.default, [layer.gradient for layer in layers], 1)
        weights = write(first.weight, aten.mm.default, write(first.weight, aten.t.default, matrix), shared)
        for layer, (begin, end) in zip(layers, parts, strict=True):
            layer.weight.replace_all_uses_with(write(layer.weight, aten.slice.Tensor, weights, 0, begin, end))
            for bias in layer.biases:
                summed = summed or write(bias, aten.sum.dim_IntList, matrix, [0])
                part = write(bias, aten.slice.Tensor, summed, 0, begin, end)
                bias.replace_all_uses_with(_shaped(part, bias))
        if total is not None:
            product = write(total.node, aten.mm.default, matrix, write(total.node, aten.cat.default, below))
    for node in sorted(moved, key=lambda node: order[node]):
        node.all_input_nodes[0].append(node)
    if total is not None:
        _replace_total(graph, total, product)
    return True


def _early_readers(nodes: Iterable[fx.Node], order: Mapping[fx.Node, int], last: int) -> set[fx.Node] | None:
    """Return the nodes up to the place `last` that read `nodes`, or one another; None if they are not all views."""
    found, todo = set[fx.Node](), list(nodes)
    while todo:
        for user in todo.pop().users:
            if order[user] <= last and user not in found:
                if not is_view(user) or len(user.all_input_nodes) != 1:
                    return None
                found.add(user)
                todo.append(user)
    return found


def _replace_total(graph: fx.Graph, total: _Total, product: fx.Node) -> None:
    """Replace a sum of products by their joined product and the other terms."""
    with graph.inserting_before(total.node):
        value = _shaped(product, total.node)
        for other in total.others:
            value = write(total.node, aten.add.Tensor, value, other)
    total.node.replace_all_uses_with(value)


def _shaped(node: fx.Node, like: fx.Node) -> fx.Node:
    """Return a contiguous tensor with the sizes of `like`."""
    sizes = like.meta["val"].shape
    return node if node.meta["val"].shape == sizes else write(like, aten.view.default, node, [*sizes])
