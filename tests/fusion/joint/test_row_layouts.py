"""Tensors that are normalised by rows are laid out by rows where that is faster, with unchanged results."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

import fusion
from fusion.codegen.target import Layouts
from fusion.joint.row_layouts import prefer_rows

aten = torch.ops.aten

LAYOUTS = Layouts(begins=8e6, multiplication=(1.5, 8.0))


def layer_norm(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:])


def root_mean_square(x: Tensor) -> Tensor:
    wide = x.to(torch.float64)
    return x * (wide.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt().to(x.dtype)


class Heard(nn.Module):
    """Two blocks that normalize the channels of a convolution; a part is returned."""

    def __init__(self, norm: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.norm, self.hear, self.places = norm, nn.Conv1d(3, 6, 3, padding=1), nn.Parameter(torch.randn(7, 6))
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, sound: Tensor) -> tuple[Tensor, Tensor]:
        x = F.gelu(self.hear(sound)).transpose(1, 2) + self.places
        given = x + self.first(self.norm(x))
        x = given + self.second(self.norm(given))
        return given, self.norm(x)


def outcome(run: Callable[..., tuple[Tensor, ...]], module: nn.Module, x: Tensor) -> list[Tensor]:
    """Return the results, and the gradients of all inputs that have one."""
    results = run(x)
    loss = torch.stack([result.square().sum() for result in results]).sum()
    return [*results, *torch.autograd.grad(loss, [x, *module.parameters()])]


@pytest.mark.parametrize("norm", [layer_norm, root_mean_square])
def test_numbers_and_strides_agree_with_eager(norm: Callable[[Tensor], Tensor]) -> None:
    module = Heard(norm).double()
    x = torch.randn(2, 3, 7, dtype=torch.float64, requires_grad=True)
    fused = fusion.fuse(module, options={"strict": True})
    for ours, theirs in zip(outcome(fused, module, x), outcome(module, module, x), strict=True):
        torch.testing.assert_close(ours, theirs)
        assert ours.stride() == theirs.stride()
    with torch.no_grad():
        for ours, theirs in zip(fused(x), module(x), strict=True):
            torch.testing.assert_close(ours, theirs)
            assert ours.stride() == theirs.stride()


def traced(function: Callable[..., object], *given: Tensor, symbolic: bool = False) -> GraphModule:
    return make_fx(function, tracing_mode="symbolic" if symbolic else "fake")(*given)


def copies(graph: GraphModule) -> list[Tensor]:
    return [node.meta["val"] for node in graph.graph.nodes if node.target is aten.clone.default]


def stream(norm: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """Three additions to a tensor of transposed rows, and the norm of each."""

    def run(x: Tensor, weight: Tensor) -> Tensor:
        stream = x.transpose(1, 2).sin()
        for _ in range(3):
            stream = stream + norm(stream) @ weight
        return stream.sum()

    return run


@pytest.mark.parametrize("norm", [layer_norm, root_mean_square])
def test_one_copy_does_for_a_stream(norm: Callable[[Tensor], Tensor]) -> None:
    given = torch.randn(2, 16, 40), torch.randn(16, 16)
    graph = traced(stream(norm), *given)
    before = len(copies(graph))
    assert prefer_rows(graph, LAYOUTS)
    assert len(copies(graph)) == before + 1
    sums = [
        node for node in graph.graph.nodes if node.target is aten.add.Tensor and node.meta["val"].shape[1:] == (40, 16)
    ]
    assert len(sums) == 3 and all(node.meta["val"].is_contiguous() for node in sums)
    torch.testing.assert_close(graph(*given), stream(norm)(*given))
    assert not prefer_rows(graph, LAYOUTS)


def test_a_norm_alone_is_not_worth_a_copy() -> None:
    """It reads across memory once either way."""
    graph = traced(lambda x: layer_norm(x.transpose(1, 2).sin()), torch.randn(2, 16, 40))
    code = graph.code
    assert not prefer_rows(graph, LAYOUTS) and graph.code == code


def test_columns_that_are_summed_are_no_rows() -> None:
    graph = traced(lambda x: [(x + k).mean((0, 1)) for k in range(5)], torch.randn(2, 16, 40))
    assert not prefer_rows(graph, LAYOUTS)


def test_a_tensor_whose_layout_a_view_needs_keeps_it() -> None:
    def both(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        rows = x.transpose(1, 2).sin()
        first = rows + layer_norm(rows) @ weight
        second = first + layer_norm(first) @ weight
        return rows.transpose(1, 2).view(2, -1), layer_norm(second).sum()  # contiguous rows would have no such view

    given = torch.randn(2, 16, 40), torch.randn(16, 16)
    graph = traced(both, *given)
    assert prefer_rows(graph, LAYOUTS)
    lies = {node.target: node.meta["val"].stride(-1) == 1 for node in graph.graph.nodes if node.name in ("sin", "add")}
    assert lies == {aten.sin.default: False, aten.add.Tensor: True}
    for ours, theirs in zip(graph(*given), both(*given), strict=True):
        torch.testing.assert_close(ours, theirs)
        assert ours.stride() == theirs.stride()


def test_symbolic_sizes_are_left() -> None:
    graph = traced(stream(layer_norm), torch.randn(2, 16, 40), torch.randn(16, 16), symbolic=True)
    code = graph.code
    assert not prefer_rows(graph, LAYOUTS) and graph.code == code


def test_a_number_without_dimensions_has_no_rows() -> None:
    x = torch.tensor(-1.5)
    assert torch.equal(fusion.fuse(lambda x: x.mean(0), options={"strict": True})(x), x)


def test_images_of_convolutions_keep_their_channels_last() -> None:
    """A gate reads the mean of each channel, which lies across memory; its product is the image of a convolution."""

    def gated(x: Tensor, weight: Tensor) -> Tensor:
        for _ in range(3):
            x = F.conv2d(x * x.mean((2, 3), keepdim=True).sigmoid(), weight)
        return x.mean((2, 3))

    image = torch.randn(2, 8, 12, 12).contiguous(memory_format=torch.channels_last)
    graph = traced(lambda x, weight: gated(x.sin(), weight), image, torch.randn(8, 8, 1, 1))
    assert not prefer_rows(graph, LAYOUTS)
    calls = [node for node in graph.graph.nodes if node.target is aten.convolution.default]
    assert len(calls) == 3
    for call in calls:
        assert call.args[0].meta["val"].is_contiguous(memory_format=torch.channels_last)
