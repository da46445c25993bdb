"""Finds the maps whose results only generated kernels read, so that they may be stored in another way."""

from __future__ import annotations

from fusion.lowering.ir.chunks import Chunked
from fusion.lowering.ir.program import Extern, Map, Program, Scatter, reads


def private_maps(program: Program) -> dict[str, Map]:
    """Return the maps by result, without those that the caller, calls, library alternatives or scatters see."""
    calls = [node for node in program.nodes if isinstance(node, (Extern, Chunked))]
    calls += [node for steps in program.library.values() for node in steps if isinstance(node, (Extern, Chunked))]
    seen = {name for call in calls for name in reads(call)} | program.output_names()
    seen |= {node.start for node in program.nodes if isinstance(node, Scatter)}
    return {node.out: node for node in program.nodes if isinstance(node, Map) and node.out not in seen}
