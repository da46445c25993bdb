"""Splits the walk of a chain with few programs into parts that run side by side (flash-decoding).

Input: a Program and its streams as clusters; output: an equal Program in which every stream that would leave the device
idle is cut (`partial.py`), and the walks of single parts as clusters.  A part is as long as some whole blocks; a
symbolic length is cut into as many parts as its hint calls for.  A stream stays whole where cutting it is not predicted
to be faster (`occupancy.py`), or its folds refuse it.

Source: flash-decoding (Dao et al. 2023), as a rule over axes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import sympy

from fusion.codegen.target import Capabilities
from fusion.lowering.program import Program
from fusion.schedule.chained.occupancy import counts_of, length_of_part
from fusion.schedule.clusters.legality import Cluster, positions
from fusion.schedule.iteration.dependences import Dependences
from fusion.schedule.reductions.partial import Cut, cut, with_cuts


def best_cut(dependences: Dependences, cluster: Cluster, capabilities: Capabilities) -> tuple[int, Cut | None]:
    """Into how many parts the walk of a stream is cut, and how; 1 where it is not."""
    for count in counts_of(dependences, cluster, capabilities):
        (axis,) = cluster.space.reduced
        made = cut(dependences, cluster, axis, length_of_part(axis.size, count), count)
        if made is not None:
            return count, made
    return 1, None


def in_parts(
    program: Program,
    clusters: Sequence[Cluster],
    capabilities: Capabilities,
    hints: Mapping[sympy.Symbol, int] | None = None,
) -> tuple[Program, tuple[Cluster, ...]]:
    """`program` with the walks of `clusters` in parts where that is predicted to be faster, and the clusters in it."""
    dependences = Dependences(program, hints)
    cuts: dict[int, Cut] = {}
    for number, cluster in enumerate(clusters):
        _, made = best_cut(dependences, cluster, capabilities)
        cuts |= {} if made is None else {number: made}
    if not cuts:
        return program, tuple(clusters)
    changed = with_cuts(program, list(cuts.values()))
    position_of = positions(changed)
    moved = []
    for number, cluster in enumerate(clusters):
        if number in cuts:
            space, named = cuts[number].space, cuts[number].places
        else:
            space, named = cluster.space, cluster.by_name(program)
        moved.append(Cluster.of(space, {position_of[name]: placement for name, placement in named.items()}))
    return changed, tuple(moved)
