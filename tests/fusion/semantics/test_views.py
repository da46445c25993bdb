"""Views, aliases and layouts: outputs have eager's strides and aliasing; inputs may have any layout."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import fusion
from tests.fusion.agreement import STRICT, agree, compare

Function = Callable[..., object]


def itself(x: torch.Tensor) -> object:
    return x


def itself_twice(x: torch.Tensor) -> object:
    return x, x, x + 1


def a_view(x: torch.Tensor) -> object:
    return x[1:], x.t(), x.unsqueeze(0)


def a_view_of_a_result(x: torch.Tensor) -> object:
    y = x.exp()
    return y[1:], y


def only_a_view_of_a_result(x: torch.Tensor) -> object:
    return (x + 1).t()


def two_views_of_a_result(x: torch.Tensor) -> object:
    y = x.exp()
    return y[0], y[:, 1], y.view(-1)


def one_result_twice(x: torch.Tensor) -> object:
    y = x * 2
    return y, y


def equal_results(x: torch.Tensor) -> object:
    return x.exp() + 1, x.exp() + 1


def clones(x: torch.Tensor) -> object:
    y = x + 1
    return y, y.clone(), x.clone(), x.detach()


def detached_result(x: torch.Tensor) -> object:
    y = x + 1
    return y, y.detach()


def parts(x: torch.Tensor) -> object:
    return x.split(2), x.chunk(2, 1), x.unbind(0), (x * 2).split(3)


def expanded(x: torch.Tensor) -> object:
    y = x[:1] + 1
    return y.expand(4, -1), x[0].expand(3, -1)


def contiguous(x: torch.Tensor) -> object:
    y = x + 1
    return x.contiguous(), y.contiguous(), x.t().contiguous()


def reshaped(x: torch.Tensor) -> object:
    return x.reshape(-1), x.t().reshape(-1), (x + 1).reshape(-1)


def strided(x: torch.Tensor) -> object:
    return torch.as_strided(x, (2, 2), (1, 2)), torch.as_strided(x + 1, (2, 2), (1, 2), 1)


def real_types(x: torch.Tensor) -> object:
    return x.to(x.dtype), x.to(torch.float64), x.view(torch.int32), x.float()


def changed_and_viewed(x: torch.Tensor) -> object:
    x.add_(1)
    return x, x[0], x * 2


def changed_result_and_view(x: torch.Tensor) -> object:
    y = x + 1
    z = y[1]
    z.mul_(2)
    return y, z


def nothing(x: torch.Tensor) -> object:
    return None


def read_by_a_call(x: torch.Tensor) -> object:
    """The call reads the dimensions that a fold removes."""
    y = x.amax(None, keepdim=True)
    return torch.polar(y, y), y, y[:, None]


def numbers(x: torch.Tensor) -> object:
    return x.shape[0], x.dim(), 3, "text", x.sum()


FUNCTIONS: tuple[Function, ...] = (
    *(itself, itself_twice, a_view, a_view_of_a_result, only_a_view_of_a_result, two_views_of_a_result),
    *(one_result_twice, equal_results, clones, detached_result, parts, expanded, contiguous, reshaped, strided),
    *(real_types, changed_and_viewed, changed_result_and_view, nothing, numbers, read_by_a_call),
)

UNCOMPUTED = (itself, a_view, nothing)
"""Views that compute nothing."""


@pytest.mark.parametrize("f", FUNCTIONS)
def test_outputs_share_memory_as_in_eager(f: Function) -> None:
    agree(f, torch.randn(4, 6), calls=2, kernels=f not in UNCOMPUTED)


@pytest.mark.parametrize("f", [a_view, a_view_of_a_result, one_result_twice, two_views_of_a_result, parts, expanded])
def test_gradients_flow_through_aliases(f: Function) -> None:
    agree(f, torch.randn(4, 6, requires_grad=True), backward=True, kernels=f not in UNCOMPUTED)


@pytest.mark.parametrize("f", [a_view, a_view_of_a_result, parts, reshaped])
def test_aliases_with_sizes_that_change(f: Function) -> None:
    agree(f, torch.randn(4, 6), dynamic=True, kernels=f not in UNCOMPUTED)


def test_a_returned_view_may_be_changed() -> None:
    fused = fusion.fuse(lambda x: x[1:], options=STRICT)
    x = torch.zeros(3)
    fused(x).add_(5)
    torch.testing.assert_close(x, torch.tensor([0.0, 5.0, 5.0]))


def test_a_returned_view_of_a_leaf_knows_its_base() -> None:
    x = torch.randn(3, 4, requires_grad=True)
    view = fusion.fuse(lambda x: x.t(), options=STRICT)(x * 1)
    assert view._is_view() and view.grad_fn is not None


def test_a_transposed_number_that_is_returned_with_it_may_be_changed() -> None:
    def returned(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x * 3
        z = y.t()
        z.nonzero()
        z.flatten().mul_(0.25)
        return y, z

    x = torch.tensor(0.5, requires_grad=True)
    y, z = fusion.fuse(returned, options=STRICT)(x)
    assert not y._is_view() and z._base is y
    torch.testing.assert_close(y, x * 3 / 4)
    torch.testing.assert_close(torch.autograd.grad(y, x)[0], torch.tensor(0.75))


# Layouts ------------------------------------------------------------------------------------------------------------


def channels_last(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).to(memory_format=torch.channels_last)


IMAGES: tuple[Function, ...] = (
    lambda x: x * 2 + 1,
    lambda x: torch.relu(x) + x.mean((2, 3), keepdim=True),
    lambda x: F.conv2d(x, torch.ones(5, 3, 3, 3) / 9, padding=1).relu(),
    lambda x: F.max_pool2d(x, 2),
    lambda x: F.avg_pool2d(x, 2) * 2,
    lambda x: F.interpolate(x, scale_factor=2, mode="nearest"),
    lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
    lambda x: F.batch_norm(x, torch.zeros(3), torch.ones(3), training=False),
    lambda x: F.group_norm(x, 3),
    lambda x: torch.cat([x, x + 1], 1),
    lambda x: F.pad(x, (1, 1, 2, 0)),
    lambda x: x.to(torch.float64),
    lambda x: x.sum(1),
    lambda x: x.sum(1, keepdim=True),
    lambda x: x.contiguous(),
    lambda x: x.permute(0, 2, 3, 1).contiguous() + 1,
    lambda x: torch.empty_like(x).copy_(x),
    lambda x: torch.zeros_like(x) + x,
    lambda x: torch.where(x > 0, x, 0.0),
    lambda x: x.clone(memory_format=torch.contiguous_format),
    lambda x: F.adaptive_avg_pool2d(x, 2),
    lambda x: x.softmax(1),
    lambda x: F.dropout(x, 0.0) + 1,
    lambda x: x.flip(2),
    lambda x: x[:, :, ::2] * 2,
    lambda x: F.pixel_shuffle(x.repeat(1, 4, 1, 1), 2),
)


@pytest.mark.parametrize("position", range(len(IMAGES)))
def test_channels_last(position: int) -> None:
    f = IMAGES[position]
    agree(f, channels_last(2, 3, 8, 10))
    plain = torch.randn(2, 3, 8, 10)
    agree(f, plain, kernels=f(plain) is not plain)


def test_channels_last_through_a_network_and_its_gradients() -> None:
    net = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.BatchNorm2d(8), torch.nn.ReLU(), torch.nn.Conv2d(8, 4, 1)
    ).to(memory_format=torch.channels_last)
    fused = fusion.fuse(net.eval(), options=STRICT)
    x = channels_last(2, 3, 6, 6)
    compare(net(x), fused(x))
    assert fused(x).is_contiguous(memory_format=torch.channels_last)
    net(x).sum().backward()
    expected = [p.grad for p in net.parameters()]
    net.zero_grad()
    fused(x).sum().backward()
    compare(expected, [p.grad for p in net.parameters()], strides=False, rtol=1e-4, atol=1e-5)


def test_strides_of_results_from_mixed_layouts() -> None:
    x = torch.randn(4, 5)
    for pair in ((x, x.t().contiguous().t()), (x.t(), torch.randn(5, 4)), (x, torch.randn(5)), (x.t(), torch.randn(4))):
        agree(lambda a, b: (a + b, b * a, torch.maximum(a, b).exp()), *pair)
        torch._dynamo.reset()


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(1, 6).expand(4, 6),
        lambda: torch.randn(4, 1).expand(4, 6),
        lambda: torch.randn(()).expand(4, 6),
        lambda: torch.randn(50)[3:27].view(4, 6),
        lambda: torch.randn(4000, 6)[::1000],
        lambda: torch.randn(6, 4).t(),
        lambda: torch.randn(12).unfold(0, 6, 2),  # overlapping rows
        lambda: torch.as_strided(torch.randn(40), (4, 6), (3, 2)),  # overlapping anyhow
        lambda: torch.as_strided(torch.randn(1 << 18), (4, 6), (1 << 16, 7), 5),
        lambda: torch.randn(4, 6, 3)[..., 1],
    ],
    ids=["row", "column", "scalar", "offset", "rows", "transposed", "unfold", "overlap", "huge", "last"],
)
def test_inputs_with_unusual_strides(make: Callable[[], torch.Tensor]) -> None:
    x = make()
    assert x.shape == (4, 6)
    agree(lambda x: (x.softmax(1) + 1, x.sum(0), x @ x.t(), x.t() * 2, x.amax()), x)
    agree(lambda x: (x.sin() * x).cumsum(1), x.detach().requires_grad_(), backward=True)


def test_another_storage_offset_needs_no_new_compilation() -> None:
    fused = fusion.fuse(lambda x: x.exp() + 1, options=STRICT)
    base = torch.randn(100)
    for start in (0, 1, 3, 17):
        x = base[start : start + 20]
        torch.testing.assert_close(fused(x), x.exp() + 1)
    assert len(fusion.report(fused).graphs) == 1


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (1, 1)])
def test_nothing_and_single_numbers(shape: tuple[int, ...]) -> None:
    def f(x: torch.Tensor) -> object:
        return x.exp(), x.sum(), x.reshape(-1) + 1, torch.cat([x.reshape(-1), x.reshape(-1)]), x.mean(), x * x.numel()

    agree(f, torch.randn(shape))
    agree(f, torch.randn(shape, requires_grad=True), backward=True)


def test_products_of_nothing() -> None:
    agree(lambda a, b: (a @ b + 1, (a @ b).sum()), torch.randn(3, 0), torch.randn(0, 4))
    agree(lambda a, b: a @ b, torch.randn(0, 5), torch.randn(5, 4))
    agree(lambda x: (x.sum(0), x.prod(0), x.any(0), x.all(0), x.softmax(0), x.mean(0)), torch.randn(0, 4))


def test_a_result_that_views_a_copy_is_no_view_of_its_source() -> None:
    """A call may read the original; the result is a view of the copy."""

    def f(x: torch.Tensor, y: torch.Tensor) -> object:
        copied = torch.round(x) * 1
        copied.mT.copy_(y)
        return torch.linalg.svdvals(copied.detach()), copied.mT

    agree(f, torch.randn(3, 5, 4), torch.randn(3, 5, 4).mT)
