"""Index arithmetic: everything that makes `//` and `%` (`lowering/division.py`) disappear from indices.

An index is an integer; it is non-negative where it is used unmasked, but parts of it need not be (`i - 3` in a
concatenation).  `sizes` maps each axis symbol to its extent, an axis `i` runs over `0 ≤ i < sizes[i]`; these bounds are
the only facts the laws here need.  Input: a sympy expression over axis and size symbols; output: an equal one,
hopefully without `//` and `%`.  Divisors are positive.

    intervals.py     the least and the greatest value of an index
    digits.py        indices that are mixed-radix numbers of axes
    laws.py          which `//` and `%` are not needed
    substitution.py  other indices, or loaded values, in the place of axes
    inverse.py       axes from indices
    offsets.py       several indices and their strides as one offset, and back

Answers are remembered per expression and the bounds of its symbols: the indices of a graph are few and asked for often.
"""

from __future__ import annotations

from fusion.lowering.division import ONE, ZERO, FloorDiv, Mod
from fusion.lowering.indexing.intervals import Sizes, axis_symbol, bounds, over_symbol, symbols_of
from fusion.lowering.indexing.inverse import Inverse, invert, split_points
from fusion.lowering.indexing.laws import simplify, within
from fusion.lowering.indexing.offsets import coefficient, extent_of, flatten
from fusion.lowering.indexing.substitution import replace_axes, substitute, substitute_all

__all__ = [
    "ONE",
    "ZERO",
    "FloorDiv",
    "Inverse",
    "Mod",
    "Sizes",
    "axis_symbol",
    "bounds",
    "coefficient",
    "extent_of",
    "flatten",
    "invert",
    "over_symbol",
    "replace_axes",
    "simplify",
    "split_points",
    "substitute",
    "substitute_all",
    "symbols_of",
    "within",
]
