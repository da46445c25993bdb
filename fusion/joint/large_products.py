"""Large products: products of a joint graph that kernels recompute, block by block, where they read them.

The scheduler decides which, in forward and in backward (`schedule/chained/candidates.py`).  The passes over the
joint graph predict it by the same criteria, with sizes as traced.
"""

from __future__ import annotations

import torch
from torch import fx

from fusion.joint.factors import operands, value_of
from fusion.lowering.sizes import elements, hint_of
from fusion.schedule.chained.candidates import LEAST_TILE
from fusion.schedule.chained.place_producers import HELD


def grows(product: fx.Node) -> bool:
    """Return whether a product has a short reduced axis, and is larger than its operands together.

    It is not worth saving between forward and backward, which has the operands in any case.
    """
    operand_count = sum(elements(value_of(operand).shape) for operand in operands(product))
    return hint_of(short(product)) <= HELD and elements(value_of(product).shape) > operand_count


def is_tile(product: fx.Node) -> bool:
    """Return whether a product grows, and is too large for the library's result to be stored."""
    return grows(product) and elements(value_of(product).shape) >= LEAST_TILE


def short(product: fx.Node) -> int | torch.SymInt:
    """Return the size of the reduced axis of a product."""
    return value_of(operands(product)[0]).shape[-1]
