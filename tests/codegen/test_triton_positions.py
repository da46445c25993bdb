"""Folds of positions in Triton: carried in 32 bits where they are short, and what they begin with fits."""

from __future__ import annotations

import pytest
import torch

from codegen.targets import TARGETS
from lowering.expr import IndexValue, Load, const
from lowering.kernel import Fold, Role, Store
from tests.lowering.building import I0, R0, kernel, op, param

I64 = torch.int64


@pytest.mark.parametrize("fold_op", ["max", "min"])
def test_the_extreme_of_chosen_positions(fold_op: str) -> None:
    named = op("eq", Load("index", (R0,), I64), IndexValue(I0))
    chosen = op("where", named, IndexValue(R0), const(-1, I64))
    fold = Fold("extreme0", fold_op, (chosen,), (R0,), I64)
    made = kernel(
        [param("index", (6,), I64), param("out", (5,), I64, written=True)],
        {I0: (5, Role.GRID), R0: (6, Role.WHOLE)},
        fold,
        Store("out", I0, fold.ref),
    )
    target = TARGETS["triton"]("sm_90")
    source = target.emit(made)
    assert str(torch.iinfo(I64).max) not in source and str(torch.iinfo(I64).min) not in source
    assert dict(target.stages(made, source))["cubin"][:4] == b"\x7fELF"
