"""Fields: a few bits of a byte become floats four at a time, by bit patterns.

What enters are the expressions of a kernel; what leaves are the lines that convert those of them which are some bits of
a byte, plus a constant, as 4-bit weights are:

    f32(i8(w & 15) - 8)    →    _bits_to_float32(w, 0, 15, 0, -8)
    f32(w & 15) - 8        →    _bits_to_float32(w, 0, 15, 0, -8)    as long as the float holds each integer on the way
    f32((w << 4) >> 4)     →    _bits_to_float32(w, 0, 15, 8, -8)    of a signed byte: its sign is a bit to flip

The bits are put under the exponent of a float whose last bits then count ones (2²³ in float32, 2¹⁰ in float16, 2⁷ in
bfloat16), from which what is too much is subtracted.  All of that is exact.  Four neighbouring bytes are masked at
once, where the device's own conversions take them one by one.  Whatever could wrap around on the way, or is not exact
in the float, stays a conversion.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from fusion.codegen.triton.devices import Feature
from fusion.codegen.triton.expressions.scopes import Tile
from fusion.codegen.triton.expressions.spell import TYPES, Code
from fusion.codegen.triton.expressions.values import Values
from fusion.lowering.expr import Cast, Const, Expr, IndexValue, Op, postorder
from fusion.lowering.kernel import Loop, statements, values_of

_BASES = {torch.float32: 2**23, torch.float16: 2**10, torch.bfloat16: 2**7}
"""The power of two whose last bit counts ones; integers up to twice that are exact."""

_COMMUTE = ("and", "add")


@dataclass(frozen=True, slots=True)
class Field:
    """The integer `(((byte >> shift) & mask) ^ flip) + offset`.

    `mask` is None while it is still all of a signed byte, shifted.  `up`: by how much it has been shifted out of its
    byte, until it is shifted back.
    """

    byte: Expr
    shift: int = 0
    mask: int | None = None
    flip: int = 0
    offset: int = 0
    up: int = 0

    def then(self, name: str, value: int, dtype: torch.dtype) -> Field | None:
        """The field after one more operation with a constant, computed in `dtype`; None if that is none."""
        if name in ("add", "sub"):
            found = self.settled()
            moved = replace(found, offset=found.offset + (value if name == "add" else -value))
            return None if moved.mask is None else moved.within(dtype)
        if self.offset != 0 or value < 0:
            return None
        if name == "shl" and self == Field(self.byte, mask=self.mask) and dtype is self.byte.dtype and value < 8:
            return replace(self, up=value)
        if name == "shr" and self.up > 0:
            return self._back(value, signed=dtype.is_signed)
        if name == "and" and self.up == 0:
            return replace(self, mask=value if self.mask is None else self.mask & value)
        if name == "shr" and value < 8:
            return replace(self, shift=self.shift + value, mask=None if self.mask is None else self.mask >> value)
        return None

    def _back(self, value: int, *, signed: bool) -> Field | None:
        """What was shifted up, shifted down at least as far: its upper bits are gone, or copies of the new sign."""
        if not self.up <= value < 8:
            return None
        return _bits(self.byte, value - self.up, 8 - value, signed=signed)

    def settled(self) -> Field:
        """The same number; one that is still a part of a signed byte as bits of which the highest one is the sign."""
        if self.mask is not None or not 0 < self.shift < 8:
            return self
        return _bits(self.byte, self.shift, 8 - self.shift, signed=True)

    def within(self, dtype: torch.dtype) -> Field | None:
        """The same field, if numbers of `dtype` are each of its values."""
        found = self.settled()
        least, greatest = (-128, 127) if found.mask is None else (found.offset, found.offset + found.mask)
        lowest, highest = _integers(dtype)
        return found if found.up == 0 and lowest <= least and greatest <= highest else None

    def exact(self, dtype: torch.dtype) -> bool:
        """Are these some bits of the byte, whose float in `dtype` a bit pattern gives exactly?"""
        if self.mask is None or self.mask == 0 or self.mask & (self.mask + 1) != 0 or self.up > 0:
            return False
        base, bits = _BASES[dtype], self.mask.bit_length()
        return bits < 8 and self.shift + bits <= 8 and abs(base - self.offset) <= 2 * base


def _bits(byte: Expr, shift: int, count: int, *, signed: bool) -> Field:
    """So many bits of a byte; with a sign, the highest one counts downwards."""
    sign = 1 << (count - 1) if signed else 0
    return Field(byte, shift, (1 << count) - 1, sign, -sign)


def _integers(dtype: torch.dtype) -> tuple[int, int]:
    """The least and the greatest integer up to which `dtype` has all of them."""
    if dtype in _BASES:
        return -2 * _BASES[dtype], 2 * _BASES[dtype]
    info = torch.iinfo(dtype)
    return info.min, info.max


def field_of(expr: Expr) -> Field | None:
    """What `expr`, an integer or a float that is one, is as bits of a byte; None where it is anything else.

    >>> from fusion.lowering.expr import Load, const
    >>> byte = Load("w", (), torch.uint8)
    >>> high = Op("shr", (byte, const(4, torch.uint8)), torch.uint8)
    >>> field_of(Op("sub", (Cast(high, torch.int8), const(8, torch.int8)), torch.int8))
    Field(byte=Load(buffer='w', index=(), dtype=torch.uint8, mask=None), shift=4, mask=15, flip=0, offset=-8, up=0)
    """
    steps: list[tuple[Expr, int]] = []
    while True:
        inner = _inner(expr)
        if inner is None:
            break
        steps.append((expr, inner[1]))
        expr = inner[0]
    if expr.dtype not in (torch.uint8, torch.int8):
        return None
    found: Field | None = Field(expr, mask=255 if expr.dtype is torch.uint8 else None)
    for step, value in reversed(steps):
        if found is None:
            return None
        found = found.within(step.dtype) if isinstance(step, Cast) else found.then(_name(step), value, step.dtype)
    return None if found is None else found.settled()


def _inner(expr: Expr) -> tuple[Expr, int] | None:
    """What one step of a field is made of: the number before it, and the constant (0 for a conversion)."""
    if not _counts(expr.dtype):
        return None
    if isinstance(expr, Cast):
        return (expr.arg, 0) if _counts(expr.arg.dtype) else None
    if not isinstance(expr, Op) or len(expr.args) != 2:
        return None
    first, second = expr.args
    known = _constant(second)
    if known is None and expr.name in _COMMUTE:
        first, known = second, _constant(first)
    return None if known is None else (first, known)


def _name(step: Expr) -> str:
    assert isinstance(step, Op)
    return step.name


def _constant(expr: Expr) -> int | None:
    if isinstance(expr, IndexValue) and expr.index.is_Integer:
        return int(expr.index)
    if isinstance(expr, Const) and _counts(expr.dtype) and float(expr.value).is_integer():
        return int(expr.value)
    return None


def _counts(dtype: torch.dtype) -> bool:
    """Are there integers of this type, or floats that bit patterns give?"""
    return dtype in _BASES or not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool)


# Lines ----------------------------------------------------------------------------------------------------------------


def convert(values: Values, roots: Sequence[Expr] | None = None) -> None:
    """From here on, the kernel of `values`, or these expressions, have fields converted by bit patterns, where the
    device has the operations.
    """
    if not values.device.has(Feature.HALF_PAIRS):
        return
    if roots is None:
        stmts = statements(values.layout.blocked.body)
        roots = [value for stmt in stmts if not isinstance(stmt, Loop) for value in values_of(stmt)]
    for node in postorder(*roots):
        if node.dtype in _BASES:
            found = field_of(node)
            if found is not None and found.exact(node.dtype):
                values.made_by[node] = partial(_converted, values, found, node.dtype)


def _converted(values: Values, field: Field, dtype: torch.dtype) -> Tile:
    byte = values.value(field.byte)
    given = f"{byte.code.text}, {field.shift}, {field.mask}, {field.flip}, {field.offset}"
    return replace(byte, code=Code(f"_bits_to_{TYPES[dtype].removeprefix('tl.')}({given})"), narrow=False)
