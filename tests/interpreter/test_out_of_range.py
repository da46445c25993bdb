"""Bounds checks in Triton: assertions of the device, which its interpreter raises, for the lanes inside."""

from __future__ import annotations

import pytest
import torch

import fusion
from tests.fusion.test_out_of_range import OPERATIONS, X, refused


@pytest.mark.parametrize("name", OPERATIONS)
def test_assertions_hold_where_eager_does_not_raise(name: str) -> None:
    function, dim, wraps = OPERATIONS[name]
    fused = fusion.fuse(function, options={"target": "triton"})
    first, last = -X.shape[dim] if wraps else 0, X.shape[dim] - 1
    for places in ([0, last, 1], [2, first, 1]):
        torch.testing.assert_close(fused(X, torch.tensor(places)), function(X, torch.tensor(places)))
    for beyond in (last + 1, first - 1):
        places = torch.tensor([1, beyond, 0])
        assert isinstance(refused(fused, X, places), type(refused(function, X, places)))


def test_lanes_behind_the_end_are_not_asked() -> None:
    """Their indices, computed from masked loads, are out of range; nothing is loaded there either."""

    def function(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        at = torch.arange(i.shape[0])
        return x[i + at] * x[at * 2 - i].relu()

    fused = fusion.fuse(function, options={"target": "triton", "strict": True})
    x, at = torch.randn(601), torch.arange(301)
    torch.testing.assert_close(fused(x, at * 0), function(x, at * 0))
    assert isinstance(refused(fused, x, at * 0 + 301), IndexError)
