"""Run time: the spliced module, and what is looked at around each call of it.

    splice     a schedule as an fx module whose code is what runs, with its `names`, `sizes`, `memory` and `views`
    results    calls that give other strides than PyTorch said
    chunks     a region that runs for some rows at a time
    recording  launches as a CUDA graph

Eager's own operations run where inputs overlap otherwise (`overlaps`), a call has other `surroundings`, a launch is
refused (`refusals`) or derivatives are asked for that there are none of (`second_derivatives`), with the same random
numbers (`draws`) and `checkpoints`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

Boxed: TypeAlias = Callable[[list[object]], tuple[object, ...]]
"""A compiled graph: called with its inputs in one list, which it empties, so that an input dies after its last use."""
