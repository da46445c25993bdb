"""Converts bit fields of bytes, such as packed 4-bit weights, to floats, four bytes at a time, by bit patterns.

Input: the expressions of a kernel; output: the lines that convert the expressions that are some bits of a byte, plus a
constant, as 4-bit weights are:

    f32(i8(w & 15) - 8)    →    _bits_to_float32(w, 0, 15, 0, -8)
    f32(w & 15) - 8        →    _bits_to_float32(w, 0, 15, 0, -8)    as long as the float holds each integer on the way
    f32((w << 4) >> 4)     →    _bits_to_float32(w, 0, 15, 8, -8)    of a signed byte: its sign is a bit to flip

The bits are put under the exponent of a float whose last bits then count ones (2²³ in float32, 2¹⁰ in float16, 2⁷ in
bfloat16), and the excess is subtracted.  All of that is exact.  Four neighbouring bytes are masked at once, where the
device's own conversions process them one by one.  Expressions that could wrap around on the way, or are not exact in
the float, remain conversions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from fusion.codegen.triton.devices import Feature
from fusion.codegen.triton.expressions.code import Code, compose, listed
from fusion.codegen.triton.expressions.scalar_code import TYPES
from fusion.codegen.triton.expressions.scopes import Tile
from fusion.codegen.triton.expressions.values import Values
from fusion.lowering.ir.expr import Cast, Const, Expr, IndexValue, Op, postorder
from fusion.lowering.ir.kernel import Loop, statements, values_of

_BASES = {torch.float32: 2**23, torch.float16: 2**10, torch.bfloat16: 2**7}
"""The power of two whose last bit counts ones; integers up to twice that are exact."""

_COMMUTE = ("and", "add")


@dataclass(frozen=True, slots=True)
class Field:
    """The integer `(((byte >> shift) & mask) ^ flip) + offset`.

    `mask` is None while the field is all of a signed byte, shifted.  `up`: by how much it is shifted out of its byte,
    until it is shifted back.
    """

    byte: Expr
    shift: int = 0
    mask: int | None = None
    flip: int = 0
    offset: int = 0
    up: int = 0

    def then(self, name: str, value: int, dtype: torch.dtype) -> Field | None:
        """Return the field after one more operation with a constant, computed in `dtype`; None if the result is not a
        field.
        """
        if name in ("add", "sub"):
            field = self.normalised()
            shifted = replace(field, offset=field.offset + (value if name == "add" else -value))
            return None if shifted.mask is None else shifted.within(dtype)
        if self.offset != 0 or value < 0:
            return None
        if name == "shl" and self == Field(self.byte, mask=self.mask) and dtype is self.byte.dtype and value < 8:
            return replace(self, up=value)
        if name == "shr" and self.up > 0:
            return self._shifted_back(value, signed=dtype.is_signed)
        if name == "and" and self.up == 0:
            return replace(self, mask=value if self.mask is None else self.mask & value)
        if name == "shr" and value < 8:
            return replace(self, shift=self.shift + value, mask=None if self.mask is None else self.mask >> value)
        return None

    def _shifted_back(self, value: int, *, signed: bool) -> Field | None:
        """Return a field that was shifted up, after it is shifted down by at least as much.

        Its upper bits are dropped or, if `signed`, copies of its new sign bit.
        """
        if not self.up <= value < 8:
            return None
        return _bits(self.byte, value - self.up, 8 - value, signed=signed)

    def normalised(self) -> Field:
        """Return the same number; a signed byte that is shifted down becomes a mask and an offset for its sign bit."""
        if self.mask is not None or not 0 < self.shift < 8:
            return self
        return _bits(self.byte, self.shift, 8 - self.shift, signed=True)

    def within(self, dtype: torch.dtype) -> Field | None:
        """Return the same field, if `dtype` represents each of its values."""
        field = self.normalised()
        least, greatest = (-128, 127) if field.mask is None else (field.offset, field.offset + field.mask)
        lowest, highest = _integers(dtype)
        return field if field.up == 0 and lowest <= least and greatest <= highest else None

    def exact(self, dtype: torch.dtype) -> bool:
        """Return whether a bit pattern represents the float of these bits in `dtype` exactly."""
        if self.mask is None or self.mask == 0 or self.mask & (self.mask + 1) != 0 or self.up > 0:
            return False
        base, bits = _BASES[dtype], self.mask.bit_length()
        return bits < 8 and self.shift + bits <= 8 and abs(base - self.offset) <= 2 * base


def _bits(byte: Expr, shift: int, count: int, *, signed: bool) -> Field:
    """Return `count` bits of a byte; with a sign, the highest one is negative."""
    sign = 1 << (count - 1) if signed else 0
    return Field(byte, shift, (1 << count) - 1, sign, -sign)


def _integers(dtype: torch.dtype) -> tuple[int, int]:
    """Return the least and the greatest integer up to which `dtype` represents all of them."""
    if dtype in _BASES:
        return -2 * _BASES[dtype], 2 * _BASES[dtype]
    info = torch.iinfo(dtype)
    return info.min, info.max


def field_of(expr: Expr) -> Field | None:
    """Return `expr`, an integer or a float with an integer value, as bits of a byte; None if it is anything else.

    >>> from fusion.lowering.ir.expr import Load, const
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
    field_: Field | None = Field(expr, mask=255 if expr.dtype is torch.uint8 else None)
    for step, value in reversed(steps):
        if field_ is None:
            return None
        field_ = field_.within(step.dtype) if isinstance(step, Cast) else field_.then(_name(step), value, step.dtype)
    return None if field_ is None else field_.normalised()


def _inner(expr: Expr) -> tuple[Expr, int] | None:
    """Return the operand and the constant of an operation on integers (0 for a conversion); None for any other."""
    if not _is_integral(expr.dtype):
        return None
    if isinstance(expr, Cast):
        return (expr.arg, 0) if _is_integral(expr.arg.dtype) else None
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
    if isinstance(expr, Const) and _is_integral(expr.dtype) and float(expr.value).is_integer():
        return int(expr.value)
    return None


def _is_integral(dtype: torch.dtype) -> bool:
    """Return whether the type holds integers, or floats that are constructed from bit patterns."""
    return dtype in _BASES or not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool)


# Lines ----------------------------------------------------------------------------------------------------------------


def convert(values: Values, roots: Sequence[Expr] | None = None) -> None:
    """Convert fields by bit patterns in the kernel of `values`, or in `roots`, if the device has the operations."""
    if not values.device.has(Feature.HALF_PAIRS):
        return
    if roots is None:
        stmts = statements(values.layout.blocked.body)
        roots = [value for stmt in stmts if not isinstance(stmt, Loop) for value in values_of(stmt)]
    for node in postorder(*roots):
        if node.dtype in _BASES:
            field_ = field_of(node)
            if field_ is not None and field_.exact(node.dtype):
                values.emitters[node] = partial(_converted, values, field_, node.dtype)


def _converted(values: Values, field: Field, dtype: torch.dtype) -> Tile:
    byte = values.value(field.byte)
    function = f"_bits_to_{TYPES[dtype].removeprefix('tl.')}"
    arguments = listed([byte.code, field.shift, Code(str(field.mask)), field.flip, field.offset])
    return replace(byte, code=compose("{}({})", function, arguments), narrow=False)
