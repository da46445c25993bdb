"""Lays out a graph in layers, from top to bottom, as in Sugiyama, Tagawa and Toda (1981).

Input: the widths of nodes and the edges between them, each from an earlier to a later node; output: the centre of each
node and the points of each edge.  An edge over several layers gets a point in each, which takes part in the ordering,
so that edges do not run through nodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import TypeAlias

import networkx as nx

ROW, GAP = 64.0, 18.0
"""The distance between layers, and the space between neighbours in a layer."""
SWEEPS, SHIFTS = 6, 8
"""How often layers are ordered by their neighbours, and moved towards them."""

Point: TypeAlias = tuple[float, float]
Key: TypeAlias = tuple[int, int]
"""A place in a layer: (node, -1), or (edge, layer) for a point of an edge."""


@dataclass(frozen=True, slots=True)
class GraphDrawing:
    """Centres of nodes, the points of each edge from centre to centre, and the size of all."""

    centres: tuple[Point, ...]
    edges: tuple[tuple[Point, ...], ...]
    width: float
    height: float


def layered(widths: Sequence[float], edges: Sequence[tuple[int, int]]) -> GraphDrawing:
    """Lay out nodes of these widths.

    >>> layered([100, 100, 100], [(0, 1), (0, 2)]).centres
    ((109.0, 32.0), (50.0, 96.0), (168.0, 96.0))
    """
    layers = _layers(len(widths), edges)
    paths = [_path(number, edge, layers) for number, edge in enumerate(edges)]
    rows: list[list[Key]] = [[] for _ in range(1 + max(layers, default=-1))]
    for node, layer in enumerate(layers):
        rows[layer].append((node, -1))
    for path in paths:
        for key in path[1:-1]:
            rows[key[1]].append(key)
    above, below = _neighbours(paths)
    _order(rows, above, below)
    width = {(node, -1): size for node, size in enumerate(widths)}
    x = _placed(rows, above, below, width)
    centres = tuple((x[node, -1], ROW * (layer + 0.5)) for node, layer in enumerate(layers))
    lines = tuple(
        tuple(centres[key[0]] if key[1] < 0 else (x[key], ROW * (key[1] + 0.5)) for key in path) for path in paths
    )
    right = max((x[node, -1] + size / 2 for node, size in enumerate(widths)), default=0.0)
    return GraphDrawing(centres, lines, right, ROW * len(rows))


def _layers(count: int, edges: Sequence[tuple[int, int]]) -> list[int]:
    """Return the layer of each node: below all of its producers, and a node without any just above its first reader."""
    graph: nx.DiGraph[int] = nx.DiGraph()
    graph.add_nodes_from(range(count))
    graph.add_edges_from(edges)
    layers = [0] * count
    for node in nx.topological_sort(graph):
        layers[node] = max((layers[before] + 1 for before in graph.predecessors(node)), default=0)
    for node in range(count):
        if not graph.in_degree(node) and graph.out_degree(node):
            layers[node] = min(layers[after] for after in graph.successors(node)) - 1
    return layers


def _path(number: int, edge: tuple[int, int], layers: Sequence[int]) -> list[Key]:
    start, end = edge
    return [(start, -1), *((number, layer) for layer in range(layers[start] + 1, layers[end])), (end, -1)]


def _neighbours(paths: Sequence[Sequence[Key]]) -> tuple[dict[Key, list[Key]], dict[Key, list[Key]]]:
    above: dict[Key, list[Key]] = {}
    below: dict[Key, list[Key]] = {}
    for path in paths:
        for upper, lower in pairwise(path):
            above.setdefault(lower, []).append(upper)
            below.setdefault(upper, []).append(lower)
    return above, below


def _order(rows: Sequence[list[Key]], above: Mapping[Key, Sequence[Key]], below: Mapping[Key, Sequence[Key]]) -> None:
    """Order each layer by the mean position of its neighbours, in the layer above and below in turn."""
    place = {key: float(k) for row in rows for k, key in enumerate(row)}
    for sweep in range(SWEEPS):
        near = below if sweep % 2 else above
        for row in reversed(rows) if sweep % 2 else rows:
            means = {key: fmean(place[other] for other in near[key]) if key in near else place[key] for key in row}
            row.sort(key=means.__getitem__)
            place.update((key, float(k)) for k, key in enumerate(row))


def _placed(
    rows: Sequence[Sequence[Key]],
    above: Mapping[Key, Sequence[Key]],
    below: Mapping[Key, Sequence[Key]],
    width: Mapping[Key, float],
) -> dict[Key, float]:
    """Return the horizontal centres: each row is moved towards its neighbours, in its order."""
    x: dict[Key, float] = {}
    for row in rows:
        x.update(_spread(row, [0.0] * len(row), width))
    for shift in range(SHIFTS):
        for row in reversed(rows) if shift % 2 else rows:
            near = [[*above.get(key, ()), *below.get(key, ())] for key in row]
            wanted = [
                fmean(x[other] for other in each) if each else x[key] for key, each in zip(row, near, strict=True)
            ]
            x.update(_spread(row, wanted, width))
    left = min((centre - width.get(key, 0.0) / 2 for key, centre in x.items()), default=0.0)
    return {key: round(centre - left, 1) for key, centre in x.items()}


def _spread(row: Sequence[Key], wanted: Sequence[float], width: Mapping[Key, float]) -> dict[Key, float]:
    """Return centres near the wanted ones, in order and without overlaps: groups that touch move as one."""
    groups: list[tuple[float, list[float], float]] = []  # the mean wanted place of a group, its offsets, its extent
    for key, want in zip(row, wanted, strict=True):
        size = width.get(key, 0.0) + GAP
        group = (want - size / 2, [size / 2], size)
        while groups and groups[-1][0] + groups[-1][2] > group[0]:
            start, offsets, extent = groups.pop()
            members = len(offsets) + len(group[1])
            begin = (start * len(offsets) + (group[0] - extent) * len(group[1])) / members
            group = (begin, [*offsets, *(extent + each for each in group[1])], extent + group[2])
        groups.append(group)
    centres = [start + offset for start, offsets, _ in groups for offset in offsets]
    return dict(zip(row, centres, strict=True))


__all__ = ["GraphDrawing", "layered"]
