"""Reductions of tensors that are contiguous along different axes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from fusion.codegen.triton import TritonTarget
from tests.fusion.schedule.test_pack import kernel, launches

TARGET = TritonTarget("sm_90")


@pytest.mark.parametrize(
    "function",
    [
        lambda turned, straight: (turned.T * straight).sum(1),
        lambda turned, straight: torch.softmax(turned.T + straight, 1),
        lambda turned, straight: (turned.T * straight).sum(0),
        lambda turned, straight: torch.softmax(straight, 1).T.contiguous(),
    ],
    ids=["rows", "softmax", "columns", "stored"],
)
def test_neighbours_of_both_tensors_are_taken_together(function: Callable[..., torch.Tensor]) -> None:
    """One row at a time, each of its elements would be a sector of the tensor that is turned."""
    first = kernel(launches(function, (768, 12544), (12544, 768), target=TARGET)[0])
    config = TARGET.configs(first)[0]
    assert config.block("x") >= 16 and config.block("r") >= 16
