"""Lowers copies and conversions, which change the dtype or allocate a tensor without computing anything.

A conversion that the user wrote is explicit: its rounding is kept.  One in PyTorch's decomposition of another operation
stands for the rounding of that operation's stored result: it is implicit.  Copies between devices are refused.
"""

from __future__ import annotations

import torch

from fusion.lowering.builder import Builder
from fusion.lowering.errors import Unsupported
from fusion.lowering.registry import lowers
from fusion.lowering.rules.creation import filled
from fusion.lowering.rules.formula import literal
from fusion.lowering.rules.promotion import convert, rounded
from fusion.lowering.value import Value, broadcast_to

aten, prims = torch.ops.aten, torch.ops.prims

CONVERSIONS = frozenset({aten._to_copy, aten.to, aten.type_as, aten.copy, aten.copy_, prims.convert_element_type})
"""Operations by which a user converts."""

ONLY_STORED = "only_stored"
"""The mark, in a node's meta, of a conversion that no user wrote, which only rounds a stored value."""


@lowers(aten.clone.default, aten.lift_fresh_copy.default, aten.contiguous.default, prims.clone.default)
def copy(ctx: Builder, x: Value, *, memory_format: torch.memory_format | None = None) -> Value:
    """x itself: layouts are decided when a buffer is allocated."""
    return x


@lowers(aten._to_copy.default)
def to_copy(
    ctx: Builder,
    x: Value | float,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    non_blocking: bool = False,
    memory_format: torch.memory_format | None = None,
) -> Value:
    """x converted to `dtype`; in a trace of `torch.vmap` it may be a number, which stands for a 0-d tensor."""
    if not isinstance(x, Value):
        return filled(ctx, literal(x, torch.float64 if isinstance(x, float) else torch.int64))
    if device is not None and torch.device(device).type != x.device.type:
        raise Unsupported(f"copy from {x.device} to {device}")
    if device is not None and torch.device(device).index not in (None, x.device.index):
        raise Unsupported(f"copy from {x.device} to {device}")
    if layout not in (None, torch.strided) or pin_memory:
        raise Unsupported("copy to another layout or to pinned memory")
    if dtype is None:
        return x
    return rounded(x, dtype) if _is_implicit(ctx) else convert(x, dtype)


def _is_implicit(ctx: Builder) -> bool:
    """Return whether the current conversion is part of another operation, or only stores a value."""
    meta = ctx.current.meta
    whole = meta.get("original_aten")
    part = whole is not None and getattr(whole, "overloadpacket", whole) not in CONVERSIONS
    return part or bool(meta.get(ONLY_STORED))


@lowers(prims.convert_element_type.default)
def convert_element_type(ctx: Builder, x: Value, dtype: torch.dtype) -> Value:
    """x converted to `dtype`."""
    return convert(x, dtype)


@lowers(aten.copy.default)
def copy_into(ctx: Builder, x: Value, src: Value, non_blocking: bool = False) -> Value:
    """`src` broadcast to the shape of x and converted to its dtype."""
    if src.device != x.device and src.rank > 0:
        raise Unsupported(f"copy from {src.device} to {x.device}")
    source = convert(broadcast_to(src, x.shape), x.dtype)
    return Value(x.shape, x.dtype, x.device, source.expr)
