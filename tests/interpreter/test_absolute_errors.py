"""Softly capped scores under Triton's interpreter: a tanh of which only the absolute error counts, against float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import pytest
import torch
from torch import Tensor

import fusion

Attention: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]
BF16, F16 = torch.bfloat16, torch.float16
LENGTH = 515


def capped(scores: Tensor, cap: float) -> Tensor:
    return torch.tanh(scores / cap) * cap


def attended(scores: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(scores.double() if v.dtype is torch.float64 else scores.float(), -1).to(v.dtype) @ v


def scores_of(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5


def causal(scores: Tensor) -> Tensor:
    i = torch.arange(scores.shape[-1])
    return scores.masked_fill(i[:, None] < i, -torch.inf)


def sloped(scores: Tensor) -> Tensor:
    i = torch.arange(scores.shape[-1])
    return scores - 0.25 * (i[:, None] - i).abs()


PROGRAMS: dict[str, Attention] = {
    "capped": lambda q, k, v: attended(capped(scores_of(q, k), 5.0), v),
    "capped high, causal": lambda q, k, v: attended(causal(capped(scores_of(q, k), 50.0)), v),
    "capped, then a slope": lambda q, k, v: attended(causal(sloped(capped(scores_of(q, k), 30.0))), v),
    "capped by a negative factor": lambda q, k, v: attended(torch.tanh(scores_of(q, k) / -7.0) * -7.0, v),
    "a tanh of a bias": lambda q, k, v: attended(scores_of(q, k) + 2.0 * torch.tanh(scores_of(k, q)), v),
}


def drawn(dtype: torch.dtype, scale: float) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return tuple((torch.randn(1, 1, LENGTH, 16, generator=generator) * by).to(dtype) for by in (scale, scale, 1.0))


def error(result: Tensor, exact: Tensor) -> float:
    return float((result.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("scale", [1.0, 12.0], ids=["usual", "saturated"])
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("name", PROGRAMS)
def test_capped_scores_take_no_tanh(name: str, dtype: torch.dtype, scale: float) -> None:
    program, inputs = PROGRAMS[name], drawn(dtype, scale)
    fused = fusion.fuse(program, options={"target": "triton"})
    result, exact = fused(*inputs), program(*(x.double() for x in inputs))
    assert error(result, exact) <= 1.2 * error(program(*inputs), exact)
    (kernel,) = fusion.report(fused).kernels
    assert "tanh(" not in kernel.source and "libdevice.fast_dividef(1.0, " in kernel.source


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_gradients_of_capped_scores_take_one_power_for_both(dtype: torch.dtype) -> None:
    program = PROGRAMS["capped high, causal"]
    inputs = [x.requires_grad_() for x in drawn(dtype, 6.0)]
    exact_inputs = [x.detach().double().requires_grad_() for x in inputs]
    fused = fusion.fuse(program, options={"target": "triton"})

    def gradients(function: Attention, inputs: list[Tensor]) -> tuple[Tensor, ...]:
        return torch.autograd.grad(function(*inputs).sin().sum(), inputs)

    exact = gradients(program, exact_inputs)
    for mine, eager, wanted in zip(gradients(fused, inputs), gradients(program, inputs), exact, strict=True):
        assert error(mine, wanted) <= 1.2 * error(eager, wanted)
    sources = [kernel.source for kernel in fusion.report(fused).kernels if "tl.dot" in kernel.source]
    assert len(sources) > 1 and not any("tanh(" in source for source in sources)


@pytest.mark.parametrize(
    "program",
    [
        lambda q, k, v: attended(capped(scores_of(q, k), 3000.0), v),
        lambda q, k, v: attended(torch.tanh(scores_of(q, k)).square(), v),
        lambda q, k, v: attended(scores_of(q, k) / (2 + torch.tanh(scores_of(q, k))), v),
    ],
    ids=["large factor", "square", "divisor"],
)
def test_a_tanh_of_which_more_counts_is_computed(program: Attention) -> None:
    fused = fusion.fuse(program, options={"target": "triton"})
    inputs = drawn(BF16, 1.0)
    exact = program(*(x.double() for x in inputs))
    assert error(fused(*inputs), exact) <= 1.2 * error(program(*inputs), exact)
    assert any("tanh(" in kernel.source for kernel in fusion.report(fused).kernels)


def test_strict_numerics_keep_the_tanh() -> None:
    fused = fusion.fuse(PROGRAMS["capped"], options={"target": "triton", "numerics": "strict"})
    fused(*drawn(BF16, 1.0))
    assert any("tanh(" in kernel.source for kernel in fusion.report(fused).kernels)


def test_numbers_that_are_not_finite() -> None:
    inputs = drawn(BF16, 1.0)
    inputs[0][0, 0, 3], inputs[0][0, 0, 4, 0] = torch.nan, torch.inf
    result = fusion.fuse(PROGRAMS["capped"], options={"target": "triton"})(*inputs)
    exact = PROGRAMS["capped"](
        *(x.double() for x in inputs)
    )  # bfloat16 products on AMX spread a NaN to the row beside it
    assert torch.equal(result.isnan(), exact.isnan()) and bool(exact.isnan().any())
