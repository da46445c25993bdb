"""Blocked: kernels with products, running values or loops inside loops, computed tile by tile.

Input: a kernel; output: the text of one C function.  `function` is the path: threads take `blocks` of the grid, and
what statements leave for each other is `held` in tiles of their own, in the nests of a `scope`; a product is calls that
multiply its `factors`, and a block that cannot change anything is skipped (`skips`).
"""

from __future__ import annotations

from fusion.codegen.c.blocked.function import blocked_function, needs_blocks

__all__ = ["blocked_function", "needs_blocks"]
