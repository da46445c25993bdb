"""Tensors with the negative bit: the imaginary part of a conjugate is a view of memory with the opposite sign, which
kernels would read.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import fusion
from fusion.backend import FusionWarning
from tests.fusion.agreement import STRICT, agree, compare


def imaginary(x: Tensor) -> Tensor:
    """-x, negated where it is read."""
    negated = torch.complex(x, x).conj().imag
    assert negated.is_neg()
    return negated


@torch.library.custom_op("fusion_tests::imaginary", mutates_args=())
def imaginary_operation(x: Tensor) -> Tensor:
    """-x, as a result whose negative bit is not declared."""
    return torch._neg_view(x.clone())


@imaginary_operation.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@pytest.mark.parametrize("dynamic", [False, True])
def test_within(dynamic: bool) -> None:
    x = torch.randn(5, 6)
    agree(lambda x: torch.complex(x, x).conj().imag * 3, x, dynamic=dynamic)
    agree(lambda x: torch.complex(x, x).conj().imag[1:, ::2].exp().sum(0), x, dynamic=dynamic)

    def product(x: Tensor) -> Tensor:
        return (torch.complex(x, x.cos()).conj() * torch.complex(x.sin(), x)).real

    agree(product, x.requires_grad_(), backward=True, dynamic=dynamic)


def test_as_the_result_of_a_call() -> None:
    agree(lambda x: imaginary_operation(x + 1).sin() * 2, torch.randn(3, 4))


@pytest.mark.filterwarnings("ignore::fusion.backend.FusionWarning")
def test_as_an_input() -> None:
    def program(x: Tensor) -> tuple[Tensor, ...]:
        return x * 3 + 1, x.t(), x.resolve_neg() * 2

    fused, x = fusion.fuse(program, options=STRICT), torch.randn(3, 4)
    compare(program(x), fused(x))
    compare(program(imaginary(x)), fused(imaginary(x)))
    compare(program(x), fused(x))
    mine, yours = imaginary(x), imaginary(x)
    fused = fusion.fuse(lambda x: x.mul_(2) + 1, options=STRICT)
    compare(mine.mul_(2) + 1, fused(yours))
    compare(mine, yours)


@pytest.mark.filterwarnings("ignore::fusion.backend.FusionWarning")
def test_as_a_gradient() -> None:
    fused = fusion.fuse(lambda x: x.sin() * 2, options=STRICT)
    for gradient in (imaginary(torch.rand(5)), torch._neg_view(torch.rand(5)), torch.rand(5)):
        mine, yours = (torch.linspace(0, 2, 5).requires_grad_() for _ in range(2))
        (mine.sin() * 2).backward(gradient)
        fused(yours).backward(gradient)
        compare(mine.grad, yours.grad)


def test_the_region_reports_why_it_runs_eagerly() -> None:
    fused = fusion.fuse(lambda x: x.cosh() - 1)
    with pytest.warns(FusionWarning, match="negated where it is read"):
        fused(imaginary(torch.randn(3)))
    assert "negated" in fusion.report(fused).graphs[0].failure
