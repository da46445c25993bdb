"""Reductions of tensors that are contiguous along different axes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn.functional import layer_norm

from fusion.codegen.c.target import CTarget
from fusion.codegen.triton import TritonTarget
from fusion.lowering.ir.kernel import Role
from tests.codegen.triton.blocking import block
from tests.fusion.schedule.test_pack import kernel, launches
from tests.fusion.schedule.test_quantised import calls

TARGET = TritonTarget("sm_90")


def test_gathered_rows_are_read_along_their_columns() -> None:
    """The indices of a bag are contiguous along it, but the rows that they choose have most of the bytes."""
    ids, table = torch.zeros(8192, 8, dtype=torch.int64), torch.empty(100_000, 512)
    (call,) = calls(lambda ids, table: table[ids].sum(1), ids, table)
    assert block(kernel(call)).dims[-1].axes[-1].size == 512


def test_gathered_rows_are_folded_whole() -> None:
    """Programs fill the device, one for each word: its row is neither split nor folded for several words at once."""
    ids, table = torch.zeros(16, 512, dtype=torch.int64), torch.empty(30_000, 768)
    (call,) = calls(lambda ids, table: layer_norm(table[ids], (768,)), ids, table)
    assert block(kernel(call)).dims[-1].axes[-1].size == 768


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


def normalised(image: torch.Tensor) -> torch.Tensor:
    """Groups of 8 channels over all pixels, with the channels of a pixel next to each other in the result."""
    return torch.nn.functional.group_norm(image, 16).permute(0, 2, 3, 1).contiguous()


def test_a_norm_leaves_a_result_in_another_layout_to_a_map() -> None:
    """Stored by the kernel that folds along pixels, each element would be a memory request."""
    folding, storing = (kernel(step) for step in launches(normalised, (32, 128, 56, 56), target=TARGET))
    assert folding.with_role(Role.WHOLE) and not storing.with_role(Role.WHOLE)
    assert min(TARGET.configs(storing)[0].block(side) for side in "yx") >= 16


def stored_across(rows: int, columns: int) -> int:
    """The kernels that normalise rows on a CPU, and store them with their columns next to each other."""

    def turned(x: torch.Tensor) -> torch.Tensor:
        return layer_norm(x, (columns,)).transpose(1, 2).contiguous()

    return len(launches(turned, (8, rows, columns), target=CTarget()))


def test_a_cpu_leaves_rows_whose_lines_are_evicted_to_a_map() -> None:
    """Lanes run along a row, whose elements are in lines of their own: 2 KiB apart, in two sets of the cache."""
    assert stored_across(512, 256) == 2
    assert stored_across(49, 384) == 1
    assert stored_across(49, 4096) == 2


def test_a_norm_stores_its_result_in_the_layout_of_its_operand() -> None:
    step, *others = launches(lambda x: torch.nn.functional.group_norm(x, 16), (32, 128, 56, 56), target=TARGET)
    assert not others and kernel(step).with_role(Role.WHOLE)


def test_rows_of_small_images_are_one_side_of_a_tile() -> None:
    """A row of 6 pixels is no side of a tile; the 36 pixels of an image are."""

    def pooled(image: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.max_pool2d(image.permute(0, 3, 1, 2), 3, 2).flatten(1)

    (step,) = launches(pooled, (128, 13, 13, 256), target=TARGET)
    assert dict(TARGET.configs(kernel(step))[0].blocks) == {"y": 64, "x": 64}
