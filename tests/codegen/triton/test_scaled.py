"""Kernels that scale in place: few programs, offsets of as many bits as needed, and nothing to do for a factor of 1."""

from __future__ import annotations

import sympy
import torch

from fusion.codegen.triton.devices.h200 import H200
from fusion.codegen.triton.target import emit
from fusion.lowering.ir.expr import Load, Op, make_cast
from fusion.lowering.ir.kernel import Kernel, KernelAxis, Param, Role, Store

BF16, F32 = torch.bfloat16, torch.float32


def scaling(elements: int, *, stored: sympy.Expr | None = None) -> Kernel:
    """Return a kernel that multiplies a vector by a number, in place unless it is `stored` at another offset."""
    i, size = sympy.Symbol("i0", integer=True, nonnegative=True), sympy.Integer(elements)
    vector = Param("in0", BF16, (size,), (sympy.Integer(1),), written=True)
    number = Param("in1", F32, (), (), written=False)
    product = Op("mul", (make_cast(Load("in0", (i,), BF16), F32), Load("in1", (sympy.Integer(0),), F32)), F32)
    store = Store("in0", i if stored is None else stored, make_cast(product, BF16))
    return Kernel("scale", (vector, number), (), (KernelAxis(i, size, Role.GRID),), (store,))


def test_few_programs_compute_all_blocks() -> None:
    source = emit(scaling(1 << 20), device=H200)
    assert "if in1 == 1.0:\n        return" in source
    assert "for block in range(tl.program_id(0), blocks, tl.num_programs(0)):" in source
    assert "min(8 * processors" in source and "int64" not in source


def test_offsets_of_large_tensors_have_64_bits() -> None:
    source = emit(scaling(65536 * 50257), device=H200)
    assert "x0 = tl.cast(block, tl.int64) * XBLOCK" in source


def test_a_product_that_is_stored_elsewhere_is_computed_for_1_too() -> None:
    i = sympy.Symbol("i0", integer=True, nonnegative=True)
    source = emit(scaling(1 << 20, stored=(1 << 20) - 1 - i), device=H200)
    assert "== 1.0" not in source and "for block" not in source
