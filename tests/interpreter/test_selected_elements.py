"""An element of a row that a sum selects is loaded, under Triton's interpreter, against the evaluator."""

from __future__ import annotations

import pytest
import torch

from fusion.codegen.triton import TritonTarget
from fusion.lowering.ir.expr import Expr, IndexValue, Load, const, make_cast
from fusion.lowering.ir.expr import make_op as op
from fusion.lowering.ir.kernel import Fold, Kernel, Loop, Role, Store
from tests.codegen.kernels.making import BF16, F16, F32, I64, assert_same, expected, kernel, param, tensors
from tests.lowering.building import I0, R0

TARGET = TritonTarget()
ROWS = 3


def less_the_chosen(length: int, dtype: torch.dtype, *, checks: bool) -> Kernel:
    """x[i, r] becomes x[i, r] - x[i, place[i]] + max x[i], in place; the chosen one is stored too."""
    element = Load("x", (length * I0 + R0,), dtype)
    place: Expr = Load("place", (I0,), I64)
    if checks:
        place = op("checked", place, const(length, I64), const(length - 1, I64), const(1, I64))
    chosen = op("where", op("eq", IndexValue(R0), place), make_cast(element, F32), const(0.0, F32))
    result = Fold("found0", "sum", (chosen,), (R0,), F32)
    largest = Fold("max0", "max", (make_cast(element, F32),), (R0,), F32)
    changed = make_cast(op("add", op("sub", make_cast(element, F32), result.ref), largest.ref), dtype)
    return kernel(
        "less_the_chosen",
        [
            param("x", dtype, ROWS, length, written=True),
            param("place", I64, ROWS),
            param("out", F32, ROWS, written=True),
        ],
        {I0: (ROWS, Role.GRID), R0: (length, Role.LOOP)},
        Loop((R0,), (largest, result)),
        Store("out", I0, result.ref),
        Loop((R0,), (Store("x", length * I0 + R0, changed),)),
    )


@pytest.mark.parametrize("dtype", [F16, BF16, F32], ids=str)
@pytest.mark.parametrize("length", [8192, 9001])
@pytest.mark.parametrize("checks", [False, True])
def test_the_element_is_loaded_before_its_row_is_overwritten(length: int, dtype: torch.dtype, checks: bool) -> None:
    example = less_the_chosen(length, dtype, checks=checks)
    given = tensors(example)
    given[1].copy_(torch.tensor([0, 4097, -1 if checks else length]))  # beyond the row there is nothing
    want = expected(example, given)
    source = TARGET.emit(example)
    TARGET.build(example, source)(*given)
    assert_same(example, given, want)
    assert bool((want[2] != 0).all()) == checks
    before, loop, *_ = source.split("for r0 in range(")
    assert "tl.debug_barrier()" in before and "==" not in loop
