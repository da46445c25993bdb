"""Generated products that share an operand, under Triton's interpreter, against float64."""

from __future__ import annotations

import pytest
import torch

from fusion.codegen.triton import TritonTarget
from fusion.codegen.triton.forms.persistent_product import PersistentConfig
from tests.fusion.schedule.test_contractions import (
    SHARED,
    error,
    gated,
    listed,
    meeting,
    only_kernel,
    ordered,
    outputs,
    random_tensors,
)

TARGET = TritonTarget("sm_90")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", SHARED)
def test_products_of_one_operand(name: str, dtype: torch.dtype) -> None:
    function, shapes = SHARED[name]
    given = random_tensors(shapes, dtype)
    kernel = only_kernel(function, given)
    outs = outputs(kernel)
    TARGET.build(kernel, TARGET.emit(kernel))(*ordered(kernel, given), *outs)
    want = listed(function(*(tensor.double() for tensor in given)))
    assert error(outs, want) <= 2 * error(listed(function(*given)), want) + 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("rows", "terms", "columns"), [(90, 7, 85), (49, 19, 49), (128, 20, 64)])
def test_products_that_meet(rows: int, terms: int, columns: int, dtype: torch.dtype) -> None:
    """Both in one loop, with operands of their own."""
    given = [torch.randn(shape).to(dtype) for shape in [(rows, terms), (terms, columns)] * 2]
    kernel = only_kernel(meeting, given)
    source = TARGET.emit(kernel)
    assert source.count("tl.dot(") == 2 and source.count("for k0 in ") == 1
    outs = outputs(kernel)
    TARGET.build(kernel, source)(*given, *outs)
    want, eager = meeting(*(tensor.double() for tensor in given)), meeting(*given)
    assert error(outs, want) <= 2 * error(eager, want) + 1e-6


PERSISTENT = PersistentConfig((("m", 128), ("k", 64), ("n", 64)), num_warps=8, num_stages=3)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["up first", "gate first"])
@pytest.mark.parametrize("shapes", [(160, 1024, 128), (200, 1000, 136)], ids=str)
def test_two_products_of_the_same_rows_are_one(order: tuple[int, int], shapes: tuple[int, int, int]) -> None:
    """Wherever their matrices are in memory."""
    rows, columns, along = shapes
    weights = torch.randn(2, columns, along).half()
    given = [torch.randn(rows, along).half(), weights[order[0]], weights[order[1]]]
    kernel = only_kernel(gated, given)
    source = TARGET.emit(kernel, PERSISTENT)
    assert source.count("tl.make_tensor_descriptor(") == 1 and source.count(" TensorDescriptor(") == 2
    assert source.count("tl.dot(") == 1
    outs = outputs(kernel)
    TARGET.build(kernel, source)(*given, *outs)
    want = listed(gated(*(tensor.double() for tensor in given)))
    assert error(outs, want) <= 2 * error(listed(gated(*given)), want)


def test_descriptors_fetch_a_shared_matrix_once() -> None:
    function, _ = SHARED["one matrix"]
    given = [torch.randn(shape).half() for shape in ((128, 1024), (160, 128), (160, 128))]
    kernel = only_kernel(function, given)
    source = TARGET.emit(kernel, PERSISTENT)
    assert source.count(" TensorDescriptor(") == 4 and source.count("in1_desc.load(") == 1
    outs = outputs(kernel)
    TARGET.build(kernel, source)(*ordered(kernel, given), *outs)
    want = listed(function(*(tensor.double() for tensor in given)))
    assert error(outs, want) <= 2 * error(listed(function(*given)), want)


@pytest.mark.parametrize("rows", [1, 3])
def test_few_rows_are_sums_of_products(rows: int) -> None:
    given = [torch.randn(shape).bfloat16() for shape in ((rows, 531), (77, 531), (77, 531))]
    kernel = only_kernel(gated, given)
    source = TARGET.emit(kernel)
    assert "tl.dot" not in source
    outs = outputs(kernel)
    TARGET.build(kernel, source)(*given, *outs)
    want = listed(gated(*(tensor.double() for tensor in given)))
    assert error(outs, want) <= 2 * error(listed(gated(*given)), want)
