"""A product stored into a tensor of the caller, under Triton's interpreter: a library chooses its own layout."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import fusion

READERS: list[Callable[[torch.Tensor], torch.Tensor]] = [lambda t: t.softmax(-1), lambda t: t.relu() + 1]


@pytest.mark.parametrize("layout", ["rows with gaps", "transposed"])
@pytest.mark.parametrize("read", READERS)
def test_a_library_product_is_read_in_its_own_layout(read: Callable[[torch.Tensor], torch.Tensor], layout: str) -> None:
    def update(target: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        target.addmm_(x, y, beta=0)
        return read(target)

    def target() -> torch.Tensor:
        return torch.zeros(64, 128)[:, :64] if layout == "rows with gaps" else torch.zeros(64, 64).t()

    x, y = torch.randn(64, 8192), torch.randn(8192, 64) / 90
    fused, (ours, theirs) = fusion.fuse(update, options={"target": "triton", "strict": True}), (target(), target())
    torch.testing.assert_close(fused(ours, x, y), update(theirs, x, y), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    assert "aten.mm.default" in [call.name for graph in fusion.report(fused).graphs for call in graph.externs]
