"""Chains contractions: a product that is read block by block where it is computed never reaches memory.

Input: a Program; output: a Program in which the nodes of such kernels are together, and the clusters they make, from
which `growth.py` grows on.  Nothing here knows what attention is.  A *tile* is the result of a contraction over a short
axis, or a map of one: larger than all that went into it, cheap to make again.  A *sink* takes tiles in: a reduction, or
a contraction that runs over one of their axes.  From a sink, everything that leads to it is pulled into one space: the
sink's own parallel axes are spread over programs (the columns of a contraction are held whole), the axis it runs over
is walked, the short axes are private to the tiles.

A reduction on the way (a row maximum) is pulled in too if it runs over the walked axis, and lives there as a running
value by the online rule; if that refuses, it stays a sink of its own and is read from memory.  Tiles that several
kernels need are made again by each: their nodes are copied.  A tile of few rows is smaller than what it is made of; it
is one where that is predicted to be faster.  Rows of other programs join it (`rows.py`), and a walk that would leave
the device idle is cut into parts (`split_walks.py`).

Source: the idea of FlashAttention (Dao et al. 2022) as a rule over axes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import sympy

from fusion.codegen.target import Capabilities
from fusion.lowering.program import Contract, Map, Program, Reduce, Scan
from fusion.schedule.chained.candidates import tiles_of
from fusion.schedule.chained.copies import apart
from fusion.schedule.chained.merge_walks import united
from fusion.schedule.chained.occupancy import time_alone, time_in_parts
from fusion.schedule.chained.place_producers import Pull, Stream, products_of_vectors
from fusion.schedule.chained.rows import with_shared_columns
from fusion.schedule.chained.split_walks import best_cut, in_parts
from fusion.schedule.clusters.expand import expand
from fusion.schedule.clusters.legality import Cluster, positions_in
from fusion.schedule.iteration.dependences import Dependences
from fusion.schedule.reductions.walks import walk
from fusion.schedule.rewrites.inline import inline_cheap_maps


def stream(
    program: Program, capabilities: Capabilities, hints: Mapping[sympy.Symbol, int] | None = None
) -> tuple[Program, tuple[Cluster, ...]]:
    """Find the streams of `program`, copy tiles so that each has its own, and inline what is cheap into their operands.

    Returns:
        The program (the same object if there are none), and the clusters of the streams, by position in it.
    """
    if "dot" not in capabilities.fold_ops:
        return program, ()
    finder = _Finder(program, Dependences(program, hints), capabilities)
    streams = finder.run()
    if not streams:
        return program, ()
    changed, clusters = apart(program, streams)
    changed, clusters = in_parts(changed, clusters, capabilities, hints)
    inlined = inline_cheap_maps(changed)
    return inlined, positions_in(inlined, changed, clusters)


class _Finder:
    """The search for streams in one program."""

    def __init__(self, program: Program, dependences: Dependences, capabilities: Capabilities) -> None:
        self.program, self.dependences, self.capabilities = program, dependences, capabilities
        self.tiles = tiles_of(dependences)

    def run(self) -> list[Stream]:
        """The streams; products that are none of matrices in one of them are left to memory, and no tiles of any."""
        stored = frozenset[int]()
        while True:
            found = self._found()
            refused = stored.union(*(products_of_vectors(self.dependences, made) for made in found))
            if refused == stored:
                return found
            stored, self.tiles = refused, tiles_of(self.dependences, refused)

    def _found(self) -> list[Stream]:
        """Streams, the sinks that are found last in the program first: they pull most."""
        found: list[Stream] = []
        pulled: set[int] = set()
        sinks = [p for p in reversed(range(len(self.program.nodes))) if self._is_sink(p)]
        for sink in sorted(sinks, key=lambda p: isinstance(self.program.nodes[p], Reduce)):
            if sink in pulled:
                continue
            made = self._pulled(sink)
            if made is not None:
                found = self._beside(found, made)
                pulled |= {p for p in made.places if not isinstance(self.program.nodes[p], (Map, Contract))}
                pulled.add(sink)
        found = [with_shared_columns(self.dependences, made) for made in found]
        return [made for part in self._connected(found) if self._is_worthwhile(part) for made in part]

    def _is_sink(self, position: int) -> bool:
        node = self.program.nodes[position]
        if not isinstance(node, (Reduce, Scan, Contract)) or position in self.tiles:
            return False
        return any(p in self.tiles for p in self.dependences.producers(position))

    # Pulling ----------------------------------------------------------------------------------------------------------

    def _pulled(self, sink: int) -> Stream | None:
        """The stream of one sink, without the reductions that cannot run beside it."""
        left: set[int] = set()
        while True:
            pull = Pull(self.dependences, self.tiles, sink, left)
            made = pull.run()
            if made is None:
                return None
            refused = self._refused(made)
            if refused is None:
                return made
            if refused == sink or refused in left:
                return None
            left.add(refused)

    def _beside(self, found: Sequence[Stream], made: Stream) -> list[Stream]:
        """`found` and one more stream, in the kernel of another one that makes the same tiles over the same axes."""
        for number, other in enumerate(found):
            both = united(self.dependences, other, made)
            if both is not None and self._refused(both) is None:
                return [*found[:number], both, *found[number + 1 :]]
        return [*found, made]

    def _refused(self, made: Stream) -> int | None:
        """The first fold that does not run in one walk; None if all do."""
        cluster = Cluster.of(made.space, made.places)
        axes = [axis.symbol for axis in made.space.reduced]
        expanded = expand(self.dependences, cluster, grown=False)
        writes = tuple(write for write in expanded.writes if self.dependences.writer[write.buffer] not in self.tiles)
        if not isinstance(walk(replace(expanded, writes=writes), axes, ()), str):
            return None
        folds = [p for p in cluster.members if isinstance(self.program.nodes[p], Reduce)]
        return folds[-1] if folds else made.sinks[0]

    # Is it worth it ---------------------------------------------------------------------------------------------------

    def _connected(self, found: Sequence[Stream]) -> Iterator[list[Stream]]:
        """Streams that share tiles, which are made by all of them or go to memory; only where every reader is one."""
        groups: list[tuple[set[int], list[Stream]]] = []
        for made in found:
            tiles, streams = {p for p in made.places if p in self.tiles}, [made]
            for group in [group for group in groups if group[0] & tiles]:
                groups.remove(group)
                tiles, streams = tiles | group[0], [*group[1], *streams]
            groups.append((tiles, streams))
        for tiles, streams in groups:
            members = {p for made in streams for p in made.places}
            readers = {r for p in tiles for r in self.dependences.readers[self.dependences.compute(p).out]}
            if readers <= members:
                yield streams

    def _is_worthwhile(self, found: Sequence[Stream]) -> bool:
        """Are these streams together predicted to be faster than tiles in memory?"""
        tiles = {p for made in found for p in made.places if p in self.tiles}
        capabilities, dependences = self.capabilities, self.dependences
        apart = sum(2 * dependences.bytes(dependences.compute(p).out) for p in tiles) / capabilities.bandwidth
        apart += sum(time_alone(dependences, p, capabilities) for p in tiles) + capabilities.launch_us * len(tiles)
        apart += sum(time_alone(dependences, sink, capabilities) for made in found for sink in made.sinks)
        counts = [best_cut(dependences, Cluster.of(made.space, made.places), capabilities)[0] for made in found]
        times = (time_in_parts(dependences, *which, capabilities) for which in zip(found, counts, strict=True))
        return sum(times) < apart
