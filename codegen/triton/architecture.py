"""Architectures: what a name such as "sm_90" says, and what products on one may do."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Units:
    """The matrix units of an architecture; with `tf32`, operands of float32 may be rounded to 19 bits."""

    arch: str
    tf32: bool = False


def capability(arch: str) -> int:
    """The compute capability of an NVIDIA architecture, times ten; 0 of any other.

    >>> capability("sm_90a"), capability("sm_120"), capability("gfx942")
    (90, 120, 0)
    """
    named = re.fullmatch(r"sm_(\d+)[af]?", arch)
    return int(named[1]) if named else 0
