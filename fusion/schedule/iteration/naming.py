"""Names the buffers that a pass adds, and limits the names of kernels."""

from __future__ import annotations

from collections.abc import Container

LONGEST_NAME = 200
"""Characters of a kernel's name, at most: it is part of file names."""


def limited(name: str) -> str:
    """Return a name without the words that exceed `LONGEST_NAME`.

    >>> limited("mul_add"), len(limited("_".join(["softmax"] * 40)))
    ('mul_add', 199)
    """
    return name if len(name) <= LONGEST_NAME else name[: LONGEST_NAME + 1].rpartition("_")[0]


def unused(wish: str, taken: Container[str]) -> str:
    """Return `wish`, with as many underscores as make it new.  Kernel names leave them out.

    >>> unused("sum_part", {"sum", "sum_part"})
    'sum_part_'
    """
    while wish in taken:
        wish += "_"
    return wish
