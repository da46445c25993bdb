"""Library or generated: who computes a contraction, priced with everything that was fused with it.

`Program → Program`.  A cluster around a contraction is one generated kernel.  The alternative is the library's
product between kernels of their own for what leads to its operands and for what follows it.  These pay their launches,
and move operands and product through memory: a weight stored in 8 bits is read, written and read again in 16.  But the
library may multiply faster.  Where the alternative wins, the contraction is replaced by the library's call, and the
rest is clustered anew.
"""

from __future__ import annotations

from dataclasses import replace

from codegen.target import Target
from fusion.schedule.clusters import Clustering
from fusion.schedule.kernels import kernel_of
from fusion.schedule.legality import Cluster
from fusion.schedule.profit import Prices
from lowering.program import Contract, Node, Program


def prefer_library(program: Program, clustering: Clustering, target: Target) -> Program:
    """The program with contractions left to the library where that is predicted to be faster; else the same object."""
    prices = clustering.prices
    replaced: set[int] = set()
    for cluster in clustering.clusters:
        if not cluster.space.rigid or cluster.space.streamed:
            continue
        position = next(m for m in cluster.members if isinstance(program.nodes[m], Contract))
        contract = program.nodes[position]
        assert isinstance(contract, Contract)
        if not contract.library:
            continue
        if _apart(prices, cluster, position) <= _together(prices, cluster, contract, target):
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


def _together(prices: Prices, cluster: Cluster, contract: Contract, target: Target) -> float:
    """Microseconds of the generated kernel: the larger of its products and its traffic, at its share of the speed."""
    moved = sum(prices.traffic(cluster)) / prices.capabilities.bandwidth
    share = target.efficiency(kernel_of(prices, cluster).kernel)
    return prices.capabilities.launch_us + max(prices.contraction(cluster, contract), moved) / share


def _apart(prices: Prices, cluster: Cluster, position: int) -> float:
    """Microseconds of the library's product and of the kernels before and after it."""
    before = _leading_to(prices, cluster, position)
    after = tuple(m for m in cluster.members if m != position and m not in before)
    total = 0.0
    for members in (before, (position,), after):
        if not members:
            continue
        moved = sum(prices.traffic(replace(cluster, members=members))) / prices.capabilities.bandwidth
        contract = prices.dependences.compute(position)
        assert isinstance(contract, Contract)
        product = prices.contraction(cluster, contract) if position in members else 0.0
        total += prices.capabilities.launch_us + max(product, moved)
    return total


def _leading_to(prices: Prices, cluster: Cluster, position: int) -> tuple[int, ...]:
    """The members of a cluster that make the operands of the contraction at `position`."""
    dependences = prices.dependences
    makers = {dependences.compute(m).out: m for m in cluster.members}
    found: set[int] = set()
    pending = [position]
    while pending:
        read = {makers[load.buffer] for load in dependences.loads[pending.pop()] if load.buffer in makers}
        pending.extend(read - found)
        found |= read
    return tuple(sorted(found))
