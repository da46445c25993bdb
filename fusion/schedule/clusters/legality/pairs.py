"""Checks two clusters by rules that need no algebra: devices, sizes, folds that cannot share a kernel."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from fusion.codegen.target import Capabilities
from fusion.lowering.algebra.last_bits import compared
from fusion.lowering.ir.expr import Expr, Op, loads, postorder
from fusion.lowering.ir.program import Contract, Map
from fusion.schedule.clusters.legality.cluster import Cluster
from fusion.schedule.iteration import scattered
from fusion.schedule.iteration.dependences import Dependences
from fusion.schedule.iteration.space import Space

MAX_MEMBERS = 64
"""Nodes per kernel.  Larger kernels gain little more, and register pressure and compile time grow."""


@dataclass(frozen=True, slots=True)
class ClusterPair:
    """Two clusters that may become one kernel with these `members`."""

    dependences: Dependences
    capabilities: Capabilities
    first: Cluster
    second: Cluster
    members: tuple[int, ...]

    @property
    def sides(self) -> tuple[Cluster, Cluster]:
        """Both clusters."""
        return self.first, self.second

    @property
    def spaces(self) -> tuple[Space, Space]:
        """The iteration spaces of both."""
        return self.first.space, self.second.space


def not_empty(pair: ClusterPair) -> str | None:
    """Refuse an axis without elements: there is nothing to fuse."""
    empty = any(axis.size == 0 for space in pair.spaces for axis in space.axes)
    return "an axis has no elements: there is nothing to share" if empty else None


def same_device(pair: ClusterPair) -> str | None:
    """Check that a kernel runs on one device."""
    buffers = pair.dependences.program.buffers
    a, b = (buffers[pair.dependences.outs[cluster.members[0]]].device for cluster in pair.sides)
    return None if a == b else f"different devices: {a} and {b}"


def small_enough(pair: ClusterPair) -> str | None:
    """Limit the operations and the tensors of a kernel."""
    dependences, members = pair.dependences, pair.members
    if len(members) > MAX_MEMBERS:
        return f"the kernel would hold more than {MAX_MEMBERS} operations"
    together = frozenset(members)
    touched = {dependences.outs[m] for m in members}.union(*(dependences.read[m] for m in members))
    inside = {dependences.outs[m] for m in members if not dependences.stored(m, together)}
    most = pair.capabilities.max_params
    if len(touched - inside) > most:
        return f"the kernel would take more than {most} tensors"
    return None


def scatters_apart(pair: ClusterPair) -> str | None:
    """Refuse a scatter in one kernel with the producer of its start, or with its readers."""
    return scattered.conflict(pair.dependences, pair.members, pair.spaces)


def no_other_fold(pair: ClusterPair) -> str | None:
    """Refuse a contraction in one kernel with folds other than contractions."""
    sides = [[pair.dependences.compute(m) for m in cluster.members] for cluster in pair.sides]
    folds = [[node for node in side if not isinstance(node, Map)] for side in sides]
    if not all(folds) or not any(isinstance(node, Contract) for side in folds for node in side):
        return None
    if any(space.chained for space in pair.spaces):
        return "a chain of products shares its kernel with no other fold"
    if not all(isinstance(node, Contract) for side in folds for node in side):
        return "a contraction shares its kernel with no other fold"
    return None


def stored_before_products(pair: ClusterPair) -> str | None:
    """Refuse a product in one kernel with an operand that is stored before."""
    program = pair.dependences.program
    if program.apart:
        results = {pair.dependences.outs[member] for member in pair.members}
        for operand, product in program.apart:
            if operand in results and product in results:
                return f"it is faster to store {operand} before"
    return None


def stored_where_ranked(pair: ClusterPair) -> str | None:
    """Require that computed floats which are compared with other elements of the same tensor, as in a sort, are stored
    before.

    A compiler may use an FMA for one side and not for the other.  Then a number would differ in its last bit from
    itself: two elements of a row would get one rank, and another rank none.
    """
    nodes = [pair.dependences.compute(member) for member in pair.members]
    ranked = frozenset[str]().union(*(_ranked(node.exprs) for node in nodes))
    for node in nodes:
        if node.out in ranked and isinstance(node, Map) and any(isinstance(part, Op) for part in postorder(node.expr)):
            return f"{node.out} is compared with itself at another point, and has to be the same there"
    return None


@lru_cache(maxsize=4096)
def _ranked(exprs: tuple[Expr, ...]) -> frozenset[str]:
    """Return the float tensors of which two elements are compared."""
    buffers: set[str] = set()
    for args in compared(*exprs):
        here, there = ({load for load in loads(arg) if load.dtype.is_floating_point} for arg in args)
        buffers |= {a.buffer for a in here for b in there if a.buffer == b.buffer and a.index != b.index}
    return frozenset(buffers)
