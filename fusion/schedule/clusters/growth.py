"""Grows clusters, the nodes of one kernel, by joining along the most profitable edge.

Input: a Program; output: its clusters in execution order, and a refusal for every data edge that was not fused.  Growth
is deterministic: candidates are tried by bytes saved, then by position in the program.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import networkx as nx
import sympy

from fusion.codegen.target import Capabilities
from fusion.lowering.errors import Origin
from fusion.lowering.ir.chunks import Chunked
from fusion.lowering.ir.program import Contract, Extern, Program, writes
from fusion.lowering.printer import format_bytes
from fusion.schedule.clusters.legality import (
    CannotJoin,
    Cluster,
    Link,
    folds_rows,
    join_rows_and_columns,
    may_join,
    may_share_body,
    single,
    sums_columns,
)
from fusion.schedule.clusters.profit import EARLY, ChainedShare, Prices
from fusion.schedule.iteration.dependences import Dependences

MAX_SIBLINGS = 8
"""How many later readers of the same buffer a cluster is considered with."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A data edge that was not fused, with the reason and the cost.

    Attributes:
        producer: the buffer on the edge.
        consumer: the buffer computed from it; "?" for a call that computes none.
        origin: the line of the program that asks for the consumer.
        bytes: the bytes written and read again in each run.
        microseconds: their predicted time.
    """

    producer: str
    consumer: str
    reason: str
    origin: Origin
    bytes: int
    microseconds: float

    def __str__(self) -> str:
        return (
            f"{self.producer} → {self.consumer}: {self.reason} "
            f"[{format_bytes(self.bytes)}, {self.microseconds:.1f} µs; {self.origin}]"
        )


@dataclass(frozen=True, slots=True)
class Clustering:
    """Clusters in execution order, the edges between them with the reason why they remain, and the prices."""

    clusters: tuple[Cluster, ...]
    refusals: tuple[Refusal, ...]
    prices: Prices


def refusals_of(
    dependences: Dependences, capabilities: Capabilities, why: Callable[[int, int], str | None]
) -> Iterator[Refusal]:
    """Yield a refusal for each edge between two nodes for which `why` returns a reason."""
    program = dependences.program
    for name, writer in dependences.writer.items():
        for reader in dependences.readers.get(name, ()):
            reason = why(writer, reader)
            if reason is None:
                continue
            out = next(iter(writes(program.nodes[reader])), None)
            origin = program.origins.get(out or name, Origin(name))
            size = 2 * dependences.bytes(name)
            yield Refusal(name, out or "?", reason, origin, size, capabilities.rates.memory_us(size))


def grow(
    program: Program,
    capabilities: Capabilities,
    hints: Mapping[sympy.Symbol, int] | None = None,
    given: Sequence[Cluster] = (),
    *,
    chained_share: ChainedShare | None = None,
    joins: bool = True,
    before: Clustering | None = None,
) -> Clustering:
    """Group the nodes of `program` into clusters; `given` clusters may grow, but stay together.

    `chained_share` returns the efficiency of a chain (see `Prices`).  Without `joins`, each other node is a cluster of
    its own.  `before`: the clusters of an earlier version of the Program, whose prices are taken where nothing changed.

    >>> from fusion.inspect.examples import TARGET, lowered
    >>> from torch import empty
    >>> program = lowered(lambda x: (x + 1).sum(-1) * 2, empty(3, 5))
    >>> [[program.nodes[member].out for member in c.members] for c in grow(program, TARGET.capabilities).clusters]
    [['add', 'sum_1', 'mul']]
    """
    dependences, known = Dependences(program, hints), None if before is None else before.prices
    return _Growth(dependences, Prices(dependences, capabilities, chained_share, known)).run(given, joins)


class _Growth:
    """The state of one clustering: the quotient graph, whose nodes are clusters."""

    def __init__(self, dependences: Dependences, prices: Prices) -> None:
        self.dependences = dependences
        self.capabilities = prices.capabilities
        self.prices = prices
        self.clusters: dict[int, Cluster] = {}
        self.owner: dict[int, int] = {}  # node → cluster
        self.graph: nx.DiGraph[int] = nx.DiGraph()
        self.rank: dict[int, int] = {}  # cluster → its position in a topological order
        self.ranked: list[int | None] = []  # position → cluster
        self.reasons: dict[tuple[int, int], str] = {}
        self.refused: dict[int, list[Link]] = {}  # cluster → links that were refused with its present axes
        self.results: dict[int, dict[str, int]] = {}  # cluster → the results of its members, with the member
        self.read: dict[int, frozenset[str]] = {}  # cluster → the buffers that its members load
        self.heap: list[tuple[int, int, int, int, Link]] = []  # bytes saved, most first; positions; when it was pushed
        self.pushed = 0
        self.next = len(dependences.program.nodes)

    def run(self, given: Sequence[Cluster], joins: bool) -> Clustering:
        program = self.dependences.program
        for position in range(len(program.nodes)):
            self.clusters[position] = single(self.dependences, self.capabilities, position)
            self.owner[position] = position
            self.results[position] = {self.dependences.outs[position]: position}
            self.read[position] = self.dependences.read[position]
        self.graph = self.dependences.graph.copy()
        self.ranked = list(self.clusters)
        self.rank = {cluster: cluster for cluster in self.clusters}
        for cluster in given:
            self._merge(cluster)
        if joins:
            self._join_all()
        order = nx.lexicographical_topological_sort(self.graph, key=self._schedule_key)
        refusals = tuple(refusals_of(self.dependences, self.capabilities, self._why_apart))
        return Clustering(tuple(self.clusters[c] for c in order), refusals, self.prices)

    def _join_all(self) -> None:
        for position in range(len(self.dependences.program.nodes)):
            for link in self._links_from(position):
                self._push(link)
        while self.heap:
            self._try(heapq.heappop(self.heap)[-1])
        self._cross()
        self._unite()

    def _schedule_key(self, cluster: int) -> int:
        """Return when a ready cluster runs: in program order, but without operands as late as possible.

        A tensor of zeros that is added to at the end would otherwise occupy memory from the beginning.  So would an
        input whose last read is for a result (a copy saved for backward): that runs once all other readers have.
        """
        own = self.clusters[cluster].members[-1]
        if not self.read[cluster]:
            return min((self.clusters[c].members[-1] for c in self.graph.successors(cluster)), default=own)
        if not self._is_result(cluster):
            return own
        writer, readers = self.dependences.writer, self.dependences.readers
        freed = [name for name in self.read[cluster] if name in writer and name not in self.dependences.outputs]
        if sum(map(self.dependences.bytes, freed)) < sum(map(self.dependences.bytes, self.results[cluster])):
            return own
        others = [reader for name in freed for reader in readers[name] if not self._is_result(self.owner[reader])]
        before = [self.clusters[c].members[-1] for c in self.graph.predecessors(cluster)]
        return min(own, max([*others, *before], default=own))

    def _is_result(self, cluster: int) -> bool:
        """Return whether only views read the results of a cluster."""
        firsts = {c: self.dependences.node(self.clusters[c].members[0]) for c in self.graph.successors(cluster)}
        return all(isinstance(first, Extern) and first.is_view and self._is_result(c) for c, first in firsts.items())

    # Candidates -----------------------------------------------------------------------------------------------------

    def _links_from(self, position: int) -> Iterator[Link]:
        """Yield edges from a node to its readers, and between readers of the same buffer."""
        node = self.dependences.node(position)
        for name in writes(node):
            for reader in self.dependences.readers.get(name, ()):
                if not isinstance(node, (Extern, Chunked)):
                    yield Link(name, position, reader, vertical=True)
        if isinstance(node, (Extern, Chunked)):
            return
        for name in self.dependences.reads[position]:
            readers = self.dependences.readers[name]
            here = bisect_left(readers, position)
            for other in readers[here + 1 : here + 1 + MAX_SIBLINGS]:
                yield Link(name, position, other, vertical=False)

    def _push(self, link: Link) -> None:
        a, b = self.owner[link.first], self.owner[link.second]
        if a == b or self.clusters[a].extern or self.clusters[b].extern:
            return
        self.pushed += 1
        heapq.heappush(self.heap, (-self._bytes_saved_first(a, b), link.second, link.first, self.pushed, link))

    def _bytes_saved_first(self, first: int, second: int) -> int:
        """Return the bytes that joining two clusters saves, the order in which joins are tried.

        A consumer of a product joins that product before its own consumers: as an epilogue it is computed once, as the
        prologue of the next product for each block of the other side.
        """
        saved = self._shared(first, second)
        if not self._multiplies(second) or self._multiplies(first):
            return saved
        products = (cluster for cluster in self.graph.predecessors(first) if self._multiplies(cluster))
        return min([saved, *(self._shared(product, first) - 1 for product in products)])

    def _multiplies(self, cluster: int) -> bool:
        return any(isinstance(self.dependences.node(member), Contract) for member in self.clusters[cluster].members)

    def _shared(self, first: int, second: int) -> int:
        """Return the bytes that joining saves: common reads once, and stores that no other cluster needs."""
        results, operands = self.results[first], self.read[second]
        passed = results.keys() & operands
        total = sum(self.dependences.bytes(name) for name in (operands & self.read[first]) | passed)
        together = {*self.clusters[first].members, *self.clusters[second].members} if passed else ()
        for name in passed:
            if not self.dependences.stored(results[name], together):
                total += self.dependences.bytes(name)
        return total

    # Joining --------------------------------------------------------------------------------------------------------

    def _try(self, link: Link) -> None:
        a, b = self.owner[link.first], self.owner[link.second]
        if a == b:
            return
        if self._path(a, b) or self._path(b, a, direct=True):
            self.reasons[link.first, link.second] = "another node that must run in between stands apart"
            return
        joined = may_join(self.dependences, self.capabilities, self.clusters[a], self.clusters[b], link)
        if isinstance(joined, CannotJoin):
            self.reasons[link.first, link.second] = joined.reason
            for side in (a, b):
                self.refused.setdefault(side, []).append(link)
            return
        verdict = self.prices.worth(self.clusters[a], self.clusters[b], joined)
        if verdict is not None:
            self.reasons[link.first, link.second] = verdict
            return
        self._replace(a, b, joined)

    def _cross(self) -> None:
        """Add sums of columns to the loops of kernels that fold the rows of the same matrices."""
        if not self.capabilities.held_row:
            return
        dependences = self.dependences
        for a in [c for c, cluster in self.clusters.items() if sums_columns(dependences, cluster)]:
            if a not in self.clusters:  # joined by then, as rows
                continue
            near = {other for name in (*self.read[a], *self.results[a]) for other in self._touching(name)} - {a}
            for b in sorted(near, key=lambda c: self.clusters[c].members[0]):
                columns, rows = self.clusters[a], self.clusters[b]
                if not folds_rows(dependences, rows) or self._path(a, b) or self._path(b, a):
                    continue
                joined = join_rows_and_columns(dependences, self.capabilities, columns, rows)
                if isinstance(joined, Cluster):
                    verdict = self.prices.worth(columns, rows, joined)
                    if verdict is None:
                        self._merge(joined)
                        break
                else:
                    verdict = joined.reason
                self._keep_apart(a, b, verdict)

    def _keep_apart(self, a: int, b: int, reason: str) -> None:
        """Record the reason why two clusters do not become one."""
        for first, second in ((a, b), (b, a)):
            for name in self.results[first].keys() & self.read[second]:
                readers = [reader for reader in self.dependences.readers[name] if self.owner[reader] == second]
                self.reasons.update({(self.results[first][name], reader): reason for reader in readers})

    def _touching(self, name: str) -> set[int]:
        """Return the clusters that read or compute a tensor."""
        writer = self.dependences.writer.get(name)
        positions = (*self.dependences.readers.get(name, ()), *(() if writer is None else (writer,)))
        return {self.owner[position] for position in positions}

    def _unite(self) -> None:
        """Merge small unrelated clusters into one body (horizontal fusion).

        Only pointwise clusters that take little longer than their launch, over axes of the same sizes: they share their
        indices.  Kernels over other axes share a launch later, each with a body of its own (`pack.py`).
        """
        alike: dict[tuple[object, ...], int] = {}
        small = 2 * self.capabilities.rates.launch_us
        # Folds are not merged: each holds registers until its loop ends, and many of them together spill.
        for b in sorted(self.clusters, key=lambda c: self.clusters[c].members[0]):
            cluster = self.clusters[b]
            if cluster.extern or cluster.space.reduced or self.prices.time(cluster) > small:
                continue
            if sum(map(self.dependences.bytes, self.results[b])) > EARLY:  # held until the last of them is needed
                continue
            shape = tuple(axis.size for axis in cluster.space.parallel)
            a = alike.get(shape)
            if a is not None and not (self._path(a, b, direct=True) or self._path(b, a, direct=True)):
                joined = may_share_body(self.dependences, self.capabilities, self.clusters[a], cluster)
                if isinstance(joined, Cluster):
                    alike[shape] = self._replace(a, b, joined)
                    continue
            alike[shape] = b

    def _merge(self, joined: Cluster) -> int:
        """Replace the clusters whose members `joined` has."""
        new, self.next = self.next, self.next + 1
        parts = {self.owner[member] for member in joined.members}
        self.clusters[new] = joined
        self.graph.add_node(new)
        for old in parts:
            self.graph.add_edges_from((p, new) for p in self.graph.predecessors(old) if p not in parts and p != new)
            self.graph.add_edges_from((new, s) for s in self.graph.successors(old) if s not in parts and s != new)
        self.results[new] = {name: member for old in parts for name, member in self.results[old].items()}
        self.read[new] = frozenset[str]().union(*(self.read[old] for old in parts))
        for old in parts:
            self.graph.remove_node(old)
            del self.clusters[old], self.results[old], self.read[old]
        self.owner.update(dict.fromkeys(joined.members, new))
        self._rank(new, parts)
        return new

    def _rank(self, new: int, parts: Collection[int]) -> None:
        """Insert `new` into the topological order between its parts, and move their successors among them behind it."""
        positions = [self.rank.pop(part) for part in parts]
        first, last = min(positions), max(positions)
        for place in positions:
            self.ranked[place] = None
        between = [c for c in self.ranked[first : last + 1] if c is not None]
        behind = set[int]()
        inside = set(between)
        todo = [s for s in self.graph.successors(new) if s in inside]
        while todo:
            here = todo.pop()
            if here not in behind:
                behind.add(here)
                todo.extend(s for s in self.graph.successors(here) if s in inside)
        order = [*(c for c in between if c not in behind), new, *(c for c in between if c in behind)]
        for place, cluster in enumerate(order, first):
            self.ranked[place] = cluster
            self.rank[cluster] = place
        for place in range(first + len(order), last + 1):
            self.ranked[place] = None

    def _replace(self, a: int, b: int, joined: Cluster) -> int:
        smaller = min((a, b), key=lambda c: len(self.clusters[c].members))
        touched = list(self.clusters[smaller].members)
        changed = {side for side in (a, b) if self.clusters[side].space.axes != joined.space.axes}
        known = {side: self.refused.pop(side, []) for side in (a, b)}
        new = self._merge(joined)
        self.refused[new] = [link for side in (a, b) if side not in changed for link in known[side]]
        for link in (link for side in changed for link in known[side]):
            self._push(link)  # a join that was refused over other axes may now be possible
        for member in touched:  # the smaller side may be joinable now that it is part of a larger cluster
            for link in self._links_from(member):
                self._push(link)
            for name in self.dependences.reads[member]:
                if name in self.dependences.writer:
                    self._push(Link(name, self.dependences.writer[name], member, vertical=True))
        return new

    def _path(self, start: int, end: int, *, direct: bool = False) -> bool:
        """Return whether there is a path from `start` to `end` through another cluster (`direct`: or any path)."""
        last = self.rank[end]
        if self.rank[start] > last:
            return False
        stack = [s for s in self.graph.successors(start) if direct or s != end]
        seen = set(stack)
        while stack:
            here = stack.pop()
            if here == end:
                return True
            if self.rank[here] > last:
                continue
            for after in self.graph.successors(here):
                if after not in seen:
                    seen.add(after)
                    stack.append(after)
        return False

    # The ledger -----------------------------------------------------------------------------------------------------

    def _why_apart(self, writer: int, reader: int) -> str | None:
        """Return why an edge was not fused; None if it was, or moves no data."""
        if self.owner[writer] == self.owner[reader]:
            return None
        ends = (self.dependences.program.nodes[position] for position in (writer, reader))
        extern = next((node for node in ends if isinstance(node, (Extern, Chunked))), None)
        if extern is None:
            return self.reasons.get((writer, reader), "no candidate")
        if isinstance(extern, Extern) and extern.is_view:
            return None
        return f"{extern.name} is an extern" + (f" ({extern.reason})" if extern.reason else "")
