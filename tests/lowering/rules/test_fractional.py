"""Fractional max pooling and its gradient against eager, from the same random numbers: no call remains."""

from __future__ import annotations

import pytest
import torch

from tests.lowering.lowered import check

aten = torch.ops.aten


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("shape", "kernel", "windows"),
    [
        ((2, 3, 9, 11), (2, 3), (4, 5)),
        ((3, 17, 9), (4, 1), (1, 9)),
        ((2, 2, 7, 9, 8), (2, 3, 2), (3, 4, 6)),
        ((2, 5, 6, 7), (2, 2, 6), (2, 3, 1)),
    ],
)
def test_pooling_and_its_gradient(shape, kernel, windows, dtype):
    count, generator = len(kernel), torch.Generator().manual_seed(2)
    forward = aten.fractional_max_pool2d if count == 2 else aten.fractional_max_pool3d
    backward = aten.fractional_max_pool2d_backward if count == 2 else aten.fractional_max_pool3d_backward
    x = torch.randn(*shape[:-2], shape[-1], shape[-2], generator=generator).transpose(-1, -2).to(dtype)
    batch = shape[0] if len(shape) == count + 2 else 1
    drawn = torch.rand(batch, shape[-count - 1], count, generator=generator).to(dtype)
    check(lambda x, u: forward(x, kernel, windows, u), x, drawn)
    out, indices = forward(x, kernel, windows, drawn)
    grad = torch.randint(-4, 5, out.shape, generator=generator).to(dtype)
    check(lambda g, x, i: backward(g, x, kernel, windows, i), grad, x, indices)
