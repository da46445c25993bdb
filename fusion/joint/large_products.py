"""Large products: those of a joint graph that kernels compute again, block by block, where they read them.

Which these are is decided when forward and backward are scheduled (`schedule/chained/candidates.py`).  The passes over
the joint graph tell them by the same measures, with sizes as they were when the graph was traced.
"""

from __future__ import annotations

import torch
from torch import fx

from fusion.joint.factors import operands, value_of
from fusion.lowering.sizes import elements, hint_of
from fusion.schedule.chained.candidates import SMALL
from fusion.schedule.chained.place_producers import HELD


def grows(product: fx.Node) -> bool:
    """Does a product run over a short axis, and is larger than its operands together?

    It is not worth saving between forward and backward, which has the operands in any case.
    """
    made_of = sum(elements(value_of(operand).shape) for operand in operands(product))
    return hint_of(short(product)) <= HELD and elements(value_of(product).shape) > made_of


def is_tile(product: fx.Node) -> bool:
    """Does a product grow, and is too large to be the library's, in memory?"""
    return grows(product) and elements(value_of(product).shape) >= SMALL


def short(product: fx.Node) -> int | torch.SymInt:
    """The size that a product runs over."""
    return value_of(operands(product)[0]).shape[-1]
