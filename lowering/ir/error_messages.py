"""Encodes how eager refuses a position out of range, which depends on the operation.

In the operation `checked` (`lowering/checks/checked.py`) a wording and a dimension are one number, so that kernels need
nothing for it.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

import torch
import torch.nn.functional as F
from torch import fx

from fusion.lowering.errors import ElementOutOfRange, IndexOutOfRange, SubscriptOutOfRange
from fusion.lowering.ir.expr import Const, const

DIMS: Final = 100
"""More than a tensor has dimensions."""


class Wording(Enum):
    """An error of eager, and its message, with the position, the dimension that it is along, and the size of that."""

    def __init__(self, error: type[IndexOutOfRange], text: str) -> None:
        self.error, self.text = error, text

    SUBSCRIPT = SubscriptOutOfRange, "index {index} is out of bounds for dimension {dim} with size {size}"
    ELEMENT = ElementOutOfRange, "index {index} is out of bounds for dimension {dim} with size {size}"
    ROW = SubscriptOutOfRange, "index out of range in self"
    COLUMN = ElementOutOfRange, "INDICES element is out of DATA bounds, id={index} axis_dim={size}"
    COPIED = SubscriptOutOfRange, "index_copy_(): index {index} is out of bounds for dimension {dim} with size {size}"
    FLAT = SubscriptOutOfRange, "out of range: tried to access index {index} on a tensor of {size} elements."
    BAG = ElementOutOfRange, "embedding_bag: Expected idx >= 0 && idx < num_embeddings but found idx to be {index}"
    TARGET = SubscriptOutOfRange, "Target {index} is out of bounds."
    MARGIN = ElementOutOfRange, "target out of range"
    LABELS = ElementOutOfRange, "argument #2 'target' is out of range"
    UNPOOLED = ElementOutOfRange, "Found an invalid max index: {index} (output volumes have {size} elements)"

    def number(self, dim: int) -> Const:
        """Return the constant that encodes the wording, and a dimension, in a check."""
        return const(DIMS * list(Wording).index(self) + dim, torch.int64)

    def failure(self, index: int, dim: int, size: int) -> IndexOutOfRange:
        """Return the error to raise for a position."""
        return self.error(self.text.format(index=index, dim=dim, size=size))


DECOMPOSED: dict[str, Wording] = {
    "aten.nll_loss_forward.default": Wording.TARGET,
    "aten.nll_loss2d_forward.default": Wording.TARGET,
    "aten.nll_loss_backward.default": Wording.TARGET,
    "aten.nll_loss2d_backward.default": Wording.TARGET,
    "aten.max_unpool2d.default": Wording.UNPOOLED,
    "aten.max_unpool3d.default": Wording.UNPOOLED,
}
"""Operations that are decomposed into others, which look at their positions; a derivative makes the same check."""

CALLED: dict[object, Wording] = {
    F.multi_margin_loss: Wording.MARGIN,
    F.multilabel_margin_loss: Wording.LABELS,
}
"""Functions of the program that PyTorch decomposes before it records the operation."""


def worded(number: int) -> tuple[Wording, int]:
    """Decode the wording and the dimension from a check's last operand.

    >>> worded(int(Wording.TARGET.number(1).value))
    (<Wording.TARGET: (<class 'fusion.lowering.errors.SubscriptOutOfRange'>, 'Target {index} is out of bounds.')>, 1)
    """
    return list(Wording)[number // DIMS], number % DIMS


def wording_of(call: fx.Node, own: Wording) -> Wording:
    """Return the wording of a call: the wording of the operation from which it was decomposed, or else its own."""
    whole = str(call.meta.get("original_aten"))  # by name: metadata may hold a copy of the operation
    if whole in DECOMPOSED:
        return DECOMPOSED[whole]
    functions = [function for _, function in call.meta.get("source_fn_stack", ())]
    return CALLED.get(functions[-1], own) if functions else own
