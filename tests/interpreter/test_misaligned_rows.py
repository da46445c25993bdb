"""Rows whose length fits no block, under Triton's interpreter, against float64: as if blocks held one row each."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import fusion
from fusion.codegen.triton import Config, TritonTarget
from fusion.lowering.ir.kernel import Kernel, Role
from tests.codegen.kernels.making import BF16, F16, F32, assert_same, expected, tensors
from tests.codegen.kernels.pointwise import normalised
from tests.codegen.kernels.rows import fold, shifted_softmax, softmax

TARGET = TritonTarget()

Function = Callable[..., torch.Tensor]
OPTIONS = {"strict": True, "target": "triton"}
HALVES = (torch.bfloat16, torch.float16)


def gradient(x: torch.Tensor, t: torch.Tensor, top: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The gradient of a cross-entropy: four numbers per row."""
    valid = (t >= 0)[:, None]
    one = torch.where(t[:, None] == torch.arange(x.shape[1]), 1.0, 0.0)
    return torch.where(valid, (torch.exp(x.double() - top[:, None]) - one) * scale[:, None], 0).to(x.dtype)


def scaled(x: torch.Tensor, t: torch.Tensor, top: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (x * scale[:, None] + top[:, None]).to(x.dtype)


def inputs(rows: int, columns: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rows * columns)
    x, top, scale = (torch.randn(*s, generator=generator) for s in ((rows, columns), (rows,), (rows,)))
    return [x.to(dtype), torch.randint(-1, columns, (rows,), generator=generator), top, scale]


def source_of(fused: Callable[..., object]) -> str:
    return fusion.report(fused).kernels[-1].source  # of the last compilation


def check(function: Function, fused: Function, given: list[torch.Tensor]) -> None:
    got = fused(*given)
    x, t, *rest = given
    want = function(x.double(), t, *(each.double() for each in rest))
    assert got.dtype is x.dtype and got.stride() == function(*given).stride()
    rounding = torch.finfo(x.dtype).eps if x.dtype in HALVES else 2e-6
    assert bool(((got.double() - want).abs() <= rounding * (want.abs() + 1)).all())


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32], ids=str)
@pytest.mark.parametrize("columns", [64, 129, 250, 1000, 1501])
def test_numbers_of_a_row_are_read_once(columns: int, dtype: torch.dtype) -> None:
    fused = fusion.fuse(gradient, options=OPTIONS, dynamic=False)
    check(gradient, fused, inputs(5, columns, dtype))
    source = source_of(fused)
    assert ("bi" in source) == (columns != 129)  # of that no block takes at most an eighth too much
    assert f"% {columns}" not in source or columns == 129


def test_rows_with_gaps_and_any_start() -> None:
    fused = fusion.fuse(gradient, options=OPTIONS, dynamic=False)
    x, *rest = inputs(7, 1501, torch.bfloat16)
    whole = torch.zeros(9 * 1603, dtype=torch.bfloat16)
    strided = whole[3:].as_strided((7, 1501), (1603, 1)).copy_(x)
    check(gradient, fused, [strided, *rest])


def test_rows_of_any_number_and_length() -> None:
    fused = fusion.fuse(scaled, options=OPTIONS, dynamic=True)
    for rows, columns in ((5, 1501), (3, 40), (17, 2049)):
        check(scaled, fused, inputs(rows, columns, torch.float32))
    source = source_of(fused)
    assert "bi" in source and "xi //" not in source and "xi %" not in source


def columns_of_batches(x: torch.Tensor, top: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return ((x - top[..., None]) * scale[..., None]).sum(1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(3, 140, 517), (2, 40, 250), (2, 300, 1001)], ids=str)
def test_sums_of_columns_read_numbers_of_a_row_once(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x, top, scale = (torch.randn(*s, generator=generator) for s in (shape, shape[:2], shape[:2]))
    fused = fusion.fuse(columns_of_batches, options=OPTIONS, dynamic=False)
    got = fused(x.to(dtype), top, scale)
    want = columns_of_batches(x.to(dtype).double(), top.double(), scale.double())
    assert bool(((got.double() - want).abs() <= 1e-5 * (want.abs() + shape[1])).all())
    source = fusion.report(fused).kernels[0].source
    assert "bi * " in source and f"// {shape[2]}" not in source


WALKS = {
    "softmax": softmax(3, 8193, Role.LOOP, F16),
    "softmax in one block": softmax(2, 9001, Role.LOOP, F32),
    "map": normalised(530, 8193, F16),
    "largest": fold("argmax", 2, 8195, Role.LOOP),
    "apart": shifted_softmax(3, 8193, 8211, 8195, 3, BF16),
    "with an aligned result": shifted_softmax(3, 8193, 8195, 8200, 1, BF16),
    "congruent": shifted_softmax(3, 8193, 8201, 8193, 8, BF16),
}


@pytest.mark.parametrize("name", WALKS)
def test_loops_from_aligned_addresses(name: str) -> None:
    kernel: Kernel = WALKS[name]
    config = Config((("r", 16384),), num_warps=4) if "one block" in name else None
    given = tensors(kernel)
    want = expected(kernel, given)
    source = TARGET.emit(kernel, config)
    TARGET.build(kernel, source)(*given)
    assert_same(kernel, given, want)
    assert "r_shift = " in source


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool])
def test_single_numbers(dtype: torch.dtype) -> None:
    """A kernel without any dimension has no loop."""
    x, y = torch.tensor(1.5).to(dtype), torch.tensor(2.0).to(dtype)
    fused = fusion.fuse(lambda x, y: x + y.sum(), options=OPTIONS)
    torch.testing.assert_close(fused(x, y), x + y.sum())
    assert fusion.report(fused).kernels


@pytest.mark.parametrize("before", [0, 1, 4])
def test_the_last_word_of_an_aligned_row_is_read_at_once(before: int) -> None:
    """Memory after the word that a row ends in may not be allocated."""
    kernel = softmax(1, 3001, Role.LOOP)
    given = tensors(kernel)
    given[0] = torch.cat([torch.zeros(1, before), given[0]], 1)[:, before:]
    want = expected(kernel, given)
    TARGET.build(kernel, TARGET.emit(kernel))(*given)
    assert_same(kernel, given, want)
