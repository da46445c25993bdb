"""Simplifies index arithmetic: removes `//` and `%` (`lowering/ir/division.py`) from indices.

An index is an integer; it is non-negative where it is used unmasked, but parts of it need not be (`i - 3` in a
concatenation).  `sizes` maps each axis symbol to its extent, an axis `i` runs over `0 ≤ i < sizes[i]`; these bounds are
the only facts that the laws need.  Input: a sympy expression over axis and size symbols; output: an equal one, with as
few `//` and `%` as possible.  Divisors are positive.

    intervals.py     the least and the greatest value of an index
    digits.py        indices as mixed-radix numbers over axes
    laws.py          simplification of `//` and `%` by bounds
    substitution.py  replacement of axes by indices or loaded values
    inverse.py       axes as functions of indices
    offsets.py       several indices and their strides as one offset, and back

Results are cached per expression and bounds of its symbols: a graph has few indices, and asks for them often.
"""

from __future__ import annotations

from fusion.lowering.indexing.intervals import Sizes, axis_symbol, bounds, over_symbol
from fusion.lowering.indexing.inverse import Inverse, invert, split_points
from fusion.lowering.indexing.laws import simplify, within
from fusion.lowering.indexing.offsets import (
    RUN,
    direct_part,
    flatten,
    stride_along,
    within_run,
)
from fusion.lowering.indexing.substitution import replace_axes, substitute, substitute_all
from fusion.lowering.ir.affine import coefficient, extent_of, symbols_of
from fusion.lowering.ir.division import ONE, ZERO, FloorDiv, Mod

__all__ = [
    "ONE",
    "RUN",
    "ZERO",
    "FloorDiv",
    "Inverse",
    "Mod",
    "Sizes",
    "axis_symbol",
    "bounds",
    "coefficient",
    "direct_part",
    "extent_of",
    "flatten",
    "invert",
    "over_symbol",
    "replace_axes",
    "simplify",
    "split_points",
    "stride_along",
    "substitute",
    "substitute_all",
    "symbols_of",
    "within",
    "within_run",
]
