"""Builds a Kernel from a cluster: axes get roles, folds and stores loops, and everything canonical names.

Two clusters that compute the same give equal Kernels, whatever the names of their buffers.

    axes.py              axes: merged, in memory order, `i0, i1, …` and `r0, r1, …`; their role
    bodies.py            statements: as few loops over the reduced axes as possible
    chained.py           the same for tiles that the kernel computes and loops over
    rows_and_columns.py  the same for rows that are folded and whose columns are summed
    finish.py            parameters and names
"""

from __future__ import annotations

from fusion.lowering.ir.kernel import KernelAxis, Role
from fusion.schedule.clusters.expand import expand
from fusion.schedule.clusters.legality import Cluster
from fusion.schedule.clusters.profit import Prices
from fusion.schedule.kernels.axes import canonical, kernel_axes, role_of
from fusion.schedule.kernels.bodies import body_of
from fusion.schedule.kernels.chained import chained_body
from fusion.schedule.kernels.finish import KernelCall, finished, origins_of
from fusion.schedule.kernels.rows_and_columns import rows_and_columns_body


def kernel_of(prices: Prices, cluster: Cluster) -> KernelCall:
    """Build the kernel of one cluster of computed nodes, or take that of a cluster like it, with other buffers."""
    call, names = prices.alike.of_first("kernel", cluster, lambda: _built(prices, cluster))
    if all(first == own for first, own in names.items()):
        return call
    return call.renamed(names, origins_of(prices.dependences, cluster))


def _built(prices: Prices, cluster: Cluster) -> KernelCall:
    dependences, capabilities = prices.dependences, prices.capabilities
    expanded = expand(dependences, cluster, hoists=not capabilities.invariant).simplified(cluster.space.sizes)
    if cluster.space.chained:
        axes, body = chained_body(cluster, expanded, added=not capabilities.bounds)
        return finished(prices, cluster, axes, body, expanded)
    if cluster.space.folds_both_ways:
        axes, body = rows_and_columns_body(cluster, expanded)
        return finished(prices, cluster, axes, body, expanded)
    parallel, reduced, expanded = kernel_axes(cluster, expanded, reorders=not capabilities.invariant)
    role = role_of(capabilities, expanded, cluster, reduced, dependences)
    parallel, reduced, expanded = canonical(parallel, reduced, expanded)
    body = body_of(expanded, parallel, reduced, role, follows=capabilities.follows)
    axes = (
        *(KernelAxis(axis.symbol, axis.size, Role.GRID) for axis in parallel),
        *(KernelAxis(axis.symbol, axis.size, role) for axis in reduced),
    )
    return finished(prices, cluster, axes, body, expanded)


__all__ = ["KernelCall", "kernel_of"]
