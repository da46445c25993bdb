"""Operands of products that are contiguous along no axis of a tile are copied first, where that is faster."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fusion.aot import Export, export_kernels

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


def normed_patches(x: Tensor, gain: Tensor, shift: Tensor, weight: Tensor) -> Tensor:
    """Multiply patches of 2 × 2 normed pixels by a weight in the order of PyTorch's convolutions."""
    n, height, width, channels = x.shape
    normed = torch.nn.functional.layer_norm(x, (channels,), gain, shift)
    patches = normed.view(n, height // 2, 2, width // 2, 2, channels).permute(0, 1, 3, 2, 4, 5)
    columns = weight.permute(2, 3, 1, 0).reshape(4 * channels, -1)
    return patches.reshape(-1, 4 * channels) @ columns


def exported(channels: int, side: int, images: int = 32) -> Export:
    shapes = (images, side, side, channels), (channels,), (channels,), (2 * channels, channels, 2, 2)
    inputs = [torch.empty(shape, dtype=torch.bfloat16) for shape in shapes]
    return export_kernels(normed_patches, *inputs, target="triton", arch="sm_90")


@pytest.mark.parametrize(("channels", "side"), [(96, 56), (64, 56)])
def test_a_small_scattered_weight_is_copied_where_many_tiles_read_it(channels: int, side: int) -> None:
    """In one launch its elements are as many requests for each block of 128 rows: 62 µs on an H200."""
    export = exported(channels, side)
    assert any("mm_operand" in step for step in export.steps)
    assert not any("mm_operand" in step for step in exported(channels, 8, images=1).steps)


@pytest.mark.parametrize(("channels", "side", "step"), [(96, 56, 32), (64, 56, 64)])
def test_a_step_divides_the_channels_of_normed_patches(channels: int, side: int, step: int) -> None:
    """Their statistics are then one number for each row in a step, rather than one for each element."""
    (product,) = [kernel for kernel in exported(channels, side).kernels if "matmul" in kernel.name]
    assert f'"KBLOCK": {step},' in product.source
    assert f"k0 // {channels} % 2" in product.source and f"ki // {channels} % 2" not in product.source


def test_normed_patches_are_stored_where_no_step_divides_their_channels() -> None:
    """Each of their elements would load two statistics."""
    export = exported(80, 56)
    assert "aten.mm.default" in export.steps and not any("matmul" in step for step in export.steps)


@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last], ids=str)
def test_windows_share_the_sectors_of_their_neighbours(order: torch.memory_format) -> None:
    """Nine elements of a window of few channels, which are last, are neighbours in memory: it is read, not copied."""

    def windows(x: Tensor, weight: Tensor) -> Tensor:
        rows = x.unfold(2, 3, 1).unfold(3, 3, 1).permute(0, 2, 3, 1, 4, 5)
        return (rows.reshape(-1, 27) @ weight.reshape(33, 27).t()).relu()

    shapes = (5, 3, 63, 58), (33, 3, 3, 3)
    inputs = [torch.empty(shape, dtype=torch.bfloat16).contiguous(memory_format=order) for shape in shapes]
    (product,) = export_kernels(windows, *inputs, target="triton", arch="sm_90").steps
    assert "matmul" in product


def test_turned_positions_of_rows_are_compiled() -> None:
    """Positions have one number for each row of a tile: no lanes follow each other along its columns."""

    def looked_up(positions: Tensor, table: Tensor, weight: Tensor) -> Tensor:
        return table[positions.t().flatten()] @ weight

    inputs = torch.empty(32, 128, dtype=torch.int64), torch.empty(1024, 64), torch.empty(64, 256)
    assert export_kernels(looked_up, *inputs, target="triton", arch="sm_90").kernels
