"""Writes to positions held in a tensor, and searches in sorted sequences, against eager: no call remains."""

from __future__ import annotations

import pytest
import torch

from fusion.lowering.errors import IndexOutOfRange
from fusion.lowering.interpret import run_program
from fusion.lowering.lower import lower
from fusion.lowering.rules import compared
from tests.lowering.lowered import calls, check, lowered, traced

X = torch.arange(60, dtype=torch.float32).view(3, 4, 5) / 8
SOURCE = -torch.arange(30, dtype=torch.float32).view(3, 2, 5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_slices_are_replaced(dtype):
    index = torch.tensor([3, 1])
    check(lambda x, i, s: x.index_copy(1, i, s), X.to(dtype), index, SOURCE.to(dtype))
    check(lambda x, i: x.index_fill(1, i, 7), X.to(dtype), index)
    check(lambda x, i, v: x.index_fill(-1, i, v), X.to(dtype), torch.tensor([-1, 0, 0]), torch.tensor(2.5).to(dtype))


def test_of_numbers():
    one, zero = torch.tensor(3.0), torch.tensor(0)
    check(lambda x, i, s: x.index_copy(0, i, s), one, zero, torch.tensor(4.0))
    check(lambda x, i: x.index_fill(0, i, 4.0), one, zero)
    check(lambda x, i, s: x.scatter(0, i, s), one, zero, torch.tensor(5.0))
    check(lambda x, i, s: x.scatter(0, i, s), one, zero.view(1), torch.tensor([5.0]))


def test_the_last_source_wins():
    index = torch.tensor([2, 0, 2])
    source = torch.arange(45, dtype=torch.float32).view(3, 3, 5)
    check(lambda x, i, s: x.index_copy(1, i, s), X, index, source)


def test_no_source_at_all():
    nothing, none = torch.zeros(3, 0, 5, dtype=torch.long), torch.zeros(3, 0, 5)
    check(lambda x, i, s: (x.scatter(1, i, s), x.scatter(1, i, 2.0), x.scatter_add(1, i, s)), X, nothing, none)
    check(lambda x, i, s: x.scatter_reduce(1, i, s, "amax", include_self=False), X, nothing, none)
    check(lambda x, i, s: x.index_reduce(0, i, s, "prod"), torch.tensor(2.0), torch.tensor([0]), torch.tensor(4.0))
    check(lambda x, i, s: x.index_copy(1, i, s), X, torch.zeros(0, dtype=torch.long), SOURCE[:, :0])
    check(lambda x, i: x.index_fill(1, i, 1.0), X, torch.zeros(0, dtype=torch.long))


def test_positions_along_one_dimension():
    aten = torch.ops.aten
    index = torch.tensor([[3, -4], [1, 2]])
    check(lambda x, i, v: aten.index_put(x, [None, i], v), X, index, torch.arange(60.0).view(3, 2, 2, 5))
    check(lambda x, i, v: aten.index_put(x, [None, i], v), X, index, torch.tensor(9.0))
    check(lambda x, i, v: aten.index_put(x, [i], v), X, torch.tensor([2, 0]), torch.arange(5.0))


@pytest.mark.parametrize("accumulate", [False, True])
def test_masks_with_one_number(accumulate):
    aten, number = torch.ops.aten, torch.tensor(2.5)
    for mask in (X > 3, (X > 3)[..., 0], (X > 3)[:, 0, 0]):
        check(lambda x, m, v: aten.index_put(x, [m], v, accumulate), X, mask, number)
    check(lambda x, m, v: aten.index_put(x, [None, m], v, accumulate), X.bfloat16(), X[0] > 1, number[None].bfloat16())


ROWS = torch.tensor([[3, 3], [0, 1], [5, 4], [3, 2]])

MEETING = {
    "src": lambda x, i, s: x.scatter(1, i, s),
    "value": lambda x, i, s: x.scatter(1, i, 2.5),
    "add": lambda x, i, s: x.scatter_add(1, i, s),
    "fewer_rows": lambda x, i, s: x.scatter(1, i[:2], s),
    "fewer_rows_and_one": lambda x, i, s: x.scatter(1, i[:2, :1], s),
    "fewer_rows_of_one_number": lambda x, i, s: x.scatter(1, i[:2, :1], 1.0),
    "fewer_rows_added": lambda x, i, s: x.scatter_add(1, i[1:3], s),
    "along_the_first": lambda x, i, s: x.scatter_add(0, i.t() % 4, s.t().contiguous()),
    "reduced_by_add": lambda x, i, s: x.scatter(1, i, s, reduce="add"),
    "reduced_by_value_added": lambda x, i, s: x.scatter(1, i, 3, reduce="add"),
    "reduced_by_product": lambda x, i, s: x.scatter(1, i, s, reduce="multiply"),
    "slices": lambda x, i, s: x.index_add(1, i[0], s[:, :2], alpha=2),
    "slices_along_the_first": lambda x, i, s: x.index_add(0, i[3].int() % 4, x[:2]),
    "gather_backward": lambda x, i, s: torch.ops.aten.gather_backward(s[:, :2], x, 1, i, False),
    "select_backward": lambda x, i, s: torch.ops.aten.index_select_backward(s[:, :2], x.shape, 1, i[2]),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64])
@pytest.mark.parametrize("name", MEETING)
def test_few_sources_per_row(name, dtype):
    """Small integers, whose sums do not depend on their order."""
    x, source = torch.arange(24).view(4, 6).to(dtype), torch.arange(12).view(4, 3).to(dtype)
    check(lambda x, i, s: MEETING[name](x, i, s), x, ROWS, source)
    check(lambda x, i, s: MEETING[name](x, i, s), x.t().contiguous().t(), ROWS, source * 2)


def test_a_large_tensor_with_few_sources():
    x, index = torch.zeros(300, 5000), torch.arange(900).view(300, 3) * 5
    check(lambda x, i: x.scatter(1, i, 1.0), x, index)


REDUCED = ("sum", "prod", "mean", "amax", "amin")


@pytest.mark.parametrize("include_self", [True, False])
@pytest.mark.parametrize("reduce", REDUCED)
def test_sources_are_folded(reduce, include_self):
    x, source = torch.randn(4, 6), torch.randn(4, 3)
    source[0, 1] = torch.nan
    for index in (ROWS, ROWS[:3, :1], ROWS[:, :1]):
        check(lambda x, i, s: x.scatter_reduce(1, i, s, reduce, include_self=include_self), x, index, source)
    if reduce != "sum":
        check(lambda x, i, s: x.index_reduce(1, i, s, reduce, include_self=include_self), x, ROWS[3], source[:, :2])


def test_positions_are_added_to():
    aten, x = torch.ops.aten, torch.arange(24.0).view(4, 6)
    check(lambda x, i, v: aten.index_put(x, [None, i], v, True), x, torch.tensor([5, -1, 0]), torch.arange(3.0))
    check(lambda x, i, v: aten.index_put(x, [i], v, True), x, torch.tensor([[1, 1], [0, -4]]), torch.tensor(2.0))
    check(lambda x, i, v: x.put(i, v, True), x, torch.tensor([[23, -1], [0, 5]]), torch.ones(2, 2))
    check(lambda x, i, v: x.put(i, v), x, torch.tensor([[23, -2], [0, 5]]), torch.ones(2, 2))
    check(lambda x, i, v: x.index_add(0, i, v, alpha=3), torch.tensor(2.0), torch.tensor([0]), torch.tensor(4.0))


@pytest.mark.parametrize("padding", [-1, 3])
def test_rows_that_were_looked_up(padding):
    indices = torch.tensor([[3, 0, 3], [6, 1, 0]])
    aten = torch.ops.aten
    check(lambda g, i: aten.embedding_dense_backward(g, i, 7, padding, False), torch.randn(2, 3, 4), indices)
    program = lowered(lambda g, i: aten.embedding_dense_backward(g, i, 7, padding, True), torch.randn(2, 3, 4), indices)
    assert "often" in calls(program)["embedding_dense_backward.default"]


def test_elements_go_back_to_where_they_were_the_largest():
    x = torch.randn(2, 3, 6, 8)
    values, at = torch.nn.functional.max_pool2d(x, 2, return_indices=True)
    check(lambda v, i: torch.nn.functional.max_unpool2d(v, i, 2), values, at)
    last = torch.channels_last
    values, at = torch.nn.functional.max_pool2d(x.to(memory_format=last), 2, return_indices=True)
    check(lambda v, i: torch.nn.functional.max_unpool2d(v, i, 2), values, at)
    x = torch.randn(2, 3, 4, 6, 2).bfloat16()
    values, at = torch.nn.functional.max_pool3d(x, 2, return_indices=True)
    check(lambda v, i: torch.nn.functional.max_unpool3d(v, i, 2), values.permute(1, 0, 2, 3, 4), at.transpose(0, 1))


def test_several_positions():
    aten, index = torch.ops.aten, torch.tensor([0, 0, 1])
    check(lambda x, i, v: aten.index_put(x, [i, i], v, True), X, index, torch.ones(5))
    check(lambda x, i, v: aten.index_put(x, [i, i - 2], v), X, torch.tensor([0, 2, 1]), torch.arange(15.0).view(3, 5))
    check(lambda x, i, v: aten.index_put(x, [i[:, None], None, i], v, True), X, index, torch.ones(3, 3, 4))
    check(lambda x, i, v: aten.index_put(x, [i, None, i], v, True), X, index, torch.ones(3, 4))


@pytest.fixture
def one_by_one(monkeypatch):
    """No element looks for its sources, however few there are."""
    monkeypatch.setattr(compared, "MOST_COMPARISONS", 0)
    monkeypatch.setattr(compared, "FEW_SOURCES", 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8])
@pytest.mark.usefixtures("one_by_one")
def test_sources_find_their_places(dtype):
    """Small integers, whose sums do not depend on their order; sources that are stored do not collide."""
    x, source = torch.arange(24).view(4, 6).to(dtype), torch.arange(12).view(4, 3).to(dtype)
    for function in (MEETING[name] for name in MEETING if "add" in name or "value" in name):
        check(lambda x, i, s, f=function: f(x, i, s), x.t().contiguous().t(), ROWS, source)
    single = torch.tensor([3, 0, 5, 1])
    check(lambda x, i, s: x.index_copy(1, i, s), x, single, x[:, :4] + 1)
    check(lambda x, i: x.index_fill(1, i, 7), x, single - 6)
    check(lambda x, i, s: x.put(i * 2, s), x, single, source[:, 0])
    check(lambda x, i, s: x.put(i * 0 - 2, s, True), x, single, source[:, 0])
    check(lambda x, i, s: x.scatter(1, i.expand(4, -1), s), x, single[:3], source)
    check(lambda x, i, s: torch.ops.aten.index_put(x, [None, i], s[:, 0, None]), x, single, source)


@pytest.mark.usefixtures("one_by_one")
def test_bools_are_added_as_any():
    x = torch.tensor([[True, False, False], [False, False, True]])
    check(lambda x, i, s: x.scatter_add(1, i, s), x, torch.tensor([[1, 1], [2, 0]]), ~x[:, 1:])


@pytest.mark.parametrize("include_self", [True, False])
@pytest.mark.parametrize("reduce", REDUCED)
@pytest.mark.usefixtures("one_by_one")
def test_sources_that_find_their_places_are_folded(reduce, include_self):
    x, source = torch.randn(4, 6), torch.randn(4, 3)
    x[2, 5], source[0, 1] = -torch.nan, torch.nan
    for dtype in (torch.float32, torch.bfloat16):
        given = (x.to(dtype), ROWS, source.to(dtype))
        check(lambda x, i, s: x.scatter_reduce(1, i, s, reduce, include_self=include_self), *given)
    whole = (torch.arange(24, dtype=torch.int16).view(4, 6) * 1000, ROWS, torch.full((4, 3), 300, dtype=torch.int16))
    if reduce != "mean":
        check(lambda x, i, s: x.scatter_reduce(1, i, s, reduce, include_self=include_self), *whole)


@pytest.mark.usefixtures("one_by_one")
def test_places_out_of_range_fail_their_check():
    for function in (lambda x, i, s: x.index_add(1, i, s), lambda x, i, s: x.index_copy(1, i, s)):
        program = lowered(function, X, torch.tensor([1, 3]), SOURCE)
        for index in (torch.tensor([1, 4]), torch.tensor([1, -1])):
            with pytest.raises((IndexError, RuntimeError)) as expected:
                function(X, index, SOURCE)
            with pytest.raises(IndexOutOfRange) as raised:
                run_program(program, [X, index, SOURCE])
            assert str(raised.value) == str(expected.value)


def test_an_operation_that_a_target_lacks_is_left():
    x, index = torch.zeros(1 << 12), torch.arange(1 << 11)
    graph = traced(lambda x, i: x.index_fill(0, i, 1.0), [x, index])
    assert "store" in calls(lower(graph, scatters={"sum"}))["index_fill.int_Scalar"]
    assert not calls(lower(graph, scatters={"store"}))


@pytest.mark.parametrize("right", [False, True])
@pytest.mark.parametrize("length", [0, 1, 2, 7, 8, 33])
def test_boundaries(length, right):
    boundaries = torch.arange(length, dtype=torch.float32) // 2
    x = torch.tensor([[-1.0, 0.0, 0.5, 1.0], [3.0, 16.0, 99.0, torch.nan], [torch.inf, -torch.inf, 2.0, 15.5]])
    check(lambda b, x: torch.bucketize(x, b, right=right), boundaries, x)
    check(lambda b, x: torch.searchsorted(b, x.to(torch.float64), right=right, out_int32=True), boundaries, x)


def test_a_sequence_per_row():
    rows = torch.arange(24).view(2, 3, 4) % 7
    ascending, order = rows.sort(-1)
    x = torch.arange(30).view(2, 3, 5) % 9 - 1
    check(lambda s, x: torch.searchsorted(s, x), ascending, x)
    check(lambda s, x, o: torch.searchsorted(s, x, side="right", sorter=o), rows, x, order)
    check(lambda s: torch.searchsorted(s, 3.5), ascending[0, 0])
    check(lambda s: torch.bucketize(3, s), ascending[0, 0])
