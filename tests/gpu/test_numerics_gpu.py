"""Strict numerics on a device: chains of pointwise operations have the bits of eager."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from fusion import fuse
from tests.fusion.test_numerics import CHAINS, DTYPES, STRICT, operands

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("chain", CHAINS, ids=lambda chain: chain.__name__)
def test_chains_have_the_bits_of_eager(chain: Callable[..., torch.Tensor], dtype: torch.dtype) -> None:
    x, y = (tensor.cuda() for tensor in operands(dtype))
    assert torch.equal(fuse(chain, options=STRICT)(x, y), chain(x, y))


def test_numbers_are_compared_as_halves() -> None:
    x = torch.linspace(-2, 2, 4001, device="cuda").bfloat16()
    assert torch.equal(fuse(lambda x: x > 0.1)(x), x > 0.1)
