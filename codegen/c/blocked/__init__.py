"""Computes kernels with products, running values or nested loops tile by tile.

Input: a kernel; output: the text of one C function.  `function` is the path: threads take `blocks` of the grid, and
intermediate values are `held` in private tiles, which the loop nests of a `scope` fill; a product becomes calls that
multiply its `factors`, and blocks without effect are skipped (`skips`).
"""

from __future__ import annotations

from fusion.codegen.c.blocked.blocks import MOST_BLOCK_ROWS, is_streamed, programs
from fusion.codegen.c.blocked.function import blocked_function, needs_blocks, sides

__all__ = ["MOST_BLOCK_ROWS", "blocked_function", "is_streamed", "needs_blocks", "programs", "sides"]
