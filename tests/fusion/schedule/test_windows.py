"""Small windows are folded in registers, as part of maps: the same numbers, positions and strides as eager's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import fusion

POOLS: dict[str, Callable[[Tensor], object]] = {
    "max": lambda x: F.max_pool2d(x.relu(), 3, 2, 1),
    "max with positions": lambda x: F.max_pool2d(x, 3, 2, 1, return_indices=True),
    "apart": lambda x: F.max_pool2d(x, 2, 3, dilation=2, return_indices=True),
    "mean": lambda x: F.avg_pool2d(x * 2, 3, 1, 1, count_include_pad=False),
    "long": lambda x: F.max_pool2d(x, 7, 2, 3),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("target", ["reference", "c"])
@pytest.mark.parametrize("channels_last", [True, False])
@pytest.mark.parametrize("name", POOLS)
def test_pools(name: str, channels_last: bool, target: str, dtype: torch.dtype) -> None:
    x = torch.randn(2, 6, 19, 23, generator=torch.Generator().manual_seed(0)).mul(2).round().to(dtype)  # with equals
    x[0, 1, 4, 5] = float("nan")
    x[1, 2] = -float("inf")
    x = x.to(memory_format=torch.channels_last) if channels_last else x
    fused = fusion.fuse(POOLS[name], options={"target": target, "strict": True})

    def outcome(run: Callable[[Tensor], object]) -> list[Tensor]:
        given = x.clone().requires_grad_()
        result = run(given)
        results = [result] if isinstance(result, Tensor) else list(result)  # type: ignore[call-overload]
        return [*results, *torch.autograd.grad(results[0].float().sin().nansum(), given)]

    for ours, theirs in zip(outcome(fused), outcome(POOLS[name]), strict=True):
        # Eager rounds each gradient that it adds up.
        allowed = {"rtol": 1e-2, "atol": 1e-2} if dtype is torch.bfloat16 and name == "mean" else {}
        torch.testing.assert_close(ours, theirs, equal_nan=True, **allowed)
        assert ours.stride() == theirs.stride()


def test_a_window_is_no_fold_and_its_position_no_kernel() -> None:
    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        y, at = torch.ops.aten.max_pool2d_with_indices(x * 2 + 1, [3, 3], [2, 2], [1, 1])
        return y + 1, at

    x = torch.randn(2, 8, 21, 24).to(memory_format=torch.channels_last)
    (kernel,) = fusion.explain(both, options={"target": "reference", "strict": True})(x).kernels
    assert " over " not in kernel.source and ">= 19" not in kernel.source


def test_rows_are_still_folded() -> None:
    (kernel,) = fusion.explain(lambda x: x.sum(-1), options={"target": "reference", "strict": True})(
        torch.randn(300, 4)
    ).kernels
    assert " over " in kernel.source


@pytest.mark.parametrize(
    ("pool", "shape", "dtype"),
    [
        (lambda x: F.max_pool2d(x * 2, 3, 2, 1), (2, 5, 40, 41), torch.int16),
        (lambda x: F.max_pool3d(x * 2, 2), (2, 3, 4, 5, 6), torch.int8),
        (lambda x: F.adaptive_max_pool2d(x * 2, 3), (2, 3, 181, 182), torch.int32),
    ],
    ids=["2d", "3d", "adaptive"],
)
def test_positions_are_kept_in_few_bytes(
    pool: Callable[[Tensor], Tensor], shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).requires_grad_()
    result = fusion.fuse(pool, options={"strict": True})(x)
    assert result.grad_fn is not None
    kept = {saved.dtype for saved in result.grad_fn.saved_tensors}  # type: ignore[attr-defined]  # of a compiled function
    assert dtype in kept and torch.int64 not in kept
    weights = result.detach().sin()
    (ours,) = torch.autograd.grad(result, x, weights)
    torch.testing.assert_close(ours, torch.autograd.grad(pool(x), x, weights)[0])


@pytest.mark.parametrize("channels_last", [True, False])
def test_lanes_run_where_no_point_of_a_window_is_padding(channels_last: bool) -> None:
    """A condition that is the same for all lanes kept compilers from using any: 28 ms instead of 0.4."""
    x = torch.randn(2, 32, 21, 24)
    x = x.to(memory_format=torch.channels_last) if channels_last else x
    options = {"target": "c", "strict": True}
    (kernel,) = fusion.explain(lambda x: F.max_pool2d(x, 3, 2, 1, return_indices=True), options=options)(x).kernels
    assert "in0[" in kernel.source and "? in0[" not in kernel.source


def test_a_sum_of_one_number_is_no_fold() -> None:
    x = torch.randn(8, 16, 1, 1)
    (kernel,) = fusion.explain(lambda x: x.sum((2, 3)) * 2, options={"target": "c", "strict": True})(x).kernels
    assert "+=" not in kernel.source


@pytest.mark.parametrize("pool", [lambda x: F.max_pool2d(x, 3, 2, 1), lambda x: F.adaptive_max_pool2d(x, 5)])
@pytest.mark.parametrize("channels_last", [True, False])
def test_gradients_of_maxima_are_added_where_they_belong_on_a_cpu(
    pool: Callable[[Tensor], Tensor], channels_last: bool
) -> None:
    """With channels last, along which lanes run, each element reads the windows around it."""
    x = torch.randn(2, 16, 13, 17).to(memory_format=torch.channels_last if channels_last else torch.contiguous_format)
    given = x.requires_grad_()
    fused = fusion.fuse(pool, options={"strict": True})
    (ours,) = torch.autograd.grad(fused(given).square().sum(), given)
    (theirs,) = torch.autograd.grad(pool(given).square().sum(), given)
    torch.testing.assert_close(ours, theirs)
    assert ours.stride() == theirs.stride()
    last = fusion.report(fused).kernels[-1].source
    assert ("+ in0[" in last or "+ in1[" in last) is not channels_last


@pytest.mark.parametrize("target", ["reference", "c"])
def test_a_position_among_one_needs_no_values(target: str) -> None:
    """Nothing is computed without a reader, a product least of all."""
    options = {"target": target, "strict": True}
    x, weight = torch.randn(1, 20), torch.randn(20, 33)

    def place(x: Tensor, weight: Tensor) -> Tensor:
        return (x.exp() @ weight).softmax(-1).argmax(0)

    fused = fusion.fuse(place, options=options)
    assert torch.equal(fused(x, weight), place(x, weight))
    report = fusion.report(fused)
    assert len(report.kernels) == 1 and not report.externs, str(report)
