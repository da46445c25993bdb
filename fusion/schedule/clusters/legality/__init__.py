"""Decides whether two clusters can be one kernel.

One rule per function, each returning None or the reason of the refusal; `may_join` runs them in order.  Whether a path
leaves the pair and comes back is a property of the graph, not of the pair, and is checked in `growth.py`.

    pairs.py             rules about two clusters that need no algebra
    placing.py           the axes of one cluster in the space of another
    joined.py            rules about the joined cluster
    rows_and_columns.py  rows that are folded and columns that are summed, in one loop
"""

from __future__ import annotations

from fusion.schedule.clusters.legality.cluster import (
    CannotJoin,
    Cluster,
    Link,
    SeveralLoops,
    positions,
    positions_in,
    single,
)
from fusion.schedule.clusters.legality.join import may_join, may_share_body
from fusion.schedule.clusters.legality.rows_and_columns import folds_rows, join_rows_and_columns, sums_columns

__all__ = [
    "CannotJoin",
    "Cluster",
    "Link",
    "SeveralLoops",
    "folds_rows",
    "join_rows_and_columns",
    "may_join",
    "may_share_body",
    "positions",
    "positions_in",
    "single",
    "sums_columns",
]
