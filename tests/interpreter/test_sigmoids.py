"""GELU in its fast forms, under Triton's interpreter, against float64: every number of a 16-bit type, and tails."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

import pytest
import torch
import torch.nn.functional as F  # the name everyone knows it by

from fusion.codegen.triton import TritonTarget
from tests.fusion.schedule.test_pack import kernel
from tests.fusion.schedule.test_quantised import calls, only_kernel

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
    only = only_kernel(function, x)
    source = TARGET.emit(only)
    assert ("_quick_erfc(" if function is erf else "tl.exp2(") in source and "tanh" not in source
    out = torch.full_like(x, 7.0)
    TARGET.build(only, source)(x, out)
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
    only = only_kernel(tanh_gradient, x)
    source = TARGET.emit(only)
    assert source.count("tl.exp2(") == 1 and "tanh(" not in source
    out = torch.full_like(x, 7.0)
    TARGET.build(only, source)(x, out)
    eager, want = tanh_gradient(x).double(), tanh_gradient(x.double())
    assert torch.equal(out.isnan(), eager.isnan())
    number = torch.isfinite(want)
    error, theirs = ((result.double() - want)[number].abs() for result in (out, eager))
    rounding = want[number].abs() * torch.finfo(dtype).eps / 2
    assert bool((error <= 2 * torch.maximum(theirs, rounding) + 1e-6).all())


def test_a_tanh_that_is_wanted_itself_is_computed() -> None:
    source = TARGET.emit(only_kernel(lambda x: torch.tanh(x) * (1 + torch.tanh(x)), torch.randn(64).half()))
    assert source.count("_quick_tanh(") == 2  # its definition, and one call


def bias_gradient(x: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    return torch.ops.aten.gelu_backward(gradient, x).sum(0)


def test_parts_of_a_rounded_sum_take_the_fast_forms() -> None:
    """The parts are float32, but the only result that is computed from them is not."""
    torch.manual_seed(0)
    x, gradient = (torch.randn(4096, 32).bfloat16() for _ in range(2))
    parts, merged = (kernel(call) for call in calls(bias_gradient, x, gradient))
    source = TARGET.emit(parts)
    assert "_quick_erfc(" in source and "libdevice.erf(" not in source
    between = torch.empty(tuple(map(int, merged.params[0].shape))[::-1]).T
    TARGET.build(parts, source)(gradient, x, between)
    out = torch.empty(32, dtype=torch.bfloat16)
    TARGET.build(merged, TARGET.emit(merged))(between, out)
    want = bias_gradient(x.double(), gradient.double())
    assert float((out.double() - want).norm() / want.norm()) < torch.finfo(torch.bfloat16).eps / 2


def test_parts_that_are_kept_in_full_take_the_full_forms() -> None:
    x = torch.empty(4096, 32, dtype=torch.bfloat16)
    parts = kernel(calls(lambda x, gradient: bias_gradient(x.float(), gradient.float()), x, x)[0])
    assert "libdevice.erf(" in TARGET.emit(parts)


def perceptron(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    return F.gelu(x @ up) @ down


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_operands_that_are_rounded_take_the_fast_form(dtype: torch.dtype) -> None:
    """The inner layer of a chain of products."""
    torch.manual_seed(0)
    given = [torch.randn(8192, 16), torch.randn(16, 64), torch.randn(64, 16) / 8]
    x, up, down = (tensor.to(dtype) for tensor in given)
    only = only_kernel(perceptron, x, up, down)
    source = TARGET.emit(only)
    assert source.count("_quick_erfc(") == 2 and "libdevice.erf(" not in source
    out = torch.empty(8192, 16, dtype=dtype)
    TARGET.build(only, source)(x, up, down, out)
    want = perceptron(*(tensor.double() for tensor in (x, up, down)))
    theirs = float((perceptron(x, up, down).double() - want).norm())
    assert float((out.double() - want).norm()) < 2 * theirs
