"""Attention whose masks are the least number of the type, under Triton's interpreter, against float64."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1 before Triton is imported", allow_module_level=True)
pytest.importorskip("triton")

import torch

import fusion
from tests.fusion.attentions import least_number, least_number_added

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, on numbers that become infinite


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("function", [least_number, least_number_added], ids=lambda function: function.__name__)
def test_rows_that_begin_with_or_consist_of_masked_keys(
    function: Callable[..., torch.Tensor], dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(1, 1, 300, 16, generator=generator).to(dtype).requires_grad_() for _ in range(3)]
    fused = fusion.fuse(function, options={"target": "triton", "strict": True})
    seed = torch.randn(1, 1, 300, 16, generator=generator)

    def results(run: Callable[..., torch.Tensor], inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        out = run(*inputs)
        return [out.double(), *(grad.double() for grad in torch.autograd.grad(out, inputs, seed.to(out.dtype)))]

    exact = results(function, [x.detach().double().requires_grad_() for x in inputs])
    for got, eager, expected in zip(results(fused, inputs), results(function, inputs), exact, strict=True):
        assert (got - expected).norm() <= 2 * (eager - expected).norm() + 1e-6 * expected.norm()
