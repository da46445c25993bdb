"""Values that vary along the lanes alone: one table for all rows, and gathers of neighbours by one."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import fusion
from fusion.codegen.c.compiler import find_compiler
from fusion.codegen.c.target import CTarget
from fusion.lowering.ir.kernel import Store
from tests.codegen.c.test_lanes import kernels_of, loops_in_lanes
from tests.codegen.kernels.making import BF16, BOOL, F32, F64, I8, I64, assert_same, expected, packed, tensors
from tests.codegen.kernels.pointwise import sampled

SHAPES = ((7, 20, 3), (15, 16, 4), (20, 50, 1), (31, 64, 7), (40, 75, 9), (300, 290, 3), (300, 290, 30))
"""Elements of a row, columns that are read, and fourths of an element between them."""


@pytest.mark.parametrize("dtype", [F32, F64, BF16, I8, I64, BOOL], ids=str)
def test_elements_are_gathered_near_and_far(dtype):
    """In rows of less than a vector, of less than two, and of several; the steps fit into a window or do not."""
    target = CTarget()
    kernel = packed("packed", *(sampled(33, *shape, dtype) for shape in SHAPES))
    source = target.emit(kernel)
    assert source.count(" find_windows(place0") == len(SHAPES)
    given = tensors(kernel)
    want = expected(kernel, given)
    target.build(kernel, source)(*given)
    assert_same(kernel, given, want)


def resized(x: torch.Tensor) -> torch.Tensor:
    return F.interpolate(x, size=(24, 50), mode="bilinear")


@pytest.mark.skipif("Free Software" not in find_compiler().version, reason="GCC reports it")
def test_positions_of_columns_are_computed_once():
    """A row of an image that is resized computes its own position; those of its columns, and weights, are tables."""
    (source,) = kernels_of(resized, torch.randn(2, 3, 12, 25))
    before, loops = source[source.index("int64_t place0") :].split("for (int64_t i0", 1)
    (lanes,) = re.findall(r"#pragma omp simd\n\s*for \(int64_t i2 .*\n((?:.*;\n)+)", loops)
    assert "float_to_int64_t" in before and "float_to_int64_t" not in lanes
    assert loops.count("gather_float(in0 + ") == 4
    assert "table0[i2]" in lanes and "in0[" not in lanes
    assert loops_in_lanes(source) >= 1


@pytest.mark.parametrize("padding", [0, 1])
def test_deviations_of_channels_are_computed_once_for_all_windows(padding):
    """The bounds of a window do not decide which channel's variance is read."""

    def pooled(x, mean, variance):
        return F.max_pool2d(F.batch_norm(x, mean, variance).relu(), 3, 2, padding)

    x = torch.randn(2, 64, 13, 13).contiguous(memory_format=torch.channels_last)
    mean, variance = torch.randn(64), torch.rand(64) + 0.1
    variance[3], variance[5], variance[7] = 0.0, torch.inf, torch.nan
    (source,) = kernels_of(pooled, x, mean, variance)
    before, windows = source.split("for (int64_t i0", 1)
    assert "sqrt" in before and "sqrt" not in windows
    got = fusion.fuse(pooled, options={"target": "c", "strict": True})(x, mean, variance)
    torch.testing.assert_close(got, pooled(x, mean, variance), equal_nan=True)


def test_a_fold_has_lanes_along_gathered_columns():
    """Along the channels, whose stride is long, classes of 128 × 128 points took ten times as long."""

    def classes(x: torch.Tensor) -> torch.Tensor:
        return F.interpolate(x, scale_factor=2.0, mode="bilinear").argmax(1)

    x = torch.randn(2, 21, 16, 24)
    x[0, 3, 5, 6] = float("nan")
    fused = fusion.fuse(classes, options={"target": "c", "strict": True})
    assert torch.equal(fused(x), classes(x))
    (source,) = kernels_of(classes, x)
    assert source.count(" gather_float(in0 + ") == 4
    assert re.search(r"#pragma omp simd\n\s*for \(int64_t i2", source)


def test_a_table_of_an_index_tensor_is_checked():
    """Also where no other line reads the index."""
    fused = fusion.fuse(lambda x, at: x[:, at] + 1, options={"target": "c", "strict": True})
    x, at = torch.randn(40, 30), torch.randint(-30, 30, (70,))
    assert torch.equal(fused(x, at), x[:, at] + 1)
    at[69] = 30
    with pytest.raises(IndexError):
        fused(x, at)


def test_a_tensor_that_changes_is_not_gathered():
    """The position of a row that is read may be one that another row has written."""
    kernel = sampled(40, 40, 40, 3)
    (store,) = kernel.body
    assert isinstance(store, Store)
    x = replace(kernel.param("x"), written=True)
    source = CTarget().emit(replace(kernel, params=(x,), body=(replace(store, param="x"),)))
    assert "find_windows(" in CTarget().emit(kernel) and "find_windows(" not in source


def test_few_rows_have_no_table():
    """One thread would compute it while all others wait."""
    assert "find_windows(" in CTarget().emit(sampled(32, 40, 75, 3))
    assert "find_windows(" not in CTarget().emit(sampled(31, 40, 75, 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.uint8], ids=str)
def test_sizes_may_be_symbolic(dtype):
    """Tables of unknown length are on the heap."""
    fused = fusion.fuse(lambda x: F.interpolate(x, scale_factor=2.0), dynamic=True, options={"strict": True})
    for width in (3, 20, 1030):
        x = (torch.randn(3, 4, 5, width) * 50).abs().to(dtype)
        assert torch.equal(fused(x), F.interpolate(x, scale_factor=2.0))
    *_, source = [kernel.source for graph in fusion.report(fused).graphs for kernel in graph.kernels]
    assert "place0 = aligned_alloc(64" in source
