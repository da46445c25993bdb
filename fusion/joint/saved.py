"""Decides which values are saved between forward and backward, and in which precision.

A forward kernel has the maximum or the sum of a row in float32; if the row has 16 bits, eager stores it in 16 bits.
There it is as precise as the row, which was stored as well.  Here backward recomputes the row in float32, and a rounded
maximum is not the maximum of that row: exp(s - m) would be off by up to exp(|m| / 256), and so the full row.  So
statistics of 16-bit rows are saved in float32.  So are the statistics that a norm returns beside its result, which
eager's CPU kernels round: backward subtracts the mean from the row, and a row of one element is that mean.

A running log-sum-exp is a statistic of the row up to each point, as large as the row: if it is rounded, a value of
10000 is off by up to 4, and exp(x - it) by a factor of 50.  Usually it is a result of the program as well, in 16 bits:
a running value of the row in float32 is computed and saved, and rounded for that result.

An input that backward needs is saved as it was when forward began.  The partition may choose an input where eager saves
a tensor computed from it; if the program changes the input in place, it would have another value by then.

A saved tensor whose memory neither the caller nor another saved tensor shares is marked as `DONATED`: backward may
overwrite it.

Input: the graphs of forward and backward after the partition, which are both changed in place.  Unchanged: values that
are no statistics of rows, or have other dtypes, and inputs of the graph that do not change.
"""

from __future__ import annotations

from collections import Counter
from operator import getitem
from typing import cast

import torch
from torch import fx
from torch._functorch._aot_autograd.descriptors import InputMutationAOTOutput
from torch._ops import OpOverload

from fusion.joint.factors import is_tensor, value_of
from fusion.joint.facts import folds, lowered, value_of_call
from fusion.joint.writing import convert, write
from fusion.lowering.ir.program import Scan
from fusion.lowering.ir.scalar_ops import HALVES
from fusion.lowering.ir.sizes import elements
from fusion.lowering.rules.conversion import ONLY_STORED

aten = torch.ops.aten

DONATED = "donated"
"""The mark of an input of backward to which nothing else refers."""

MIN_ROW = 4
"""The smallest ratio of a row's size to its statistic's size for which that counts as a statistic."""


def widen_statistics(forward: fx.GraphModule, backward: fx.GraphModule, outputs: int) -> None:
    """Save statistics of 16-bit rows in float32.

    Args:
        outputs: the number of forward results that are the program's own; the others are saved for backward.

    >>> from fusion.inspect.examples import show_graph, traced
    >>> from torch import bfloat16, empty
    >>> def f(x):
    ...     y = x * 2
    ...     return y.sin(), y.amax(-1)
    >>> forward = traced(f, empty(3, 8, dtype=bfloat16))
    >>> backward = traced(lambda amax, g: amax * g, empty(3, dtype=bfloat16), empty(3, dtype=bfloat16))
    >>> show_graph(lambda graph: widen_statistics(graph, backward, 1), forward)
      mul = mul.Tensor(x, 2)
      sin = sin(mul)
      amax = amax(mul, [-1])
    - return sin, amax
    + _to_copy = _to_copy(amax, dtype=torch.float32)
    + return sin, _to_copy
    >>> show_graph(lambda graph: None, backward)
      _to_copy = _to_copy(amax, dtype=torch.bfloat16)
      mul = mul.Tensor(_to_copy, g)
      return mul
    """
    output = forward.graph.output_node()
    results = list(cast("list[fx.Node]", output.args[0]))
    backward_inputs = {node.name: node for node in backward.graph.nodes if node.op == "placeholder"}
    changed = False
    for position, node in enumerate(results):
        if position < outputs or not is_tensor(node) or node.name not in backward_inputs or not _is_statistic(node):
            continue
        if _is_running(node):
            results[position], narrow = _rounded_last(node)
            results[:] = [narrow if result is node else result for result in results]
        else:
            with forward.graph.inserting_before(output):
                results[position] = convert(node, torch.float32)
        _take_wide(backward_inputs[node.name], value_of(results[position]))
        changed = True
    if changed:
        output.args = (tuple(results),)
        for graph in (forward, backward):
            graph.graph.lint()
            graph.recompile()


def keep_unchanged(forward: fx.GraphModule, backward: fx.GraphModule, outputs: int) -> None:
    """Save copies of inputs that the program changes in place, and of views of them; backward gets their strides.

    Args:
        outputs: the number of forward results that are the program's own; the others are saved for backward.

    >>> from fusion.inspect.examples import show_graph
    >>> from torch import empty
    >>> backward = fx.GraphModule({}, fx.Graph())
    >>> def f(x):
    ...     y, z = x.cos(), x.t()
    ...     x.copy_(x.sin())
    ...     return y, z
    >>> show_graph(lambda graph: keep_unchanged(graph, backward, 1), f, empty(2, 3))
      cos = cos(x)
      t = t(x)
    + clone = clone(t)
      sin = sin(x)
      copy_ = copy_(x, sin)
    - return cos, t
    + return cos, clone
    """
    changed = _changed_inputs(forward)
    output = forward.graph.output_node()
    results = list(cast("list[fx.Node]", output.args[0]))
    positions = [k for k in range(outputs, len(results)) if _memory_of(results[k]) in changed] if changed else []
    backward_inputs = {node.name: node for node in backward.graph.find_nodes(op="placeholder")}
    for position in positions:
        node = results[position]
        with forward.graph.inserting_after(node):  # before the mutation, which comes last
            copy = results[position] = write(node, aten.clone.default, node)
        if node.name in backward_inputs:  # the copy has no gaps between its elements
            placeholder = backward_inputs[node.name]
            placeholder.meta = {**placeholder.meta, "val": value_of(copy)}
            placeholder.meta.pop("tensor_meta", None)
    if positions:
        output.args = (tuple(results),)
        forward.graph.lint()
        forward.recompile()


def mark_donated(forward: fx.GraphModule, backward: fx.GraphModule, outputs: int) -> None:
    """Mark saved tensors that only backward refers to.

    Args:
        outputs: the number of forward results that are the program's own; the others are saved for backward.

    >>> from fusion.inspect.examples import show_graph, traced
    >>> from torch import empty
    >>> forward = traced(lambda x: (x.sin(), x.cos()), empty(3))
    >>> backward = traced(lambda cos, tangents: cos * tangents, empty(3), empty(3))
    >>> show_graph(lambda graph: mark_donated(forward, graph, 1), backward)
    + input cos   # donated
      mul = mul.Tensor(cos, tangents)
      return mul
    """
    results = cast("list[fx.Node | None]", forward.graph.output_node().args[0])
    input_memory = {_memory(node) for node in forward.graph.find_nodes(op="placeholder")}
    shared = Counter(map(_memory, results))
    unshared = {
        node.name
        for node in results[outputs:]
        if node is not None
        and _memory(node) is not None
        and shared[_memory(node)] == 1
        and _memory(node) not in input_memory
    }
    for node in backward.graph.find_nodes(op="placeholder"):
        if node.name in unshared and is_tensor(node):
            node.meta[DONATED] = True


def _memory(node: fx.Node | None) -> int | None:
    """Return an identifier of a tensor's storage, as traced."""
    return value_of(node).untyped_storage()._cdata if node is not None and is_tensor(node) else None


def _changed_inputs(forward: fx.GraphModule) -> set[fx.Node]:
    """Return the inputs that the graph overwrites, and those whose new values it returns."""
    holders = forward.graph.find_nodes(op="placeholder")
    copies = forward.graph.find_nodes(op="call_function", target=aten.copy_.default)
    described = forward.graph.output_node().meta.get("desc", ())
    later = [desc.mutated_input for desc in described if isinstance(desc, InputMutationAOTOutput)]
    return {cast(fx.Node, copy.args[0]) for copy in copies} | {
        node for node in holders if node.meta.get("desc") in later
    }


def _memory_of(node: fx.Node) -> fx.Node:
    """Return the base of a view, or the node itself."""
    while isinstance(node, fx.Node) and (node.target is getitem or getattr(node.target, "is_view", False)):
        node = cast(fx.Node, node.args[0])
    return node


def _rounded_last(node: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Compute a running statistic in float32; return it, and its rounding, which replaces the statistic."""
    row, *rest = node.args
    graph = node.graph
    with graph.inserting_before(node):
        wide_row = convert(cast(fx.Node, row), torch.float32)
        wide = write(node, cast(OpOverload, node.target), wide_row, *rest)
        narrow = convert(wide, value_of(node).dtype)
    narrow.meta[ONLY_STORED] = True
    node.replace_all_uses_with(narrow)
    graph.erase_node(node)
    return wide, narrow


def _take_wide(placeholder: fx.Node, wide: torch.Tensor) -> None:
    """Let backward take a statistic in float32, and read it rounded, as eager has it."""
    dtype = value_of(placeholder).dtype
    users = list(placeholder.users)
    placeholder.meta = {**placeholder.meta, "val": wide}
    placeholder.meta.pop("tensor_meta", None)
    with placeholder.graph.inserting_after(placeholder):
        narrow = convert(placeholder, dtype)
    narrow.meta[ONLY_STORED] = True
    for user in users:
        user.replace_input_with(placeholder, narrow)


def _is_statistic(node: fx.Node) -> bool:
    """Return whether this is a 16-bit statistic: running, beside a norm's result, or maps of reductions of rows."""
    if value_of(node).dtype not in HALVES:
        return False
    if _is_running(node):
        return True
    if node.target is getitem and _is_side_result(node):
        return True
    size = elements(value_of(node).shape)
    todo, seen = [node], {node}
    while todo:
        node = todo.pop()
        source = cast(fx.Node, node.args[0]) if node.target is getitem else node
        if folds(source):
            row = next(filter(is_tensor, source.all_input_nodes))
            small = elements(value_of(row).shape) >= MIN_ROW * max(size, elements(value_of(node).shape))
            if small and row.op != "placeholder" and value_of(row).dtype.is_floating_point:
                return True
        elif value_of_call(node) is not None:
            fresh = [arg for arg in node.all_input_nodes if is_tensor(arg) and arg not in seen]
            seen.update(fresh)
            todo += fresh
    return False


def _is_running(node: fx.Node) -> bool:
    """Return whether the result at each point is a logarithm of a sum of exponentials of the row up to there."""
    call = lowered(node)
    return call is not None and any(isinstance(step, Scan) and step.op == "logsumexp" for step in call.nodes)


def _is_side_result(statistic: fx.Node) -> bool:
    """Return whether this is a fold that a call returns beside a result as large as its operand, as norms do."""
    norm, position = cast("tuple[fx.Node, int]", statistic.args)
    first = norm.meta["val"][0]
    row = next(filter(is_tensor, norm.all_input_nodes))
    full_size = isinstance(first, torch.Tensor) and elements(first.shape) == elements(value_of(row).shape)
    return full_size and position > 0 and bool(folds(norm))
