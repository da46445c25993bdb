"""Plans the workspace of a program by liveness: buffers that are not live at the same time share a slot.

Input: the buffers that launches write, in order, with their sizes in bytes and the launches that read them; output: the
slot of each, and the sizes of each slot, whose largest it has room for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import sympy


@dataclass(frozen=True, slots=True)
class Alive:
    """The live range of a buffer: from the step that writes it to the last step that reads it."""

    name: str
    bytes: sympy.Expr
    first: int
    last: int


@dataclass(slots=True)
class MemoryPlan:
    """The slots of a workspace.

    Attributes:
        slots: buffer → the number of its slot.
        sizes: for each slot, the sizes of its buffers in bytes, each once.
    """

    slots: dict[str, int] = field(default_factory=dict)
    sizes: list[list[sympy.Expr]] = field(default_factory=list)


def planned(buffers: Sequence[Alive], hints: Mapping[sympy.Symbol, int]) -> MemoryPlan:
    """Assign each buffer a memory slot that is free from its first to its last step.

    Among free slots one of the same size is taken, else the one whose size, as traced, is nearest.

    >>> row, rows = sympy.Integer(64), 64 * sympy.Symbol("s", integer=True)
    >>> alive = [Alive("x", rows, 0, 1), Alive("y", row, 1, 2), Alive("z", rows, 2, 3)]
    >>> plan = planned(alive, {sympy.Symbol("s", integer=True): 8})
    >>> plan.slots, plan.sizes
    ({'x': 0, 'y': 1, 'z': 0}, [[64*s], [64]])
    """
    plan = MemoryPlan()
    until: list[int] = []
    for buffer in sorted(buffers, key=lambda each: each.first):
        free = [slot for slot, last in enumerate(until) if last < buffer.first]
        slot = min(free, key=lambda k: _distance(plan.sizes[k], buffer.bytes, hints), default=len(until))
        if slot == len(until):
            until.append(buffer.last)
            plan.sizes.append([])
        until[slot] = buffer.last
        if buffer.bytes not in plan.sizes[slot]:
            plan.sizes[slot].append(buffer.bytes)
        plan.slots[buffer.name] = slot
    return plan


def _distance(slot: Sequence[sympy.Expr], size: sympy.Expr, hints: Mapping[sympy.Symbol, int]) -> tuple[bool, int]:
    traced = max(_traced(each, hints) for each in slot)
    return size not in slot, abs(traced - _traced(size, hints))


def _traced(size: sympy.Expr, hints: Mapping[sympy.Symbol, int]) -> int:
    value = size.xreplace({symbol: sympy.Integer(hint) for symbol, hint in hints.items()})
    return int(value) if value.is_Integer else 0


__all__ = ["Alive", "MemoryPlan", "planned"]
