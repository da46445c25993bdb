"""Conditions that hold for all lanes or none: results as in eager, and a text without masks."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusion

X = torch.randn(2, 8, 20, 18)


def around(x: Tensor) -> Tensor:
    return F.pad(x, (2, 3, 1, 2), mode="circular") * 2


def into_depth(x: Tensor) -> Tensor:
    return torch.cat([x[..., i::2, j::2] for j in (0, 1) for i in (0, 1)], 1)


def beside(x: Tensor) -> Tensor:
    return F.group_norm(torch.cat([x.relu(), x.flip(0) * 2], 1), 4)


def upsampled(x: Tensor) -> Tensor:
    return F.silu(F.group_norm(torch.cat([F.interpolate(x + 1, scale_factor=2.0), x.repeat(1, 1, 2, 2)], 1), 4))


def enlarged(x: Tensor) -> Tensor:
    return F.silu(F.interpolate(x, scale_factor=(1.0, 2.0)))


def written(x: Tensor) -> Tensor:
    """Parts that are written one after the other, and copied from each other."""
    result = torch.zeros(2, 8, 24, 20, dtype=x.dtype)
    result[:, :, 2:-2, 1:-1] = x
    result[:, :, 0] = result[:, :, 3]
    result[:, 1:] = result[:, :-1] + 1
    result[..., -1] = result[..., 2]
    return result * 3


def padded(x: Tensor) -> Tensor:
    return F.pad(x, (0, 0, 0, 0, 2, 3), value=1.5) + 1


PROGRAMS = [around, into_depth, beside, upsampled, enlarged, written, padded]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int32, torch.bool])
@pytest.mark.parametrize("program", PROGRAMS)
def test_results_are_those_of_eager(program: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    x = (X * 4).to(dtype)
    try:
        expected = program(x)
    except (RuntimeError, TypeError):
        pytest.skip(f"eager has no such kernel of {dtype}")
    fused = fusion.fuse(program, options={"target": "c"})
    torch.testing.assert_close(fused(x), expected)
    assert fusion.report(fused).kernels


@pytest.mark.parametrize("program", PROGRAMS)
def test_with_strides_and_sizes_of_one(program: Callable[[Tensor], Tensor]) -> None:
    for x in (X.mT.contiguous().mT, X[..., ::2, :].repeat(1, 1, 2, 1)[:, :, 1::2].repeat(1, 1, 2, 1), X[:1].clone()):
        if program is written and len(x) == 1:
            continue
        fused = fusion.fuse(program, options={"target": "c"})
        torch.testing.assert_close(fused(x), program(x))
        assert fusion.report(fused).kernels


def source(program: Callable[..., Tensor], *inputs: Tensor) -> str:
    fused = fusion.fuse(program, options={"target": "c", "strict": True})
    fused(*inputs)
    (kernel,) = fusion.report(fused).kernels
    return str(kernel.source)


def masked(text: str) -> list[str]:
    """The loads under a mask."""
    return re.findall(r"\? in\d+\[", text)


@pytest.mark.parametrize("program", [around, into_depth, beside, enlarged])
def test_no_load_is_masked(program: Callable[[Tensor], Tensor]) -> None:
    assert not masked(source(program, torch.randn(2, 8, 32, 32)))


def test_a_choice_between_elements_of_one_tensor_is_one_load() -> None:
    text = source(into_depth, torch.randn(2, 8, 32, 32))
    assert len(re.findall(r"in0\[", text)) == 1
    assert len(re.findall(r"in0\[", source(around, torch.randn(2, 8, 32, 32)))) == 3  # one for each side


def test_a_tensor_that_is_too_small_to_be_read_from_its_start_keeps_its_mask() -> None:
    def shifted(x: Tensor, y: Tensor) -> Tensor:
        return torch.cat([x.expand(4, 32), y], 0) + 1

    text = source(shifted, torch.randn(1, 1), torch.randn(0, 32))
    assert "in0[0]" in text
    fused = fusion.fuse(shifted, options={"target": "c"})
    for rows in (0, 1, 5):
        x, y = torch.randn(1, 1), torch.randn(rows, 32)
        torch.testing.assert_close(fused(x, y), shifted(x, y))
        assert fusion.report(fused).kernels


def test_elements_of_pairs_are_read_once() -> None:
    text = source(enlarged, torch.randn(2, 8, 32, 32))
    assert text.count("in0[") == 1 and len(re.findall(r"out0\[.*\] = ", text)) == 2


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_fold_that_is_never_chosen(dynamic: bool) -> None:
    """The choices around it decide that only once the kernel is formed."""

    def chosen(x: Tensor) -> Tensor:
        place = torch.arange(20)
        inner = torch.where(place < 9, x, x.amax(-1, keepdim=True))
        return torch.where(place < 5, inner * 2, x.sum(-1, keepdim=True))

    def all_chosen(x: Tensor) -> Tensor:
        place = torch.arange(20)
        return torch.where(place < 5, torch.where(place < 9, x + 1, x.amax(-1, keepdim=True)), x)

    for program in (chosen, all_chosen):
        fused = torch.compile(program, backend="fusion", dynamic=dynamic, options={"target": "c", "strict": True})
        x = torch.randn(7, 20)
        torch.testing.assert_close(fused(x), program(x))
