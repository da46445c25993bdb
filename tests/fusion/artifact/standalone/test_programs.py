"""Programs as libraries compute what eager computes: results, layouts, and what becomes of the arguments."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim

from tests.fusion.artifact.standalone.calling import exported

ROWS = ({0: Dim("rows", max=1024)},)


def assert_exported(
    program: Callable[..., object], folder: Path, *calls: Sequence[Any], tolerance: float = 2e-4, shapes: Any = None
) -> None:
    """Export a program for the first call, and compare all calls with eager."""
    library = exported(program, folder, *copy.deepcopy(calls[0]), dynamic_shapes=shapes)
    for call in calls:
        eager_args, given = copy.deepcopy((tuple(call), tuple(call)))
        with torch.no_grad():
            expected: Any = program(*eager_args)
        found = library(*(each if isinstance(each, torch.Tensor) else torch.tensor(each) for each in given))
        expected = expected if isinstance(expected, torch.Tensor) else tuple(expected)
        options: dict[str, Any] = {"rtol": tolerance, "atol": tolerance, "equal_nan": True, "check_stride": True}
        torch.testing.assert_close(found, expected, **options)
        for one, other in zip(eager_args, given, strict=True):
            if isinstance(one, torch.Tensor):
                torch.testing.assert_close(other, one, **options)
    library.close()


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 40), nn.GELU(), nn.LayerNorm(40), nn.Linear(40, 5)).eval()


def test_an_mlp_with_rows_that_vary(tmp_path: Path) -> None:
    x = torch.randn(37, 24)
    assert_exported(mlp(), tmp_path, [torch.randn(4, 24)], [x], [torch.randn(24, 9).t()], shapes=ROWS)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_dtypes(dtype: torch.dtype, tmp_path: Path) -> None:
    tolerance = 2e-2 if dtype.itemsize == 2 else 1e-10
    assert_exported(mlp().to(dtype), tmp_path, [torch.randn(3, 24, dtype=dtype)], tolerance=tolerance)


def test_reductions_with_rows_that_vary(tmp_path: Path) -> None:
    def program(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.sum(), x.mean(0), x.argmax(1), x.var(1), x.softmax(0)

    assert_exported(program, tmp_path, [torch.randn(5, 91)], [torch.randn(333, 91)], shapes=ROWS)


def convolutional() -> nn.Module:
    torch.manual_seed(0)
    first = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)
    second = nn.Conv2d(8, 12, 3, stride=2, groups=4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    return nn.Sequential(*first, *second, nn.Linear(12, 10)).eval()


def test_convolutions_with_images_that_vary(tmp_path: Path) -> None:
    calls = [torch.randn(4, 3, 17, 18)], [torch.randn(7, 3, 17, 18)]
    assert_exported(convolutional(), tmp_path, *calls, shapes=ROWS)


def test_convolutions_with_channels_last(tmp_path: Path) -> None:
    image = torch.randn(2, 3, 9, 11).contiguous(memory_format=torch.channels_last)
    assert_exported(nn.Conv2d(3, 5, 3).eval(), tmp_path, [image])


def test_transposed_and_dilated_convolutions(tmp_path: Path) -> None:
    def program(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        larger = F.conv_transpose1d(x, up, stride=2, padding=1, output_padding=1, groups=2)
        return F.conv1d(larger, down, dilation=3, padding=2)

    assert_exported(program, tmp_path, [torch.randn(2, 4, 9), torch.randn(4, 3, 3), torch.randn(5, 6, 2)])


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.inner(x).view(batch, length, 3, 4, 8).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.outer(mixed.transpose(1, 2).reshape(batch, length, width))


def test_attention_of_few_and_of_many_positions(tmp_path: Path) -> None:
    torch.manual_seed(0)
    lengths = ({1: Dim("length", max=500)},)
    assert_exported(Attention().eval(), tmp_path, [torch.randn(2, 9, 32)], [torch.randn(2, 77, 32)], shapes=lengths)
    assert_exported(Attention().eval(), tmp_path, [torch.randn(1, 300, 32)])


def test_results_that_are_arguments_and_views(tmp_path: Path) -> None:
    def program(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        z = x + y
        return x, z, z.flatten(), z[1:3]

    assert_exported(program, tmp_path, [torch.randn(5, 6), torch.randn(5, 6)])


def test_arguments_that_are_changed(tmp_path: Path) -> None:
    def program(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        z = y.t() @ y
        return x.add_(z), x.copy_(z * 2).sum()

    assert_exported(program, tmp_path, [torch.randn(6, 6), torch.randn(7, 6)])


def test_sizes_that_are_computed(tmp_path: Path) -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        rows = x.shape[0]
        return torch.cat([x, x.new_ones(rows % 7 + 2, 5), x.new_zeros(rows // 3 + 1, 5)]) * (rows * rows)

    calls = [torch.randn(9, 5)], [torch.randn(22, 5)]
    assert_exported(program, tmp_path, *calls, shapes=({0: Dim("rows", min=4, max=64)},))


@pytest.mark.parametrize(
    ("program", "args"),
    [
        (lambda x: x * 2, (torch.ones(0, 3),)),
        (lambda x, n: x * n, (torch.randn(4, 3), 5)),
        (lambda x: (x > 0, x.isnan()), (torch.tensor([1.0, -1.0, float("nan")]),)),
        (lambda x: x + torch.tensor([1.0, 2.0, 3.0]), (torch.randn(4, 3),)),
        (lambda x, i: torch.zeros(5).index_add(0, i, x), (torch.randn(4), torch.tensor([0, 4, 0, 1]))),
        (lambda x: x.sort(-1)[0], (torch.randn(4, 30),)),
        (lambda x: x.unfold(0, 3, 2) * 2, (torch.randn(9),)),
    ],
    ids=["empty", "number", "bool", "constant", "scatter", "sort", "windows"],
)
def test_small_programs(program: Callable[..., object], args: Sequence[Any], tmp_path: Path) -> None:
    assert_exported(program, tmp_path, args)
