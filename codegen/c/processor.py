"""Describes which instructions a CPU has, and which an object may contain.

An object for `native` may use every feature of the CPU that compiled it; one for a level of x86-64, such as
`x86-64-v3`, the features that the psABI of x86-64 lists for it.  Names are as in Linux' `/proc/cpuinfo`.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from fusion.lowering.errors import Unsupported

NATIVE = "native"

_V2 = frozenset({"cx16", "lahf_lm", "popcnt", "pni", "sse4_1", "sse4_2", "ssse3"})
_V3 = _V2 | {"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"}
LEVELS: Mapping[str, frozenset[str]] = {
    "x86-64": frozenset(),
    "x86-64-v2": _V2,
    "x86-64-v3": _V3,
    "x86-64-v4": _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
}
"""Level of x86-64 → its features, from the least to the most."""

_COMPUTES = re.compile(r"pni|s?sse.*|avx.*|amx.*|fma.*|f16c|bmi[12]|abm|movbe|popcnt|adx|gfni|cx16|lahf_lm|xsave")
"""The features of x86-64 that a compiler may use for loops of numbers.  Others (virtual machines, keys) are ignored:
they differ between CPUs that run the same objects."""


@lru_cache(maxsize=1)
def features() -> frozenset[str]:
    """Return the features of this machine's CPU that objects depend on; none where the system does not say."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return frozenset()
    known = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    words = frozenset(known[1].split()) if known else frozenset[str]()
    return frozenset(filter(_COMPUTES.fullmatch, words)) if platform.machine() == "x86_64" else words


def required_by(arch: str) -> frozenset[str]:
    """Return the features that an object for `arch` needs.

    Raises:
        Unsupported: no object can be compiled for `arch` here.

    >>> from fusion.codegen.c.processor import required_by
    >>> sorted(required_by("x86-64-v4") - required_by("x86-64-v3"))  # doctest: +SKIP
    ['avx512bw', 'avx512cd', 'avx512dq', 'avx512f', 'avx512vl']
    """
    if arch == NATIVE:
        return features()
    if arch not in LEVELS or platform.machine() != "x86_64":
        known = (NATIVE, *LEVELS) if platform.machine() == "x86_64" else (NATIVE,)
        raise Unsupported(
            f"the c target does not build for {arch!r} on {platform.machine()}", hint=f"known: {', '.join(known)}"
        )
    return LEVELS[arch]


__all__ = ["LEVELS", "NATIVE", "features", "required_by"]
