"""Interior: a loop over blocks in which its condition holds everywhere.

Input: a loop with a `where`; output: the same loop without it, and with the condition, its conjuncts and their
negations replaced by constants in its body.
"""

from __future__ import annotations

from dataclasses import replace

from fusion.lowering.conditions import given
from fusion.lowering.kernel import Loop, map_values, statements, values_of


def unconditional(loop: Loop) -> Loop:
    """Return `loop` for blocks in which its condition holds."""
    if loop.where is None:
        return loop
    roots = [value for stmt in statements(loop.body) for value in values_of(stmt)]
    known = dict(zip(roots, given(loop.where, roots), strict=True))
    body = map_values(loop.body, lambda values: [known[value] for value in values])
    return replace(loop, body=body, where=None)
