"""Describes how fast a target's own attention kernels and the library's run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

GENERATED = "generated"
"""The form of an attention kernel that every target generates; other forms have target-specific names."""

Shares: TypeAlias = Mapping[int, tuple[float, float]]
"""Width of a head, at most → (forward, backward) efficiency, relative to the library's GEMMs of the same dtype.  Wider
heads run as fast as the widest.
"""


@dataclass(frozen=True, slots=True)
class AttentionSpeed:
    """The efficiency of an attention kernel, in the arithmetic of the tiles that it does not skip.

    Attributes:
        plain: without a mask.
        skipping: with skipped tiles, which make programs unequal: `is_causal`, a window.
        masked: with a mask that is read for every score.
        begins: the prologue and epilogue of a tile of rows in forward, in columns of its loop that take as long.
    """

    plain: Shares
    skipping: Shares
    masked: Shares
    begins: float = 0.0

    def scaled(self, factor: float) -> AttentionSpeed:
        """Return the efficiencies relative to GEMMs that are slower by `factor`."""
        kinds = (self.plain, self.skipping, self.masked)
        plain, skipping, masked = ({w: (f * factor, b * factor) for w, (f, b) in kind.items()} for kind in kinds)
        return AttentionSpeed(plain, skipping, masked, self.begins)

    def forward(self, share: float, walk: float) -> float:
        """Return the efficiency `share` of forward when the loop has only `walk` columns.

        >>> AttentionSpeed({}, {}, {}, begins=256.0).forward(0.9, 256.0)
        0.45
        """
        return share * walk / (walk + self.begins)
