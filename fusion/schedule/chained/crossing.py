"""Computes two chains in one loop nest where each loops over the rows of the other.

Input: chains of a program; output: fewer, where that is predicted to be faster.  Let one chain fold a matrix of tiles
along its rows, and another one the same matrix along its columns: the gradient of queries sums over keys, those of keys
and values sum over queries, and all need the scores and their gradients.  Two kernels compute each of these tiles
twice.  One nest computes it once: the rows of the first chain become an outer loop, its own loop stands inside, and the
folds of the second chain *cross* it.  They have a result for each of its points, which the target keeps until the outer
loop is over, and adds to in the order of the loops (measured: docs/performance.md, `crossing`).  So only the axes that
both chains spread remain for programs.

Only products cross: a fold that follows a running value would have to rescale the results of all points.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import combinations

import networkx as nx

from fusion.codegen.target import Capabilities
from fusion.lowering.ir.program import Contract, Map
from fusion.schedule.chained.merge_loops import grid_and_loop_axes, shared_products, united
from fusion.schedule.chained.occupancy import share_that_counts, time_in_parts
from fusion.schedule.chained.place_producers import Chain
from fusion.schedule.iteration.dependences import Dependences


def crossed(
    dependences: Dependences,
    chains: Sequence[Chain],
    capabilities: Capabilities,
    shares_a_loop: Callable[[Chain], bool],
) -> list[Chain]:
    """Return `chains`, with pairs in one nest where that is predicted to be faster.

    Args:
        shares_a_loop: whether the folds of a chain can share its loops.
    """
    kept = list(chains)
    if not capabilities.outer_block:
        return kept
    for first, second in combinations(chains, 2):
        if not all(any(chain is other for other in kept) for chain in (first, second)):
            continue
        nests = (crossing(dependences, *pair) for pair in ((first, second), (second, first)))
        possible = [nest for nest in nests if nest is not None and shares_a_loop(nest)]
        if not possible:
            continue
        best = min(possible, key=lambda nest: _time(dependences, nest, capabilities))
        apart = sum(_time(dependences, chain, capabilities) for chain in (first, second))
        if _time(dependences, best, capabilities) < apart:
            kept = [best if chain is first else chain for chain in kept if chain is not second]
    return kept


def crossing(dependences: Dependences, first: Chain, second: Chain) -> Chain | None:
    """Return `second` in the space of `first`, whose loop it crosses; None if neither loops over the other's rows."""
    if first.space.outer or second.space.outer or not _multiplies(dependences, second):
        return None
    shared = shared_products(dependences, first, second)
    names = grid_and_loop_axes(dependences, first, second, shared[0]) if shared else None
    if names is None or _depends(dependences, first, second) or _depends(dependences, second, first):
        return None
    looped = {axis.symbol for axis in first.space.reduced}
    rows = {axis.symbol for axis in first.space.spread}
    folded = {names[axis.symbol] for axis in second.space.reduced}
    spread = {names[axis.symbol] for axis in second.space.spread if axis.size != 1}
    outer = frozenset(rows & folded)
    if len(outer) < len(second.space.reduced) or not looped <= spread <= looped | (rows - outer):
        return None
    both = united(dependences, first, second, names)
    return None if both is None else replace(both, space=replace(both.space, outer=outer))


def _multiplies(dependences: Dependences, chain: Chain) -> bool:
    """Return whether all folds of a chain are products."""
    return all(isinstance(dependences.node(member), (Map, Contract)) for member in chain.places)


def _depends(dependences: Dependences, first: Chain, second: Chain) -> bool:
    """Return whether a node of one chain needs a result of the other, so that they run one after the other."""
    after = set[int]().union(*(nx.descendants(dependences.graph, sink) for sink in first.sinks))
    return not after.isdisjoint(second.places)


def _time(dependences: Dependences, chain: Chain, capabilities: Capabilities) -> float:
    """Return the microseconds of a chain, with the blocks that its masks are expected to leave."""
    return time_in_parts(dependences, chain, 1, capabilities, share_that_counts(dependences, chain))


__all__ = ["crossed", "crossing"]
