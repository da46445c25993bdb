"""Predicts the speed of alternating products, as `persistent_product.speed` does for those of one group.

A block takes the time of its sum, and of `end` more elements of the sum: groups in turn hide most of an epilogue, but
compete for registers and issue slots.  With one block for each multiprocessor nothing hides it.
"""

from __future__ import annotations

from collections.abc import Sequence

from fusion.codegen.triton.blocks import Blocked, extent, programs
from fusion.codegen.triton.devices import speeds
from fusion.codegen.triton.forms import persistent_product
from fusion.codegen.triton.forms.alternating_product.config import default
from fusion.codegen.triton.forms.persistent_product.speed import filled, further, work_of
from fusion.codegen.triton.products.descriptors import loads_tiles


def reached(parts: Sequence[Blocked]) -> float:
    """Return the predicted share of the library's speed for products of one launch, if the last round were full."""
    known = speeds(parts[0].device).persistent
    shape, length = known.alternating, extent(parts[0].sides(parts[0].dots[0])[2].size)
    assert shape is not None, "called for a device without groups of warps"
    end = shape.end + shape.slope * max(map(work_of, parts)) + shape.further * max(map(further, parts))
    end += shape.loading if any(map(loads_tiles, parts)) else 0
    return shape.share * (length + known.library_end) / (length + end)


def of_groups(parts: Sequence[Blocked]) -> float:
    """Return the predicted share of the library's speed on the blocks of these products."""
    return reached(parts) * filled([(part, default(part)) for part in parts], 1)


def is_fastest(parts: Sequence[Blocked]) -> bool:
    """Return whether no configuration of one group is predicted to be faster; several products are in one loop."""
    return of_groups(parts) >= persistent_product.speed.best(parts, joined=len(parts) > 1)


def hides_epilogues(parts: Sequence[Blocked]) -> bool:
    """Return whether there are blocks for both groups."""
    blocks = sum(programs(part, default(part), dict(part.kernel.traced)) for part in parts)
    return blocks > parts[0].device.multiprocessors
