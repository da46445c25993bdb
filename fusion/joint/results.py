"""Results of a joint graph: what forward returns for backward alone, and only while the graph is being parted.

Input: an ATen graph, whose results are changed in place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

from torch import fx


def add_results(joint: fx.GraphModule, kept: Sequence[fx.Node], position: int) -> int:
    """Have the graph return `kept`, too, before its result at `position`; returns how many they are.

    A partition computes in forward what forward returns, whatever it would make of it otherwise.
    """
    if kept:
        change_results(joint, lambda results: [*results[:position], *kept, *results[position:]])
        _described(joint, lambda found: [*found[:position], *(found[0] for _ in kept), *found[position:]])
        joint.recompile()
    return len(kept)


def drop_results(graph: fx.GraphModule, start: int, stop: int) -> None:
    """Have the graph not return its results from `start` to `stop`; what backward needs of them comes after these."""
    if start < stop:
        change_results(graph, lambda results: [*results[:start], *results[stop:]])
        _described(graph, lambda found: [*found[:start], *found[stop:]])
        graph.recompile()


def change_results(graph: fx.GraphModule, change: Callable[[list[fx.Node | None]], list[fx.Node | None]]) -> None:
    """Replace the results of the graph by what `change` makes of them."""
    output = graph.graph.output_node()
    output.args = (tuple(change(list(cast("Sequence[fx.Node | None]", output.args[0])))),)


def _described(graph: fx.GraphModule, change: Callable[[list[object]], list[object]]) -> None:
    """AOTAutograd says of each result what it is, where it does."""
    output = graph.graph.output_node()
    if "desc" in output.meta:
        output.meta["desc"] = change(list(output.meta["desc"]))
