"""Predicts the share of a loop's blocks that a condition leaves.

Input: `Loop.where` and the sizes of the axes; output: a share, from the condition's values in sampled blocks of rows.
Nothing is known of numbers in memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType

import sympy
import torch

from fusion.lowering.interpret.evaluate import Scope, evaluate
from fusion.lowering.ir.expr import Expr, free_axes, loads

SKIPPED_BLOCK = 64
"""Rows and columns of a block that is skipped as a whole."""
BANDS = 16
"""The number of blocks of rows that are sampled for skipped blocks."""


UNKNOWN_SHARE = 3 / 4
"""The share that a mask in memory is expected to leave: between a causal one's and one that hides nothing."""


def share_of_blocks(
    where: Expr | None,
    looped: Sequence[sympy.Symbol],
    sizes: Mapping[sympy.Symbol, int],
    known: Mapping[sympy.Symbol, int] = MappingProxyType({}),
) -> float:
    """Return the share of the blocks of a loop over `looped` that a condition leaves; 1 if it depends on data.

    >>> from fusion.lowering.ir.expr import IndexValue, make_op
    >>> i, j = sympy.symbols("i j", integer=True)
    >>> seen = make_op("ge", IndexValue(i), IndexValue(j))
    >>> share_of_blocks(seen, [j], {i: 1024, j: 1024})
    0.53125
    """
    if where is None or any(True for _ in loads(where)):
        return 1.0
    return _share_of_blocks(where, tuple(looped), tuple(sizes.items()), tuple(known.items()))


@lru_cache(maxsize=1 << 10)
def _share_of_blocks(
    where: Expr,
    looped: tuple[sympy.Symbol, ...],
    sizes_of_axes: tuple[tuple[sympy.Symbol, int], ...],
    known: tuple[tuple[sympy.Symbol, int], ...],
) -> float:
    """Evaluate a condition in some blocks; cached, as the masks of all layers are one, and are priced several times."""
    sizes = dict(sizes_of_axes)
    asked = free_axes(where)
    spread = max((axis for axis in sizes if axis in asked and axis not in looped), key=sizes.__getitem__, default=None)
    blocks = 1 if spread is None else -(-sizes[spread] // SKIPPED_BLOCK)
    first = sorted({band * blocks // min(BANDS, blocks) for band in range(min(BANDS, blocks))})
    shares = []
    for block in first:
        box = {axis: range(size if axis in looped else 1) for axis, size in sizes.items() if axis in asked}
        if spread is not None:
            box[spread] = range(block * SKIPPED_BLOCK, min((block + 1) * SKIPPED_BLOCK, sizes[spread]))
        (held,) = evaluate([where], box, Scope({}, dict(known), {}))
        keep = [k for k, axis in enumerate(box) if axis in looped]
        along = held.any(dim=tuple(k for k in range(held.dim()) if k not in keep)) if len(keep) < held.dim() else held
        flat = along.flatten()
        padded = torch.nn.functional.pad(flat, (0, -len(flat) % SKIPPED_BLOCK))
        shares.append(float(padded.view(-1, SKIPPED_BLOCK).any(1).double().mean()))
    return sum(shares) / len(shares)


def expected_share(
    where: Expr | None,
    looped: Sequence[sympy.Symbol],
    sizes: Mapping[sympy.Symbol, int],
    known: Mapping[sympy.Symbol, int] = MappingProxyType({}),
) -> float:
    """Return the share of the blocks of a loop that a condition leaves; of a matrix in memory the one to be expected.

    Arguments are those of `share_of_blocks`.
    """
    axes = frozenset(looped)
    within = [free_axes(load) for load in loads(*([] if where is None else [where]))]
    if any(spanned & axes and spanned - axes for spanned in within):
        return UNKNOWN_SHARE
    return share_of_blocks(where, looped, sizes, known)
