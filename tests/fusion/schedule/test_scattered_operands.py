"""Operands of products that are contiguous along no axis of a tile are copied first, where that is faster."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fusion.aot import export_kernels

pytestmark = pytest.mark.usefixtures("without_disassembly")


def steps(x: Tensor, columns: int) -> tuple[str, ...]:
    def flattened(x: Tensor, weight: Tensor) -> Tensor:
        return x.flatten(1) @ weight

    return export_kernels(flattened, x, torch.empty(9216, columns), target="triton", arch="sm_90").steps


def test_flattened_images_with_channels_last_are_copied() -> None:
    images = torch.empty(1024, 256, 6, 6)
    assert "mm_operand" in steps(images.to(memory_format=torch.channels_last), 4096)
    assert "mm_operand" not in steps(images, 4096)


def test_a_neighbour_writes_the_rows_itself() -> None:
    def activated(x: Tensor, weight: Tensor) -> Tensor:
        return x.relu().flatten(1) @ weight

    images = torch.empty(1024, 256, 6, 6).to(memory_format=torch.channels_last)
    export = export_kernels(activated, images, torch.empty(9216, 4096), target="triton", arch="sm_90")
    assert export.steps[0] == "relu" and len(export.steps) == 2
    assert "float32[1024, 256, 6, 6] strides [9216, 36, 6, 1], written" in export.kernels[0].source


@pytest.mark.parametrize("shape", [(1024, 64, 128), (1024, 16, 144)])
def test_operands_that_are_contiguous_in_runs_are_read_as_they_are(shape: tuple[int, int, int]) -> None:
    """Heads of 16 neighbours or more fill memory requests."""
    heads = torch.empty(shape[1], shape[0], shape[2]).transpose(0, 1)

    def merged(x: Tensor, weight: Tensor) -> Tensor:
        return x.flatten(1) @ weight

    weight = torch.empty(shape[1] * shape[2], 4096)
    names = export_kernels(merged, heads, weight, target="triton", arch="sm_90").steps
    assert not any("operand" in name for name in names)
