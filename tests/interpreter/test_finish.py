"""Products whose epilogue runs in parts, with tiles loaded through descriptors, under Triton's interpreter."""

from __future__ import annotations

import pytest
import sympy
import torch

from fusion.codegen.triton import Config, TritonTarget
from fusion.codegen.triton.forms.persistent_product import PersistentConfig
from fusion.lowering.ir.kernel import Fold, Loop, Role, Store
from tests.codegen.kernels.making import (
    BF16,
    F16,
    F32,
    GRID,
    LOOP,
    assert_same,
    b,
    expected,
    i,
    j,
    kernel,
    load,
    param,
    r,
    tensors,
)
from tests.codegen.kernels.products import matmul, residual

TARGET = TritonTarget("sm_90")
WHOLE = PersistentConfig((("m", 64), ("k", 64), ("n", 64)), num_warps=4, num_stages=3)
PARTS = PersistentConfig((("m", 64), ("k", 64), ("n", 64)), num_warps=4, num_stages=3, parts=2)


@pytest.mark.parametrize("config", [WHOLE, PARTS], ids=["whole", "parts"])
@pytest.mark.parametrize("over", [False, True], ids=["elsewhere", "in place"])
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_a_residual(dtype: torch.dtype, over: bool, config: Config) -> None:
    example = residual(200, 232, 136, dtype, over=over)  # no size is a multiple of a block
    given = tensors(example)
    want = expected(example, given)
    source = TARGET.emit(example, config)
    assert "c_desc.load(" in source and "_desc.store(" in source
    assert ("for part in tl.static_range(2):" in source) is (config is PARTS)
    TARGET.build(example, source)(*given)
    assert_same(example, given, want)


@pytest.mark.parametrize("config", [WHOLE, PARTS], ids=["whole", "parts"])
@pytest.mark.parametrize("turned", [(False, False), (False, True), (True, True)], ids=str)
def test_products_of_a_batch(turned: tuple[bool, bool], config: Config) -> None:
    """One descriptor holds all matrices; programs loop over the blocks of all of them."""
    example = matmul(136, 200, 72, BF16, batch=5, turned=turned)
    given = tensors(example)
    want = expected(example, given)
    source = TARGET.emit(example, config)
    assert source.count(" TensorDescriptor(") == 3 and "[5, 136, 200]" in source
    TARGET.build(example, source)(*given)
    assert_same(example, given, want)


@pytest.mark.parametrize("config", [WHOLE, PARTS], ids=["whole", "parts"])
@pytest.mark.parametrize("rows", [1, 63, 200])
def test_rows_that_are_not_known(rows: int, config: Config) -> None:
    """For any number of rows: descriptors use the sizes that the launch is called with."""
    batch, length = sympy.symbols("s0 s1", integer=True, positive=True)
    example = residual(batch * length, 232, 136, BF16)
    given = tensors(example, sizes={batch: 1, length: rows})
    want = expected(example, given, (1, rows))
    source = TARGET.emit(example, config)
    assert "c_desc.load(" in source and "out_desc.store(" in source
    TARGET.build(example, source)(*given, 1, rows)
    assert_same(example, given, want)


@pytest.mark.parametrize("turned", [(False, False), (False, True)], ids=str)
def test_a_batch_that_is_not_known(turned: tuple[bool, bool]) -> None:
    """The batch and the rows of its matrices, whose distance is the number of rows."""
    batch, rows = sympy.symbols("s0 s1", integer=True, positive=True)
    example = matmul(rows, 200, 136, BF16, batch=batch, turned=turned)
    source = TARGET.emit(example, PARTS)
    assert source.count(" TensorDescriptor(") == 3
    for sizes in ((2, 70), (1, 1)):
        given = tensors(example, sizes=dict(zip((batch, rows), sizes, strict=True)))
        want = expected(example, given, sizes)
        TARGET.build(example, source)(*given, *sizes)
        assert_same(example, given, want)


def test_a_sum_whose_length_is_not_known() -> None:
    """The gradient of a weight runs over all rows."""
    rows = sympy.Symbol("s0", integer=True, positive=True)
    example = matmul(136, 200, rows, BF16, turned=(True, False))
    source = TARGET.emit(example, WHOLE)
    assert source.count(" TensorDescriptor(") == 3
    for size in (1, 64, 150):
        given = tensors(example, sizes={rows: size})
        want = expected(example, given, (size,))
        TARGET.build(example, source)(*given, size)
        assert_same(example, given, want, factor=2)


def test_parts_of_a_sum() -> None:
    """The batch is a part of the summed axis; results wider than 16 bits are stored through pointers."""
    a, c = load("a", 384 * i + 128 * b + r, F16), load("b", 384 * j + 128 * b + r, F16)
    dot = Fold("acc", "dot", (a, c), (r,), F32, (i,), (j,))
    params = (param("a", F16, 200, 384), param("b", F16, 136, 384), param("out", F32, 3, 200, 136, written=True))
    axes: dict[sympy.Symbol, tuple[object, Role]] = {b: (3, GRID), i: (200, GRID), j: (136, GRID), r: (128, LOOP)}
    store = Store("out", 200 * 136 * b + 136 * i + j, dot.ref)
    example = kernel("partial", params, axes, Loop((r,), (dot,)), store)
    given = tensors(example)
    want = expected(example, given)
    source = TARGET.emit(example, WHOLE)
    assert "[3, 200, 128], [128, 384, 1]" in source and "tl.store(out_ptr" in source
    TARGET.build(example, source)(*given)
    assert_same(example, given, want)
