"""Chains contractions: a product that is read block by block in the kernel that computes it never reaches memory.

Input: a Program; output: a Program in which the nodes of such kernels are together, and their clusters, from which
`growth.py` grows on.  Nothing here is specific to attention.  A *tile* is the result of a contraction over a short
axis, or a map of one: larger than its operands together, or half as large in a batch, and cheap to recompute.  A *sink*
consumes tiles: a reduction, or a contraction over one of their axes.  From a sink, all its producers are placed in one
iteration space: the sink's own parallel axes are spread over programs (the columns of a contraction are held whole),
its reduced axis is looped over, the short axes are private to the tiles.

A reduction on the way (a row maximum) is placed too if it runs over the looped axis, and becomes a running value by the
online rule; if that refuses, it stays a sink of its own and is read from memory.  Each kernel recomputes the tiles that
several kernels need: their nodes are copied.  Two kernels that loop over each other's rows may become one nest
(`crossing.py`).  A tile of few rows is smaller than its operands; it is a tile where that is predicted to be faster.
Rows of other programs join it (`rows.py`), and a loop that would leave the device idle is split into parts
(`split_loops.py`).

Source: the idea of FlashAttention (Dao et al. 2022) as a rule over axes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import sympy

from fusion.codegen.target import Capabilities
from fusion.lowering.ir.program import Contract, Map, Program, Reduce
from fusion.schedule.chained.candidates import tiles_of
from fusion.schedule.chained.copies import separated
from fusion.schedule.chained.crossing import crossed
from fusion.schedule.chained.merge_loops import merged
from fusion.schedule.chained.occupancy import scalar_time, share_that_counts, time_alone, time_in_parts
from fusion.schedule.chained.place_producers import Chain, ProducerPlacement, products_of_vectors
from fusion.schedule.chained.rows import with_shared_columns
from fusion.schedule.chained.split_loops import best_cut, split_loops
from fusion.schedule.clusters.expand import expand
from fusion.schedule.clusters.legality import Cluster, positions_in
from fusion.schedule.iteration.dependences import Dependences
from fusion.schedule.reductions.one_loop import one_loop
from fusion.schedule.rewrites.inline import inline_cheap_maps


def chain_products(
    program: Program, capabilities: Capabilities, hints: Mapping[sympy.Symbol, int] | None = None
) -> tuple[Program, tuple[Cluster, ...]]:
    """Find the chains of `program`, give each its own copy of its tiles, and inline cheap maps into their operands.

    Returns:
        The program (the same object if there are none), and the clusters of the chains, by position in it.

    >>> from fusion.inspect.examples import TARGET, lowered
    >>> from torch import empty
    >>> program = lowered(lambda q, k, v: (q @ k).softmax(-1) @ v, empty(6, 200, 4), empty(6, 4, 220), empty(6, 220, 4))
    >>> _, chains = chain_products(program, TARGET.capabilities)
    >>> [[program.nodes[member].out for member in loop.members] for loop in chains]
    [['bmm', 'amax', 'sub', 'exp', 'sum_1', 'div', 'bmm_1']]
    """
    if "dot" not in capabilities.fold_ops:
        return program, ()
    search = _Finder(program, Dependences(program, hints), capabilities)
    chains = search.run()
    if not chains:
        return program, ()
    changed, clusters = separated(program, chains)
    changed, clusters = split_loops(changed, clusters, capabilities, hints)
    inlined = inline_cheap_maps(changed)
    return inlined, positions_in(inlined, changed, clusters)


class _Finder:
    """The search for chains in one program."""

    def __init__(self, program: Program, dependences: Dependences, capabilities: Capabilities) -> None:
        self.program, self.dependences, self.capabilities = program, dependences, capabilities
        self.tiles = tiles_of(dependences, capabilities)
        self.blocking = frozenset[int]()  # products that keep later ones from being chained

    def run(self) -> list[Chain]:
        """Return the chains.

        A product in one that is not of matrices is stored, and no longer a tile of any; so is one that no chain
        computes, where later products wait for it (queries and keys, which a narrow layer projects), or which could be
        the sink of earlier ones (the result of one query, which a layer of few rows projects).
        """
        stored = frozenset[int]()
        while True:
            candidates = self._candidates()
            refused = stored.union(*(products_of_vectors(self.dependences, chain) for chain in candidates))
            refused |= self.blocking.difference(*(chain.places for chain in candidates))
            if refused == stored:  # whatever keeps products from being chained is stored before
                ends = {p for p in self.tiles if self._ends_tiles(p)}
                refused |= ends.difference(*(chain.places for chain in candidates))
            if refused == stored:
                return candidates
            stored, self.tiles = refused, tiles_of(self.dependences, self.capabilities, refused)

    def _candidates(self) -> list[Chain]:
        """Return candidate chains; sinks late in the program come first: they have most producers."""
        candidates: list[Chain] = []
        pulled: set[int] = set()
        sinks = [p for p in reversed(range(len(self.program.nodes))) if self._is_sink(p)]
        for sink in sorted(sinks, key=lambda p: isinstance(self.program.nodes[p], Reduce)):
            if sink in pulled:
                continue
            chain = self._chain_of(sink)
            if chain is not None:
                candidates = self._merged(candidates, chain)
                pulled |= {p for p in chain.places if not isinstance(self.program.nodes[p], (Map, Contract))}
                pulled.add(sink)
        candidates = crossed(
            self.dependences, candidates, self.capabilities, lambda chain: self._refused(chain) is None
        )
        candidates = [with_shared_columns(self.dependences, chain) for chain in candidates]
        return [chain for part in self._connected(candidates) if self._is_worthwhile(part) for chain in part]

    def _is_sink(self, position: int) -> bool:
        node = self.program.nodes[position]
        if not isinstance(node, (Reduce, Contract)) or position in self.tiles:
            return False
        return any(p in self.tiles for p in self.dependences.producers(position))

    def _ends_tiles(self, position: int) -> bool:
        """Return whether a node is a product of a tile."""
        node = self.program.nodes[position]
        return isinstance(node, Contract) and any(p in self.tiles for p in self.dependences.producers(position))

    # Chains of sinks --------------------------------------------------------------------------------------------------

    def _chain_of(self, sink: int) -> Chain | None:
        """Return the chain of one sink, without reductions that cannot share its loop, which stay in memory."""
        in_memory: set[int] = set()
        while True:
            placement = ProducerPlacement(self.dependences, self.tiles, sink, in_memory)
            chain = placement.run()
            if chain is None:
                self.blocking |= placement.blocking
                return None
            refused = self._refused(chain)
            if refused is None:
                return chain
            if refused == sink or refused in in_memory:
                return None
            in_memory.add(refused)

    def _merged(self, candidates: Sequence[Chain], chain: Chain) -> list[Chain]:
        """Return `candidates` and one more chain, merged with a chain of the same tiles over the same axes."""
        for number, other in enumerate(candidates):
            both = merged(self.dependences, other, chain)
            if both is not None and self._refused(both) is None:
                return [*candidates[:number], both, *candidates[number + 1 :]]
        return [*candidates, chain]

    def _refused(self, chain: Chain) -> int | None:
        """Return the first fold that cannot share the loop; None if all can."""
        cluster = Cluster.of(chain.space, chain.places)
        axes = [axis.symbol for axis in chain.space.reduced]
        expanded = expand(self.dependences, cluster, grown=False)
        writes = tuple(write for write in expanded.writes if self.dependences.writer[write.buffer] not in self.tiles)
        if not isinstance(one_loop(replace(expanded, writes=writes), axes, (), [*chain.space.outer]), str):
            return None
        folds = [p for p in cluster.members if isinstance(self.program.nodes[p], Reduce)]
        return folds[-1] if folds else chain.sinks[0]

    # Profit -----------------------------------------------------------------------------------------------------------

    def _connected(self, candidates: Sequence[Chain]) -> Iterator[list[Chain]]:
        """Yield groups of chains that share tiles and include all their readers: each is chained as a whole or not."""
        groups: list[tuple[set[int], list[Chain]]] = []
        for chain in candidates:
            tiles, chains = {p for p in chain.places if p in self.tiles}, [chain]
            for group in [group for group in groups if group[0] & tiles]:
                groups.remove(group)
                tiles, chains = tiles | group[0], [*group[1], *chains]
            groups.append((tiles, chains))
        for tiles, chains in groups:
            members = {p for chain in chains for p in chain.places}
            readers = {r for p in tiles for r in self.dependences.readers[self.dependences.compute(p).out]}
            if readers <= members:
                yield chains

    def _is_worthwhile(self, candidates: Sequence[Chain]) -> bool:
        """Return whether these chains together are predicted to be faster than tiles in memory.

        Without them, a tile that only maps read joins their kernel, and makes no trip through memory.
        """
        tiles = {p for chain in candidates for p in chain.places if p in self.tiles}
        sinks = [sink for chain in candidates for sink in chain.sinks]
        capabilities, dependences = self.capabilities, self.dependences
        stored = [p for p in tiles if not self._is_read_by_maps_alone(p)]
        trips = sum(2 * dependences.bytes(dependences.compute(p).out) for p in stored)
        scalars = sum(scalar_time(dependences, p, capabilities) for p in tiles)
        unfused = capabilities.rates.price(trips, scalars=scalars, launches=len(stored) + len(sinks)).total
        unfused += sum(time_alone(dependences, p, capabilities) for p in (*tiles, *sinks))
        counts = [best_cut(dependences, Cluster.of(chain.space, chain.places), capabilities)[0] for chain in candidates]
        cut = [*zip(candidates, counts, strict=True)]
        if sum(time_in_parts(dependences, *each, capabilities) for each in cut) < unfused:
            return True
        shares = [share_that_counts(dependences, chain) for chain in candidates]
        times = (
            time_in_parts(dependences, *each, capabilities, share) for each, share in zip(cut, shares, strict=True)
        )
        return sum(times) < unfused

    def _is_read_by_maps_alone(self, position: int) -> bool:
        """Return whether all readers of a tile are maps."""
        readers = self.dependences.readers[self.dependences.compute(position).out]
        return all(isinstance(self.dependences.node(reader), Map) for reader in readers)
