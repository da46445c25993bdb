"""Numerics on a device: eager's bits under strict numerics, positions of maxima, exact steps of Adam."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from fusion import fuse, report
from tests.fusion.test_numerics import CHAINS, DTYPES, STRICT, operands, scaled_twice
from tests.fusion.training.test_optimizers import errors_of_steps

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("chain", CHAINS, ids=lambda chain: chain.__name__)
def test_chains_have_the_bits_of_eager(chain: Callable[..., torch.Tensor], dtype: torch.dtype) -> None:
    x, y = (tensor.cuda() for tensor in operands(dtype))
    assert torch.equal(fuse(chain, options=STRICT)(x, y), chain(x, y))


def test_a_product_minus_itself_is_zero() -> None:
    """As in `x - x.detach()`: not the rounding error of the product, which sorting would see."""
    x, y = torch.rand(2, 10007, device="cuda").unbind()
    compiled = fuse(lambda x, y: (x * y) - (x * y).detach(), options={"strict": True})
    assert not compiled(x, y).any()
    assert report(compiled).kernels and not report(compiled).externs


def test_numbers_are_compared_as_16_bit_floats() -> None:
    x = torch.linspace(-2, 2, 4001, device="cuda").bfloat16()
    assert torch.equal(fuse(lambda x: x > 0.1)(x), x > 0.1)


@pytest.mark.parametrize("shape", [(4096, 4000), (8, 200000), (3000, 77)], ids=str)
def test_a_row_has_its_maximum_where_it_is_compared(shape: tuple[int, int]) -> None:
    """In one loop, in two, and with rows in parts: some element of each row equals its maximum."""
    x = torch.randn(shape, device="cuda", requires_grad=True)
    product, largest = fuse(scaled_twice, options={"strict": True})(x)
    assert largest.any(-1).all()
    torch.testing.assert_close(product, x * 2.5)
    sums = fuse(lambda x: (x * 2.5 + (x - 1) * 1.3).amax(-1), options={"strict": True})
    (gradient,) = torch.autograd.grad(sums(x).sum(), x)
    torch.testing.assert_close(gradient.sum(-1), torch.full_like(gradient[:, 0], 2.5 + 1.3))


@pytest.mark.parametrize("name", ["Adam", "AdamW", "NAdam"])
def test_steps_of_an_optimizer_are_as_exact_as_eager(name: str) -> None:
    error, allowed = errors_of_steps(name, "cuda")
    assert error <= allowed
