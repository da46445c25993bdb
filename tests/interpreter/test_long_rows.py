"""Long rows that are folded and stored, under Triton's interpreter, which holds none in shared memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusion

ROWS = 9


def loss_and_gradient(x: Tensor, chosen: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return a row's negative log-likelihood, and its gradient by `x` times the row's scale."""
    logs = F.log_softmax(x, -1)
    hot = torch.arange(x.shape[-1]) == chosen[:, None]
    return -logs.gather(1, chosen[:, None])[:, 0], ((logs.exp() - torch.where(hot, 1.0, 0.0)) * scale[:, None]).to(
        x.dtype
    )


def normalised(x: Tensor, chosen: Tensor, scale: Tensor) -> Tensor:
    return F.silu(F.layer_norm(x, x.shape[-1:]) * scale[:, None])


def in_place(x: Tensor, chosen: Tensor, scale: Tensor) -> Tensor:
    return x.copy_(F.silu(F.layer_norm(x, x.shape[-1:]) * scale[:, None]) + x[:, :1])


PROGRAMS: Mapping[str, Callable[..., Tensor | tuple[Tensor, Tensor]]] = {
    "loss and gradient": loss_and_gradient,
    "norm": normalised,
    "in place": in_place,
}


def drawn(length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, length, generator=generator) * 3
    x[1], x[2, 5:], x[3, 7] = -1e4, -float("inf"), 300.0
    chosen = torch.randint(0, length, (ROWS,), generator=generator)
    return x.to(dtype), chosen, torch.randn(ROWS, generator=generator).to(dtype)


def flat(result: Tensor | tuple[Tensor, Tensor]) -> Tensor:
    results = result if isinstance(result, tuple) else (result,)
    return torch.cat([each.double().reshape(-1) for each in results])


@pytest.mark.parametrize("length", [32768, 30008])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", PROGRAMS)
def test_rows_agree_with_float64(name: str, dtype: torch.dtype, length: int) -> None:
    program, tensors = PROGRAMS[name], drawn(length, dtype)
    exact = flat(program(*(each.double() if each.is_floating_point() else each.clone() for each in tensors)))
    eager = flat(program(*(each.clone() for each in tensors)))
    function = fusion.fuse(program, options={"target": "triton"})
    mine = flat(function(*(each.clone() for each in tensors)))
    finite = exact.isfinite()
    assert torch.equal(mine.isnan(), eager.isnan())
    error, usual = ((each - exact)[finite].norm() for each in (mine, eager))
    assert error <= 2 * usual + 1e-5 * exact[finite].norm()
    assert fusion.report(function).kernels


def test_elements_and_their_exponentials_wait_for_the_sum() -> None:
    x, _, _ = drawn(32768, torch.bfloat16)
    function = fusion.fuse(lambda x: F.gelu(x.softmax(-1) * x), options={"target": "triton"})
    exact = F.gelu(x.double().softmax(-1) * x.double())
    torch.testing.assert_close(function(x).double(), exact, rtol=2e-2, atol=1e-3, equal_nan=True)
    assert fusion.report(function).kernels
