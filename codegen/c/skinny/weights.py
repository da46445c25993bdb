"""Derives how a factor is stored: which numbers the bits of one loaded element stand for.

Input: an expression of one load, such as a conversion, a centred integer or one of two integers in a byte; output: the
width, sign and order of its weights.  The encoding of bytes is derived by evaluating the expression for all 256 values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import sympy
import torch
from torch import Tensor

from fusion.lowering.interpret.evaluate import Scope, evaluate
from fusion.lowering.ir.expr import Cast, Expr, Load, free_axes, loads, rewrite

WIDTHS = {torch.float32: 32, torch.bfloat16: 16, torch.int8: 8, torch.uint8: 8}
"""The dtypes of elements from which weights are read, and their bits."""

_BYTE = sympy.Symbol("byte", integer=True, nonnegative=True)


@dataclass(frozen=True, slots=True)
class Weights:
    """Weights in a buffer.

    Attributes:
        buffer, offset: where the element of a weight is.
        bits, signed, high, offset_by: as in `Stream`.
        half: the axis of the two weights in a byte.
    """

    buffer: str
    offset: sympy.Expr
    bits: int
    signed: bool = False
    high: bool = False
    offset_by: int = 0
    half: sympy.Symbol | None = None


def weights_of(value: Expr, halves: Sequence[sympy.Symbol]) -> Weights | None:
    """Return the storage of the weights that a float32 expression computes; None if they are not single elements.

    `halves`: axes of size 2, one of which may count the weights in a byte.
    """
    read = list(loads(value))
    elements = {(load.buffer, load.index, load.dtype) for load in read}
    if len(elements) != 1 or value.dtype is not torch.float32:
        return None
    ((buffer, (offset,), dtype),) = elements
    if dtype not in WIDTHS or isinstance(offset, Expr):
        return None
    if dtype.is_floating_point:
        plain = value.arg if isinstance(value, Cast) else value
        whole = isinstance(plain, Load) and plain.mask is None
        return Weights(buffer, offset, WIDTHS[dtype]) if whole else None
    table = _table(value, dtype, tuple(halves))
    own = [axis for axis in halves if axis in free_axes(value) and axis not in offset.free_symbols]
    if table is None or len(own) > 1 or (not own and any(load.mask is not None for load in read)):
        return None
    if not own:
        integers = _integers(table.flatten(), torch.arange(256), 8) if table.numel() == 256 else None
        return None if integers is None else Weights(buffer, offset, 8, integers[0], offset_by=integers[1])
    return _halved(table.view(256, -1), Weights(buffer, offset, 4, half=own[0]))


def _halved(table: Tensor, weights: Weights) -> Weights | None:
    """Return the weights if the columns of a table are functions of the low and the high 4 bits, or the reverse."""
    if table.shape[1] != 2:
        return None
    each = torch.arange(256)
    for high in (False, True):
        first, second = (each >> 4, each & 15) if high else (each & 15, each >> 4)
        columns = [_integers(table[:, column], bits, 4) for column, bits in ((0, first), (1, second))]
        if columns[0] is not None and columns[0] == columns[1]:
            signed, offset_by = columns[0]
            return Weights(weights.buffer, weights.offset, 4, signed, high, offset_by, weights.half)
    return None


def _integers(values: Tensor, bits: Tensor, width: int) -> tuple[bool, int] | None:
    """Return whether the integers that `bits` stand for have a sign, and the number that `values` adds to them."""
    for signed in (False, True):
        whole = torch.where(bits >= 1 << (width - 1), bits - (1 << width), bits) if signed else bits
        added = values.double() - whole
        offset = float(added[0])
        if offset.is_integer() and abs(offset) < 1 << 20 and bool((added == offset).all()):
            return signed, int(offset)
    return None


@lru_cache(maxsize=256)
def _table(value: Expr, dtype: torch.dtype, halves: tuple[sympy.Symbol, ...]) -> Tensor | None:
    """Return the value of `value` for each byte, and at both points of the axes `halves` on which it depends."""

    def by_byte(node: Expr) -> Expr | None:
        return Load("bytes", (_BYTE,), node.dtype, node.mask) if isinstance(node, Load) else None

    of_byte = rewrite([value], by_byte)[0]
    axes = free_axes(of_byte) - {_BYTE}
    if not axes <= set(halves) or len(axes) > 1:
        return None
    bytes_ = torch.arange(256).to(torch.uint8).view(dtype)
    box = {_BYTE: range(256), **{axis: range(2) for axis in axes}}
    return evaluate([of_byte], box, Scope({"bytes": bytes_}, {}, {}))[0]
