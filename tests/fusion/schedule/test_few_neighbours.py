"""Reductions of few neighbours in memory read whole rows: each neighbour is a part, beside those of the next group."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusion.aot import export_kernels

pytestmark = pytest.mark.usefixtures("without_disassembly")


def parts(channels: int, order: torch.memory_format, groups: int = 32) -> str:
    """The text of the first stage of a group norm."""

    def normed(x: Tensor) -> Tensor:
        return F.group_norm(x, groups)

    x = torch.empty(8, channels, 64, 64, dtype=torch.bfloat16).contiguous(memory_format=order)
    first, *_ = export_kernels(normed, x, target="triton", arch="sm_90").kernels
    assert first.name == "native_group_norm_part"
    return first.source


@pytest.mark.parametrize(("channels", "few"), [(128, 4), (320, 10), (640, 20)])
def test_channels_of_a_group_are_parts_of_their_own(channels: int, few: int) -> None:
    text = parts(channels, torch.channels_last)
    assert f", {few}] strides [{channels}, {few}, {8 * channels}, 1], written" in text
    assert '"XBLOCK": 64' in text


def test_channels_that_fill_memory_requests_are_folded_together() -> None:
    text = parts(2048, torch.channels_last)
    assert "strides [32, 1, 256], written" in text


def test_channels_first_are_read_in_rows() -> None:
    text = parts(128, torch.contiguous_format)
    assert "XBLOCK" not in text and ", 4] strides" not in text
