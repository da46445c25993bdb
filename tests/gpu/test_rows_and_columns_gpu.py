"""Rows that are folded and columns that are summed by one kernel, on a device; gradients computed with their loss."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusion
from tests.interpreter.test_rows_and_columns import PROGRAMS, crossed

pytestmark = pytest.mark.gpu

SHAPES = [(16384, 768), (64, 197, 1024), (5000, 3000), (4096, 8192)]


def gradients(run: Callable[..., Tensor], *tensors: Tensor, symbolic: bool = False) -> tuple[Tensor, ...]:
    *leaves, upstream = tensors
    leaves = [leaf.clone().requires_grad_() for leaf in leaves]
    if symbolic:
        torch._dynamo.mark_dynamic(leaves[0], 0)
    return torch.autograd.grad(run(*leaves), leaves, upstream)


def drawn(*shape: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    x, upstream = (torch.randn(shape, device="cuda", dtype=dtype) for _ in range(2))
    weight, bias = (torch.randn(shape[-1], device="cuda", dtype=dtype) for _ in range(2))
    return x, weight, bias, upstream


def agree(mine: tuple[Tensor, ...], exact: tuple[Tensor, ...], eager: tuple[Tensor, ...]) -> None:
    for got, wanted, usual in zip(mine, exact, eager, strict=True):
        error, bound = ((each.double() - wanted).norm() for each in (got, usual))
        assert error <= 2 * bound + 1e-5 * wanted.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    program, tensors = PROGRAMS[name], drawn(*shape, dtype=dtype)
    function = fusion.fuse(program)
    mine = gradients(function, *tensors)
    agree(mine, gradients(program, *(each.double() for each in tensors)), gradients(program, *tensors))
    assert crossed(function)


def test_symbolic_numbers_of_rows() -> None:
    program = PROGRAMS["layer norm"]
    function = fusion.fuse(program)
    for rows in (8192, 8191, 5, 30000):
        tensors = drawn(rows, 1024, dtype=torch.float32)
        mine = gradients(function, *tensors, symbolic=True)
        agree(mine, gradients(program, *(each.double() for each in tensors)), gradients(program, *tensors))


@pytest.mark.parametrize("shape", [(8192, 50257), (4096, 32000), (16384, 1000)], ids=str)
@pytest.mark.parametrize("scale", [1.0, 0.375])
def test_gradients_of_logits(scale: float, shape: tuple[int, int]) -> None:
    def loss(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(x, y, ignore_index=7) * 1.0

    x, y = torch.randn(shape, device="cuda", dtype=torch.bfloat16), torch.randint(0, shape[1], shape[:1], device="cuda")

    def gradient(run: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
        leaf = x.to(dtype).requires_grad_()
        return torch.autograd.grad(run(leaf, y) * scale, leaf)

    function = fusion.fuse(loss)
    agree(gradient(function, x.dtype), gradient(loss, torch.float64), gradient(loss, x.dtype))
    at_once = [kernel for kernel in fusion.report(function).kernels if "times 1 everything" in kernel.source]
    assert len(at_once) == (x.nbytes >= 1 << 24)
