"""Finds the products of matrices that a library leaves to the BLAS that it links."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from fusion.lowering.ir.program import Buffer, BufferRef, Extern

_aten = torch.ops.aten
_OPERANDS = {
    _aten.mm.default: (None, 0, 1),
    _aten.bmm.default: (None, 0, 1),
    _aten.addmm.default: (0, 1, 2),
    _aten.baddbmm.default: (0, 1, 2),
}
"""Operation → the positions of the summand, and of the operands."""


@dataclass(frozen=True, slots=True)
class CalledProduct:
    """A product, by the names of its tensors; `added`: its summand."""

    added: str | None
    left: str
    right: str
    out: str


def product_of(call: Extern, buffers: Mapping[str, Buffer]) -> CalledProduct | None:
    """Return the product that a call computes, in float32 or float64; None if it is another one, or scaled."""
    if call.target not in _OPERANDS or any(factor != 1 for factor in call.kwargs.values()):
        return None
    positions, (out,) = _OPERANDS[call.target], call.outs
    given = [None if position is None else call.args[position] for position in positions]
    names = [arg.name if isinstance(arg, BufferRef) else None for arg in given]
    dtypes = {buffers[name].dtype for name in (*names, out) if name is not None}
    if len(dtypes) > 1 or not dtypes <= {torch.float32, torch.float64}:
        return None
    added, left, right = names
    assert left is not None and right is not None and out is not None
    return CalledProduct(added, left, right, out)


__all__ = ["CalledProduct", "product_of"]
