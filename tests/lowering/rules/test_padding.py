"""Resampling at given positions and the gradient of replicated edges, against eager, without remaining calls."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from tests.lowering.lowered import check
from tests.lowering.rules.test_pooling import numbers, with_gradient


@pytest.mark.parametrize("corners", [False, True])
def test_cubic_resizing(corners):
    check(
        lambda x: F.interpolate(x, size=(7, 3), mode="bicubic", align_corners=corners),
        numbers(1, 2, 4, 5),
        tolerance=1e-4,
    )


def test_a_grid():
    grid = torch.linspace(-1.1, 1.1, 2 * 3 * 4 * 2).view(2, 3, 4, 2)
    check(lambda x, g: F.grid_sample(x, g, align_corners=False), numbers(2, 3, 5, 6), grid, tolerance=1e-4)


PADDED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "line": lambda x: F.pad(x[0], (2, 1), mode="replicate"),
    "image": lambda x: F.pad(x, (2, 1, 0, 3), mode="replicate"),
    "volume": lambda x: F.pad(x[None], (1, 2, 3, 0, 1, 1), mode="replicate"),
    "cropped": lambda x: F.pad(x, (-1, 2, 1, -1), mode="replicate"),
    "of_one": lambda x: F.pad(x[:, :, :1], (0, 0, 2, 3), mode="replicate"),
}


@pytest.mark.parametrize("name", PADDED)
def test_replicated_edges(name):
    check(with_gradient(PADDED[name]), numbers(2, 3, 4, 5))
