"""Duplicates the nodes of a tile that several chains compute, so that each chain has its own.

Input: a Program and its chains; output: an equal Program in which the nodes of every chain have no other readers, and
the chains as clusters of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fusion.lowering.ir.chunks import Chunked
from fusion.lowering.ir.program import Extern, Node, Program, reading, writes
from fusion.schedule.chained.place_producers import Chain
from fusion.schedule.clusters.legality import Cluster, positions
from fusion.schedule.iteration.naming import unused


def separated(program: Program, chains: Sequence[Chain]) -> tuple[Program, tuple[Cluster, ...]]:
    """Copy the tiles that several chains compute, and return each chain as a cluster of its own nodes."""
    owner: dict[int, int] = {}
    copies: dict[int, list[Node]] = {}  # position → copies inserted behind it
    buffers = dict(program.buffers)
    origins: dict[str, str] = {}
    inlined: dict[str, tuple[str, ...]] = {}
    renamed: list[dict[str, str]] = []
    for number, chain in enumerate(chains):
        names: dict[str, str] = {}
        for member in sorted(chain.places):
            node = program.nodes[member]
            assert not isinstance(node, (Extern, Chunked))
            if member not in owner:
                owner[member] = number
                continue
            names[node.out] = name = unused(f"{node.out}_{number}", buffers)
            buffers[name] = replace(buffers[node.out], name=name)
            origins[name] = node.out
            inlined[name] = program.operations_of(node.out)
            copies.setdefault(member, []).append(replace(reading(node, names), out=name))
        renamed.append(names)
    nodes: list[Node] = []
    for position, node in enumerate(program.nodes):
        if position in owner and not isinstance(node, (Extern, Chunked)):
            node = reading(node, renamed[owner[position]])
        nodes += [node, *copies.get(position, ())]
    library = {name: () for position in owner for name in writes(program.nodes[position])}  # they stay in their kernels
    changed = program.edited(nodes, buffers=buffers.values(), origins=origins, inlined=inlined, library=library)
    position_of = positions(changed)
    clusters = []
    for chain, names in zip(chains, renamed, strict=True):
        places = {}
        for member, placement in chain.places.items():
            (out,) = writes(program.nodes[member])
            places[position_of[names.get(out, out)]] = placement
        clusters.append(Cluster.of(chain.space, places))
    return changed, tuple(clusters)
