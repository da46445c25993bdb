"""Convolutions of few channels as products whose rows are padded windows, against float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fusion.joint import patches
from tests.codegen.triton.test_default_blocks import TARGET, first, padded_windows


@pytest.mark.parametrize(("image", "outputs"), [((2, 3, 37, 41), 24), ((1, 4, 20, 23), 80)])
def test_windows_are_those_of_float64(image: tuple[int, ...], outputs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patches, "on_matrix_units", lambda image: True)
    shapes = image, (outputs, image[1], 7, 7)
    kernel = first(padded_windows, *shapes)
    source = TARGET.emit(kernel)
    assert source.count("tl.dot(") == 1
    x, weight = (torch.randn(shape, generator=torch.Generator().manual_seed(7)).bfloat16() for shape in shapes)
    exact = F.conv2d(x.double(), weight.double(), stride=2, padding=3)
    out = torch.full_like(exact, 7.0, dtype=torch.bfloat16)
    TARGET.build(kernel, source)(x, weight, out)
    assert (out - exact).norm() <= 3e-3 * exact.norm()
