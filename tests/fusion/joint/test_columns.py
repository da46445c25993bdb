"""Convolutions on CPUs that are products of the weight with the windows of the image, where these are faster."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

import fusion
from fusion.codegen.c.device import BLOCKED_US, EPYC
from fusion.codegen.c.target import CTarget
from fusion.codegen.target import Capabilities
from fusion.joint.columns import convolutions, multiply_columns
from fusion.schedule.overrides import ONE_KERNEL, Overrides

THREADS = 2


def capabilities(speed: float, blocked_us: float) -> Capabilities:
    """Return those of a CPU with generated products of float32 at a speed relative to the library's."""
    return replace(
        CTarget().capabilities,
        rates=replace(EPYC, threads=THREADS).rates,
        lone_products={4: speed},
        layouts=replace(EPYC.layouts, blocked_us=blocked_us),
    )


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def replaced(
    function: Callable[..., Tensor], *given: Tensor, speed: float = 1.0, blocked_us: float = BLOCKED_US
) -> fx.GraphModule:
    graph = make_fx(function, tracing_mode="fake")(*given)
    multiply_columns(graph, capabilities(speed, blocked_us))
    return graph


def convolved(x: Tensor, weight: Tensor) -> Tensor:
    return F.conv2d(x, weight, padding=weight.shape[-1] // 2)


@pytest.mark.parametrize(
    ("image", "weight", "padding"),
    [((1, 64, 8, 8), (128, 64, 3, 3), 1), ((2, 16, 9, 7), (64, 16, 1, 1), 0), ((1, 8, 6, 9), (24, 8, 2, 3), (1, 0))],
)
def test_convolutions_of_small_images_are_products(
    image: tuple[int, ...], weight: tuple[int, ...], padding: int | tuple[int, int]
) -> None:
    def biased(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.conv2d(x, weight, bias, padding=padding)

    given = drawn(*image), drawn(*weight), drawn(weight[0])
    graph = replaced(biased, *given)
    assert not convolutions(graph) and "bmm" in graph.code and ("pad" in graph.code) is bool(padding)
    result, eager, exact = graph(*given), biased(*given), biased(*(each.double() for each in given))
    assert (result.shape, result.stride()) == (eager.shape, eager.stride())
    assert (result - exact).norm() <= 2 * (eager - exact).norm()


def test_pixels_of_images_with_channels_last_are_rows() -> None:
    def biased(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.conv2d(x, weight, bias)

    given = drawn(2, 16, 9, 7).contiguous(memory_format=torch.channels_last), drawn(64, 16, 1, 1), drawn(64)
    graph = replaced(biased, *given)
    assert not convolutions(graph) and "mm.default" in graph.code and "bmm" not in graph.code
    result, eager, exact = graph(*given), biased(*given), biased(*(each.double() for each in given))
    assert (result.shape, result.stride()) == (eager.shape, eager.stride())
    assert (result - exact).norm() <= 2 * (eager - exact).norm()


def test_a_convolution_whose_arithmetic_outweighs_the_layouts_is_the_library_s() -> None:
    assert convolutions(replaced(convolved, drawn(8, 64, 56, 56), drawn(64, 64, 3, 3)))


def test_few_output_channels_do_not_share_the_windows() -> None:
    """A block of rows of the product has six of them."""
    assert convolutions(replaced(convolved, drawn(1, 128, 32, 32), drawn(1, 128, 3, 3)))


@pytest.mark.parametrize(
    "call",
    [
        lambda x, w: F.conv2d(x.contiguous(memory_format=torch.channels_last), w),
        lambda x, w: F.conv2d(x, w, stride=2),
        lambda x, w: F.conv2d(x, w, dilation=2),
        lambda x, w: F.conv2d(x, w[:, :4], groups=2),
        lambda x, w: F.conv_transpose2d(x, w.transpose(0, 1)),
    ],
    ids=["channels last", "stride", "dilation", "groups", "transposed"],
)
def test_other_convolutions_are_unchanged(call: Callable[..., Tensor]) -> None:
    assert len(convolutions(replaced(call, drawn(1, 8, 8, 8), drawn(32, 8, 3, 3)))) == 1


@pytest.mark.parametrize(("speed", "blocked_us"), [(0.0, BLOCKED_US), (0.9, BLOCKED_US), (1.0, 0.0)])
def test_nothing_is_changed_where_the_library_is_faster_or_was_not_measured(speed: float, blocked_us: float) -> None:
    given = drawn(1, 64, 8, 8), drawn(128, 64, 3, 3)
    assert convolutions(replaced(convolved, *given, speed=speed, blocked_us=blocked_us))


@pytest.mark.parametrize("side", [5, 8, 20, 40])
def test_windows_are_packed_by_their_positions(side: int) -> None:
    """Of 16 neighbours in a row, in two rows, in three and in more."""
    torch._dynamo.reset()
    backend = fusion.Backend(
        fusion.Options.read(options={"target": "c"}), overrides=Overrides(ONE_KERNEL, library=False)
    )
    given = drawn(2, 24, side + 2, side + 2), drawn(40, 24, 3, 3)
    result = torch.compile(F.conv2d, backend=backend, dynamic=False)(*given)
    (source,) = [kernel.source for kernel in backend.reports[0].kernels if "pack_apart_float(" in kernel.source]
    assert source.count("int64_t terms0[216];") == 1 and ", terms0 + r0_0, places0, " in source
    exact = F.conv2d(*(each.double() for each in given))
    assert (result - exact).norm() <= 2 * (F.conv2d(*given) - exact).norm()
