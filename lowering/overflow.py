"""Numbers that eager refuses to convert to the dtype of a tensor they are written into.

Input: an fx node.  A node that eager refuses is refused here too, so that it stays a call and raises eager's own error.
Other operations wrap such a number around (`x + 300` with uint8) or promote it.
"""

from __future__ import annotations

import math

import sympy
import torch
from torch import fx
from torch._ops import OpOverload, OpOverloadPacket

from fusion.lowering.errors import Unsupported

aten = torch.ops.aten

CONVERTING: frozenset[OpOverloadPacket] = frozenset(
    (
        aten.addcdiv,
        aten.addcmul,
        aten.clamp,
        aten.clamp_max,
        aten.clamp_min,
        aten.constant_pad_nd,
        aten.fill,
        aten.full,
        aten.full_like,
        aten.hardtanh,
        aten.index_fill,
        aten.masked_fill,
        aten.new_full,
        aten.scalar_tensor,
        aten.scatter,
        aten.threshold,
        aten.where,
    )
)
"""Operations whose number arguments become elements of the result, are compared with them or multiply them."""


def refuse_overflow(node: fx.Node) -> None:
    """Refuse a call with a number that does not fit into the dtype of its result.

    Raises:
        Unsupported: a number does not fit.
    """
    target, val = node.target, node.meta.get("val")
    if not (isinstance(target, OpOverload) and target.overloadpacket in CONVERTING and isinstance(val, torch.Tensor)):
        return
    arguments = target._schema.arguments
    arguments_and_values = [*zip(arguments, node.args, strict=False)]
    arguments_and_values += [
        (argument, node.kwargs[argument.name]) for argument in arguments if argument.name in node.kwargs
    ]
    for argument, number in arguments_and_values:
        if "number" not in str(argument.type) or not isinstance(number, (int, float)):
            continue
        if not fits(number, val.dtype):
            raise Unsupported(f"{number} does not fit into {val.dtype}")


def refuse_wide(number: sympy.Expr) -> None:
    """Refuse a number that is computed with a constant of more than 64 bits: kernels compute in 64.

    Raises:
        Unsupported: there is such a constant.
    """
    if any(not -(1 << 63) <= int(constant) < 1 << 63 for constant in number.atoms(sympy.Integer)):
        raise Unsupported(f"{number} needs more than 64 bits")


def fits(number: int | float, dtype: torch.dtype) -> bool:
    """Return whether eager converts a number to `dtype`; negative ones convert to unsigned integers, too.

    >>> fits(300, torch.uint8), fits(-255, torch.uint8), fits(1e10, torch.float16), fits(-math.inf, torch.float16)
    (False, True, False, True)
    """
    if isinstance(number, bool) or dtype is torch.bool:
        return True
    if dtype.is_floating_point:
        return not math.isfinite(number) or abs(number) <= torch.finfo(dtype).max
    if dtype.is_complex:
        return True
    info = torch.iinfo(dtype)
    return (info.min or -info.max) <= number <= info.max
