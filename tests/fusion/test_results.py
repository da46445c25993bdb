"""Calls that do not give what PyTorch said they would: other strides are put right, another shape is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import fusion
from fusion.runtime.results import as_said
from lowering.errors import FusionError, Unsupported
from lowering.lower import lower
from tests.lowering.lowered import single_call


@torch.library.custom_op("fusion_tests::turned", mutates_args=())
def turned(x: Tensor) -> tuple[Tensor, Tensor]:
    """Twice x, column by column, and where x is not 0: as many rows as there are such numbers."""
    return (x * 2).t().contiguous().t(), torch.nonzero(x)


@turned.register_fake
def _(x: Tensor) -> tuple[Tensor, Tensor]:
    """Wrong: row by row, and one row."""
    return torch.empty(x.shape), torch.empty((1, x.dim()), dtype=torch.long)


@pytest.mark.parametrize("dynamic", [False, True])
def test_strides_that_were_not_said(dynamic: bool):
    f = fusion.fuse(lambda x: turned(x + 1)[0].sin() + 1, dynamic=dynamic, options={"strict": True})
    for rows, columns in ((3, 5), (4, 7), (1, 7)):
        x = torch.randn(rows, columns)
        torch.testing.assert_close(f(x), ((x + 1) * 2).sin() + 1)
    assert len(fusion.report(f).kernels) % 2 == 0 and fusion.report(f).externs


def test_a_shape_that_was_not_said():
    f = fusion.fuse(lambda x: turned(x)[1].sum(0) * 2, options={"strict": True})
    torch.testing.assert_close(f(torch.eye(3) * torch.tensor([0.0, 1.0, 0.0])), torch.tensor([2, 2]))
    with pytest.raises(FusionError, match=r"turned.* shape \[3, 2\], where PyTorch had said \[1, 2\]"):
        f(torch.eye(3))


def test_what_lies_as_said_is_not_copied():
    x = torch.randn(3, 1, 4)
    assert as_said(x, "x", (3, 1, 4), (4, 4, 1)) is x
    assert as_said(x, "x", (3, None, 4), (4, 7, 1)) is x
    assert as_said(x, "x", (3, 1, 4), None) is x
    assert as_said(x[:0], "x", (0, 1, 4), (9, 9, 9)).numel() == 0
    got = as_said(x, "x", (3, 1, 4), (1, 1, 3))
    assert got.stride() == (1, 1, 3) and torch.equal(got, x)


def test_a_size_that_only_data_tells_is_not_taken_as_known():
    """The gradient of `index_fill` looks up what an index names, each once: traced as one element by PyTorch 2.11."""
    nothing = torch.empty(0, dtype=torch.long)
    graph = single_call(torch.ops.aten._unique.default, (torch.tensor([3, 1, 3]),), (torch.tensor([3]), nothing))
    with pytest.raises(Unsupported, match=r"_unique.* as if its size were known"):
        lower(graph)
    alone = single_call(torch.ops.aten._unique.default, (torch.tensor([3]),), (torch.tensor([3]), nothing))
    assert len(lower(alone).nodes) == 1
