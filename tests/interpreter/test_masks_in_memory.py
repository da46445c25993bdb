"""Attention under masks that are tensors, under Triton's interpreter: blocks that a mask rules out are not computed."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor

import fusion
from fusion.schedule.chained import mask_bounds
from tests.fusion.masks import added, masks

BF16, F64 = torch.bfloat16, torch.float64
INFINITE = float("-inf")
LENGTH = 515  # eight groups of rows, and a part of one
KINDS = tuple(masks(LENGTH))


@pytest.fixture(autouse=True)
def _bounds_are_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks of small programs get bounds, too."""
    monkeypatch.setattr(mask_bounds, "_SHARE", float("inf"))


def scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5


def hidden(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return scores(q, k).masked_fill(~mask, INFINITE).softmax(-1) @ v


def chosen(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    weights = torch.where(mask, scores(q, k), INFINITE).softmax(-1)
    return weights.masked_fill(~mask.any(-1, keepdim=True), 0) @ v


PROGRAMS: Mapping[str, Callable[..., Tensor]] = {"hidden": hidden, "chosen, guarded": chosen}


def drawn(*shape: int, dtype: torch.dtype = BF16) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(*shape, generator=generator).to(dtype) for _ in range(3))


def compiled(function: Callable[..., Tensor], **options: object) -> Callable[..., Tensor]:
    return fusion.fuse(function, options={"target": "triton", **options})


def agrees(result: Tensor, exact: Tensor, eager: Tensor) -> bool:
    """Is a result NaN where float64 is, and elsewhere about as near to it as eager is?"""
    known = ~(exact.isnan() | eager.isnan())  # on AMX a bfloat16 product spreads a NaN to other rows
    mine, usual = ((each.double() - exact)[known].norm() for each in (result, eager))
    return torch.equal(result.isnan(), exact.isnan()) and bool(mine <= 1.5 * usual + 1e-12)


def is_narrowed(source: str) -> bool:
    """Does the loop of this kernel begin and end where numbers in memory say?"""
    return bool(re.search(r"n_start = .*in\d", source) and re.search(r"n_end = .*in\d", source))


def sources(function: object) -> list[str]:
    return [kernel.source for kernel in fusion.report(function).kernels]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_every_kind_of_mask(name: str, kind: str) -> None:
    program, mask, inputs = PROGRAMS[name], masks(LENGTH)[kind], drawn(1, 2, LENGTH, 16)
    function = compiled(program)
    result = function(*inputs, mask)
    assert agrees(result, program(*(x.double() for x in inputs), mask), program(*inputs, mask))
    products = [source for source in sources(function) if "tl.dot(" in source]
    assert products and all(is_narrowed(source) for source in products)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_under_every_kind_of_mask(kind: str) -> None:
    mask, inputs = masks(LENGTH)[kind], drawn(1, 2, LENGTH, 16)
    function = compiled(chosen)

    def gradients(run: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        leaves = [x.to(dtype).requires_grad_() for x in inputs]
        return [*torch.autograd.grad(run(*leaves, mask).float().sin().sum(), leaves)]

    mine, exact, eager = gradients(function, BF16), gradients(chosen, F64), gradients(chosen, BF16)
    assert all(agrees(*three) for three in zip(mine, exact, eager, strict=True))
    products = [source for source in sources(function) if "tl.dot(" in source]
    assert len(products) > 1 and all(is_narrowed(source) for source in products)
    folded = [source for source in sources(function) if "in0_ptr,  # bool[" in source and "tl.dot(" not in source]
    assert len(folded) == 2  # once forward, once backward: queries and keys share it


@pytest.mark.parametrize("hiding", [INFINITE, torch.finfo(BF16).min], ids=["infinity", "least"])
@pytest.mark.parametrize("kind", ["causal", "empty rows", "first and window"])
def test_numbers_that_are_added(kind: str, hiding: float) -> None:
    def with_added(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return (scores(q, k) + mask).softmax(-1) @ v

    mask, inputs = added(masks(LENGTH)[kind], BF16, hiding), drawn(1, 2, LENGTH, 16)
    function = compiled(with_added)
    result = function(*inputs, mask)
    assert agrees(result, with_added(*(x.double() for x in inputs), mask.double()), with_added(*inputs, mask))
    products = [source for source in sources(function) if "tl.dot(" in source]
    assert products and all(is_narrowed(source) for source in products)


def test_a_mask_for_each_sequence_and_a_view_of_a_larger_one() -> None:
    first, second = masks(LENGTH)["documents"], masks(LENGTH)["window"]
    larger = torch.zeros(2, 1, LENGTH + 5, LENGTH + 9, dtype=torch.bool)
    larger[0, 0, 5:, 9:], larger[1, 0, 5:, 9:] = first, second
    mask, inputs = larger[..., 5:, 9:], drawn(2, 3, LENGTH, 16)
    function = compiled(hidden)
    result = function(*inputs, mask)
    assert agrees(result, hidden(*(x.double() for x in inputs), mask), hidden(*inputs, mask))
    assert any(is_narrowed(source) for source in sources(function))


def test_a_transposed_mask_is_folded_along_memory() -> None:
    mask, inputs = masks(LENGTH)["causal"].t().contiguous().t(), drawn(1, 2, LENGTH, 16)
    function = compiled(hidden)
    result = function(*inputs, mask)
    assert agrees(result, hidden(*(x.double() for x in inputs), mask), hidden(*inputs, mask))
    assert any("turned" in kernel.name for kernel in fusion.report(function).kernels)


def test_layers_share_the_folds_of_a_mask() -> None:
    def layers(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        for _ in range(3):
            v = hidden(q, k, v, mask)
        return v

    mask, inputs = masks(LENGTH)["window"], drawn(1, 2, LENGTH, 16)
    function = compiled(layers)
    result = function(*inputs, mask)
    assert agrees(result, layers(*(x.double() for x in inputs), mask), layers(*inputs, mask))
    names = [kernel.name for kernel in fusion.report(function).kernels]
    assert sum("group" in name for name in names) == 1
    assert sum("matmul" in name for name in names) == 1 or sum("matmul" in name for name in names) == 3


def test_a_mask_beside_a_causal_one() -> None:
    def both(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        place = torch.arange(q.shape[-2])
        return scores(q, k).masked_fill(~mask | (place[None, :] > place[:, None]), INFINITE).softmax(-1) @ v

    mask, inputs = masks(LENGTH)["both sides"], drawn(1, 2, LENGTH, 16)
    function = compiled(both)
    result = function(*inputs, mask)
    assert agrees(result, both(*(x.double() for x in inputs), mask), both(*inputs, mask))


def test_symbolic_lengths() -> None:
    function = fusion.fuse(hidden, options={"target": "triton"}, dynamic=True)
    for length in (600, 515, 577):
        mask, inputs = masks(length)["window"], drawn(1, 2, length, 16)
        result = function(*inputs, mask)
        assert agrees(result, hidden(*(x.double() for x in inputs), mask), hidden(*inputs, mask))
    assert any(is_narrowed(source) for source in sources(function))


def test_weights_that_are_dropped_behind_the_softmax_count_in_its_sum() -> None:
    def dropped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return scores(q, k).softmax(-1).masked_fill(~mask, 0) @ v

    for kind in ("random", "causal"):
        mask, inputs = masks(LENGTH)[kind], drawn(1, 2, LENGTH, 16)
        result = compiled(dropped)(*inputs, mask)
        assert agrees(result, dropped(*(x.double() for x in inputs), mask), dropped(*inputs, mask))


def test_bounds_that_would_cost_much_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mask_bounds, "_SHARE", 1e-9)
    mask, inputs = masks(LENGTH)["causal"], drawn(1, 2, LENGTH, 16)
    function = compiled(hidden)
    function(*inputs, mask)
    assert not any(is_narrowed(source) for source in sources(function))
