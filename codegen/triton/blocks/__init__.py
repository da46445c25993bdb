"""Maps the axes of a kernel to block dimensions: tiling, and the layout of tiles.

Input: a Kernel; output: its block dimensions in the order in which tiles are laid out (the contiguous one last), and
every axis rewritten as a digit of the linear index of its dimension.

    pointwise     GRID axes → x, or (y, x) where a load and the store are contiguous along different axes, or rows
                  and columns (b, x) where several values are loaded once per row
    reduction     GRID axes → x, reduced axes → r (more of them where folds reduce different axes); a loop over long
                  rows that start at unaligned addresses begins at the aligned address before (`aligned_rows`)
    contraction   rows → m, columns → n, folded axes → k, the other GRID axes → b, one value per program; the sides
                  of further contractions are these dimensions too, or reduced ones of their own

Axes of size 1 are dropped, except one for each side of a contraction.  The offsets of loads and stores decide which
axes are contiguous.  The sizes of the blocks are a `Config`, which a form (`forms`) picks.
"""

from __future__ import annotations

from fusion.codegen.triton.blocks.config import (
    Config,
    describe,
    extent,
    full_rounds,
    keeps_busy,
    power_of_two,
    programs,
)
from fusion.codegen.triton.blocks.dims import Blocked, Dim, LaneDim
from fusion.codegen.triton.blocks.rewrite import block, block_as
from fusion.codegen.triton.blocks.rows import row_block

__all__ = [
    "Blocked",
    "Config",
    "Dim",
    "LaneDim",
    "block",
    "block_as",
    "describe",
    "extent",
    "full_rounds",
    "keeps_busy",
    "power_of_two",
    "programs",
    "row_block",
]
