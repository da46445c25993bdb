"""GELU in its fast forms, under Triton's interpreter, against float64: every number of a 16-bit type, and tails."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

import pytest
import torch
import torch.nn.functional as F  # the name everyone knows it by

from fusion.codegen.triton import TritonTarget
from tests.fusion.schedule.test_quantised import only_kernel

Function: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
TARGET = TritonTarget("sm_90")


def erf(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x)


def tanh(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


def exact(function: Function, x: torch.Tensor) -> torch.Tensor:
    """In float64, without the cancellation that even float64 suffers from far below 0."""
    if function is erf:
        return 0.5 * x * torch.erfc(-x / math.sqrt(2))
    return x * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("function", [erf, tanh], ids=lambda function: function.__name__)
def test_every_number(function: Function, dtype: torch.dtype) -> None:
    x = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
    kernel = only_kernel(function, x)
    source = TARGET.emit(kernel)
    assert ("_quick_erfc(" if function is erf else "tl.exp2(") in source and "tanh" not in source
    out = torch.full_like(x, 7.0)
    TARGET.build(kernel, source)(x, out)
    eager, want = function(x).double(), exact(function, x.double())
    assert torch.equal(out.isnan(), x.isnan() | (x == -torch.inf)) and bool((out[x == torch.inf] == torch.inf).all())
    number = torch.isfinite(want.to(dtype)) & torch.isfinite(eager)
    error, theirs = ((result.double() - want)[number].abs() for result in (out, eager))
    rounding = want[number].abs() * torch.finfo(dtype).eps / 2
    assert bool((error <= 2 * torch.maximum(theirs, rounding) + torch.finfo(dtype).tiny).all())


def tanh_gradient(x: torch.Tensor) -> torch.Tensor:
    """1 + tanh(x) and 1 - tanh(x)², as the gradient of GELU has both."""
    bent = torch.tanh(x)
    return (1 + bent) + x * (1 - bent * bent)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_gradient_takes_one_exponential(dtype: torch.dtype) -> None:
    x = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
    kernel = only_kernel(tanh_gradient, x)
    source = TARGET.emit(kernel)
    assert source.count("tl.exp2(") == 1 and "tanh(" not in source
    out = torch.full_like(x, 7.0)
    TARGET.build(kernel, source)(x, out)
    eager, want = tanh_gradient(x).double(), tanh_gradient(x.double())
    assert torch.equal(out.isnan(), eager.isnan())
    number = torch.isfinite(want)
    error, theirs = ((result.double() - want)[number].abs() for result in (out, eager))
    rounding = want[number].abs() * torch.finfo(dtype).eps / 2
    assert bool((error <= 2 * torch.maximum(theirs, rounding) + 1e-6).all())


def test_a_tanh_that_is_wanted_itself_is_computed() -> None:
    source = TARGET.emit(only_kernel(lambda x: torch.tanh(x) * (1 + torch.tanh(x)), torch.randn(64).half()))
    assert source.count("_quick_tanh(") == 2  # its definition, and one call
