"""Choices: how large the blocks of a kernel are, on how many warps and in which form.

What enters is a kernel over block dimensions; what leaves are configurations, the one that a model of the device likes
best first.  A module for each kind of kernel: `rows` (no contraction), `vectors` and `narrow` (a matrix with a few
vectors, as sums of products and on the matrix units), `contractions` and `persistent` (products through pointers and
through tensor memory), `chains` (products of products, such as attention; `grouped`: in groups of warps).  `efficiency`
tells the scheduler how fast the first choice will be, `limits` what the device has room for.
"""

from __future__ import annotations

from fusion.codegen.numerics import Numerics
from fusion.codegen.triton.blocks import Blocked, Config
from fusion.codegen.triton.choices import chains, contractions, limits, narrow, persistent, rows, vectors


def candidates(blocked: Blocked, numerics: Numerics) -> tuple[Config, ...]:
    """Configurations worth timing that fit the device, the default first."""
    return limits.within(blocked, _candidates(blocked, numerics))


def _candidates(blocked: Blocked, numerics: Numerics) -> tuple[Config, ...]:
    if not blocked.contraction:
        return vectors.candidates(blocked) or rows.candidates(blocked)
    if blocked.chained:
        return chains.candidates(blocked, numerics)
    if any(dim.name == "s" for dim in blocked.dims):
        return narrow.candidates(blocked)
    others = contractions.candidates(blocked, numerics)
    return tuple(dict.fromkeys((*narrow.candidates(blocked), *persistent.candidates(blocked), *others)))
