"""Names the buffers that a pass adds."""

from __future__ import annotations

from collections.abc import Container


def unused(wish: str, taken: Container[str]) -> str:
    """Return `wish`, with as many underscores as make it new.  Kernel names leave them out.

    >>> unused("sum_part", {"sum", "sum_part"})
    'sum_part_'
    """
    while wish in taken:
        wish += "_"
    return wish
