"""Interior: a loop as it is in blocks in which its condition holds throughout.

What enters is a loop with a `where`; what leaves is the same loop without it, and without the places in its body where
the condition, a part of it that must hold with it, or the opposite of one, is computed for each element.
"""

from __future__ import annotations

from dataclasses import replace

from fusion.lowering.conditions import given
from fusion.lowering.kernel import Loop, map_values, statements, values_of


def unconditional(loop: Loop) -> Loop:
    """`loop` where its condition is known to hold."""
    if loop.where is None:
        return loop
    roots = [value for stmt in statements(loop.body) for value in values_of(stmt)]
    known = dict(zip(roots, given(loop.where, roots), strict=True))
    body = map_values(loop.body, lambda values: [known[value] for value in values])
    return replace(loop, body=body, where=None)
