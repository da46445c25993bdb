"""Pooling and its gradients, windows and theirs, against eager: no call remains, ends and gaps agree with eager."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from tests.lowering.lowered import check

DTYPES = (torch.float32, torch.float64, torch.bfloat16)


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Numbers of which no two are equal, in no order, some negative."""
    count = torch.Size(shape).numel()
    return ((torch.arange(count) * 7919 % 1009 - 504) / 64).view(shape).to(dtype)


def with_gradient(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], object]:
    """The function and the gradient of its result under fixed weights."""

    def both(x: torch.Tensor) -> object:
        x = x.detach().requires_grad_()
        out = function(x)
        weights = torch.arange(out.numel(), dtype=out.dtype, device=out.device).view(out.shape) / 16 + 1
        return out.detach(), torch.autograd.grad(out, x, weights)[0]

    return both


IMAGES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "avg": lambda x: F.avg_pool2d(x, 2),
    "avg_gaps": lambda x: F.avg_pool2d(x, 2, 3),
    "avg_padded": lambda x: F.avg_pool2d(x, 3, 2, padding=1),
    "avg_without_padding": lambda x: F.avg_pool2d(x, 3, 2, padding=1, count_include_pad=False),
    "avg_ceil": lambda x: F.avg_pool2d(x, (3, 2), (2, 3), padding=(1, 0), ceil_mode=True),
    "avg_ceil_without_padding": lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True, count_include_pad=False),
    "avg_divisor": lambda x: F.avg_pool2d(x, 3, 2, divisor_override=5),
    "adaptive_avg": lambda x: F.adaptive_avg_pool2d(x, (3, 2)),
    "adaptive_avg_more": lambda x: F.adaptive_avg_pool2d(x, (11, 12)),
    "adaptive_avg_even": lambda x: F.adaptive_avg_pool2d(x, (7, 3)),
    "adaptive_avg_one": lambda x: F.adaptive_avg_pool2d(x, 1),
    "max": lambda x: F.max_pool2d(x, 2),
    "max_gaps": lambda x: F.max_pool2d(x, 2, 3),
    "max_padded": lambda x: F.max_pool2d(x, 3, 2, padding=1),
    "max_dilated": lambda x: F.max_pool2d(x, 3, 1, padding=1, dilation=2),
    "max_ceil": lambda x: F.max_pool2d(x, (3, 2), (2, 3), padding=(1, 0), ceil_mode=True),
    "adaptive_max": lambda x: F.adaptive_max_pool2d(x, (3, 2)),
    "fold_of_unfold": lambda x: F.fold(F.unfold(x[None], (3, 2), 2, 1, (2, 1))[0], (7, 9), (3, 2), 2, 1, (2, 1)),
    "unfold": lambda x: x.unfold(1, 3, 2).unfold(2, 2, 3),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", IMAGES)
def test_images(name, dtype):
    check(with_gradient(IMAGES[name]), numbers(2, 7, 9, dtype=dtype))


@pytest.mark.parametrize("channels_last", [True, False])
@pytest.mark.parametrize(("size", "left"), [(5, True), (4, False), (19, False)])
def test_gradients_of_large_unequal_windows_are_left_where_lanes_run_along_the_image(size, left, channels_last):
    x = numbers(2, 3, 20, 20).to(memory_format=torch.channels_last if channels_last else torch.contiguous_format)
    grad = numbers(2, 3, size, size + left)
    leaves = ["_adaptive_avg_pool2d_backward.default"] if left and not channels_last else []
    check(torch.ops.aten._adaptive_avg_pool2d_backward, grad, x, leaves=leaves, tolerance=1e-5)


VOLUMES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "avg": lambda x: F.avg_pool3d(x, 2, 2, 1),
    "adaptive_avg": lambda x: F.adaptive_avg_pool3d(x, (2, 3, 1)),
    "max": lambda x: F.max_pool3d(x, 3, 2, 1),
    "adaptive_max": lambda x: F.adaptive_max_pool3d(x, (2, 3, 1)),
}


@pytest.mark.parametrize("name", VOLUMES)
def test_volumes(name):
    check(with_gradient(VOLUMES[name]), numbers(1, 2, 4, 5, 3))


def test_lines():
    for function in (lambda x: F.avg_pool1d(x, 3, 2), lambda x: F.max_pool1d(x, 3, 2, 1)):
        check(with_gradient(function), numbers(2, 3, 11))


def test_positions_of_maxima():
    x = numbers(2, 6, 5)
    check(lambda x: F.max_pool2d(x, 3, 2, 1, return_indices=True), x)
    check(lambda x: F.adaptive_max_pool2d(x, (4, 2), return_indices=True), x)


def test_a_nan_is_the_largest_and_an_edge_is_not():
    x = numbers(1, 6, 6)
    x[0, 2, 3] = torch.nan
    x[0, 4:, 4:] = -torch.inf
    check(lambda x: F.max_pool2d(x, 2, 2, return_indices=True), x)
    check(lambda x: F.max_pool2d(x, 3, 3, 1, return_indices=True), x)


def test_layouts_stay():
    x = numbers(2, 3, 6, 8).to(memory_format=torch.channels_last)
    check(lambda x: F.max_pool2d(x, 2), x)
    check(lambda x: F.avg_pool2d(x, 2), x)
    check(lambda x: F.adaptive_avg_pool2d(x, 3), x[:, :, ::2])


def test_integers():
    check(lambda x: F.max_pool2d(x, 3, 2, 1), numbers(1, 6, 6).long())


def test_a_window_of_a_number():
    check(with_gradient(lambda x: x.unfold(0, 1, 1)), torch.tensor(2.5))
