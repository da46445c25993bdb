"""Bags of embeddings, and masks with a source for each element, forward and backward against eager: no call remains."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from fusion.lowering.ir.program import Scatter
from tests.lowering.lowered import check, lowered

aten = torch.ops.aten
TABLE = torch.randn(11, 5)
INDICES = torch.tensor([3, 0, 3, 10, 7, 7, 7, 1])
OFFSETS = torch.tensor([0, 2, 2, 6])  # the second bag is empty
WEIGHTS = torch.rand(8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_bags(mode, dtype):
    def bag(w, i, o, **more):
        return F.embedding_bag(i, w, o, mode=mode, **more)

    table = TABLE.to(dtype)
    check(bag, table, INDICES, OFFSETS)
    check(bag, table, INDICES.int(), OFFSETS.int())
    check(lambda w, i, o: bag(w, i, o, padding_idx=7), table, INDICES, OFFSETS)
    check(lambda w, i, o: bag(w, i, o, include_last_offset=True), table, INDICES, torch.tensor([0, 3, 8]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("shape", [(4, 2), (1, 8), (8, 1)])
def test_bags_of_one_length(mode, dtype, shape):
    """Bags of one length are rows of a reduction: no update waits for another."""
    table, indices = TABLE.to(dtype), INDICES.view(shape)
    check(lambda w, i: F.embedding_bag(i, w, mode=mode), table, indices)
    check(lambda w, i: F.embedding_bag(i, w, mode=mode, padding_idx=7), table, indices)
    check(lambda w, i: F.embedding_bag(i.view(-1), w, torch.arange(4) * 2, mode=mode), table, indices)
    if mode != "max":
        program = lowered(lambda w, i: F.embedding_bag(i, w, mode=mode), table, indices)
        assert not any(isinstance(node, Scatter) for node in program.nodes)


def test_weighted_bags():
    check(
        lambda w, i, o, by: F.embedding_bag(i, w, o, mode="sum", per_sample_weights=by),
        TABLE,
        INDICES,
        OFFSETS,
        WEIGHTS,
    )


def gradient(grad, i, o, mode, by=None, padding=-1):
    """Compute the gradient from eager's own auxiliary results, of which only the bags matter."""
    bags = torch.searchsorted(o, torch.arange(8), right=True) - 1
    counted = torch.zeros(4, dtype=torch.long).index_add(0, bags, (i != padding).long())
    largest = torch.zeros(4, 5, dtype=torch.long)
    return aten._embedding_bag_backward(grad, i, o, bags, counted, largest, 11, False, mode, False, by, padding)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("mode", [0, 1])
def test_gradients_of_tables(mode, dtype):
    grad = torch.randn(4, 5, dtype=dtype)
    check(lambda g, i, o: gradient(g, i, o, mode), grad, INDICES, OFFSETS)
    check(lambda g, i, o: gradient(g, i, o, mode, padding=7), grad, INDICES, OFFSETS)
    if mode == 0:
        check(lambda g, i, o, by: gradient(g, i, o, mode, by), grad, INDICES, OFFSETS, WEIGHTS.to(dtype))


def test_gradients_of_weights():
    backward = aten._embedding_bag_per_sample_weights_backward
    bags = torch.searchsorted(OFFSETS, torch.arange(8), right=True) - 1
    for padding in (-1, 7):
        given = (torch.randn(4, 5), TABLE, INDICES, OFFSETS, bags)
        check(lambda *args, p=padding: backward(*args, 0, p), *given)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_largest_of_a_bag(dtype):
    table = (TABLE * 2).round().to(dtype)  # with ties
    for padding in (-1, 7):
        for indices, offsets in ((INDICES, OFFSETS), (INDICES.int(), OFFSETS.int())):
            check(lambda w, i, o: aten._embedding_bag(w, i, o, False, 2, padding_idx=padding), table, indices, offsets)  # noqa: B023
            check(lambda w, i, o: F.embedding_bag(i, w, o, mode="max", padding_idx=padding), table, indices, offsets)  # noqa: B023
        _, bags, sizes, largest = aten._embedding_bag(table, INDICES, OFFSETS, False, 2, padding_idx=padding)
        check(
            lambda g, i, o, b, s, m: aten._embedding_bag_backward(g, i, o, b, s, m, 11, False, 2, False, None, padding),  # noqa: B023
            *(torch.randint(-4, 5, (4, 5)).to(dtype), INDICES, OFFSETS, bags, sizes, largest),
        )


# Masks ----------------------------------------------------------------------------------------------------------------

X = torch.arange(24.0).view(4, 6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_a_source_for_each_place(dtype):
    x, source = (X > 3).to(dtype) if dtype is torch.bool else X.to(dtype), (X.flatten() % 3 - 1).to(dtype)
    for mask in (X % 5 > 2, X[:, :1] > 6, X < 0, X >= 0):
        check(lambda x, m, s: x.masked_scatter(m, s), x, mask, source)
    check(lambda x, m, s: x.masked_scatter(m, s), x.t(), X.t() % 5 > 2, source.view(6, 4).t())
    check(lambda x, m, s: x.masked_scatter(m, s), x[:1], X % 5 > 2, source)


def test_gradients_of_sources():
    for mask in (X % 5 > 2, X >= 0, X < 0):
        check(lambda g, m: aten.masked_scatter_backward(g, m, [5, 6]), X.sin(), mask)


@pytest.mark.parametrize("accumulate", [False, True])
def test_masks_as_indices(accumulate):
    """Sources for all places, or for each, where the mask spans the first, the middle or the last dimensions."""
    z = torch.arange(120.0).view(4, 6, 5)

    def put(indices, x, mask, values):
        check(lambda x, m, v: aten.index_put(x, [*indices, m], v, accumulate), x, mask, -values)

    mask = X % 5 > 2
    count = int(mask.sum())
    put([], X, mask, torch.arange(1.0, 1 + count))
    put([], z, mask, torch.arange(5.0 * count).view(count, 5))
    put([], z, mask, torch.arange(5.0))
    put([], z, mask, torch.arange(float(count)).view(count, 1))
    last = z[0] % 4 > 1
    count = int(last.sum())
    put([None], z.bfloat16(), last, torch.arange(1, 1 + count).bfloat16())
    put([None], z, last, torch.arange(4.0 * count).view(4, count))
    middle = z[0, :, 0] % 10 > 4
    put([None], z, middle, torch.arange(20.0 * int(middle.sum())).view(4, -1, 5))


def test_positions_that_are_not_zero():
    x = torch.randint(-1, 2, (4, 3, 5), generator=torch.Generator().manual_seed(1))
    for shape in ((4, 3, 5), (60,), (6, 10)):
        for size in (0, 3, 41, 70):
            check(lambda x: torch.nonzero_static(x, size=size, fill_value=-7), x.view(shape))  # noqa: B023
    check(lambda x: torch.nonzero_static(x.mT, size=9), x.float() / 2)
    check(lambda x: torch.nonzero_static(x, size=2), x[0, 0, 0] * 0 + 1)
    check(lambda x: torch.nonzero_static(x, size=2), x[:0])
