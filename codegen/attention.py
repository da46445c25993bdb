"""The speed of attention: how a target says how fast its own kernels and the library's compute it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

GENERATED = "generated"
"""The form of a kernel of several products that every target has; others have names that their target gives them."""

Shares: TypeAlias = Mapping[int, tuple[float, float]]
"""Width of a head, at most → (forward, backward), as shares of the speed of the library's plain products of the same
dtype.  Wider heads run as fast as the widest.
"""


@dataclass(frozen=True, slots=True)
class AttentionSpeed:
    """How fast a kernel for attention runs, in the arithmetic of the blocks that it does not skip.

    Attributes:
        plain: without a mask.
        skipping: where blocks are left out, of which more and less falls to a program: `is_causal`, a window.
        masked: where an element of a mask is read for every score.
        begins: columns that forward could walk in the time that a block of rows takes before and after its walk.
    """

    plain: Shares
    skipping: Shares
    masked: Shares
    begins: float = 0.0

    def scaled(self, factor: float) -> AttentionSpeed:
        """The same speed as a share of products that are so much slower."""
        kinds = (self.plain, self.skipping, self.masked)
        plain, skipping, masked = ({w: (f * factor, b * factor) for w, (f, b) in kind.items()} for kind in kinds)
        return AttentionSpeed(plain, skipping, masked, self.begins)

    def forward(self, share: float, walk: float) -> float:
        """What is left of a forward share in walks of so many columns.

        >>> AttentionSpeed({}, {}, {}, begins=256.0).forward(0.9, 256.0)
        0.45
        """
        return share * walk / (walk + self.begins)
