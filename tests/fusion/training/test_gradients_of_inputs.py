"""Gradients of large inputs are computed with the loss: backward has nothing to read where the loss is not scaled."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusion
from fusion.joint import loss_gradients
from fusion.schedule.launches import reuse

ROWS, CLASSES = 37, 50


@pytest.fixture(autouse=True)
def _small_inputs_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_gradients, "LARGE", ROWS * CLASSES)
    monkeypatch.setattr(reuse, "LEAST_BYTES", 1)


def cross_entropy(x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(x, y)


def smoothed(x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(x, y, label_smoothing=0.1, ignore_index=3)


def squared(x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(x, y)


def distilled(x: Tensor, y: Tensor) -> Tensor:
    return F.kl_div((x / 2).log_softmax(-1), (y / 2).softmax(-1), reduction="batchmean") * 4


def binary(x: Tensor, y: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(x, y.sigmoid())


def written_out(x: Tensor, y: Tensor) -> Tensor:
    return (x.logsumexp(-1) - x.gather(1, y[:, None])[:, 0]).mean()


CLASSED = {"cross entropy": cross_entropy, "smoothed": smoothed, "written out": written_out}
LOSSES: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    **CLASSED,
    "squared": squared,
    "distilled": distilled,
    "binary": binary,
}


def drawn(name: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(ROWS, CLASSES, generator=generator).to(dtype) for _ in range(2))
    return x, torch.randint(0, CLASSES, (ROWS,), generator=generator) if name in CLASSED else y


def gradient(run: Callable[[Tensor, Tensor], Tensor], x: Tensor, y: Tensor, scale: float = 1.0) -> Tensor:
    leaf = x.clone().requires_grad_()
    y = y.to(x.dtype) if y.is_floating_point() else y
    (run(leaf, y) * scale).backward()
    assert leaf.grad is not None
    return leaf.grad


def returning_at_once(function: object) -> list[str]:
    kernels = fusion.report(function).kernels
    assert kernels, "nothing was generated"
    return [kernel.source for kernel in kernels if "times 1 everything stays" in kernel.source]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", LOSSES)
def test_gradients_at_every_scale(name: str, dtype: torch.dtype) -> None:
    function = fusion.fuse(LOSSES[name])
    x, y = drawn(name, dtype)
    for scale in (1.0, 0.125, 3.0, 0.0, float("inf")):
        exact, eager = (gradient(LOSSES[name], each, y, scale) for each in (x.double(), x))
        mine = gradient(function, x, y, scale)
        if not exact.isfinite().all():
            assert not (mine.isfinite() & ~exact.isfinite()).any()  # infinity, or NaN where eager subtracts two
            continue
        error, bound = ((each.double() - exact).norm() for each in (mine, eager))
        assert error <= 2 * bound + 1e-6 * exact.norm(), (scale, error, bound)
    assert len(returning_at_once(function)) == 1


@pytest.mark.parametrize("name", LOSSES)
def test_a_graph_that_is_kept_gives_the_same_again(name: str) -> None:
    x, y = drawn(name, torch.float32)
    leaf = x.clone().requires_grad_()
    loss = fusion.fuse(LOSSES[name])(leaf, y) * 3
    first, second, third = (torch.autograd.grad(loss, leaf, retain_graph=kept)[0] for kept in (True, True, False))
    assert torch.equal(first, second) and torch.equal(first, third)


def test_half_precision_waits_for_the_scale() -> None:
    x, y = drawn("squared", torch.float16)
    function = fusion.fuse(squared)
    gradient(function, x, y, 1024.0)
    assert not returning_at_once(function)


def test_a_gradient_that_reads_nothing_large_stays_in_backward() -> None:
    function = fusion.fuse(lambda x, y: (x + y).mean())
    x, y = drawn("squared", torch.float32)
    assert torch.equal(gradient(function, x, y), torch.full_like(x, 1 / x.numel()))
    assert not returning_at_once(function)


def test_gradients_through_products_stay_in_backward() -> None:
    function = fusion.fuse(lambda x, y: (x @ y.mT).square().mean())
    x, y = drawn("squared", torch.float32)
    torch.testing.assert_close(gradient(function, x, y), gradient(lambda x, y: (x @ y.mT).square().mean(), x, y))
    assert not returning_at_once(function)


def test_losses_that_are_not_one_number_stay_in_backward() -> None:
    x, y = drawn("squared", torch.float32)
    function = fusion.fuse(lambda x, y: F.mse_loss(x, y, reduction="none").sum(-1))
    leaf = x.clone().requires_grad_()
    upstream = torch.arange(float(ROWS))
    function(leaf, y).backward(upstream)
    torch.testing.assert_close(leaf.grad, 2 * (x - y) * upstream[:, None])
    assert not returning_at_once(function)
