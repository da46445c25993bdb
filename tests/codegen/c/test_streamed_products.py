"""Products of two factors in memory: one packed panel for many rows and long sums, stored without a tile."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fusion.codegen.c.blocked.blocks import LEAST_STREAMED, STREAMED_COLUMNS, STREAMED_ROWS, is_streamed, programs
from fusion.lowering.ir.kernel import Fold, Kernel, Loop, Store
from tests.codegen.c.kernels import BF16, F32, F64, TARGET
from tests.codegen.c.launches import check
from tests.codegen.kernels import products as shapes


def plain(m: int, n: int, k: int, *, turned: tuple[bool, bool] = (False, False)) -> Kernel:
    """a · b, without an epilogue."""
    made = shapes.matmul(m, n, k, F32, turned=turned)
    loop, store = made.body
    assert isinstance(loop, Loop) and isinstance(store, Store) and isinstance(loop.body[0], Fold)
    return replace(made, body=(loop, replace(store, value=loop.body[0].ref)))


def called(kernel: Kernel) -> str:
    """Return the launched function."""
    return TARGET.emit(kernel).rpartition("int matmul(")[2]


def exact(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a.double() @ b.double()).relu()


@pytest.mark.parametrize(
    ("m", "n", "k"), [(258, 64, 1024), (259, 65, 1025), (32, 32, 1), (600, 100, 300), (37, 400, 2100), (100, 33, 70)]
)
@pytest.mark.parametrize("turned", [(False, False), (False, True), (True, False)])
def test_streamed_products_are_products(m: int, n: int, k: int, turned: tuple[bool, bool]) -> None:
    for kernel in (plain(m, n, k, turned=turned), shapes.matmul(m, n, k, F32, turned=turned)):
        a, b, out = check(kernel)
        left, right = (x.mT if is_turned else x for x, is_turned in zip((a, b), turned, strict=True))
        wanted = left.double() @ right.double()
        wanted = wanted if kernel.body[1] == plain(m, n, k, turned=turned).body[1] else wanted.relu()
        error, eager = (out.double() - wanted).abs().max(), 1e-7 * k**0.5 * wanted.abs().max()
        assert error <= eager + 1e-6


def test_a_panel_is_packed_for_all_terms_and_many_rows() -> None:
    text = called(shapes.matmul(1000, 2000, 1024, F32, turned=(False, True)))
    assert text.count("pack_float(") == text.count("multiply_float(") == 1
    assert f"i1_0 += {STREAMED_COLUMNS})" in text and "_0 == 0);" in text
    assert "= 0.0f;" not in text, "the first product overwrites its tile"
    assert "imin(252, " in text and STREAMED_ROWS >= 252, "four equal blocks of whole register blocks"


def test_a_product_that_is_stored_as_it_is_has_no_tile() -> None:
    text = called(plain(300, 200, 500))
    assert "multiply_into_float(" in text and "dot" not in text.replace("dots", "") and "acc" not in text
    assert "multiply_float(" in called(shapes.matmul(300, 200, 500, F32)), "an epilogue reads its tile"


def test_long_sums_are_accumulated_where_they_are_stored() -> None:
    text = called(plain(64, 64, 5000))
    assert "multiply_into_float(" in text and "r0_0 == 0);" in text
    check(plain(64, 64, 5000))


def test_few_rows_of_columns_are_shared_among_threads() -> None:
    """Rows are divided so that each thread has two programs, in equal parts."""
    text = called(plain(600, 64, 64))
    assert "_step_parts = imax(1, (2*threads + 1 - 1)/imax(1, 1));" in text
    assert programs(plain(600, 64, 64)) == 25


@pytest.mark.parametrize(
    "kernel",
    [
        shapes.matmul(LEAST_STREAMED - 1, 64, 64, F32),
        shapes.matmul(64, LEAST_STREAMED - 1, 64, F32),
        shapes.matmul(64, 64, 64, BF16),
        shapes.gathered_rows(64, 64, 64),
        shapes.rms_linear(64, 64, 64),
        shapes.matmul_softmax(64, 64, 64),
    ],
    ids=["few rows", "few columns", "converted", "gathered", "computed", "whole rows"],
)
def test_products_that_are_not_streamed(kernel: Kernel) -> None:
    assert not is_streamed(kernel)
    assert "multiply_into_" not in TARGET.emit(kernel)


@pytest.mark.parametrize("dtype", [F32, F64])
def test_products_of_all_floats_that_c_multiplies_are_streamed(dtype: torch.dtype) -> None:
    assert is_streamed(shapes.matmul(64, 64, 64, dtype))
    a, b, out = check(shapes.matmul(40, 70, 90, dtype))
    torch.testing.assert_close(out.double(), exact(a, b), rtol=1e-5, atol=1e-5)


def test_several_streamed_products_are_as_fast_as_one() -> None:
    one = shapes.matmul(256, 256, 256, F32)
    loop, store = one.body
    assert isinstance(loop, Loop) and isinstance(loop.body[0], Fold)
    both = replace(loop, body=(*loop.body, replace(loop.body[0], name="other")))
    assert TARGET.efficiency(replace(one, body=(both, store))) == TARGET.efficiency(one)
