"""Chooses between a generated kernel and the library for each contraction, with everything fused with it.

`Program → Program`.  A cluster around contractions is one generated kernel.  The alternative is the library's product
of each, between separate kernels for its prologue and its epilogue.  These pay their launches, and move operands and
product through memory: a weight stored in 8 bits is read, written and read again in 16.  But the library may multiply
faster.  Where the alternative wins, contractions are replaced by the library's calls, and the rest is clustered again.

The kernel that reads the result may take the epilogue then (`readers.py`).

A cluster that computes operands may also store them before: each program computes them for its tile, and a kernel that
does so waits for them.  Products of one operand that can share a launch (`pack.py`) are priced as that one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import networkx as nx

from fusion.codegen.target import Capabilities, Target
from fusion.codegen.tuning import Tuning
from fusion.lowering.ir.kernel import Kernel
from fusion.lowering.ir.program import Contract, Map, Node, Program
from fusion.schedule.clusters.alternatives import LIBRARY, ONE_KERNEL, OPERANDS_STORED, Alternative, Measure, weighed
from fusion.schedule.clusters.growth import Clustering
from fusion.schedule.clusters.legality import Cluster, positions_in
from fusion.schedule.clusters.profit import Prices
from fusion.schedule.iteration.contractions import leading_to
from fusion.schedule.kernels import kernel_of
from fusion.schedule.library.copies import merge_copies
from fusion.schedule.library.readers import reader_of
from fusion.schedule.library.split_k import split_k
from fusion.schedule.reductions.partial import with_cuts


@dataclass(frozen=True, slots=True)
class _Offer:
    """A cluster around contractions, with its alternatives: one kernel, and the library."""

    cluster: Cluster
    products: Mapping[int, Contract]
    kernel: Kernel
    ways: tuple[Alternative, ...]
    tried: Tuning

    @property
    def generated(self) -> float:
        """The microseconds of one kernel, measured or else predicted."""
        return self.tried.trials[0].microseconds

    @property
    def best(self) -> float:
        return min(trial.microseconds for trial in self.tried.trials)


def prefer_library(
    program: Program, clustering: Clustering, target: Target, measure: Measure | None = None
) -> tuple[Program, tuple[Tuning, ...]]:
    """Leave contractions to the library where that is faster; return the program and the decision for each cluster.

    The same object where none is left.  Without `measure`, predictions decide.

    >>> from fusion.inspect.examples import TARGET, show_program
    >>> from torch import empty
    >>> from fusion.schedule.clusters.growth import grow
    >>> def left(program):
    ...     return prefer_library(program, grow(program, TARGET.capabilities), TARGET)[0]
    >>> show_program(left, lambda x, w: x @ w, empty(16, 65536), empty(65536, 16))
      input x: f32[16, 65536]
      input w: f32[65536, 16]
    - mm: f32[16, 16] = contract(i0:16, i1:16 over r0:65536; rows i0, columns i1; in f32) x[i0, r0], w[r0, i1]
    + mm: f32[16, 16] = aten.mm.default(x, w)  (the library is faster here)
      return mm
    """
    prices = clustering.prices
    owners = {member: cluster for cluster in clustering.clusters for member in cluster.members}
    offers: list[_Offer] = []
    for cluster in clustering.clusters:
        if not cluster.space.rigid or cluster.space.chained:
            continue
        products = {m: node for m in cluster.members if isinstance(node := program.nodes[m], Contract)}
        if all(contract.out in program.library for contract in products.values()):
            offers.append(_offer(prices, owners, cluster, products, target))
    if measure is not None:
        offers = _measured(offers, program, measure)
    kept = {offer.cluster.members for group in _groups(prices, offers, target) for offer in group}
    taken: list[Alternative] = []
    choices: list[Tuning] = []
    for offer in offers:
        together = offer.cluster.members in kept and offer.best < offer.generated
        chosen = 0 if together else offer.tried.chosen
        taken += [offer.ways[chosen]] if chosen else []
        choices.append(replace(offer.tried, chosen=chosen))
    if not taken:
        return program, tuple(choices)
    copies = {node.out for way in taken for nodes in way.instead.values() for node in nodes if isinstance(node, Map)}
    return merge_copies(with_cuts(program, taken), copies), tuple(choices)


def is_priced_alone(node: Contract, capabilities: Capabilities) -> bool:
    """Return whether a contraction may be generated where no loop consumes its result."""
    return node.lhs.dtype.itemsize in capabilities.lone_products


def leave_lone_products(
    program: Program, chains: Sequence[Cluster], capabilities: Capabilities
) -> tuple[Program, tuple[Cluster, ...]]:
    """Leave contractions outside the chains `chains` to the library, unless they are priced alone.

    Return the program, and the chains in it.

    >>> from dataclasses import replace
    >>> from fusion.inspect.examples import TARGET, show_program
    >>> from torch import empty
    >>> def left(program):
    ...     return leave_lone_products(program, (), replace(TARGET.capabilities, lone_products={}))[0]
    >>> show_program(left, lambda x, w: x @ w.t(), empty(30, 40), empty(50, 40))
      input x: f32[30, 40]
      input w: f32[50, 40]
    - mm: f32[30, 50] = contract(i0:30, i1:50 over r0:40; rows i0, columns i1; in f32) x[i0, r0], w[i1, r0]
    + t: f32[40, 50] strides (1, 40) = aten.t.default(w)  (view)
    + mm: f32[30, 50] = aten.mm.default(x, t)  (the library is faster here)
      return mm
    """
    chained = {member for cluster in chains for member in cluster.members}
    nodes: list[Node] = []
    for position, node in enumerate(program.nodes):
        left = isinstance(node, Contract) and position not in chained and not is_priced_alone(node, capabilities)
        nodes.extend(program.library.get(node.out, [node]) if left and isinstance(node, Contract) else [node])
    unchained = program.edited(nodes)
    return unchained, tuple(chains) if unchained is program else positions_in(unchained, program, chains)


def _groups(prices: Prices, offers: Sequence[_Offer], target: Target) -> list[list[_Offer]]:
    """Group offers that share an operand and are predicted to be faster in one launch than each at its best."""
    groups: list[list[_Offer]] = []
    for offer in offers:
        group = next((g for g in groups if all(_may_share_launch(prices, other, offer, target) for other in g)), None)
        if group is None:
            groups.append([offer])
        else:
            group.append(offer)
    launch = prices.rates.launch_us
    return [
        group
        for group in groups
        if len(group) > 1 and launch + sum(o.generated - launch for o in group) < sum(o.best for o in group)
    ]


def _may_share_launch(prices: Prices, first: _Offer, second: _Offer, target: Target) -> bool:
    """Return whether two clusters may share a launch in which they read the same operand."""
    dependences = prices.dependences
    operands = [set[str]().union(*(dependences.read[m] for m in o.products)) for o in (first, second)]
    if not operands[0] & operands[1] or not target.can_share_launch(first.kernel, second.kernel):
        return False
    ends = ((first, second), (second, first))
    return not any(set(b.cluster.members) & _following(prices, a.cluster) for a, b in ends)


def _following(prices: Prices, cluster: Cluster) -> set[int]:
    """Return the nodes that depend on a cluster."""
    return set[int]().union(*(nx.descendants(prices.dependences.graph, member) for member in cluster.members))


def _measured(offers: Sequence[_Offer], program: Program, measure: Measure) -> list[_Offer]:
    """Return the offers with measured alternatives, measuring the longest first."""
    tried: dict[int, Tuning] = {}
    for number in sorted(range(len(offers)), key=lambda number: -offers[number].best):
        offer = offers[number]
        tried[number] = measure(program, offer.cluster, offer.kernel, offer.ways)
    return [replace(offer, tried=tried[number]) for number, offer in enumerate(offers)]


def _offer(
    prices: Prices, owners: Mapping[int, Cluster], cluster: Cluster, products: Mapping[int, Contract], target: Target
) -> _Offer:
    """Price the alternatives for a cluster; `owners`: node → its cluster."""
    kernel, generated = _generated(prices, cluster, products, target)
    parts = split_k(prices, cluster, products, target)
    stored = _stored(prices, cluster, products, target)
    ways = (
        Alternative(ONE_KERNEL, generated),
        *([] if parts is None else [parts]),
        *([] if stored is None else [stored]),
        _library(prices, cluster, products),
    )
    ways = _with_reader(prices, owners, cluster, products, ways)
    return _Offer(cluster, products, kernel, ways, weighed(kernel, ways))


def _generated(
    prices: Prices, cluster: Cluster, products: Mapping[int, Contract], target: Target
) -> tuple[Kernel, float]:
    """Return the kernel of a cluster, and its microseconds.

    It takes the larger of its products, at its share of the library's speed, with the prologue that each program
    evaluates for its tile, and its traffic, plus its epilogue unless other programs hide that.
    """
    multiplied = sum(prices.contraction(cluster, contract) for contract in products.values())
    kernel = kernel_of(prices, cluster).kernel
    scalar = prices.scalar_times(cluster)
    (efficiency, is_exposed), _ = prices.alike.of_first(
        "speed", cluster, lambda: (target.efficiency(kernel), target.exposes_epilogue(kernel))
    )
    prologue = sum(scalar[member] for member in _parts(prices, cluster, products)[0])
    prologue += sum(prices.packing(contract) for contract in products.values())
    epilogue = _epilogue_time(prices, cluster, products) if is_exposed else 0.0
    moved, in_kernel = prices.moved(cluster) / efficiency, multiplied / efficiency
    generated = prices.rates.price(moved, products=in_kernel, scalars=prologue, epilogue=epilogue)
    return kernel, generated.total


def _stored(prices: Prices, cluster: Cluster, products: Mapping[int, Contract], target: Target) -> Alternative | None:
    """Return the alternative that stores computed operands before; None if there are none."""
    before, after = _parts(prices, cluster, products)
    if not before:
        return None
    computed = {prices.dependences.outs[member] for member in before}
    pairs = frozenset(
        (name, contract.out)
        for position, contract in products.items()
        for name in prices.dependences.read[position] & computed
    )
    first, rest = (_part(cluster, members) for members in (before, (*products, *after)))
    storing = prices.rates.price(sum(prices.traffic(first))).total
    return Alternative(OPERANDS_STORED, storing + _generated(prices, rest, products, target)[1], apart=pairs)


def _part(cluster: Cluster, members: Iterable[int]) -> Cluster:
    """Return a cluster of some of the members, over the same space."""
    kept = tuple(sorted(members))
    places = {member: cluster.places[member] for member in kept if member in cluster.places}
    return replace(cluster, members=kept, places=places)


def _epilogue_time(prices: Prices, cluster: Cluster, products: Mapping[int, Contract]) -> float:
    """Return the microseconds of a cluster's epilogue."""
    after = replace(cluster, places={member: cluster.places[member] for member in _parts(prices, cluster, products)[1]})
    return prices.rates.scalar_us(prices.flops(after))


def _parts(
    prices: Prices, cluster: Cluster, products: Mapping[int, Contract]
) -> tuple[frozenset[int], tuple[int, ...]]:
    """Return the members of the products' prologues, and the members that are neither these nor products."""
    leading = (leading_to(prices.dependences, cluster.members, position) for position in products)
    before = frozenset[int]().union(*leading)
    return before, tuple(member for member in cluster.members if member not in before and member not in products)


def _library(prices: Prices, cluster: Cluster, products: Mapping[int, Contract]) -> Alternative:
    """Price the library's products, one by one, and the kernels before and after them."""
    before, after = _parts(prices, cluster, products)
    total = 0.0
    for members in (before, *({position} for position in products), after):
        if not members:
            continue
        part = _part(cluster, members)
        multiplied = sum(prices.by_library(cluster, products[member]) for member in part.members if member in products)
        total += prices.rates.price(sum(prices.traffic(part)), products=multiplied).total
        total += prices.rates.product_us if any(member in products for member in part.members) else 0.0
    calls = prices.dependences.program.library
    return Alternative(LIBRARY, total, {position: calls[contract.out] for position, contract in products.items()})


def _with_reader(
    prices: Prices,
    owners: Mapping[int, Cluster],
    cluster: Cluster,
    products: Mapping[int, Contract],
    ways: tuple[Alternative, ...],
) -> tuple[Alternative, ...]:
    """Add the reader of a cluster's results to its alternatives, if after the library it is cheaper with the epilogue.

    The library's products are the last of the alternatives.
    """
    epilogue = _parts(prices, cluster, products)[1]
    reader = reader_of(prices, owners, epilogue) if epilogue else None
    if reader is None:
        return ways
    by_itself = prices.rates.price(sum(prices.traffic(_part(cluster, epilogue)))).total
    if reader.joined >= reader.alone + by_itself:
        return ways
    *others, library = (replace(way, predicted=way.predicted + reader.alone) for way in ways)
    joined = library.predicted - by_itself + reader.joined - reader.alone
    return (*others, replace(library, predicted=joined, reader=reader.cluster.members))
