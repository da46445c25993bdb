"""Kernels that may flush denormals, and that their exponentials are one instruction then."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F  # the name everyone knows it by

from fusion.codegen.triton import TritonTarget
from fusion.codegen.triton.rewrites.denormals import may_flush
from fusion.lowering.ir.expr import const
from fusion.lowering.ir.expr import make_op as op
from fusion.lowering.ir.kernel import Fold, Kernel, Loop, Role, Store
from tests.codegen.kernels.attention import online_attention
from tests.codegen.kernels.making import BF16, F32, b, i, param
from tests.codegen.kernels.rows import softmax
from tests.golden import recording
from tests.golden.programs import Given, Program

pytestmark = pytest.mark.usefixtures("without_disassembly")

TARGET = TritonTarget("sm_90")
QUERIES = 64


def with_rows(value: str) -> Kernel:
    """Attention that also stores a number of each row: one of its folds, or a function of their sum."""
    kernel = online_attention(2, QUERIES, 128, 64, causal=True)
    (loop, store) = kernel.body
    assert isinstance(loop, Loop)
    folds = {stmt.name: stmt.ref for stmt in loop.body if isinstance(stmt, Fold)}
    whole = folds["whole"]
    chosen = op("where", op("eq", folds["top"], const(-math.inf, F32)), const(math.nan, F32), whole)
    of_sum = {"log": op("log", whole), "chosen log": op("log", chosen), "sine": op("sin", whole)}
    rows = Store("rows", QUERIES * b + i, folds.get(value) or of_sum[value])
    return replace(
        kernel, params=(*kernel.params, param("rows", F32, 2, QUERIES, written=True)), body=(loop, store, rows)
    )


def rescaled(value: float) -> Kernel:
    """Attention whose exponentials have another operand than the maximum."""
    kernel = with_rows("whole")
    loop, *stores = kernel.body
    assert isinstance(loop, Loop)
    top, *_ = [stmt for stmt in loop.body if isinstance(stmt, Fold) and stmt.op == "max"]
    lower = replace(top, args=(op("mul", top.args[0], const(value, F32)),))
    return replace(kernel, body=(replace(loop, body=tuple(lower if s is top else s for s in loop.body)), *stores))


@pytest.mark.parametrize("value", ["top", "whole", "log", "chosen log"])
def test_attention_that_stores_its_folds_may_flush(value: str) -> None:
    kernel = with_rows(value)
    assert may_flush(kernel)
    ptx = _ptx(kernel)
    assert "ex2.approx.ftz.f32" in ptx and "ex2.approx.f32" not in ptx


def test_functions_whose_results_are_stored_keep_denormals() -> None:
    kernel = with_rows("sine")
    assert not may_flush(kernel) and "ftz" not in TARGET.emit(kernel)


def test_a_loss_beside_a_gradient_in_16_bits_may_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss is a logarithm of the sum of exponentials; in float32, the gradient shows what became of them."""
    flushed: dict[torch.dtype, bool] = {}
    for dtype in (torch.bfloat16, torch.float32):
        given = Given((8192, 50257), dtype, True), Given((8192,), torch.int64)
        program = Program(lambda x, y: F.cross_entropy(x.float(), y), given, backward=True)
        kernels = recording.kernels_for(program, "sm_90", monkeypatch)
        (source,) = [text for kernel, text in kernels.items() if "scatter" in kernel.name]
        flushed[dtype] = '"enable_reflect_ftz": True' in source
    assert flushed == {torch.bfloat16: True, torch.float32: False}


def test_exponentials_that_need_not_reach_1_keep_denormals() -> None:
    kernel = rescaled(0.5)
    assert not may_flush(kernel) and "ftz" not in TARGET.emit(kernel)


@pytest.mark.parametrize("role", [Role.WHOLE, Role.LOOP])
def test_rounded_shares_of_a_row_keep_no_denormals(role: Role) -> None:
    ptx = _ptx(softmax(64, 4096, role, BF16))
    assert "ex2.approx.ftz.f32" in ptx and "ex2.approx.f32" not in ptx


def test_rounded_exponentials_that_need_not_reach_1_keep_denormals() -> None:
    kernel = softmax(64, 4096, Role.WHOLE, BF16)
    top, *others = kernel.body
    assert isinstance(top, Fold)
    lower = replace(top, args=(op("mul", top.args[0], const(0.5, F32)),))
    ptx = _ptx(replace(kernel, body=(lower, *others)))
    assert "ex2.approx.f32" in ptx and "ex2.approx.ftz.f32" not in ptx


def _ptx(kernel: Kernel) -> str:
    return str(dict(TARGET.stages(kernel, TARGET.emit(kernel), "sm_90"))["ptx"])
