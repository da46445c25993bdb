"""Adds temporary results to a joint graph, which make the partition compute them in forward.

Input: an ATen graph, which is changed in place; its additional results are removed after the partition.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

from torch import fx


def add_results(joint: fx.GraphModule, kept: Sequence[fx.Node], position: int) -> int:
    """Add the results `kept` before the result at `position`; return their number.

    A partition computes in forward whatever forward returns.

    >>> from fusion.inspect.examples import show_graph
    >>> from torch import empty
    >>> def keep_first(graph):
    ...     first = next(node for node in graph.graph.nodes if node.op == "call_function")
    ...     add_results(graph, [first], 1)
    >>> show_graph(keep_first, lambda x: x.sin().cos(), empty(3))
      sin = sin(x)
      cos = cos(sin)
    - return cos
    + return cos, sin
    """
    if kept:
        change_results(joint, lambda results: [*results[:position], *kept, *results[position:]])
        _described(
            joint,
            lambda descriptions: [*descriptions[:position], *(descriptions[0] for _ in kept), *descriptions[position:]],
        )
        joint.recompile()
    return len(kept)


def drop_results(graph: fx.GraphModule, start: int, stop: int) -> None:
    """Remove the results from `start` to `stop`; if backward needs them, they also come after these.

    >>> from fusion.inspect.examples import show_graph
    >>> from torch import empty
    >>> show_graph(lambda graph: drop_results(graph, 1, 2), lambda x: (x.sin(), x.cos(), x.exp()), empty(3))
      sin = sin(x)
      cos = cos(x)
      exp = exp(x)
    - return sin, cos, exp
    + return sin, exp
    """
    if start < stop:
        change_results(graph, lambda results: [*results[:start], *results[stop:]])
        _described(graph, lambda descriptions: [*descriptions[:start], *descriptions[stop:]])
        graph.recompile()


def change_results(graph: fx.GraphModule, change: Callable[[list[fx.Node | None]], list[fx.Node | None]]) -> None:
    """Apply `change` to the list of the graph's results."""
    output = graph.graph.output_node()
    output.args = (tuple(change(list(cast("Sequence[fx.Node | None]", output.args[0])))),)


def _described(graph: fx.GraphModule, change: Callable[[list[object]], list[object]]) -> None:
    """Apply `change` to AOTAutograd's descriptions of the results, if there are any."""
    output = graph.graph.output_node()
    if "desc" in output.meta:
        output.meta["desc"] = change(list(output.meta["desc"]))
