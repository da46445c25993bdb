"""Convolutions run in channels-last layout where that is faster, with unchanged results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

import fusion
from fusion.codegen.target import Layouts
from fusion.joint import channels_last as formats
from fusion.joint.channels_last import prefer_channels_last

aten = torch.ops.aten

LAYOUTS = Layouts(begins=8e6, multiplication=(1.5, 8.0))


class Residual(nn.Module):
    """A stem, a block with a residual, pooling, a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, stride=2, bias=False), nn.BatchNorm2d(8)
        self.first, self.second = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 1)
        self.classify = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(self.norm(self.stem(x)).relu(), 3, 2, 1)
        x = (x + self.second(self.first(x).relu())).relu()
        result: Tensor = self.classify(x.mean((2, 3)))
        return result


class Views(nn.Module):
    """Results that are images, views that need their strides, other operations on images."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.mix = nn.Conv2d(4, 6, 3, padding=1), nn.Linear(6, 6)
        self.grouped, self.norm = nn.Conv2d(6, 6, 3, padding=1, groups=3), nn.GroupNorm(2, 6)
        self.up = nn.ConvTranspose2d(6, 5, 2, stride=2)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        image = self.first(x)
        tokens = self.mix(image.flatten(2).transpose(1, 2)).transpose(1, 2)
        other = F.gelu(self.norm(self.grouped(image + tokens.reshape(image.shape))))
        up = self.up(torch.cat([other[:, :3], image[:, 3:]], 1))
        wide = F.interpolate(image, scale_factor=2, mode="bilinear")
        return up, wide[:, ::2], image.view(len(x), -1)


def outcome(run: Callable[..., object], module: nn.Module, x: Tensor) -> list[Tensor]:
    """Return the results, and the gradients of all inputs that have one."""
    results = run(x)
    kept = [results] if isinstance(results, Tensor) else list(results)  # type: ignore[call-overload]
    loss = torch.stack([result.square().sum() for result in kept]).sum()
    return [*kept, *torch.autograd.grad(loss, [x, *module.parameters()])]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("kind", "shape"), [(Residual, (3, 3, 17, 22)), (Views, (2, 4, 5, 7))])
def test_numbers_and_strides_agree_with_eager(
    kind: type[nn.Module], shape: tuple[int, ...], training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(formats, "saved_bytes", lambda call, layouts: 1e9)
    module = kind().double().train(training)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    fused = fusion.fuse(module, options={"strict": True})
    for ours, theirs in zip(outcome(fused, module, x), outcome(module, module, x), strict=True):
        torch.testing.assert_close(ours, theirs)
        assert ours.stride() == theirs.stride()
    with torch.no_grad():
        torch.testing.assert_close(fused(x), module(x))


def traced(function: Callable[..., object], *shapes: tuple[int, ...], device: str = "cpu") -> GraphModule:
    with FakeTensorMode():
        return make_fx(function)(*(torch.empty(shape, device=device) for shape in shapes))


def two(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
    return F.conv2d(F.conv2d(x, first).relu() * 2, second)


SHAPES = (2, 3, 8, 9), (4, 3, 3, 3), (5, 4, 3, 3)


def test_copies_are_only_at_the_edges() -> None:
    graph = traced(two, *SHAPES)
    assert prefer_channels_last(graph, LAYOUTS, lambda call: 1e9)
    copies = [node for node in graph.graph.nodes if node.target is aten.clone.default]
    assert len(copies) == 4  # the image, two weights, and the result, which is returned as before
    given = [torch.randn(shape) for shape in SHAPES]
    torch.testing.assert_close(graph(*given), two(*given))
    assert graph(*given).is_contiguous()


@pytest.mark.parametrize("worth", [-1.0, 0.0, 100.0])
def test_nothing_is_done_that_does_not_pay(worth: float) -> None:
    graph = traced(two, *SHAPES)
    code = graph.code
    assert not prefer_channels_last(graph, LAYOUTS, lambda call: worth) and graph.code == code


def test_a_convolution_that_loses_keeps_its_strides() -> None:
    graph = traced(two, *SHAPES)
    first = next(node for node in graph.graph.nodes if node.target in formats.CONVOLUTIONS)
    assert prefer_channels_last(graph, LAYOUTS, lambda call: -1.0 if call is first else 1e9)
    image = first.args[0]
    assert isinstance(image, torch.fx.Node) and image.op == "placeholder" and first.meta["val"].is_contiguous()
    given = [torch.randn(shape) for shape in SHAPES]
    torch.testing.assert_close(graph(*given), two(*given))


def copies_of(graph: GraphModule) -> list[tuple[int, ...]]:
    """The shapes of the copies in a graph."""
    clones = (node for node in graph.graph.nodes if node.target is aten.clone.default)
    return sorted(tuple(node.meta["val"].shape) for node in clones)


def with_windows(call: torch.fx.Node) -> float:
    """The gain of a convolution: none without a window."""
    weight = call.args[1]
    assert isinstance(weight, torch.fx.Node)
    return 1e9 if weight.meta["val"].shape[-1] > 1 else 0.0


def check(graph: GraphModule, function: Callable[..., Tensor], *shapes: tuple[int, ...]) -> None:
    given = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    result, wanted = graph(*given), function(*given)
    torch.testing.assert_close(result, wanted)
    assert result.stride() == wanted.stride()


@pytest.mark.parametrize("groups", [1, 4])
def test_a_convolution_follows_whose_operands_have_the_layout_already(groups: int) -> None:
    """Strides of weights with one pixel, or one channel, are those of either layout."""

    def chain(x: Tensor, first: Tensor, middle: Tensor, last: Tensor) -> Tensor:
        return F.conv2d(F.conv2d(F.conv2d(x, first).relu(), middle, groups=groups).relu(), last)

    size = 1 if groups == 1 else 3
    shapes = (2, 3, 9, 9), (4, 3, 3, 3), (4, 4 // groups, size, size), (5, 4, 3, 3)
    graph = traced(chain, *shapes)
    assert prefer_channels_last(graph, LAYOUTS, with_windows)
    assert len(copies_of(graph)) == 4  # the image, two weights, and the result
    check(graph, chain, *shapes)


def test_a_residual_of_convolutions_without_windows_is_copied_once() -> None:
    def block(x: Tensor, stem: Tensor, down: Tensor, middle: Tensor, up: Tensor) -> Tensor:
        x = F.conv2d(x, stem).relu()
        for _ in range(3):
            x = (x + F.conv2d(F.conv2d(F.conv2d(x, down).relu(), middle, padding=1).relu(), up)).relu()
        return x

    shapes = (2, 3, 9, 9), (8, 3, 3, 3), (4, 8, 1, 1), (4, 4, 3, 3), (8, 4, 1, 1)
    graph = traced(block, *shapes)
    assert prefer_channels_last(graph, LAYOUTS, with_windows)
    assert copies_of(graph) == sorted([(2, 9, 9, 3), (8, 3, 3, 3), (4, 3, 3, 4), (2, 8, 7, 7)])
    check(graph, block, *shapes)


def test_an_image_keeps_its_layout_through_operations_that_return_another() -> None:
    """Nearest neighbours are read by index, whose result is contiguous in eager."""

    def up(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        y = F.conv2d(x, first, padding=1)
        rows = torch.arange(2 * y.shape[2], device=x.device) // 2
        wide = aten._unsafe_index.Tensor(y, [None, None, rows[:, None], rows])
        return F.conv2d(torch.cat([wide, wide.relu()], 1), second)

    shapes = (2, 3, 8, 8), (4, 3, 3, 3), (5, 8, 3, 3)
    graph = traced(up, *shapes)
    assert prefer_channels_last(graph, LAYOUTS, lambda call: 1e9)
    cat = next(node for node in graph.graph.nodes if node.target is aten.cat.default)
    assert cat.meta["val"].is_contiguous(memory_format=torch.channels_last)
    check(graph, up, *shapes)


def test_a_convolution_that_gains_nothing_reads_an_input_as_it_is() -> None:
    def ends(x: Tensor, weight: Tensor, past: Tensor) -> Tensor:
        return F.conv2d(x, past) + F.conv2d(x.sin(), weight, padding=1)

    shapes = (2, 4, 8, 8), (4, 4, 3, 3), (4, 4, 1, 1)
    graph = traced(ends, *shapes)
    assert prefer_channels_last(graph, LAYOUTS, with_windows)
    assert copies_of(graph) == [(2, 8, 8, 4), (4, 3, 3, 4)]  # of the sine, and of the weight
    check(graph, ends, *shapes)


def test_a_chain_that_gains_less_than_its_copies_keeps_its_layout() -> None:
    def chains(x: Tensor, first: Tensor, y: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        return F.conv2d(x, first), F.conv2d(y, second)

    shapes = (2, 3, 8, 8), (4, 3, 3, 3), (2, 5, 8, 8), (4, 5, 3, 3)
    graph = traced(chains, *shapes)
    assert prefer_channels_last(graph, LAYOUTS, lambda call: 1e9 if call.args[0].meta["val"].shape[1] == 5 else 10.0)
    assert copies_of(graph) == [(2, 4, 6, 6), (2, 8, 8, 5), (4, 3, 3, 5)]


def test_a_gradient_in_the_same_memory_is_not_copied() -> None:
    """The gradient of a weight with one pixel has the strides of channels last, and is returned with others."""

    def backward(x: Tensor, first: Tensor, weight: Tensor) -> Tensor:
        y = F.conv2d(x, first)
        settings = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1, [False, True, False])
        gradient: Tensor = aten.convolution_backward(F.conv2d(y, weight).cos(), y, weight, None, *settings)[1]
        return gradient

    shapes = (2, 3, 8, 8), (4, 3, 3, 3), (5, 4, 1, 1)
    graph = traced(backward, *shapes)
    assert prefer_channels_last(graph, LAYOUTS, with_windows)
    assert copies_of(graph) == [(2, 8, 8, 3), (4, 3, 3, 3)]
    check(graph, backward, *shapes)


def gains(
    dtype: torch.dtype, channels: int, groups: int, window: int, device: str = "cpu", *, layouts: Layouts = LAYOUTS
) -> list[float]:
    """Of a convolution and its gradient."""

    def both(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        y = F.conv2d(x, weight, padding=window // 2, groups=groups)
        settings = ([1, 1], [window // 2] * 2, [1, 1], False, [0, 0], groups)
        result: tuple[Tensor, ...] = aten.convolution_backward(y, x, weight, None, *settings, [True, True, False])[:2]
        return result

    with FakeTensorMode():
        shapes = (8, channels, 14, 14), (channels, channels // groups, window, window)
        graph = make_fx(both)(*(torch.empty(shape, dtype=dtype, device=device) for shape in shapes))
    return [formats.saved_bytes(node, layouts) for node in graph.graph.nodes if node.target in formats.CONVOLUTIONS]


def test_on_cpus_convolutions_run_with_channels_last_but_group_norms_do_not() -> None:
    def chain(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        return F.conv2d(F.max_pool2d(F.conv2d(x, w).relu(), 2), v).mean((2, 3))

    def normed(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        return F.conv2d(F.group_norm(F.conv2d(x, w), 8), v).mean((2, 3))

    shapes = (8, 16, 32, 32), (64, 16, 3, 3), (64, 64, 3, 3)
    layouts = replace(LAYOUTS, begins=0.0, blocks=True)
    graph = traced(chain, *shapes)
    assert prefer_channels_last(graph, layouts)
    assert copies_of(graph) == [(8, 32, 32, 16), (64, 3, 3, 16), (64, 3, 3, 64)]
    check(graph, chain, *shapes)
    graph = traced(normed, *shapes)
    assert prefer_channels_last(graph, layouts)
    (norm,) = graph.graph.find_nodes(op="call_function", target=aten.native_group_norm.default)
    assert norm.args[0].meta["val"].is_contiguous()
    check(graph, normed, *shapes)


def test_the_gain_of_convolutions(monkeypatch: pytest.MonkeyPatch) -> None:
    image, blocks = 8 * 64 * 14 * 14 * 4, replace(LAYOUTS, blocks=True)
    for groups, window in ((1, 3), (1, 1), (64, 3)):
        moved = [2 * image + 2 * LAYOUTS.begins, 3 * image + 2 * LAYOUTS.begins]
        assert gains(torch.float32, 64, groups, window, layouts=blocks) == moved
    assert gains(torch.float32, 64, 4, 3, layouts=blocks) == gains(torch.float64, 64, 1, 3, layouts=blocks) == [0, 0]
    assert gains(torch.float32, 64, 1, 3) == [0, 0]
    monkeypatch.setattr(formats, "on_matrix_units", lambda image: True)
    image, weight = 8 * 64 * 14 * 14 * 2, 64 * 64 * 9 * 2
    assert gains(torch.bfloat16, 64, 1, 3) == [
        2 * (2 * image + weight) + 2 * LAYOUTS.begins,
        2 * (3 * image + weight) + 2 * LAYOUTS.begins,
    ]
    assert gains(torch.bfloat16, 64, 1, 1) == [0, 0]
    assert gains(torch.bfloat16, 64, 4, 3) == [-1, -1]
    assert gains(torch.bfloat16, 64, 64, 7) == [image / 2 * 49 * 1.5, image / 2 * 49 * 8]


@pytest.fixture
def matrix_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


@contextmanager
def convolutions_in(precision: str) -> Iterator[None]:
    """Set the precision of cuDNN's float32 convolutions, also where PyTorch's flags are frozen."""
    before = torch._C._get_fp32_precision_getter("cuda", "conv")
    torch._C._set_fp32_precision_setter("cuda", "conv", precision)
    try:
        yield
    finally:
        torch._C._set_fp32_precision_setter("cuda", "conv", before)


@pytest.mark.usefixtures("matrix_units")
def test_convolutions_of_float32_gain_where_tf32_is_permitted() -> None:
    assert min(gains(torch.bfloat16, 64, 1, 3, "cuda")) > 0
    with convolutions_in("tf32"):
        assert min(gains(torch.float32, 64, 1, 3, "cuda")) > 0
    with convolutions_in("ieee"):
        assert gains(torch.float32, 64, 1, 3, "cuda") == gains(torch.float32, 64, 64, 7, "cuda") == [0, 0]


@pytest.mark.usefixtures("matrix_units")
@pytest.mark.parametrize(("channels", "size", "changes"), [(64, 128, True), (64, 8, False), (8, 512, False)])
def test_only_graphs_whose_convolutions_are_rounded_anyway_change(channels: int, size: int, changes: bool) -> None:
    """cuDNN computes small convolutions of float32, and those of few channels, in float32 with channels first."""

    def twice(x: Tensor, weight: Tensor) -> Tensor:
        return F.conv2d(F.conv2d(x, weight), weight)

    graph = traced(twice, (4, channels, size, size), (channels, channels, 3, 3), device="cuda")
    with convolutions_in("tf32"):
        assert prefer_channels_last(graph, LAYOUTS) == changes


def test_images_with_channels_last_are_unchanged() -> None:
    def last(x: Tensor, weight: Tensor) -> Tensor:
        return F.conv2d(x.permute(0, 3, 1, 2), weight.permute(0, 3, 1, 2))

    graph = traced(last, (2, 8, 9, 3), (4, 3, 3, 3))
    code = graph.code
    assert not prefer_channels_last(graph, LAYOUTS, lambda call: 1e9) and graph.code == code


def test_other_convolutions_are_left() -> None:
    assert not prefer_channels_last(traced(F.conv1d, (2, 3, 8), (4, 3, 3)), LAYOUTS, lambda call: 1e9)
    assert not prefer_channels_last(traced(lambda x: x + 1, (2, 3, 8, 8)), LAYOUTS, lambda call: 1e9)
