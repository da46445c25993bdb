"""Decides whether two clusters can be one kernel.

One rule per function, each returning None or the reason of the refusal; `may_join` runs them in order.  Whether a path
leaves the pair and comes back is a property of the graph, not of the pair, and is checked in `growth.py`.

    pairs.py    rules about two clusters that need no algebra
    placing.py  the axes of one cluster in the space of another
    joined.py   rules about the joined cluster
    crossed.py  rows that are folded and columns that are summed, in one loop
"""

from __future__ import annotations

from fusion.schedule.clusters.legality.cluster import CannotJoin, Cluster, Link, positions, positions_in, single
from fusion.schedule.clusters.legality.crossed import crossed, folds_rows, sums_columns
from fusion.schedule.clusters.legality.join import may_join, may_share_body

__all__ = [
    "CannotJoin",
    "Cluster",
    "Link",
    "crossed",
    "folds_rows",
    "may_join",
    "may_share_body",
    "positions",
    "positions_in",
    "single",
    "sums_columns",
]
