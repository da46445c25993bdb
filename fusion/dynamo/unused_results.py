"""Keeps results that nothing reads, where their computation may refuse data, as eager does.

Input: Dynamo's graph; it is changed in place.  A result without a reader that depends on a tensor of integers, or on an
operation that checks floats, through results that nothing else reads, is passed to an operation with an effect
(`lowering/checks/unused.py`), so that it is traced and lowered.  If lowering then finds no check, nothing is computed.

Dynamo itself drops elements that nothing reads (`x[i]`) before it calls a backend; within `unused_elements_kept`, those
that may be refused stay.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch import fx
from torch._dynamo.output_graph import OutputGraph

from fusion.dynamo.writes import written_by
from fusion.lowering.checks.unused import CHECKING, KEEP, is_integral


def keep_unused_results(graph: fx.GraphModule) -> None:
    """Keep results that nothing reads and whose computation may refuse data.

    >>> from fusion.inspect.examples import show_captured
    >>> from torch import empty
    >>> def f(x, i):
    ...     unused = x[i].exp()
    ...     return x + 1
    >>> show_captured(keep_unused_results, f, empty(3), empty(2, dtype=int))
      getitem = getitem(l_x_, l_i_)
      unused = exp(getitem)
    + keep_default = keep(unused)
      add = add(l_x_, 1)
      return add
    """
    unused = _unused(graph.graph)
    kept = [node for node in graph.graph.nodes if node in unused and not node.users and _may_refuse(node, unused)]
    for node in kept:
        _keep(_result(node), node)
    if kept:
        graph.recompile()


@contextmanager
def unused_elements_kept() -> Iterator[None]:
    """Let Dynamo not drop elements that nothing reads and whose indices may be refused.

    Dynamo compiles in one thread at a time, the one within this context.
    """
    drop = OutputGraph.remove_unused_graphargs

    def keep_elements(output: OutputGraph) -> None:
        unused = _unused(output.graph)
        for node in list(output.graph.find_nodes(op="call_function", target=operator.getitem)):
            if not node.users and _may_refuse(node, unused):
                _keep(node, node)
        drop(output)

    with mock.patch.object(OutputGraph, "remove_unused_graphargs", keep_elements):
        yield


def _unused(graph: fx.Graph) -> set[fx.Node]:
    """Return the calls that no result of the graph depends on."""
    unused: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node.op in ("call_function", "call_method") and unused.issuperset(node.users):
            unused.add(node)
    return unused


def _keep(result: fx.Node, node: fx.Node) -> None:
    """Read a result of a node after it."""
    with node.graph.inserting_after(node):
        call = node.graph.call_function(KEEP, (result,))
        call.meta.update({key: node.meta[key] for key in ("stack_trace", "nn_module_stack") if key in node.meta})
        call.meta["example_value"] = None


def _result(node: fx.Node) -> fx.Node:
    """Return the result of a call: the updated tensor for an assignment (`x[i] = y`), which returns nothing."""
    return node.args[0] if node.target is operator.setitem and isinstance(node.args[0], fx.Node) else node


def _may_refuse(node: fx.Node, unused: set[fx.Node]) -> bool:
    """Return whether a result, a dense tensor that updates no other, depends on data that may be refused."""
    value, written = _result(node).meta.get("example_value"), written_by(node)
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return False
    if written is not None and written not in unused:
        return False
    stack, seen = [node], set[fx.Node]()
    while stack:
        current = stack.pop()
        if current in seen:
            continue
        seen.add(current)
        name = current.target if isinstance(current.target, str) else getattr(current.target, "__name__", "")
        if name.rstrip("_") in CHECKING or any(map(_holds_integers, current.all_input_nodes)):
            return True
        stack += [source for source in current.all_input_nodes if source in unused]
    return False


def _holds_integers(node: fx.Node) -> bool:
    value = node.meta.get("example_value")
    return isinstance(value, torch.Tensor) and is_integral(value.dtype)
