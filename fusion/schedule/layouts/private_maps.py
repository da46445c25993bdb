"""Finds the maps whose results only generated kernels read, so that they may be stored in another way.

Library alternatives of products (`Program.library`) read maps as well: a pass that changes the readers of a map changes
them, too.
"""

from __future__ import annotations

from collections.abc import Callable

from fusion.lowering.ir.chunks import Chunked
from fusion.lowering.ir.program import Compute, Extern, Map, Node, Program, Scatter, reads


def private_maps(program: Program) -> dict[str, Map]:
    """Return the maps by result, without those that the caller, calls, library alternatives or scatters see."""
    calls = [node for node in program.nodes if isinstance(node, (Extern, Chunked))]
    calls += [node for steps in program.library.values() for node in steps if isinstance(node, (Extern, Chunked))]
    seen = {name for call in calls for name in reads(call)} | program.output_names()
    seen |= {node.start for node in program.nodes if isinstance(node, Scatter)}
    return {node.out: node for node in program.nodes if isinstance(node, Map) and node.out not in seen}


def alternatives_with(program: Program, change: Callable[[Compute], Compute]) -> dict[str, tuple[Node, ...]]:
    """Return the library alternatives, with `change` applied to each of their nodes that is not a call."""

    def changed(node: Node) -> Node:
        return node if isinstance(node, (Extern, Chunked)) else change(node)

    return {out: tuple(map(changed, steps)) for out, steps in program.library.items()}
