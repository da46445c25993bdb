"""Run time: the spliced module, and what is looked at around each call of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

Boxed: TypeAlias = Callable[[list[object]], tuple[object, ...]]
"""A compiled graph: called with its inputs in one list, which it empties, so that an input dies after its last use."""
