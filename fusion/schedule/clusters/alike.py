"""Recognises clusters that are alike: equal but for the names of their buffers, as in the layers of a model.

Input: a cluster of a Program; output: a key, equal for clusters that are alike, and the buffers in an order in which
those of alike clusters correspond.  Prices and kernels follow from the key, so that they are computed once for all
layers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import TypeVar, cast

from fusion.lowering.ir.program import Contract, reading, reads, writes
from fusion.schedule.clusters.legality import Cluster
from fusion.schedule.iteration.dependences import Dependences

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class NamedNode:
    """A node without the names of its buffers.

    Attributes:
        form: a number, equal for nodes that differ only in these names.
        buffers: its operands, in order of appearance, then its result.
    """

    form: int
    buffers: tuple[str, ...]


class Alike:
    """Recognises clusters of one Program that are alike, and keeps what was computed for the first of each kind.

    Args:
        before: of an earlier version of the Program, for the same target and sizes: what was computed there counts.
    """

    def __init__(self, dependences: Dependences, before: Alike | None = None) -> None:
        self._dependences = dependences
        self._nodes: dict[int, NamedNode] = {}
        self._forms: dict[Hashable, int] = {} if before is None else before._forms
        self._first: dict[Hashable, tuple[object, tuple[str, ...]]] = {} if before is None else before._first

    def of_first(self, use: str, cluster: Cluster, compute: Callable[[], T]) -> tuple[T, dict[str, str]]:
        """Return what `compute` returned for the first cluster like this one, and its buffers → those of this one.

        Args:
            use: names what is computed; results of the same cluster for different uses are independent.
        """
        key, buffers = self._key(cluster)
        if (use, key) not in self._first:
            self._first[use, key] = compute(), buffers
        result, first = self._first[use, key]
        return cast("T", result), dict(zip(first, buffers, strict=True))

    def node(self, position: int) -> NamedNode:
        """Return the form of the computed node at `position`, with all facts on its buffers that clusters depend on."""
        if (known := self._nodes.get(position)) is not None:
            return known
        dependences, node = self._dependences, self._dependences.compute(position)
        program = dependences.program
        operands = reads(node)
        numbers = {name: str(number) for number, name in enumerate(operands)}
        unnamed = replace(reading(node, numbers), out="")
        buffers = (*operands, *writes(node))
        facts = tuple(replace(program.buffers[name], name="") for name in buffers)
        rounding = position in dependences.rounded_anyway, node.out in dependences.rounded_later
        form = self._forms.setdefault((unnamed, facts, rounding, words_of(dependences, position)), len(self._forms))
        self._nodes[position] = named = NamedNode(form, buffers)
        return named

    def _key(self, cluster: Cluster) -> tuple[Hashable, tuple[str, ...]]:
        numbers: dict[str, int] = {}
        members: list[Hashable] = []
        for member in cluster.members:
            node, placement = self.node(member), cluster.places.get(member)
            own = tuple(numbers.setdefault(name, len(numbers)) for name in node.buffers)
            stored = self._dependences.stored(member, cluster.members)
            members.append((node.form, own, stored, None if placement is None else tuple(placement.items())))
        return (cluster.space, tuple(members)), tuple(numbers)


def words_of(dependences: Dependences, member: int) -> tuple[str, ...]:
    """Return the words for the operations of a node in the names of kernels.

    Numbers in node names are left out, inside and at the end (`sum_10_part`): kernels of equal layers are equal.
    """
    node = dependences.compute(member)
    words = []
    for name in dependences.program.operations_of(node.out):
        word = "matmul" if isinstance(node, Contract) else re.sub(r"(_\d+)+(?=_|$)", "", name)
        words.append(re.sub(r"[\W_]+", "_", word).strip("_") or "map")
    return tuple(words)
