"""Long rows in shared memory, on a device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusion

pytestmark = pytest.mark.gpu


def loss_of(x: Tensor, chosen: Tensor) -> Tensor:
    return F.cross_entropy(x, chosen)


def cross_entropy(x: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss, and its gradient, which is computed with it."""
    x = x.detach().requires_grad_()
    loss = F.cross_entropy(x, chosen)
    return loss.detach(), torch.autograd.grad(loss, x)[0]


def is_held(function: Callable[..., object]) -> bool:
    return any("gl.allocate_shared_memory" in kernel.source for kernel in fusion.report(function).kernels)


def drawn(rows: int, length: int, dtype: torch.dtype) -> Tensor:
    x = torch.randn(rows, length, device="cuda") * 3
    x[1], x[2, 7] = -1e4, 300.0
    return x.to(dtype)


@pytest.mark.parametrize("length", [32768, 32000, 30008, 50257, 10001])
@pytest.mark.parametrize("rows", [4096, 2501])
def test_cross_entropy(rows: int, length: int) -> None:
    x = drawn(rows, length, torch.bfloat16)
    chosen = torch.randint(0, length, (rows,), device="cuda")
    chosen[5] = -100
    function = fusion.fuse(loss_of)
    leaf = x.clone().requires_grad_()
    loss = function(leaf, chosen)
    (gradient,) = torch.autograd.grad(loss, leaf)
    wanted, exact = cross_entropy(x.double(), chosen)
    _, eager = cross_entropy(x, chosen)
    assert (gradient.double() - exact).norm() <= 2 * (eager.double() - exact).norm()
    torch.testing.assert_close(loss.detach().double(), wanted, rtol=1e-2, atol=0)
    assert is_held(function)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_group_norm_with_its_activation(dtype: torch.dtype) -> None:
    x = drawn(1024, 32768, dtype).view(32, 256, 64, 64)
    weight, bias = (torch.randn(256, device="cuda", dtype=dtype) for _ in range(2))

    def program(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.silu(F.group_norm(x, 32, weight, bias))

    function = fusion.fuse(program)
    exact = program(x.double(), weight.double(), bias.double())
    error, usual = ((each.double() - exact).norm() for each in (function(x, weight, bias), program(x, weight, bias)))
    assert error <= 2 * usual
    assert is_held(function)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("length", [9001, 20000, 25001])
def test_rows_that_are_folded_and_stored(length: int, dtype: torch.dtype) -> None:
    x = drawn(777, length, dtype)
    x[3], x[5, 1:], x[6, 17] = -torch.inf, -torch.inf, torch.nan
    weight, bias = (torch.randn(length, device="cuda", dtype=dtype) for _ in range(2))

    def softmax(x: Tensor) -> Tensor:
        return x.softmax(-1)

    def layer_norm(x: Tensor) -> Tensor:
        return F.layer_norm(x, (length,), weight.to(x.dtype), bias.to(x.dtype))

    for program, rows in ((softmax, x), (layer_norm, x[7:])):
        function = fusion.fuse(program)
        result, eager, exact = function(rows), program(rows), program(rows.double())
        torch.testing.assert_close(result.isnan(), eager.isnan())
        error, usual = ((each.double() - exact).nan_to_num().norm() for each in (result, eager))
        assert error <= 2 * usual
        assert is_held(function)


def test_targets_out_of_range_are_refused_in_every_row() -> None:
    """Positions are checked while a row is on its way."""
    x, chosen = drawn(2501, 32000, torch.bfloat16), torch.zeros(2501, dtype=torch.int64, device="cuda")
    function = fusion.fuse(loss_of)
    leaf = x.requires_grad_()
    torch.testing.assert_close(function(leaf, chosen), F.cross_entropy(x, chosen), rtol=1e-2, atol=1e-2)
    (source,) = (kernel.source for kernel in fusion.report(function).kernels if "allocate_shared" in kernel.source)
    assert "_inside(" in source and '"debug": True' in source
    assert source.index("commit_group()") < source.index(" = _inside(") < source.index("wait_group(0)")
