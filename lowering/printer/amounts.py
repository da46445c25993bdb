"""Amounts of memory as text."""

from __future__ import annotations


def format_bytes(count: int) -> str:
    """Format a number of bytes in the largest unit that is not below 1.

    >>> format_bytes(512), format_bytes(3 * 1024 * 1024), format_bytes(5 << 40)
    ('512 B', '3.0 MiB', '5120.0 GiB')
    """
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
