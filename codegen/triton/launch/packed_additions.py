"""Writes additions of pairs of 16-bit integers in PTX as two additions each.

`ptxas` of CUDA 12.8 to 13.0 assembles `add.s16x2` with a constant as an addition of 0, from `-O1` on, where only one
half of the result is used (sm_90).  LLVM writes such instructions for positions that it knows to fit into 16 bits:

>>> print(in_halves("    add.s16x2 %r3, %r1, %r2;"))
    { .reg .b16 a, b, c, d; mov.b32 {a, b}, %r1; mov.b32 {c, d}, %r2;
      add.s16 a, a, c; add.s16 b, b, d; mov.b32 %r3, {a, b}; }
"""

from __future__ import annotations

import re

_PACKED = re.compile(r"^(\s*)add\.[su]16x2\s+(%\w+),\s*([^,;]+),\s*([^,;]+);", re.MULTILINE)

_HALVES = r"""\1{ .reg .b16 a, b, c, d; mov.b32 {a, b}, \3; mov.b32 {c, d}, \4;
\1  add.s16 a, a, c; add.s16 b, b, d; mov.b32 \2, {a, b}; }"""


def in_halves(ptx: str) -> str:
    """Return PTX in which no instruction adds two pairs of 16-bit integers."""
    return _PACKED.sub(_HALVES, ptx) if "16x2" in ptx else ptx
