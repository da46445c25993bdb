"""Splits the loop of a chain with few programs into parts that run side by side (flash-decoding).

Input: a Program and its chains as clusters; output: an equal Program in which every chain that would leave the device
idle is split (`partial.py`), with the loops of single parts as clusters.  A part is a whole number of blocks; a
symbolic length is split into as many parts as its hint suggests.  A chain is not split where that is not predicted to
be faster (`occupancy.py`), or where its folds refuse it.

Source: flash-decoding (Dao et al. 2023), as a rule over axes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import sympy

from fusion.codegen.target import Capabilities
from fusion.lowering.ir.program import Program
from fusion.schedule.chained.occupancy import counts_of, length_of_part
from fusion.schedule.clusters.legality import Cluster, positions
from fusion.schedule.iteration.dependences import Dependences
from fusion.schedule.reductions.partial import ClusterCut, cut_cluster, with_cuts


def best_cut(dependences: Dependences, cluster: Cluster, capabilities: Capabilities) -> tuple[int, ClusterCut | None]:
    """Return into how many parts to split the loop of a chain, and the split; (1, None) for no split."""
    for count in counts_of(dependences, cluster, capabilities):
        (axis,) = cluster.space.reduced
        split = cut_cluster(dependences, cluster, axis, length_of_part(axis.size, count), count)
        if split is not None:
            return count, split
    return 1, None


def split_loops(
    program: Program,
    clusters: Sequence[Cluster],
    capabilities: Capabilities,
    hints: Mapping[sympy.Symbol, int] | None = None,
) -> tuple[Program, tuple[Cluster, ...]]:
    """Split the loops of `clusters` where that is predicted to be faster; return the program and the clusters in it."""
    dependences = Dependences(program, hints)
    cuts: dict[int, ClusterCut] = {}
    for number, cluster in enumerate(clusters):
        _, split = best_cut(dependences, cluster, capabilities)
        cuts |= {} if split is None else {number: split}
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
        moved.append(
            Cluster.of(
                space, {position_of[name]: placement for name, placement in named.items() if name in position_of}
            )
        )
    return changed, tuple(moved)
