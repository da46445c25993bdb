"""Products of rows that step through several matrices, under Triton's interpreter."""

from __future__ import annotations

import pytest

from fusion.codegen.triton import TritonTarget
from fusion.codegen.triton.forms.persistent_product import PersistentConfig
from tests.codegen.kernels.making import assert_same, expected, tensors
from tests.codegen.kernels.products import transposed

TARGET = TritonTarget("sm_90")
SMALL = PersistentConfig((("m", 64), ("k", 64), ("n", 64)), num_warps=4, num_stages=3)


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("back", [True, False])
def test_rows_of_transposed_matrices_come_through_descriptors(back: bool, flat: bool) -> None:
    kernel = transposed(3, 136, 200, 72, back=back, flat=flat)
    given = tensors(kernel)
    want = expected(kernel, given)
    source = TARGET.emit(kernel, SMALL)
    assert all(f"{name}_desc." in source for name in ("x", "w", "c", "out")) and "[3, 72, 136]" in source
    TARGET.build(kernel, source)(*given)
    assert_same(kernel, given, want)


def test_small_matrices_are_one_product() -> None:
    kernel = transposed(3, 64, 72, 40)
    given = tensors(kernel)
    want = expected(kernel, given)
    TARGET.build(kernel, TARGET.emit(kernel))(*given)
    assert_same(kernel, given, want)
