"""Bits of bytes as floats: which integers are recognised, the values of their formula, the result of the assembly."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from fusion.codegen.triton import TritonTarget
from fusion.codegen.triton.expressions.bit_fields import Field, field_of
from fusion.codegen.triton.expressions.prelude import FUNCTIONS
from fusion.codegen.triton.launch import ptx
from fusion.lowering.indexing import axis_symbol
from fusion.lowering.interpret.evaluate import Scope, evaluate
from fusion.lowering.ir.expr import Cast, Expr, Load, Op, const
from fusion.lowering.ir.kernel import Kernel, Role, Store
from tests.codegen.kernels.making import kernel, param, tensors
from tests.fusion.schedule.test_quantised import inputs, only_kernel, packed, packed_in_groups

I0 = axis_symbol(0)
U8, I8, I32 = torch.uint8, torch.int8, torch.int32
BF16, F32 = torch.bfloat16, torch.float32
BYTE, SIGNED = Load("w", (I0,), U8), Load("w", (I0,), I8)


def op(name: str, arg: Expr, value: float) -> Expr:
    return Op(name, (arg, const(value, arg.dtype)), arg.dtype)


LOW, HIGH = op("and", BYTE, 15), op("shr", BYTE, 4)

FIELDS: dict[str, Expr] = {
    "low": LOW,
    "high": HIGH,
    "masked first": op("shr", op("and", BYTE, 0xF0), 4),
    "two bits": op("and", op("shr", BYTE, 2), 3),
    "centred": op("sub", Cast(LOW, I8), 8),
    "high centred in int32": op("add", Cast(HIGH, I32), -8),
    "of a signed byte": op("and", op("shr", SIGNED, 4), 15),
    "of a widened byte": op("shr", op("and", Cast(BYTE, I32), 0x70), 4),
    "of a widened signed byte": op("and", op("shr", Cast(SIGNED, I32), 4), 15),
    "the sign and the bits after it": op("shr", SIGNED, 4),
    "low with a sign": op("shr", op("shl", SIGNED, 4), 4),
    "two bits with a sign, moved": op("add", Cast(op("shr", op("shl", SIGNED, 2), 6), I32), 5),
    "low by shifts": op("shr", op("shl", BYTE, 4), 4),
    "middle by shifts": op("shr", op("shl", BYTE, 2), 5),
    "constant first": Op("and", (const(7, U8), BYTE), U8),
    "seven bits": op("sub", Cast(op("shr", BYTE, 1), I32), 64),
    "centred as a float": op("sub", Cast(LOW, BF16), 8),
    "centred as a wider float": Cast(op("sub", Cast(Cast(HIGH, BF16), F32), 8), BF16),
    "centred as an integer and as a float": op("add", Cast(op("sub", Cast(LOW, I8), 8), F32), 100),
}

OTHERS: dict[str, Expr] = {
    "wraps below zero": op("sub", LOW, 8),
    "wraps on conversion": Cast(op("sub", Cast(LOW, I8), 8), U8),
    "a whole byte": BYTE,
    "a signed byte": SIGNED,
    "copies of the sign": op("and", op("shr", SIGNED, 6), 15),
    "kept of a sign in a wider integer": op("and", Cast(op("shr", SIGNED, 4), I32), 31),
    "shifted up and not as far down": op("shr", op("shl", BYTE, 4), 2),
    "shifted up in a wider integer": op("shr", op("shl", Cast(SIGNED, I32), 4), 4),
    "a shifted sum": op("shr", op("add", LOW, 1), 1),
    "bits with a gap": op("and", BYTE, 5),
    "of a wider word": op("and", Load("w", (I0,), I32), 15),
    "shifted up": op("shl", LOW, 1),
    "shifted past its width": op("shr", BYTE, 9),
    "between integers": op("sub", Cast(LOW, F32), 7.5),
    "rounded on the way": op("sub", op("add", Cast(LOW, BF16), 300), 300),
    "a float that is halved": op("truediv", Cast(LOW, F32), 2),
}


def converted(source: torch.dtype, dtype: torch.dtype, n: int) -> Kernel:
    """Every field of bytes of type `source`, and expressions that are no fields, as floats"""
    byte = SIGNED if source is I8 else BYTE
    values = [Cast(expr, dtype) for expr in (*FIELDS.values(), *OTHERS.values()) if byte in _nodes(expr)]
    outs = [param(f"out{k}", dtype, n, written=True) for k in range(len(values))]
    stores = [Store(out.name, I0, value) for out, value in zip(outs, values, strict=True)]
    return kernel("converted", [param("w", source, n), *outs], {I0: (n, Role.GRID)}, *stores)


def every_byte(source: torch.dtype, kernel: Kernel) -> list[torch.Tensor]:
    """Operands for `converted`."""
    given = tensors(kernel)
    given[0] = (torch.arange(len(given[0])) * 37 % 256).to(U8).view(source)
    return given


def stored(expr: Expr) -> torch.Tensor:
    """Every byte, in the dtype in which `expr` loads it."""
    return torch.arange(256, dtype=U8).view(torch.int8 if SIGNED in _nodes(expr) else U8)


def _nodes(expr: Expr) -> set[Expr]:
    return {expr}.union(*(_nodes(child) for child in expr.children()))


@pytest.mark.parametrize("name", FIELDS)
def test_the_formula_gives_every_value(name: str) -> None:
    expr = FIELDS[name]
    field = field_of(expr)
    assert field is not None
    assert field.exact(torch.float32)
    assert field.mask is not None
    (want,) = evaluate([expr], {I0: range(256)}, Scope({"w": stored(expr)}, {}, {}))
    byte = torch.arange(256)
    assert torch.equal((((byte >> field.shift) & field.mask) ^ field.flip) + field.offset, want.long())


@pytest.mark.parametrize("name", OTHERS)
def test_other_expressions_stay_conversions(name: str) -> None:
    field = field_of(OTHERS[name])
    assert field is None or not field.exact(torch.float32)


def test_a_constant_that_the_float_does_not_hold() -> None:
    """Above 256 bfloat16 has no odd numbers; below 2048 float16 has all."""
    far = Field(BYTE, mask=15, offset=-200)
    assert not far.exact(torch.bfloat16)
    assert far.exact(torch.float16)
    assert Field(BYTE, mask=15, offset=-128).exact(torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("shift", "mask", "flip", "offset"), [(0, 15, 0, -8), (4, 15, 8, -8), (2, 3, 0, 100), (1, 127, 64, -128)]
)
def test_the_assembly(dtype: torch.dtype, shift: int, mask: int, flip: int, offset: int) -> None:
    """All bytes, in an order in which neighbours differ, and in a number that is not a multiple of four."""
    text = FUNCTIONS[f"_bits_to_{str(dtype).removeprefix('torch.')}"].split("'''")[1]
    byte = (np.arange(255) * 37 % 256).astype(np.uint8)
    want = torch.from_numpy((((byte.astype(np.int64) >> shift) & mask) ^ flip) + offset).to(dtype)
    operands = [byte, *(np.full(255, value, np.uint8) for value in (shift, mask, flip))]
    if dtype is torch.float32:
        got = torch.from_numpy(ptx.run(text, operands, 4, 4).view(np.float32)[:255]) + (offset - 2.0**23)
    else:
        base = 1024 if dtype is torch.float16 else 128
        numbers = [torch.full((255,), float(value), dtype=dtype) for value in (1, offset - base)]
        operands += [number.view(torch.int16).numpy() for number in numbers]
        got = torch.from_numpy(ptx.run(text, operands, 2, 4).view(np.int16)[:255]).view(dtype)
    assert torch.equal(got, want)


def test_assembly_that_the_interpreter_does_not_know() -> None:
    with pytest.raises(NotImplementedError, match="popc"):
        ptx.run("popc.b32 $0, $1;", [np.zeros(1, np.uint32)], 4, 1)


def test_only_where_the_device_has_it() -> None:
    """AMD converts a byte of a word in one instruction; 16-bit floats in pairs came with sm_80."""
    kernel = only_kernel(packed, *inputs(packed, 16, 128, 256))
    for arch, result in (("sm_80", True), ("sm_90", True), ("sm_75", False), ("gfx942", False)):
        assert ("_bits_to_bfloat16(" in TritonTarget(arch).emit(kernel)) == result


def signed(x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Two signed weights of four bits in a signed byte."""
    weights = torch.stack(((w << 4) >> 4, w >> 4), -1).reshape(w.shape[0], -1)
    return x @ (weights.to(x.dtype) * scale[:, None]).T


@pytest.mark.parametrize(("rows", "kind"), [(1, "float32"), (16, "bfloat16")])
def test_a_subtracted_constant_is_part_of_the_bit_pattern(rows: int, kind: str) -> None:
    def centred(x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        weights = torch.stack((w & 15, w >> 4), -1).flatten(-2).to(x.dtype) - 8
        return x @ weights.T * scale

    source = TritonTarget("sm_90").emit(only_kernel(centred, *inputs(packed, rows, 128, 256)))
    assert [f"_bits_to_{kind}(in1, {shift}, 15, 0, -8)" in source for shift in (0, 4)] == [True, True]
    assert "- 8.0" not in source


def test_the_scale_of_a_group_leaves_a_field_behind() -> None:
    def in_groups(x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        weights = torch.stack((w & 15, w >> 4), -1).flatten(-2).to(x.dtype) - 8
        return x @ (weights.unflatten(-1, (scale.shape[-1], -1)) * scale[..., None]).flatten(-2).T

    source = TritonTarget("sm_90").emit(only_kernel(in_groups, *inputs(packed_in_groups, 16, 128, 256)))
    assert [f"_bits_to_bfloat16(in1, {shift}, 15, 0, -8)" in source for shift in (0, 4)] == [True, True]


@pytest.mark.parametrize(("rows", "kind"), [(1, "float32"), (16, "bfloat16")])
def test_signed_weights_take_the_same_way(rows: int, kind: str) -> None:
    x, w, scale = inputs(packed, rows, 128, 256)
    source = TritonTarget("sm_90").emit(only_kernel(signed, x, w.view(torch.int8), scale))
    assert [f"_bits_to_{kind}(in1, {shift}, 15, 8, -8)" in source for shift in (0, 4)] == [True, True]
