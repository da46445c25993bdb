"""Products in place with a factor of 1, under Triton's interpreter, against the evaluator."""

from __future__ import annotations

import pytest
import torch

from fusion.codegen.triton import TritonTarget
from fusion.lowering.ir.expr import Load, make_cast
from fusion.lowering.ir.expr import make_op as op
from fusion.lowering.ir.kernel import Kernel, Role, Store
from tests.codegen.kernels.making import BF16, F16, F32, F64, expected, kernel, param
from tests.lowering.building import I0

TARGET = TritonTarget()


def scaled(dtype: torch.dtype, computed: torch.dtype, number: torch.dtype, stored: str = "x") -> Kernel:
    """`stored` = x times a number, computed in another dtype."""
    factors = make_cast(Load("x", (I0,), dtype), computed), make_cast(Load("by", (0 * I0,), number), computed)
    written = [param("out", dtype, 300, written=True)] if stored == "out" else []
    given = [param("x", dtype, 300, written=stored == "x"), param("by", number)]
    store = Store(stored, I0, make_cast(op("mul", *factors), dtype))
    return kernel("scaled", [*given, *written], {I0: (300, Role.GRID)}, store)


@pytest.mark.parametrize("by", [1.0, 0.5, float("nan"), -1.0])
@pytest.mark.parametrize("dtypes", [(BF16, F32, BF16), (F16, F32, F32), (F32, F32, F32), (F64, F64, F64)], ids=str)
def test_times_one_in_place_returns_at_once(dtypes: tuple[torch.dtype, torch.dtype, torch.dtype], by: float) -> None:
    example = scaled(*dtypes)
    x = torch.randn(300, generator=torch.Generator().manual_seed(0)).to(dtypes[0])
    x[:4] = torch.tensor([0.0, -0.0, float("inf"), float("nan")])
    given = [x, torch.tensor(by, dtype=dtypes[2])]
    want = expected(example, given)
    source = TARGET.emit(example)
    TARGET.build(example, source)(*given)
    assert torch.equal(given[0].nan_to_num(7.0), want[0].nan_to_num(7.0)) and torch.equal(
        x.signbit(), want[0].signbit()
    )
    assert "== 1.0:\n        return" in source


@pytest.mark.parametrize(
    "example", [scaled(F32, BF16, BF16), scaled(F32, F32, F32, "out")], ids=["rounded", "elsewhere"]
)
def test_a_product_with_one_is_written_if_it_changes_the_tensor(example: Kernel) -> None:
    given = [torch.randn(300), torch.tensor(1.0, dtype=example.params[1].dtype)]
    given += [torch.zeros(300)] * (len(example.params) - 2)
    want = expected(example, given)
    source = TARGET.emit(example)
    TARGET.build(example, source)(*given)
    assert all(map(torch.equal, given, want))
    assert "return  # times 1" not in source
