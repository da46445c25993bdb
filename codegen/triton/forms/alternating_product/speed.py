"""Predicts the speed of alternating products, as `persistent_product.speed` does for those of one group.

A block takes the time of its sum, and of `end` more elements of the sum: groups in turn hide most of an epilogue, but
compete for registers and issue slots.  The epilogue of the last block is hidden by nothing.
"""

from __future__ import annotations

from fusion.codegen.triton.blocks import Blocked, extent, programs
from fusion.codegen.triton.devices import speeds
from fusion.codegen.triton.forms import persistent_product
from fusion.codegen.triton.forms.alternating_product.config import default
from fusion.codegen.triton.forms.persistent_product.speed import filled, work_of


def reached(blocked: Blocked) -> float:
    """Return the predicted share of the library's speed, if the last round were full."""
    known = speeds(blocked.device).persistent
    shape, length = known.alternating, extent(blocked.sides(blocked.dots[0])[2].size)
    assert shape is not None, "called for a device without groups of warps"
    end = shape.end + shape.slope * work_of(blocked)
    last = known.last / _rounds(blocked)
    return shape.share * (length + known.library_end) / (length + end + last)


def of_groups(blocked: Blocked) -> float:
    """Return the predicted share of the library's speed on the blocks of this kernel."""
    return reached(blocked) * filled([(blocked, default(blocked))], 1)


def is_fastest(blocked: Blocked) -> bool:
    """Return whether no configuration of one group is predicted to be faster."""
    best = persistent_product.speed.ranked([blocked])[0]
    return of_groups(blocked) >= persistent_product.speed.of_config(blocked, best)


def _rounds(blocked: Blocked) -> int:
    """Return the number of blocks that a program computes one after another."""
    blocks = programs(blocked, default(blocked), dict(blocked.kernel.traced))
    return max(1, -(-blocks // blocked.device.multiprocessors))
