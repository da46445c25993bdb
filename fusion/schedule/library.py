"""Library or generated: who computes a contraction, priced with everything that was fused with it.

`Program → Program`.  A cluster around a contraction is one generated kernel.  The alternative is the library's
product and a kernel of its own for the rest, which pays a second launch and moves the product through memory, but may
multiply faster.  Where the alternative wins, the contraction is replaced by the library's call, and the rest is
clustered anew.
"""

from __future__ import annotations

from dataclasses import replace

from codegen.target import Target
from fusion.schedule.clusters import Clustering
from fusion.schedule.kernels import kernel_of
from lowering.program import Contract, Node, Program


def prefer_library(program: Program, clustering: Clustering, target: Target) -> Program:
    """The program with contractions left to the library where that is predicted to be faster; else the same object."""
    prices = clustering.prices
    replaced: set[int] = set()
    for cluster in clustering.clusters:
        if not cluster.space.rigid:
            continue
        position = next(m for m in cluster.members if isinstance(program.nodes[m], Contract))
        contract = program.nodes[position]
        assert isinstance(contract, Contract)
        if not contract.library:
            continue
        product = prices.contraction(cluster, contract)
        apart = product
        if len(cluster.members) > 1:
            apart += 2 * prices.dependences.bytes(contract.out) / prices.capabilities.bandwidth
            apart += prices.capabilities.launch_us
        if apart <= product / target.efficiency(kernel_of(prices, cluster).kernel):
            replaced.add(position)
    if not replaced:
        return program
    nodes: list[Node] = []
    for position, node in enumerate(program.nodes):
        if position in replaced:
            assert isinstance(node, Contract)
            nodes.extend(node.library)
        else:
            nodes.append(node)
    return replace(program, nodes=tuple(nodes))
