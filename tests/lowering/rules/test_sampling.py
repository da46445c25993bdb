"""Samples of images and volumes at the positions of a grid, and their gradients, against eager: no call remains."""

from __future__ import annotations

import math

import pytest
import torch

from fusion.lowering.interpret import run_program
from tests.lowering.lowered import calls, check, lowered

aten = torch.ops.aten

LINEAR, NEAREST, CUBIC = range(3)


def operands(*sizes: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(an image or volume, a grid that also names places outside, a gradient); none of them is contiguous."""
    generator = torch.Generator().manual_seed(3)
    points = [size + 2 for size in sizes]
    x = torch.randn(2, *sizes, 3, generator=generator, dtype=torch.float64).movedim(-1, 1)
    grid = torch.rand(len(sizes), 2, *points, generator=generator, dtype=torch.float64).movedim(0, -1) * 4 - 2
    grad = torch.randn(3, 2, *points, generator=generator, dtype=torch.float64).transpose(0, 1)
    return x.to(dtype), grid.to(dtype), grad.to(dtype)


KINDS = [(LINEAR, (4, 5)), (NEAREST, (4, 5)), (CUBIC, (4, 5)), (LINEAR, (3, 4, 1)), (NEAREST, (3, 4, 2))]
CASES = [
    *((*KINDS[0], padding, corners) for padding in range(3) for corners in (False, True)),
    *((*kind, padding, (padding + k) % 2 == 0) for k, kind in enumerate(KINDS[1:]) for padding in range(3)),
]


@pytest.mark.parametrize(("mode", "sizes", "padding", "corners"), CASES)
def test_samples_and_their_gradients(mode, sizes, padding, corners):
    x, grid, grad = operands(*sizes, dtype=torch.float64)
    forward = aten.grid_sampler_2d if len(sizes) == 2 else aten.grid_sampler_3d
    backward = aten.grid_sampler_2d_backward if len(sizes) == 2 else aten.grid_sampler_3d_backward
    check(lambda x, g: forward(x, g, mode, padding, corners), x, grid, tolerance=1e-10)
    for wanted in ([True, True], [False, True]):
        check(
            lambda d, x, g: backward(d, x, g, mode, padding, corners, wanted)[0 if wanted[0] else 1 :],  # noqa: B023
            grad,
            x,
            grid,
            tolerance=1e-10,
        )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_floats_are_sampled_in_float32(dtype):
    """Eager samples them in 16 bits."""
    x, grid, grad = operands(4, 5, dtype=dtype)

    def both(grad: torch.Tensor, x: torch.Tensor, grid: torch.Tensor) -> tuple[torch.Tensor, ...]:
        sample = aten.grid_sampler_2d(x, grid, LINEAR, 0, False)
        return sample, *aten.grid_sampler_2d_backward(grad, x, grid, LINEAR, 0, False, [True, True])

    program = lowered(both, grad, x, grid)
    assert not calls(program)
    exact = both(grad.double(), x.double(), grid.double())
    for result, want in zip(run_program(program, [grad, x, grid]), exact, strict=True):
        torch.testing.assert_close(result, want.to(dtype))


def test_positions_that_are_nan_or_infinite_sample_zero():
    x, grid, _ = operands(4, 5, dtype=torch.float32)
    grid[0, 0, 0, 1] = math.nan
    grid[0, 0, 1, 0] = math.inf
    check(lambda x, g: aten.grid_sampler_2d(x, g, LINEAR, 0, False), x, grid)
