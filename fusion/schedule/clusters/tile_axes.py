"""Determines the axes along which kernels of products load tiles."""

from __future__ import annotations

from collections.abc import Sequence

from fusion.lowering.indexing import Sizes
from fusion.lowering.ir.chunks import Chunked
from fusion.lowering.ir.program import Contract, Extern, Program, axis_sizes
from fusion.schedule.clusters.legality import Cluster


def tile_axes(program: Program, chains: Sequence[Cluster]) -> dict[int, Sizes]:
    """Return position → the axes of tiles, with their sizes, of each product and each member of the chains.

    These are the rows, the columns and the folded axes of products, and in a chain the axes of its members that follow
    them; along axes of a batch each program has one point.
    """
    result = {position: _of_product(node) for position, node in enumerate(program.nodes) if isinstance(node, Contract)}
    for chain in chains:
        products = [member for member in chain.members if member in result]
        tiled = {
            symbol
            for member in products
            for axis in result[member]
            for symbol in chain.places[member][axis].free_symbols
        }
        for member in chain.members:
            node, places = program.nodes[member], chain.places[member]
            if not isinstance(node, (Contract, Extern, Chunked)):
                sizes = axis_sizes(node)
                result[member] = {axis: sizes[axis] for axis in sizes if places[axis].free_symbols & tiled}
    return result


def _of_product(product: Contract) -> Sizes:
    """Return the axes of a product without those of its batch."""
    sizes, own = axis_sizes(product), {*product.rows, *product.columns, *(axis.symbol for axis in product.over)}
    return {axis: size for axis, size in sizes.items() if axis in own}
