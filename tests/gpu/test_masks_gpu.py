"""Attention under masks that are tensors: numbers on a device for every kind of mask, in both forms, and its speed."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import fusion
from tests.fusion.masks import added, masks

pytestmark = pytest.mark.gpu

KINDS = tuple(masks(8))


def hidden(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(~mask, float("-inf")).softmax(-1) @ v


def guarded(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return hidden(q, k, v, mask).masked_fill(~mask.any(-1, keepdim=True), 0)


def drawn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    return [torch.randn(shape, device="cuda", dtype=dtype) for _ in range(3)]


def farthest(result: Tensor, exact: Tensor) -> float:
    known = ~exact.isnan()
    return float((result.double() - exact)[known].abs().max()) if bool(known.any()) else 0.0


def narrowed(function: object) -> bool:
    products = [kernel.source for kernel in fusion.report(function).kernels if "n_start" in kernel.source]
    return bool(products)


SHAPES = [(1, 32, 2048, 128), (1, 20, 1999, 128), (1, 32, 2048, 64), (1, 40, 1024, 256)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_kind_of_mask(shape: tuple[int, ...]) -> None:
    inputs = drawn(*shape)
    for kind in KINDS:
        function, mask = fusion.fuse(hidden), masks(shape[2])[kind].cuda()
        with torch.no_grad():
            result, eager = function(*inputs, mask), hidden(*inputs, mask)
            exact = hidden(*(x.double() for x in inputs), mask)
        assert torch.equal(result.isnan(), exact.isnan()), kind
        assert farthest(result, exact) <= 2 * farthest(eager, exact) + 1e-6, kind
        assert narrowed(function)


@pytest.mark.parametrize("shape", [(1, 8, 2048, 128), (2, 8, 1100, 64)], ids=str)
def test_gradients_under_every_kind_of_mask(shape: tuple[int, ...]) -> None:
    inputs, upstream = drawn(*shape), torch.randn(shape, device="cuda")

    def gradients(run: Callable[..., Tensor], dtype: torch.dtype, mask: Tensor) -> tuple[Tensor, ...]:
        leaves = [x.to(dtype).requires_grad_() for x in inputs]
        return torch.autograd.grad(run(*leaves, mask), leaves, upstream.to(dtype))

    for kind in KINDS:
        function, mask = fusion.fuse(guarded), masks(shape[2])[kind].cuda()
        exact, eager = gradients(guarded, torch.float64, mask), gradients(guarded, torch.bfloat16, mask)
        for mine, usual, wanted in zip(gradients(function, torch.bfloat16, mask), eager, exact, strict=True):
            if bool(wanted.isnan().any()):
                continue  # rows without a column: gradients of eager's guarded NaN
            assert farthest(mine, wanted) <= 2 * farthest(usual, wanted) + 1e-6, kind


@pytest.mark.parametrize("hiding", [float("-inf"), torch.finfo(torch.bfloat16).min], ids=["infinity", "least"])
@pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
def test_numbers_that_are_added(shape: tuple[int, ...], hiding: float) -> None:
    def attended(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return (q @ k.mT / math.sqrt(q.shape[-1]) + mask).softmax(-1) @ v

    inputs = drawn(*shape)
    for kind in KINDS:
        for biased in (False, True):
            mask = added(masks(shape[2])[kind], torch.bfloat16, hiding, biased=biased).cuda()
            function = fusion.fuse(attended)
            with torch.no_grad():
                result = function(*inputs, mask)
                eager = attended(*inputs, mask)
                exact = attended(*(x.double() for x in (*inputs, mask)))
            assert torch.equal(result.isnan(), exact.isnan()), kind
            assert farthest(result, exact) <= 2 * farthest(eager, exact) + 1e-6, kind
            assert narrowed(function)


def test_a_causal_mask_in_memory_takes_less_than_the_same_without_a_mask() -> None:
    inputs = drawn(2, 16, 4096, 128)
    causal, everything = (masks(4096)[kind].cuda() for kind in ("causal", "everything"))
    function = fusion.fuse(hidden)

    def microseconds(mask: Tensor) -> float:
        times = []
        for _ in range(12):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(8):
                function(*inputs, mask)
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end) / 8 * 1000)
        return sorted(times)[len(times) // 2]

    with torch.no_grad():
        assert microseconds(causal) <= 0.75 * microseconds(everything)
