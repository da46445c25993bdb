"""Computes gradients that wait for one number in forward, while their operands are still live.

The gradient of a scalar loss is linear in the one incoming gradient, g.  Where a large product leads to the loss (the
logits of a language model), its gradient is g times a tensor that forward can compute already; computed in forward,
right after the loss and in the same chunks (`schedule/chunks`), neither the product nor its gradient has to be saved,
or computed twice.  Only the gradients of the product's operands remain, multiplied by g when it arrives, in their own
memory unless something else may still need them (`operations/ownership.py`).

The same holds for the gradient of a large input (logits that another region computes, predictions): computed by the
kernels that read the input for the loss, it need not be read again.  If g is 1, as it is for a loss that is not scaled,
nothing is left to do in backward; else the gradient is read and written once more (`codegen/scaled.py`).

Input: a functional joint graph, which is changed in place.  Unchanged: products that are small, or whose gradient
depends on more than one number or on it in a way not known to be linear, and paths with float16: its range is the
reason why losses are scaled, and g would come too late.  Gradients computed ahead are rounded once before they are
multiplied by g.

Source: Liger Kernel (Hsu et al. 2024) computes the gradient of a linear layer and its loss together, in chunks, by
hand-written kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from fusion.joint.dependence import is_tangent
from fusion.joint.factors import is_product, value_of
from fusion.joint.facts import lowered
from fusion.joint.linearity import is_gradient, is_linear
from fusion.lowering.ir.program import Map, Reduce, Scatter
from fusion.lowering.ir.sizes import elements
from fusion.operations.ownership import take_over

aten = torch.ops.aten

LARGE = 1 << 24
"""Bytes of a gradient that is computed ahead where nothing else than reading its operands is saved."""


def compute_loss_gradients(joint: fx.GraphModule, workspace: int) -> list[fx.Node]:
    """Move the gradient of every product of more than `workspace` bytes before the loss, where that is possible.

    Returns:
        The nodes that forward has to compute and save.

    >>> from fusion.inspect.examples import show_graph
    >>> from torch import empty
    >>> def f(x, w, tangents):
    ...     y = x @ w
    ...     gradient = tangents * y.cos()
    ...     return y.sin().sum(), gradient @ w.t()
    >>> show_graph(lambda graph: compute_loss_gradients(graph, 0), f, empty(3, 4), empty(4, 5), empty(()))
    + full_default = full([], 1.0, dtype=torch.float32, device=cpu)
      mm = mm(x, w)
      cos = cos(mm)
    - mul = mul.Tensor(tangents, cos)
    + mul_1 = mul.Tensor(full_default, cos)
      sin = sin(mm)
      sum_1 = sum(sin)
      t = t(w)
    - mm_1 = mm(mul, t)
    + mm_2 = mm(mul_1, t)   # save
    + take_over = take_over(mm_2, tangents)
    + mul_tensor = mul.Tensor(take_over, tangents)
    - return sum_1, mm_1
    + return sum_1, mul_tensor
    """
    kept: list[fx.Node] = []
    for product in list(joint.graph.nodes):
        if product.users and is_product(product) and _bytes(product) > workspace:
            waiting = depending_on_tangents(joint.graph)
            ends = _ends(product, waiting) if product not in waiting else []
            path = _path(ends, waiting)
            number = _linear_in(path)
            if ends and number is not None:
                kept += _move(ends, path, number)
                joint.graph.eliminate_dead_code()
    for gradient in _large_results(joint.graph):
        waiting = depending_on_tangents(joint.graph)
        path = _path([gradient], waiting)
        number = _linear_in(path)
        if number is not None and _reads_again(gradient, path, waiting):
            kept += _move([gradient], path, number)
            joint.graph.eliminate_dead_code()
    joint.recompile()
    return kept


def _large_results(graph: fx.Graph) -> list[fx.Node]:
    """Return the gradients among the results of a joint graph that are too large for a cache."""
    waiting = depending_on_tangents(graph)
    results = dict.fromkeys(graph.output_node().all_input_nodes)
    return [node for node in results if node in waiting and _holds_numbers(node) and _bytes(node) >= LARGE]


def _reads_again(gradient: fx.Node, path: list[fx.Node], waiting: set[fx.Node]) -> bool:
    """Return whether a gradient is generated code alone, and reads tensors of its size that forward reads, too."""
    steps = [node for node in path if node.op != "placeholder"]
    read = {arg for node in steps for arg in node.all_input_nodes if arg not in waiting}
    calls = [lowered(node) for node in steps]
    generated = all(
        call is not None and all(isinstance(node, (Map, Reduce, Scatter)) for node in call.nodes) for call in calls
    )
    return generated and any(_holds_numbers(node) and 2 * _bytes(node) >= _bytes(gradient) for node in read)


def _bytes(node: fx.Node) -> int:
    val = value_of(node)
    return elements(val.shape) * val.dtype.itemsize


def depending_on_tangents(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes that depend on a tangent."""
    dependent: set[fx.Node] = set()
    for node in graph.nodes:
        if is_tangent(node) or (node.op == "call_function" and any(arg in dependent for arg in node.all_input_nodes)):
            dependent.add(node)
    return dependent


def _ends(product: fx.Node, waiting: set[fx.Node]) -> list[fx.Node]:
    """Return the consumers of a product's gradient: products with it, and sums of it."""
    size = elements(value_of(product).shape)

    def is_wide(node: fx.Node) -> bool:
        val = node.meta.get("val")
        return isinstance(val, torch.Tensor) and elements(val.shape) >= size and not is_product(node)

    forward = _reached([product], lambda node: node not in waiting and is_wide(node))
    if any(user.op == "output" for node in forward for user in node.users):
        return []
    first = [user for node in forward for user in node.users if user in waiting and is_wide(user)]
    after = _reached(first, lambda node: node in waiting and not is_product(node))
    wide = {node for node in after if is_wide(node)}
    back = {node for node in after if any(user in wide for user in _reached([node], after.__contains__))}
    inner = wide | back
    # in the order in which they were reached, not that of a set: they name nodes, and names are part of cache keys
    ends = dict.fromkeys(user for node in after if node in inner for user in node.users if user not in inner)
    return [] if any(node.op == "output" for node in ends) else list(ends)


def _reached(start: Iterable[fx.Node], wanted: Callable[[fx.Node], bool]) -> dict[fx.Node, None]:
    """Return the nodes that can be reached from `start` through wanted ones, with `start`."""
    reached = dict.fromkeys(start)
    todo = list(reached)
    while todo:
        for user in todo.pop().users:
            if user not in reached and user.op == "call_function" and wanted(user):
                reached[user] = None
                todo.append(user)
    return reached


def _path(ends: Iterable[fx.Node], waiting: set[fx.Node]) -> list[fx.Node]:
    """Return all nodes that `ends` depend on, with them, in the order of the graph."""
    members: set[fx.Node] = set()
    todo = list(ends)
    while todo:
        node = todo.pop()
        if node not in members:
            members.add(node)
            todo.extend(arg for arg in node.all_input_nodes if arg in waiting)
    return [node for node in next(iter(members)).graph.nodes if node in members] if members else []


def _linear_in(path: list[fx.Node]) -> fx.Node | None:
    """Return the tangent, one number, that everything on `path` is linear in; None if there is none."""
    tangents = [node for node in path if node.op == "placeholder"]
    if len(tangents) != 1 or value_of(tangents[0]).ndim:
        return None
    inside = set(path)
    for node in path:
        if node.op == "placeholder":
            continue
        if not _holds_numbers(node) or value_of(node).dtype is torch.float16 or not _is_linear(node, inside):
            return None
    return tangents[0]


def _holds_numbers(node: fx.Node) -> bool:
    val = node.meta.get("val")
    return isinstance(val, torch.Tensor) and val.is_floating_point()


def _is_linear(node: fx.Node, inside: set[fx.Node]) -> bool:
    """Return whether a node is linear in its arguments `inside`."""
    gradient, *others = _tensors(node)
    if is_gradient(node) and gradient in inside and inside.isdisjoint(others):
        return True
    return is_linear(node, inside)


def _tensors(node: fx.Node) -> list[fx.Node]:
    """Return the tensor arguments of a node, with repetitions."""
    tensors: list[fx.Node] = []
    fx.node.map_arg((node.args, node.kwargs), tensors.append)
    return tensors


def _move(ends: list[fx.Node], path: list[fx.Node], number: fx.Node) -> list[fx.Node]:
    """Compute `path` for a tangent of 1, and multiply its ends, which are returned, by the tangent."""
    graph = number.graph
    copies: dict[fx.Node, fx.Node] = {}
    with graph.inserting_after(number):
        val = value_of(number)
        copies[number] = graph.call_function(aten.full.default, ([], 1.0), {"dtype": val.dtype, "device": val.device})
    copies[number].meta = {**number.meta, "val": val}
    for node in path[1:]:
        with graph.inserting_after(node):
            copies[node] = graph.node_copy(node, lambda arg: copies.get(arg, arg))
    for node in ends:
        with graph.inserting_after(copies[node]):
            taken = graph.call_function(take_over, (copies[node], number))
        with graph.inserting_after(taken):
            scaled = graph.call_function(aten.mul.Tensor, (taken, number))
        taken.meta, scaled.meta = dict(node.meta), dict(node.meta)
        copies[node].meta["recompute"] = CheckpointPolicy.MUST_SAVE
        node.replace_all_uses_with(scaled)
    return [copies[node] for node in ends]
