"""Convolutions that are products of matrices: windows that do not overlap, have one pixel, or see few channels."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy

from fusion.joint import patches
from fusion.joint.recomputation import prefer_recomputed_products

aten = torch.ops.aten

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def _matrix_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patches, "on_matrix_units", lambda image: True)


def drawn(*shape: int, last: bool = False, dtype: torch.dtype = BF16) -> Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)
    return values.contiguous(memory_format=torch.channels_last) if last else values


def replaced(function: object, *given: Tensor, symbolic: bool = False) -> fx.GraphModule:
    graph = make_fx(function, tracing_mode="symbolic" if symbolic else "fake")(*given)
    patches.multiply_patches(graph)
    patches.multiply_windows(graph)
    patches.multiply_pixels(graph)
    return graph


def convolutions(graph: fx.GraphModule) -> int:
    return sum("convolution" in str(node.target) for node in graph.graph.nodes)


def compare(result: Tensor, eager: Tensor, exact: Tensor) -> None:
    assert (result.shape, result.stride()) == (eager.shape, eager.stride())
    assert (result - exact).norm() <= 2 * (eager - exact).norm()


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(
    ("image", "window"), [((16, 24), (4, 4)), ((18, 27), (4, 4)), ((9, 8), (3, 2)), ((4, 4), (4, 4)), ((5, 7), (1, 7))]
)
def test_windows_that_do_not_overlap(image: tuple[int, int], window: tuple[int, int], last: bool) -> None:
    def patched(x: Tensor, weight: Tensor) -> Tensor:
        return F.conv2d(x, weight, stride=window)

    given = drawn(2, 6, *image, last=last), drawn(5, 6, *window)
    graph = replaced(patched, *given)
    assert convolutions(graph) == 0
    compare(graph(*given), patched(*given), patched(*(each.double() for each in given)))


SIGNALS: dict[str, tuple[tuple[int, ...], tuple[int, ...], torch.memory_format]] = {
    "signal": ((2, 6, 23), (5,), torch.contiguous_format),
    "video": ((2, 3, 4, 6, 9), (2, 3, 3), torch.contiguous_format),
    "one patch of a video": ((7, 3, 2, 4, 4), (2, 4, 4), torch.contiguous_format),
    "video with channels last": ((2, 3, 4, 6, 8), (2, 3, 4), torch.channels_last_3d),
}


@pytest.mark.parametrize("name", SIGNALS)
def test_signals_and_videos(name: str) -> None:
    shape, window, order = SIGNALS[name]
    weight = drawn(5, shape[1], *window)
    given = drawn(*shape).contiguous(memory_format=order), weight
    settings = None, window, [0] * len(window), [1] * len(window), False, [0] * len(window), 1

    def patched(x: Tensor, weight: Tensor) -> Tensor:
        return aten.convolution(x, weight, *settings)

    graph = replaced(patched, *given)
    assert convolutions(graph) == 0
    compare(graph(*given), patched(*given), patched(*(each.double() for each in given)))
    if any(side % size for side, size in zip(shape[2:], window, strict=True)):
        return

    def gradients(upstream: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        return aten.convolution_backward(upstream, x, weight, *settings, [True, True, False])[:2]

    given = patched(*given).cos(), *given
    graph = replaced(gradients, *given)
    assert convolutions(graph) == 0
    exact = gradients(*(each.double() for each in given))
    for each, eager, wide in zip(graph(*given), gradients(*given), exact, strict=True):
        compare(each, eager, wide)


OVERLAPPING: dict[str, tuple[tuple[int, ...], tuple[int, ...], list[int], list[int]]] = {
    "stem": ((2, 3, 15, 18), (7, 7), [2, 2], [3, 3]),
    "one channel": ((2, 1, 9, 8), (5, 5), [1, 1], [2, 2]),
    "uneven": ((2, 4, 11, 13), (3, 5), [2, 1], [0, 1]),
    "signal": ((2, 1, 61), (10,), [5], [0]),
    "padded signal": ((2, 4, 23), (3,), [1], [1]),
    "video": ((2, 3, 5, 9, 8), (3, 7, 7), [1, 2, 2], [1, 3, 3]),
}


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("name", OVERLAPPING)
def test_windows_of_few_channels(name: str, last: bool) -> None:
    shape, window, stride, padding = OVERLAPPING[name]
    settings = None, stride, padding, [1] * len(window), False, [0] * len(window), 1

    def convolved(x: Tensor, weight: Tensor) -> Tensor:
        return aten.convolution(x, weight, *settings)

    image = drawn(*shape)
    if last and image.ndim > 3:
        image = image.contiguous(memory_format=torch.channels_last if image.ndim == 4 else torch.channels_last_3d)
    given = image, drawn(5, shape[1], *window)
    graph = replaced(convolved, *given)
    assert convolutions(graph) == 0
    compare(graph(*given), convolved(*given), convolved(*(each.double() for each in given)))


@pytest.mark.parametrize("read_twice", [False, True])
@pytest.mark.parametrize(
    ("shape", "window", "stride"), [((2, 3, 15, 18), 7, 2), ((2, 6, 16, 24), 4, 4), ((2, 6, 5, 7), 1, 1)]
)
def test_a_bias_is_added_by_the_product(shape: tuple[int, ...], window: int, stride: int, read_twice: bool) -> None:
    """There is one result to be stored then, unless the program reads the sum and the convolution."""

    def convolved(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        image = F.conv2d(x, weight, stride=stride)
        biased = image + bias.view(-1, 1, 1)
        return biased * image.sigmoid() if read_twice else biased.sigmoid()

    given = drawn(*shape, last=window == 1), drawn(5, shape[1], window, window), drawn(5)
    graph = replaced(convolved, *given)
    assert convolutions(graph) == 0
    targets = [node.target for node in graph.graph.nodes]
    assert (aten.addmm.default in targets) != read_twice and (aten.mm.default in targets) == read_twice
    compare(graph(*given), convolved(*given), convolved(*(each.double() for each in given)))


@pytest.mark.parametrize("bias", [torch.randn(1, 1, 9).bfloat16(), torch.randn(5, 1, 1)], ids=["row", "float32"])
def test_other_terms_are_added_after_the_product(bias: Tensor) -> None:
    def convolved(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.conv2d(x, weight, stride=2) + bias

    given = drawn(2, 3, 15, 21), drawn(5, 3, 5, 5), bias
    graph = replaced(convolved, *given)
    assert aten.mm.default in [node.target for node in graph.graph.nodes]
    compare(graph(*given), convolved(*given), convolved(*(each.double() for each in given)))


def test_backward_does_not_gather_windows_again() -> None:
    """The product is larger than its rows, but these are not stored: to save it is cheaper than to compute it again."""

    def convolved(x: Tensor, weight: Tensor) -> Tensor:
        return F.conv2d(x, weight, stride=2).relu()

    graph = replaced(convolved, drawn(2, 3, 15, 21), drawn(90, 3, 5, 5))
    prefer_recomputed_products(graph)
    marks = {node.target: node.meta.get("recompute") for node in graph.graph.nodes}
    assert marks[aten.mm.default] is CheckpointPolicy.PREFER_SAVE and marks[aten.relu.default] is None


@pytest.mark.parametrize(
    ("channels", "window", "settings"),
    [(5, 3, {}), (3, 9, {}), (3, 3, {"dilation": 2}), (4, 3, {"groups": 2})],
)
def test_windows_of_many_channels_and_long_ones_are_the_librarys(
    channels: int, window: int, settings: dict[str, int]
) -> None:
    weight = drawn(4, channels // settings.get("groups", 1), window, window)
    assert convolutions(replaced(lambda x, w: F.conv2d(x, w, **settings), drawn(2, channels, 20, 20), weight)) == 1


@pytest.mark.parametrize("shape", [(2, 6, 5, 7), (3, 6, 1, 1)])
def test_pixels_of_images_with_channels_last(shape: tuple[int, ...]) -> None:
    given = drawn(*shape, last=True), drawn(5, 6, 1, 1)
    graph = replaced(F.conv2d, *given)
    assert convolutions(graph) == 0
    compare(graph(*given), F.conv2d(*given), F.conv2d(*(each.double() for each in given)))


@pytest.mark.parametrize("wanted", [(True, True), (False, True), (True, False)])
@pytest.mark.parametrize("last", [False, True])
def test_gradients(last: bool, wanted: tuple[bool, bool]) -> None:
    def gradients(upstream: Tensor, x: Tensor, weight: Tensor) -> list[Tensor]:
        settings = [3, 2], [0, 0], [1, 1], False, [0, 0], 1
        every = aten.convolution_backward(upstream, x, weight, None, *settings, [*wanted, False])
        return [each for each in every if each is not None]

    given = drawn(2, 5, 3, 4), drawn(2, 6, 9, 8, last=last), drawn(5, 6, 3, 2)
    graph = replaced(gradients, *given)
    assert convolutions(graph) == 0
    exact = gradients(*(each.double() for each in given))
    for each, eager, wide in zip(graph(*given), gradients(*given), exact, strict=True):
        compare(each, eager, wide)


@pytest.mark.parametrize(
    "settings",
    [
        {"stride": 3},  # windows of 4 overlap
        {"stride": 4, "padding": 2},
        {"stride": 4, "dilation": 2},
        {"stride": 4, "groups": 2},
        {"stride": 1},
    ],
    ids=str,
)
def test_other_convolutions_are_the_librarys(settings: dict[str, int]) -> None:
    weight = drawn(4, 6 // settings.get("groups", 1), 4, 4)
    assert convolutions(replaced(lambda x, w: F.conv2d(x, w, **settings), drawn(2, 6, 16, 16), weight)) == 1


def test_images_that_are_not_known_are_left() -> None:
    """Those of symbolic sizes, of float32, whose precision two settings decide, and pixels with channels first."""
    given = drawn(2, 6, 16, 16), drawn(5, 6, 4, 4)
    assert convolutions(replaced(lambda x, w: F.conv2d(x, w, stride=4), *given, symbolic=True)) == 1
    wide = [each.float() for each in given]
    assert convolutions(replaced(lambda x, w: F.conv2d(x, w, stride=4), *wide)) == 1
    assert convolutions(replaced(F.conv2d, given[0], drawn(5, 6, 1, 1))) == 1
