"""Runs compiled graphs: the spliced module, and the checks around each call of it.

    splice     a schedule as an fx module with readable code, with its `names`, `sizes`, `memory` and `views`
    results    calls whose results have other strides than traced
    chunks     a region that runs for some rows at a time
    recording  launches as a CUDA graph

Eager's own operations run if inputs overlap differently (`overlaps`), under modes that kernels cannot serve
(`dispatch_guards`), if derivatives are requested that were not compiled (`second_derivatives`), with the same random
numbers (`rng_replay`).  If a launch is refused (`splice`), the evaluator runs its kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

Boxed: TypeAlias = Callable[[list[object]], tuple[object, ...]]
"""A compiled graph: it takes its inputs in one list, which it empties, so that an input is freed after its last use."""
