"""Rules about two clusters that need no algebra: devices, sizes, folds that do not share a kernel."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from codegen.target import Capabilities
from fusion.schedule import scattered
from fusion.schedule.graph import Dependences
from fusion.schedule.legality.cluster import Cluster
from lowering.expr import Expr, Op, loads, postorder
from lowering.program import Contract, Map

MAX_MEMBERS = 64
"""Nodes per kernel.  Longer chains gain little more and make register pressure and compile time grow."""

COMPARISONS = frozenset({"eq", "ne", "lt", "le", "gt", "ge"})


def not_empty(
    dependences: Dependences, capabilities: Capabilities, first: Cluster, second: Cluster, members: Sequence[int]
) -> str | None:
    """An axis without elements leaves nothing to share."""
    empty = any(axis.size == 0 for axis in (*first.space.axes, *second.space.axes))
    return "an axis has no elements: there is nothing to share" if empty else None


def same_device(
    dependences: Dependences, capabilities: Capabilities, first: Cluster, second: Cluster, members: Sequence[int]
) -> str | None:
    """A kernel runs on one device."""
    buffers = dependences.program.buffers
    a, b = (buffers[dependences.compute(cluster.members[0]).out].device for cluster in (first, second))
    return None if a == b else f"different devices: {a} and {b}"


def small_enough(
    dependences: Dependences, capabilities: Capabilities, first: Cluster, second: Cluster, members: Sequence[int]
) -> str | None:
    """A kernel holds so many operations, and takes so many tensors."""
    if len(members) > MAX_MEMBERS:
        return f"the kernel would hold more than {MAX_MEMBERS} operations"
    together = frozenset(members)
    touched = {dependences.outs[m] for m in members}.union(*(dependences.read[m] for m in members))
    inside = {dependences.outs[m] for m in members if not dependences.stored(m, together)}
    if len(touched - inside) > capabilities.max_params:
        return f"the kernel would take more than {capabilities.max_params} tensors"
    return None


def scatters_apart(
    dependences: Dependences, capabilities: Capabilities, first: Cluster, second: Cluster, members: Sequence[int]
) -> str | None:
    """A scatter shares no kernel with what it begins from, nor with what reads it."""
    return scattered.not_apart(dependences, members, (first.space, second.space))


def no_other_fold(
    dependences: Dependences, capabilities: Capabilities, first: Cluster, second: Cluster, members: Sequence[int]
) -> str | None:
    """A contraction shares its kernel with no fold but contractions."""
    sides = [[dependences.compute(m) for m in cluster.members] for cluster in (first, second)]
    folds = [[node for node in side if not isinstance(node, Map)] for side in sides]
    if not all(folds) or not any(isinstance(node, Contract) for side in folds for node in side):
        return None
    if first.space.streamed or second.space.streamed:
        return "a walk of products shares its kernel with no other fold"
    if not all(isinstance(node, Contract) for side in folds for node in side):
        return "a contraction shares its kernel with no other fold"
    return None


def stored_where_ranked(
    dependences: Dependences, capabilities: Capabilities, first: Cluster, second: Cluster, members: Sequence[int]
) -> str | None:
    """Computed floats that are compared with others of the same tensor, as by a sort, are stored before.

    A compiler may fuse a product with a sum for one side and not for the other.  Then the same number differs in its
    last bit from itself: two elements of a row would have one place in it, and another place would have none.
    """
    nodes = [dependences.compute(member) for member in members]
    ranked = frozenset[str]().union(*(_ranked(node.exprs) for node in nodes))
    for node in nodes:
        if node.out in ranked and isinstance(node, Map) and any(isinstance(part, Op) for part in postorder(node.expr)):
            return f"{node.out} is compared with itself at another point, and has to be the same there"
    return None


@lru_cache(maxsize=4096)
def _ranked(exprs: tuple[Expr, ...]) -> frozenset[str]:
    """The float tensors of which two elements are compared."""
    found: set[str] = set()
    for node in postorder(*exprs):
        if isinstance(node, Op) and node.name in COMPARISONS:
            here, there = ({load for load in loads(arg) if load.dtype.is_floating_point} for arg in node.args)
            found |= {a.buffer for a in here for b in there if a.buffer == b.buffer and a.index != b.index}
    return frozenset(found)
