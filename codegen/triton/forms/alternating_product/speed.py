"""Predicts the speed of alternating products, as `persistent_product.speed` does for those of one group.

A block takes the time of its sum, and of `end` more elements of the sum: groups in turn hide most of an epilogue, but
compete for registers and issue slots, and four warps wait for each instruction of a long one.  With one block for each
multiprocessor nothing hides it.
"""

from __future__ import annotations

from collections.abc import Sequence

from fusion.codegen.triton.blocks import Blocked, Config, extent, programs
from fusion.codegen.triton.devices import speeds
from fusion.codegen.triton.forms import persistent_product
from fusion.codegen.triton.forms.alternating_product.config import AlternatingConfig, arriving, configurations
from fusion.codegen.triton.forms.alternating_product.rule import moved_by
from fusion.codegen.triton.forms.persistent_product.speed import filled, further, work_of


def ranked(parts: Sequence[Blocked]) -> list[AlternatingConfig]:
    """Return the configurations of products of one launch, the best first."""
    return sorted(configurations(parts[0].device), key=lambda config: of_config(parts, config), reverse=True)


def of_config(parts: Sequence[Blocked], config: Config) -> float:
    """Return the predicted share of the library's speed in a configuration, on the blocks of these products."""
    shapes = configurations(parts[0].device)
    known = speeds(parts[0].device).persistent
    shape = next(shape for each, shape in shapes.items() if each.num_warps == config.num_warps)  # stages are cut to fit
    length = extent(parts[0].sides(parts[0].dots[0])[2].size)
    end = shape.end + shape.slope * max(map(work_of, parts)) + shape.further * max(map(further, parts))
    end += (0, shape.loading, shape.loading + shape.second)[max(len(arriving(part)) for part in parts)]
    share = shape.share * (known.left_columns if any(map(_has_left_columns, parts)) else 1.0)
    reached = share * (length + known.library_end) / (length + end)
    return reached * filled([(part, config) for part in parts], 1)


def _has_left_columns(blocked: Blocked) -> bool:
    """Return whether the rows of the left operand are columns in memory."""
    return moved_by(blocked).left.columns.name == "m"


def best(parts: Sequence[Blocked]) -> float:
    """Return the predicted share of the library's speed of the best configuration."""
    return of_config(parts, ranked(parts)[0])


def is_fastest(parts: Sequence[Blocked]) -> bool:
    """Return whether no configuration of one group is predicted to be faster; several products are in one loop."""
    return best(parts) >= persistent_product.speed.best(parts, joined=len(parts) > 1)


def hides_epilogues(parts: Sequence[Blocked]) -> bool:
    """Return whether there are blocks for both groups."""
    config = ranked(parts)[0]
    blocks = sum(programs(part, config, dict(part.kernel.traced)) for part in parts)
    return blocks > parts[0].device.multiprocessors
