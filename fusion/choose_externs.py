"""Chooses which operations of a graph are lowered to be generated, and which stay the library's calls.

Input: a captured graph and what the target can do and what that costs; output: the graph as a Program. Left to the
library are products that it computes faster and that nothing reads where they are made, and updates of memory whose
order the caller wants fixed, where the target has none.  Strict numerics leave it all of both.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import sympy
import torch
from torch import fx

from fusion.codegen.target import Capabilities, Target
from fusion.graphs import main_device
from fusion.lowering.lower import lower
from fusion.lowering.program import Contract, Program
from fusion.schedule.chained import stream
from fusion.schedule.chunks import in_chunks
from fusion.schedule.rewrites.inline import inline_cheap_maps
from fusion.schedule.rewrites.one_hot_sums import select_terms


def lower_for(
    graph: fx.GraphModule, target: Target, hints: Mapping[sympy.Symbol, int] | None, workspace: int
) -> Program:
    """`graph` as `target` is to have it; products of more than `workspace` bytes are to be made in chunks.

    Raises:
        Unsupported: the graph as a whole cannot be represented.
    """
    capabilities, place = target.capabilities, main_device(graph)
    if target.numerics.strict:
        return lower(graph, device=place, contractions=(), scatters=frozenset(), rounded=True)
    wanted = _products(graph, capabilities, hints, workspace)
    scatters, small = _scatters(capabilities), _small(capabilities)
    return lower(graph, device=place, contractions=wanted, scatters=scatters, small=small)


def _small(capabilities: Capabilities) -> int:
    """How many multiplications the scalar units do while the library's call of a product begins."""
    behind = 1 / capabilities.flops - 1 / capabilities.matrix_flops
    return int(capabilities.launch_us / behind / 2)


def _products(
    graph: fx.GraphModule, capabilities: Capabilities, hints: Mapping[sympy.Symbol, int] | None, workspace: int
) -> Collection[str] | None:
    """The matrix products to lower as contractions, by the names of their nodes; None for all.

    Where the library multiplies faster than what is generated, only those that something walks at once, or that are
    made in chunks.
    """
    if capabilities.lone_products and "dot" in capabilities.fold_ops:
        return None
    scatters = _scatters(capabilities)
    whole = select_terms(inline_cheap_maps(lower(graph, device=main_device(graph), scatters=scatters)))
    program = in_chunks(whole, capabilities, workspace, hints)
    outside = {node.out for node in program.nodes if isinstance(node, Contract)}
    made = [node for node in whole.nodes if isinstance(node, Contract) and node.out not in outside]
    program, walked = stream(program, capabilities, hints)
    nodes = (program.nodes[member] for cluster in walked for member in cluster.members)
    made += [node for node in nodes if isinstance(node, Contract)]
    origins = {**whole.origins, **program.origins}  # streams make their tiles under other names
    return {origins[node.out].name for node in made}


def _scatters(capabilities: Capabilities) -> frozenset[str]:
    """What may be done where sources meet: nothing that depends on their order, if the caller forbids that."""
    if capabilities.ordered or not torch.are_deterministic_algorithms_enabled():
        return capabilities.scatters
    return capabilities.scatters & {"max", "min"}
