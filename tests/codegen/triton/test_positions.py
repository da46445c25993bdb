"""Folds of positions in Triton: accumulated in 32 bits for short axes, with an initial value that fits."""

from __future__ import annotations

import pytest
import torch

from fusion.codegen.targets import TARGETS
from fusion.lowering.ir.expr import IndexValue, Load, const
from fusion.lowering.ir.expr import make_op as op
from fusion.lowering.ir.kernel import Fold, Loop, Role, Store
from tests.lowering.building import I0, R0, kernel, param

pytestmark = pytest.mark.usefixtures("without_disassembly")

I64 = torch.int64


@pytest.mark.parametrize("fold_op", ["max", "min"])
def test_the_extreme_of_chosen_positions(fold_op: str) -> None:
    named = op("eq", Load("index", (R0,), I64), IndexValue(I0))
    chosen = op("where", named, IndexValue(R0), const(-1, I64))
    fold = Fold("extreme0", fold_op, (chosen,), (R0,), I64)
    example = kernel(
        [param("index", (6,), I64), param("out", (5,), I64, written=True)],
        {I0: (5, Role.GRID), R0: (6, Role.WHOLE)},
        fold,
        Store("out", I0, fold.ref),
    )
    target = TARGETS["triton"]("sm_90")
    source = target.emit(example)
    assert str(torch.iinfo(I64).max) not in source and str(torch.iinfo(I64).min) not in source
    assert dict(target.stages(example, source))["cubin"][:4] == b"\x7fELF"


def test_an_index_into_a_row_is_checked_before_the_loop_over_the_row() -> None:
    place = op("checked", Load("index", (I0,), I64), const(0, I64), const(39999, I64), const(1, I64))
    chosen = op(
        "where",
        op("eq", place, IndexValue(R0)),
        Load("x", (40000 * I0 + R0,), torch.float32),
        const(0.0, torch.float32),
    )
    fold = Fold("chosen0", "sum", (chosen,), (R0,), torch.float32)
    example = kernel(
        [
            param("x", (5, 40000), torch.float32),
            param("index", (5,), I64),
            param("out", (5,), torch.float32, written=True),
        ],
        {I0: (5, Role.GRID), R0: (40000, Role.LOOP)},
        Loop((R0,), (fold,)),
        Store("out", I0, fold.ref),
    )
    before, *walks = TARGETS["triton"]("sm_90").emit(example).split("for r0 in range(")
    assert "= _inside(" in before and walks and not any("_inside(" in loop for loop in walks)
